// Computes the product that the linear layer and attention are made of: a few rows times one panel of two vectors of
// columns.
//
// A panel keeps its columns side by side, [depth / pair][columns][pair]: pairs of bf16, or single fp32 values. A CPU that
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
// So many rows times 2 vectors of sums, the panel and a row fill the 32 registers of AVX-512, or the 16 of AVX2.
inline constexpr long kMaxRows = kLanes == 16 ? 12 : 6;
// One or two rows would leave the units of AVX2 waiting for their sums, so they are multiplied by two panels at once.
inline constexpr long kFewRows = kLanes == 16 ? 0 : 2;
// While several rows are multiplied, a panel in memory is prefetched so many bytes ahead. With one or two rows, the loads
// themselves keep memory busy.
inline constexpr long kAhead = 4096;

inline void to_operand(Bf16 from, Bf16* to) { *to = from; }
inline void to_operand(Bf16 from, float* to) { *to = widen(from); }
inline void to_operand(float from, float* to) { *to = from; }

inline long padded_to(long n, long unit) { return (n + unit - 1) / unit * unit; }

// A vector of a panel is multiplied in so many parts: pairs of bf16 at once, or one half of each pair after the other.
template <class X, class P>
inline constexpr long kParts = std::is_same_v<X, P> ? 1 : 2;

// The upper halves of pairs. It is loaded each time, because AVX2 has no register left for it.
static const volatile BitLanes kUpper = BitLanes{} + 0xffff0000u;

template <class X, class P>
inline auto part_of(const P* vector, long half) {
  if constexpr (std::is_same_v<P, float>) {
    return load(vector);
#if defined(__AVX512BF16__)
  } else if constexpr (std::is_same_v<X, Bf16>) {
    return (__m512bh)_mm512_loadu_si512(vector);
#endif
  } else {
    // A pair of bf16 is one number of 32 bits, whose halves are the upper bits of two fp32 values.
    BitLanes pairs;
    std::memcpy(&pairs, vector, sizeof pairs);
    return (Lanes)(half ? pairs & kUpper : pairs << 16);
  }
}

inline Lanes multiply_add(Lanes sums, const float* x, Lanes part) { return sums + *x * part; }
#if defined(__AVX512BF16__)
inline Lanes multiply_add(Lanes sums, const Bf16* x, __m512bh part) {
  int pair;
  std::memcpy(&pair, x, sizeof pair);
  return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32(pair), part);
}
#endif

// Computes sums[r][v] = x[r] . panel over `depth` (a multiple of the pair) values of each row, for each vector v of the
// columns of kPanels panels, one behind the other. `ahead` > 0 prefetches the panel so many bytes ahead, for a panel in
// memory: products of several rows would leave memory too idle. This is a function of its own because the sums stay in
// the registers only if nothing else wants them.
template <class X, class P, long kRows, long kPanels>
[[gnu::noinline]] void product(const X* x, long row_stride, const P* panel, long depth, long ahead,
                               Lanes (*out)[2 * kPanels]) {
  constexpr long kStep = kPair<P>, kVectors = 2 * kPanels;
  Lanes sums[kRows][kVectors] = {};
  for (long k = 0; k < depth; k += kStep) {
    const P* columns = panel + k * kColumns;
    const auto vector = [&](long v) { return columns + v / 2 * depth * kColumns + v % 2 * kStep * kLanes; };
    if (ahead) {
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; v++) __builtin_prefetch((const char*)vector(v) + ahead);
    }
#pragma GCC unroll 2
    for (long half = 0; half < kParts<X, P>; half++) {
      decltype(part_of<X>(columns, half)) parts[kVectors];
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; v++) parts[v] = part_of<X>(vector(v), half);
#pragma GCC unroll 12
      for (long r = 0; r < kRows; r++) {
#pragma GCC unroll 4
        for (long v = 0; v < kVectors; v++) sums[r][v] = multiply_add(sums[r][v], x + r * row_stride + k + half, parts[v]);
      }
    }
  }
#pragma GCC unroll 12
  for (long r = 0; r < kRows; r++) {
#pragma GCC unroll 4
    for (long v = 0; v < kVectors; v++) out[r][v] = sums[r][v];
  }
}

// Does the same for a number of rows, 1 to kMostRows, that is known only at run time.
template <long kMostRows, long kPanels, class X, class P>
void some_product(long rows, const X* x, long row_stride, const P* panel, long depth, long ahead,
                  Lanes (*sums)[2 * kPanels]) {
  if constexpr (kMostRows > 1) {
    if (rows < kMostRows) {
      return some_product<kMostRows - 1, kPanels>(rows, x, row_stride, panel, depth, ahead, sums);
    }
  }
  product<X, P, kMostRows, kPanels>(x, row_stride, panel, depth, ahead, sums);
}

// Does the same, and calls give(r, v, sums) for each row r and vector v.
template <long kMostRows = kMaxRows, long kPanels = 1, class X, class P, class Store>
void product_of(long rows, const X* x, long row_stride, const P* panel, long depth, long ahead, const Store& give) {
  Lanes sums[kMostRows][2 * kPanels];
  some_product<kMostRows, kPanels>(rows, x, row_stride, panel, depth, ahead, sums);
  for (long r = 0; r < rows; r++) {
    for (long v = 0; v < 2 * kPanels; v++) give(r, v, sums[r][v]);
  }
}

}  // namespace pdserve
