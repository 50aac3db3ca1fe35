// Computes the product that the linear layer and attention are made of: a few rows times one panel of 32 columns.
//
// A panel keeps its columns side by side, [depth / pair][32][pair]: pairs of bf16, or single fp32 values. A CPU that
// multiplies pairs (AVX512_BF16) multiplies a panel of bf16 by rows of bf16, and any other CPU by rows of fp32. Each
// row's sums are taken in the same order however many rows there are, so a request's numbers do not depend on its batch.
#pragma once
#include <type_traits>

#include "lanes.h"

namespace pdserve {

// The type as which values of type T are multiplied, but for those of a linear layer's panels, which keep theirs.
template <class T>
struct OperandOf {
  using Type = float;
};
#if defined(__AVX512BF16__)
template <>
struct OperandOf<Bf16> {
  using Type = Bf16;
};
#endif
template <class T>
using Operand = typename OperandOf<T>::Type;

template <class E>
inline constexpr long kPair = std::is_same_v<E, Bf16> ? 2 : 1;

inline constexpr long kColumns = 2 * kLanes;
// 12 rows times 2 vectors of sums, the panel and a row fill the 32 registers of AVX-512.
inline constexpr long kMaxRows = 12;

inline void to_operand(Bf16 from, Bf16* to) { *to = from; }
inline void to_operand(Bf16 from, float* to) { *to = widen(from); }
inline void to_operand(float from, float* to) { *to = from; }

inline long padded_to(long n, long unit) { return (n + unit - 1) / unit * unit; }

#if defined(__AVX512BF16__)
inline Lanes multiply_add(Lanes sums, const Bf16* x, const Bf16* panel) {
  int pair;
  std::memcpy(&pair, x, sizeof pair);
  const __m512i b = _mm512_loadu_si512(panel);
  return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)b);
}
#endif
inline Lanes multiply_add(Lanes sums, const float* x, const float* panel) { return sums + *x * load(panel); }
// A pair of bf16 is one number of 32 bits, whose halves are the upper bits of two fp32 values.
inline Lanes multiply_add(Lanes sums, const float* x, const Bf16* panel) {
  BitLanes pairs;
  std::memcpy(&pairs, panel, sizeof pairs);
  sums = sums + x[0] * (Lanes)(pairs << 16);
  return sums + x[1] * (Lanes)(pairs & 0xffff0000u);
}

// Computes sums[r][v] = x[r] . panel, over `depth` (a multiple of the pair) values of each row. `ahead` > 0 prefetches
// the panel so many bytes ahead, for a panel in memory: products of several rows would leave memory too idle.
template <class X, class P, long kRows, class Store>
inline __attribute__((always_inline)) void product(const X* x, long row_stride, const P* panel, long depth, long ahead,
                                                   const Store& give) {
  constexpr long kStep = kPair<P>;
  Lanes sums[kRows][2] = {};
  for (long k = 0; k < depth; k += kStep) {
    const P* columns = panel + k * kColumns;
    if (ahead) {
      __builtin_prefetch((const char*)columns + ahead);
      __builtin_prefetch((const char*)(columns + kStep * kLanes) + ahead);
    }
#pragma GCC unroll 12
    for (long r = 0; r < kRows; r++) {
      sums[r][0] = multiply_add(sums[r][0], x + r * row_stride + k, columns);
      sums[r][1] = multiply_add(sums[r][1], x + r * row_stride + k, columns + kStep * kLanes);
    }
  }
#pragma GCC unroll 12
  for (long r = 0; r < kRows; r++) give(r, sums[r][0], sums[r][1]);
}

// Does the same for a number of rows, 1 to kMaxRows, that is known only at run time.
template <class X, class P, class Store, long kRows = kMaxRows>
inline void product_of(long rows, const X* x, long row_stride, const P* panel, long depth, long ahead,
                       const Store& give) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return product_of<X, P, Store, kRows - 1>(rows, x, row_stride, panel, depth, ahead, give);
  }
  product<X, P, kRows>(x, row_stride, panel, depth, ahead, give);
}

}  // namespace pdserve
