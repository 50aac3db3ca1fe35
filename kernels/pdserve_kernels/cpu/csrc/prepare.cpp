// Prepares new tokens for attention: normalises and rotates heads, and stores keys and values in the cache.
#include "attention.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

template <class T>
void head(const T* from, const T* norm, float eps, const float* cos, const float* sin, long head_dim, T* to) {
  float x[kMaxHeadDim];
  for (long i = 0; i < head_dim; i++) x[i] = widen(from[i]);
  if (norm) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < head_dim; i++) squares += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(squares / head_dim + eps);
    for (long i = 0; i < head_dim; i++) x[i] *= factor * widen(norm[i]);
  }
  if (cos) {
    const long half = head_dim / 2;
#pragma omp simd
    for (long i = 0; i < half; i++) {
      const float first = x[i], second = x[half + i];
      x[i] = first * cos[i] - second * sin[i];
      x[half + i] = second * cos[i] + first * sin[i];
    }
  }
  for (long i = 0; i < head_dim; i += kLanes) store_part(to + i, load_part(x + i, head_dim - i), head_dim - i);
}

template <class T, class S>
void token(const Step& step, const Tokens& tokens, long t, long block, long offset, T* query) {
  const long dim = step.head_dim, half = dim / 2;
  float table[kMaxHeadDim], *cos = nullptr, *sin = nullptr;
  if (tokens.cos) {
    cos = table, sin = table + half;
    for (long i = 0; i < half; i++) {
      cos[i] = widen(((const T*)tokens.cos)[t * half + i]);
      sin[i] = widen(((const T*)tokens.sin)[t * half + i]);
    }
  }
  const T* from = (const T*)tokens.query + t * tokens.query_stride;
  for (long h = 0; h < step.heads; h++) {
    head(from + h * dim, (const T*)tokens.query_norm, tokens.eps, cos, sin, dim, query + (t * step.heads + h) * dim);
  }
  if (!tokens.key) return;
  const T* key = (const T*)tokens.key + t * tokens.key_stride;
  const T* value = (const T*)tokens.value + t * tokens.key_stride;
  for (long h = 0; h < step.kv_heads; h++) {
    S* tile = tile_of<S>(step, block, h, tokens.layer);
    if constexpr (kScaled<S>) {
      // Rounded to T in between, so that a key is the same whether it comes from here or as a tensor.
      T rounded[kMaxHeadDim];
      head(key + h * dim, (const T*)tokens.key_norm, tokens.eps, cos, sin, dim, rounded);
      exponents_of(step, tile)[offset] = store_scaled(tile + offset * dim, rounded, dim);
      if (step.tiles > 1) {
        tile += to_value<S>(step);
        exponents_of(step, tile)[offset] = store_scaled(tile + offset * dim, value + h * dim, dim);
      }
    } else {
      tile += offset * dim;
      head(key + h * dim, (const T*)tokens.key_norm, tokens.eps, cos, sin, dim, tile);
      if (step.tiles > 1) std::memcpy(tile + to_value<S>(step), value + h * dim, dim * sizeof(T));
    }
  }
}

}  // namespace

template <class T, class S>
void prepare(const Step& step, const Tokens& tokens, T* query) {
  each(step.num_tokens, [&](long t) {
    long low = 0, high = step.num_rows - 1;
    while (low < high) {
      const long middle = (low + high + 1) / 2;
      if (row_of(step, middle).first_token <= t) low = middle;
      else high = middle - 1;
    }
    const Row row = row_of(step, low);
    const long position = row.context - row.new_tokens + t - row.first_token;
    token<T, S>(step, tokens, t, row.blocks[position / step.block_size], position % step.block_size, query);
  });
}

template void prepare<float, float>(const Step&, const Tokens&, float*);
template void prepare<Bf16, Bf16>(const Step&, const Tokens&, Bf16*);
template void prepare<float, Fp8>(const Step&, const Tokens&, float*);
template void prepare<Bf16, Fp8>(const Step&, const Tokens&, Bf16*);

}  // namespace pdserve
