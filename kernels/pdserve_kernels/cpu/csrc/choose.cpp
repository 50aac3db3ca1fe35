// Chooses the tokens of its context that a token attends to: those whose index keys have the highest scores.
//
// A score is computed by one loop over heads and channels, in their order, so that what a token chooses does not depend on
// the other tokens of the step, nor on the number of threads.
#include <algorithm>
#include <numeric>
#include <vector>

#include "lent_cores.h"
#include "panel.h"

namespace pdserve {

// The structure CIndex of library.py.
struct Index {
  const void* tokens;      // [rows][row_size], in each row an index key from `first` on
  const int32_t* rows;     // the contexts' rows
  const int32_t* lengths;  // [num_tokens], of the contexts
  const int32_t* starts;   // [num_tokens], where they begin in `rows`
  const void* query;       // [num_tokens, heads, channels]
  const float* weights;    // [num_tokens, heads]
  int32_t* chosen;         // [num_tokens, count], rows in the order of their contexts
  int64_t num_tokens, row_size, first, heads, channels, count;
};

namespace {

constexpr long kPart = 256;  // positions that one call of a loop's body scores
constexpr long kScores = 1L << 22;  // scores that are in memory at a time, unless one context has more
constexpr int kHeads = 4;  // heads whose sums are computed together

// Writes the scores of the positions from low to high of a token's context. NaN is as high as infinity.
template <class T>
void score(const Index& index, long token, long low, long high, float* scores) {
  const long channels = index.channels, heads = padded_to(index.heads, kHeads), size = padded_to(channels, kLanes);
  std::vector<float> query(heads * size), weights(heads);
  const T* given = (const T*)index.query + token * index.heads * channels;
  for (long h = 0; h < index.heads; h++) {
    weights[h] = index.weights[token * index.heads + h];
    for (long c = 0; c < channels; c++) query[h * size + c] = widen(given[h * channels + c]);
  }
  const int32_t* rows = index.rows + index.starts[token];
  for (long i = low; i < high; i++) {
    const T* key = (const T*)index.tokens + rows[i] * index.row_size + index.first;
    float total = 0;
    for (long h = 0; h < heads; h += kHeads) {
      Lanes dots[kHeads] = {};
      for (long c = 0; c < channels; c += kLanes) {
        const Lanes k = load_part(key + c, channels - c);
        for (int j = 0; j < kHeads; j++) dots[j] += load(&query[(h + j) * size + c]) * k;
      }
      float products[kHeads];
      sums(dots, products);
      for (int j = 0; j < kHeads; j++) total += weights[h + j] * (products[j] < 0 ? 0.0f : products[j]);
    }
    scores[i] = total == total ? total : INFINITY;
  }
}

void choose(const Index& index, long token, const float* scores) {
  const long context = index.lengths[token], count = std::min<long>(index.count, context);
  const int32_t* rows = index.rows + index.starts[token];
  int32_t* chosen = index.chosen + token * index.count;
  std::vector<int32_t> places(context);
  std::iota(places.begin(), places.end(), 0);
  if (count < context) {
    std::nth_element(places.begin(), places.begin() + count, places.end(), [scores](int32_t a, int32_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    std::sort(places.begin(), places.begin() + count);
  }
  for (long i = 0; i < count; i++) chosen[i] = rows[places[i]];
}

template <class T>
void choose_all(const Index& index) {
  std::vector<long> first_score, first_part;
  std::vector<float> scores;
  for (long begin = 0, end; begin < index.num_tokens; begin = end) {
    first_score.assign(1, 0);
    first_part.assign(1, 0);
    for (end = begin; end < index.num_tokens; end++) {
      const long context = index.lengths[end];
      if (end > begin && first_score.back() + context > kScores) break;
      first_score.push_back(first_score.back() + context);
      first_part.push_back(first_part.back() + (context + kPart - 1) / kPart);
    }
    scores.resize(first_score.back());
    each<true>(first_part.back(), [&](long part) {
      const long i = std::upper_bound(first_part.begin(), first_part.end(), part) - first_part.begin() - 1;
      const long low = (part - first_part[i]) * kPart, high = std::min<long>(low + kPart, index.lengths[begin + i]);
      score<T>(index, begin + i, low, high, scores.data() + first_score[i]);
    });
    each<true>(end - begin, [&](long i) { choose(index, begin + i, scores.data() + first_score[i]); });
  }
}

}  // namespace
}  // namespace pdserve

extern "C" void pdserve_choose(int bf16, const pdserve::Index* index) {
  using namespace pdserve;
  bf16 ? choose_all<Bf16>(*index) : choose_all<float>(*index);
}
