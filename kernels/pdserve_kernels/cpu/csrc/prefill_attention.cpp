// Computes the attention of several new tokens of one request.
//
// A KV head's context is laid out once as panels, keys for query x key and values for weights x value. Then every group
// of kMaxRows query rows (a row is one token of one query head) takes one product, a softmax and another product, over
// no more keys than its last token sees.
#include <algorithm>

#include "attention.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
// Turns eight vectors of eight values into the eight vectors of their first, second, ... values.
inline void transpose(Lanes* x) {
  __m256 pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    x[i] = (Lanes)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
    x[i + 4] = (Lanes)_mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
  }
}

// Does the same as lay_out for kColumns positions that all are in the context, and a head_dim of whole columns. `key`
// and `value` are where those of the first position go.
template <class T>
void lay_out_by_vectors(const Step& step, const Row& row, long layer, long kv_head, long position, long length,
                        float* key, float* value) {
  const long dim = step.head_dim;
  const T* tiles[kColumns];
  for (long c = 0; c < kColumns; c++, position++) {
    tiles[c] = tile_of<T>(step, row.blocks[position / step.block_size], kv_head, layer) + position % step.block_size * dim;
  }
  for (long d = 0; d < dim; d += kLanes) {
    for (long c = 0; c < kColumns; c += kLanes) {
      Lanes x[kLanes];
      for (long i = 0; i < kLanes; i++) x[i] = load(tiles[c + i] + d);
      transpose(x);
      for (long i = 0; i < kLanes; i++) store(key + (d + i) * kColumns + c, x[i]);
    }
  }
  for (long c = 0; c < kColumns; c++) {
    const T* from = tiles[c] + step.block_size * dim;
    for (long d = 0; d < dim; d += kLanes) {
      store(value + d / kColumns * length * kColumns + c * kColumns + d % kColumns, load(from + d));
    }
  }
}
#endif

// Writes the positions from `low` on: keys as panels [context / kColumns][head_dim / pair][kColumns][pair],
// and values as panels [head_dim / kColumns][context / pair][kColumns][pair]. Padding is zero.
template <class T, class E>
void lay_out(const Step& step, const Row& row, long layer, long kv_head, long low, long first, long last, E* keys,
             E* values) {
  constexpr long kP = kPair<E>;
  const long dim = step.head_dim, depth = padded_to(dim, kP);
  const long length = padded_to(row.context - low, kColumns);
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (dim % kColumns == 0 && last - first == kColumns && low + last <= row.context) {
    lay_out_by_vectors<T>(step, row, layer, kv_head, low + first, length, keys + first * depth, values + first * kColumns);
    return;
  }
#endif
  for (long i = first; i < last; i++) {
    const long position = low + i;
    E* key = keys + i / kColumns * kColumns * depth + i % kColumns * kP;
    E* value = values + i / kP * kColumns * kP + i % kP;
    if (position >= row.context) {
      for (long d = 0; d < depth; d++) key[d / kP * kColumns * kP + d % kP] = E{};
      for (long d = 0; d < padded_to(dim, kColumns); d++) value[d / kColumns * length * kColumns + d % kColumns * kP] = E{};
      continue;
    }
    const T* tile = tile_of<T>(step, row.blocks[position / step.block_size], kv_head, layer) + position % step.block_size * dim;
    const T* value_tile = tile + step.block_size * dim;
    for (long d = 0; d < dim; d++) to_operand(tile[d], key + d / kP * kColumns * kP + d % kP);
    for (long d = dim; d < depth; d++) key[d / kP * kColumns * kP + d % kP] = E{};
    for (long d = 0; d < dim; d++) to_operand(value_tile[d], value + d / kColumns * length * kColumns + d % kColumns * kP);
    for (long d = dim; d < padded_to(dim, kColumns); d++) value[d / kColumns * length * kColumns + d % kColumns * kP] = E{};
  }
}

// Turns scores into weights, which are zero outside [from, to). Returns the sum of the weights.
template <class E>
float soften(float* scores, long from, long to, long length, float scale, E* weights) {
  for (long i = 0; i < from; i++) scores[i] = -INFINITY;
  for (long i = to; i < length; i++) scores[i] = -INFINITY;
  const long begin = from / kLanes * kLanes;
  Lanes best = load(scores + begin);
  for (long i = begin + kLanes; i < to; i += kLanes) best = greater(best, load(scores + i));
  const float top = maximum(best) * scale;
  Lanes sums{};
  for (long i = 0; i < length; i += kLanes) {
    Lanes x = load(scores + i);
    const Lanes weight = i < begin || i >= to ? Lanes{} : x == splat(-INFINITY) ? Lanes{} : exponential(x * scale - top);
    // The sum is that of the rounded weights, as which they are multiplied.
    store(weights + i, weight);
    sums += load(weights + i);
  }
  return sum(sums);
}

template <class T, class E>
void rows_of_queries(const Step& step, const Tokens& tokens, const Row& row, long kv_head, long low, long first_row,
                     long rows, const T* query, const E* keys, const E* values) {
  const long dim = step.head_dim, depth = padded_to(dim, kPair<E>), group = step.heads / step.kv_heads;
  const long all = padded_to(row.context - low, kColumns);
  const auto token_of = [&](long r) { return (first_row + r) / group; };
  const auto head_of = [&](long r) { return kv_head * group + (first_row + r) % group; };
  const auto position_of = [&](long r) { return row.context - row.new_tokens + token_of(r); };
  const long start = (first_visible(tokens, position_of(0)) - low) / kColumns * kColumns;
  const long end = padded_to(position_of(rows - 1) + 1 - low, kColumns), length = end - start;
  float* scores = kept<float>(Keep::kScores, kMaxRows * all);
  E* weights = kept<E>(Keep::kWeights, kMaxRows * all);
  E* q = kept<E>(Keep::kRows, kMaxRows * depth);
  for (long r = 0; r < rows; r++) {
    const T* from = query + ((row.first_token + token_of(r)) * step.heads + head_of(r)) * dim;
    for (long d = 0; d < dim; d++) to_operand(from[d], q + r * depth + d);
    for (long d = dim; d < depth; d++) q[r * depth + d] = E{};
  }
  for (long k = 0; k < length; k += kColumns) {
    product_of(rows, q, depth, keys + (start + k) * depth, depth, 0, [&](long r, long v, Lanes sums) {
      store(scores + r * length + k + v * kLanes, sums);
    });
  }
  float totals[kMaxRows];
  for (long r = 0; r < rows; r++) {
    const long from = first_visible(tokens, position_of(r)) - low - start, to = position_of(r) + 1 - low - start;
    totals[r] = soften(scores + r * length, from, to, length, step.scale, weights + r * length);
  }
  for (long d = 0; d < dim; d += kColumns) {
    product_of(rows, weights, length, values + d * all + start * kColumns, length, 0,
               [&](long r, long v, Lanes sums) {
                 const long at = d + v * kLanes;
                 if (at >= dim) return;
                 T* out = (T*)tokens.out + ((row.first_token + token_of(r)) * step.heads + head_of(r)) * dim;
                 store_part(out + at, sums / totals[r], dim - at);
               });
  }
}

long first_position(const Tokens& tokens, const Row& row) {
  return first_visible(tokens, row.context - row.new_tokens) / kColumns * kColumns;
}

}  // namespace

long panel_values(const Step& step, const Tokens& tokens, const Row& row) {
  return step.kv_heads * padded_to(row.context - first_position(tokens, row), kColumns) * padded_to(step.head_dim, kColumns);
}

template <class T>
void attend_span(const Step& step, const Tokens& tokens, const Row& row, const T* query, Operand<T>* keys,
                 Operand<T>* values) {
  const long group = step.heads / step.kv_heads, low = first_position(tokens, row);
  const long length = padded_to(row.context - low, kColumns), each_head = length * padded_to(step.head_dim, kColumns);
  const long pieces = length / kColumns;
  each(step.kv_heads * pieces, [&](long item) {
    const long h = item / pieces, first = item % pieces * kColumns;
    lay_out<T>(step, row, tokens.layer, h, low, first, first + kColumns, keys + h * each_head, values + h * each_head);
  });
  const long all = row.new_tokens * group, groups = (all + kMaxRows - 1) / kMaxRows;
  each<true>(step.kv_heads * groups, [&](long item) {
    const long h = item / groups, first = item % groups * kMaxRows;
    rows_of_queries(step, tokens, row, h, low, first, std::min(kMaxRows, all - first), query, keys + h * each_head,
                    values + h * each_head);
  });
}

template void attend_span<float>(const Step&, const Tokens&, const Row&, const float*, float*, float*);
template void attend_span<Bf16>(const Step&, const Tokens&, const Row&, const Bf16*, Operand<Bf16>*, Operand<Bf16>*);

}  // namespace pdserve
