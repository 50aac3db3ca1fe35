// The arguments of one layer's attention. The ctypes structures of library.py have the same fields.
#pragma once
#include "fp8.h"
#include "kept.h"
#include "panel.h"

namespace pdserve {

inline constexpr long kMaxHeadDim = 1024;

// A step is planned once, for all layers. Rows with one new token come first.
struct Step {
  void* cache;            // [blocks, kv_heads, layers, tiles, block_size, head_dim], or tiles in FP8
  const int32_t* tables;  // the rows' block ids, one row after the other
  const int32_t* rows;    // [num_rows][4]: new tokens, context length, first token in the step, first id in tables
  int64_t num_rows, num_singles, num_tokens;
  int64_t kv_heads, heads, layers, block_size, head_dim;
  int64_t tiles;  // 2, one of keys and one of values, or 1 if whole keys are the values
  float scale;
  float cap;  // a scaled score x becomes cap * tanh(x / cap); 0 if scores have no bound
};

// The tokens of one layer. Query, key and value of a token lie their stride in elements before the next token's.
struct Tokens {
  const void *query, *key, *value;    // key and value are null if those of the cache are there already
  int64_t query_stride, key_stride;
  const void *cos, *sin;              // [tokens, head_dim / 2]; null if nothing is rotated
  const void *query_norm, *key_norm;  // [head_dim]; null if nothing is normalised
  float eps;
  int32_t layer;
  int64_t window;      // 0 if there is none
  int64_t chunked;     // 1 if contexts are cut every `window` tokens, and none sees what is before the last cut
  const float* sinks;  // [heads], the scores of one more key without a value; null if there is none
  void* out;           // [tokens, heads, head_dim]
};

struct Row {
  long new_tokens, context, first_token;
  const int32_t* blocks;
};

inline Row row_of(const Step& step, long i) {
  const int32_t* row = step.rows + 4 * i;
  return {row[0], row[1], row[2], step.tables + row[3]};
}

// S is the type of the cache's elements: that of the queries, T, or Fp8, whose tiles end with the tokens' exponents.
template <class S>
inline constexpr bool kScaled = std::is_same_v<S, Fp8>;

template <class S>
long tile_elements(const Step& step) {
  return step.block_size * (step.head_dim + kScaled<S>);
}

// Returns the key tile of one block.
template <class S>
S* tile_of(const Step& step, long block, long kv_head, long layer) {
  const long tile = ((block * step.kv_heads + kv_head) * step.layers + layer) * step.tiles;
  return (S*)step.cache + tile * tile_elements<S>(step);
}

// Returns how many elements a value lies behind its key, and its exponent behind that of the key.
template <class S>
long to_value(const Step& step) {
  return (step.tiles - 1) * tile_elements<S>(step);
}

// Returns the exponents of a tile's tokens.
inline uint8_t* exponents_of(const Step& step, const Fp8* tile) {
  return (uint8_t*)tile + step.block_size * step.head_dim;
}

inline long first_visible(const Tokens& tokens, long position) {
  if (!tokens.window || position < tokens.window) return 0;
  return tokens.chunked ? position - position % tokens.window : position - tokens.window + 1;
}

// Bounds the scores in [from, to), of whole vectors, which are not scaled yet. Hidden ones, -INFINITY, stay hidden.
inline void bound(const Step& step, float* scores, long from, long to) {
  const float inner = 2 * step.scale / step.cap, outer = step.cap / step.scale;
  for (long i = from; i < to; i += kLanes) {
    const Lanes x = load(scores + i);
    // tanh(u) is 1 - 2 / (exp(2 u) + 1).
    store(scores + i, x == -INFINITY ? x : outer - 2 * outer / (exponential(x * inner) + 1.0f));
  }
}

// All threads of a parallel region run each of the following parts of an attention. `query` is
// [tokens, heads, head_dim], normalised and rotated.

template <class T, class S>
void prepare(const Step&, const Tokens&, T* query);

// Writes where each single token's partial results begin, and after the last one their number, which it returns.
long count_parts(const Step&, const Tokens&, long* first_part);
long partial_floats(const Step&, long parts);
template <class T, class S>
void attend_single_tokens(const Step&, const Tokens&, const T* query, float* partial, const long* first_part);

// Returns how many values `keys` and `values` each hold.
long panel_values(const Step&, const Tokens&, const Row&);
template <class T, class S>
void attend_span(const Step&, const Tokens&, const Row&, const T* query, Operand<T>* keys, Operand<T>* values);

}  // namespace pdserve
