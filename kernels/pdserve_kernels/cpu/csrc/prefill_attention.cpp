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

// Four operands of 32 bits: fp32 values, or pairs of bf16. The same shuffles serve every CPU.
typedef uint32_t Four __attribute__((vector_size(16)));
typedef uint16_t FourHalves __attribute__((vector_size(8)));

template <class E, class T>
inline Four load_four(const T* from) {
  if constexpr (sizeof(T) < sizeof(E)) {
    FourHalves bits;
    std::memcpy(&bits, from, sizeof bits);
    return __builtin_convertvector(bits, Four) << 16;
  } else {
    Four out;
    std::memcpy(&out, from, sizeof out);
    return out;
  }
}

// Turns four vectors into those of their first, second, third and fourth operands.
inline void transpose(Four* x) {
  const Four first = {0, 4, 1, 5}, second = {2, 6, 3, 7}, lower = {0, 1, 4, 5}, upper = {2, 3, 6, 7};
  const Four a = __builtin_shuffle(x[0], x[1], first), b = __builtin_shuffle(x[2], x[3], first);
  const Four c = __builtin_shuffle(x[0], x[1], second), d = __builtin_shuffle(x[2], x[3], second);
  x[0] = __builtin_shuffle(a, b, lower);
  x[1] = __builtin_shuffle(a, b, upper);
  x[2] = __builtin_shuffle(c, d, lower);
  x[3] = __builtin_shuffle(c, d, upper);
}

// Stores the values of one position, or of a pair of them side by side, kLanes elements of each.
template <class T>
inline void store_side_by_side(float* to, const T* const* from, long d) {
  store(to, load(from[0] + d));
}
inline void store_side_by_side(Bf16* to, const Bf16* const* from, long d) {
  HalfBits even, odd;
  std::memcpy(&even, from[0] + d, sizeof even);
  std::memcpy(&odd, from[1] + d, sizeof odd);
  const BitLanes pairs = __builtin_convertvector(even, BitLanes) | __builtin_convertvector(odd, BitLanes) << 16;
  std::memcpy(to, &pairs, sizeof pairs);
}

// Writes kColumns positions, the first of which is low + `first`: keys as panels
// [context / kColumns][head_dim / pair][kColumns][pair], and values as panels
// [head_dim / kColumns][context / pair][kColumns][pair]. Padding is zero, and so is what lies before `seen`, the first
// position that is read: its block may be another request's by now.
template <class T, class S, class E>
void lay_out(const Step& step, const Row& row, long layer, long kv_head, long low, long seen, long first, E* keys,
             E* values) {
  constexpr long kP = kPair<E>;
  const long dim = step.head_dim, depth = padded_to(dim, kP);
  const long length = padded_to(row.context - low, kColumns);
  E *key = keys + first * depth, *value = values + first * kColumns;
  const auto value_at = [&](long c, long d) {
    return value + d / kColumns * length * kColumns + c / kP * kP * kColumns + d % kColumns * kP + c % kP;
  };
  const T *tiles[kColumns], *value_tiles[kColumns];
  const long count = std::min(kColumns, row.context - low - first), hidden = std::max(0L, seen - low - first);
  for (long c = hidden; c < count; c++) {
    const long position = low + first + c;
    const long offset = position % step.block_size;
    const S* tile = tile_of<S>(step, row.blocks[position / step.block_size], kv_head, layer);
    if constexpr (kScaled<S>) {
      T* widened = kept<T>(Keep::kWidened, 2 * kColumns * dim) + 2 * c * dim;
      widen_scaled(tile + offset * dim, exponents_of(step, tile)[offset], dim, widened);
      tiles[c] = value_tiles[c] = widened;
      if (step.tiles == 1) continue;
      tile += to_value<S>(step);
      widen_scaled(tile + offset * dim, exponents_of(step, tile)[offset], dim, widened + dim);
      value_tiles[c] = widened + dim;
    } else {
      tiles[c] = tile + offset * dim;
      value_tiles[c] = tiles[c] + to_value<S>(step);
    }
  }
  if (!hidden && count == kColumns && dim % kColumns == 0) {
    for (long d = 0; d < dim; d += 4 * kP) {
      for (long c = 0; c < kColumns; c += 4) {
        Four x[4];
        for (long i = 0; i < 4; i++) x[i] = load_four<E>(tiles[c + i] + d);
        transpose(x);
        for (long i = 0; i < 4; i++) std::memcpy(key + (d + i * kP) * kColumns + c * kP, &x[i], sizeof x[i]);
      }
    }
    for (long c = 0; c < kColumns; c += kP) {
      for (long d = 0; d < dim; d += kLanes) store_side_by_side(value_at(c, d), value_tiles + c, d);
    }
    return;
  }
  for (long c = 0; c < kColumns; c++) {
    const long known = c >= hidden && c < count ? dim : 0;
    const auto key_at = [&](long d) { return key + d / kP * kColumns * kP + c * kP + d % kP; };
    for (long d = 0; d < known; d++) to_operand(tiles[c][d], key_at(d));
    for (long d = known; d < depth; d++) *key_at(d) = E{};
    for (long d = 0; d < known; d++) to_operand(value_tiles[c][d], value_at(c, d));
    for (long d = known; d < padded_to(dim, kColumns); d++) *value_at(c, d) = E{};
  }
}

// Turns scores into weights, which are zero outside [from, to). Returns the sum of the weights and of the sink's, if there
// is one.
template <class E>
float soften(const Step& step, float* scores, long from, long to, long length, E* weights, const float* sink) {
  for (long i = 0; i < from; i++) scores[i] = -INFINITY;
  for (long i = to; i < length; i++) scores[i] = -INFINITY;
  const long begin = from / kLanes * kLanes;
  if (step.cap) bound(step, scores, begin, to);
  Lanes best = load(scores + begin);
  for (long i = begin + kLanes; i < to; i += kLanes) best = greater(best, load(scores + i));
  float top = maximum(best) * step.scale;
  // NaN passes this comparison, so that it shows in the result.
  if (sink && top <= *sink) top = *sink;
  Lanes sums{};
  for (long i = 0; i < length; i += kLanes) {
    Lanes x = load(scores + i);
    const Lanes weight = i < begin || i >= to ? Lanes{} : x == splat(-INFINITY) ? Lanes{} : exponential(x * step.scale - top);
    // The sum is that of the rounded weights, as which they are multiplied.
    store(weights + i, weight);
    sums += load(weights + i);
  }
  return sum(sums) + (sink ? std::exp(*sink - top) : 0.0f);
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
    const float* sink = tokens.sinks ? tokens.sinks + head_of(r) : nullptr;
    totals[r] = soften(step, scores + r * length, from, to, length, weights + r * length, sink);
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

template <class T, class S>
void attend_span(const Step& step, const Tokens& tokens, const Row& row, const T* query, Operand<T>* keys,
                 Operand<T>* values) {
  const long group = step.heads / step.kv_heads, low = first_position(tokens, row);
  const long seen = first_visible(tokens, row.context - row.new_tokens);
  const long length = padded_to(row.context - low, kColumns), each_head = length * padded_to(step.head_dim, kColumns);
  const long pieces = length / kColumns;
  each(step.kv_heads * pieces, [&](long item) {
    const long h = item / pieces, first = item % pieces * kColumns;
    lay_out<T, S>(step, row, tokens.layer, h, low, seen, first, keys + h * each_head, values + h * each_head);
  });
  const long all = row.new_tokens * group, groups = (all + kMaxRows - 1) / kMaxRows;
  each<true>(step.kv_heads * groups, [&](long item) {
    const long h = item / groups, first = item % groups * kMaxRows;
    rows_of_queries(step, tokens, row, h, low, first, std::min(kMaxRows, all - first), query, keys + h * each_head,
                    values + h * each_head);
  });
}

template void attend_span<float, float>(const Step&, const Tokens&, const Row&, const float*, float*, float*);
template void attend_span<float, Fp8>(const Step&, const Tokens&, const Row&, const float*, float*, float*);
template void attend_span<Bf16, Bf16>(const Step&, const Tokens&, const Row&, const Bf16*, Operand<Bf16>*, Operand<Bf16>*);
template void attend_span<Bf16, Fp8>(const Step&, const Tokens&, const Row&, const Bf16*, Operand<Bf16>*, Operand<Bf16>*);

}  // namespace pdserve
