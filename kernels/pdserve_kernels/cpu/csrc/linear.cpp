// Computes x @ weight.T + bias in bf16 or fp32.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kept.h"
#include "lent_cores.h"
#include "panel.h"

namespace pdserve {
namespace {

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#define PDSERVE_HAS_LINEAR
// Returns `count` values as those by which panels are multiplied.
template <class X, class T>
const X* inputs(const T* x, long count) {
  if constexpr (std::is_same_v<X, T>) {
    return x;
  } else {
    X* out = kept<X>(Keep::kInputs, count);
    for (long i = 0; i < count; i++) to_operand(x[i], out + i);
    return out;
  }
}

template <class T>
struct Layer {
  const Operand<T>* x;
  const T *panels, *bias;
  T* out;
  long rows, inner, outer;

  // Computes the outputs of kPanels panels, from number p on.
  template <long kMostRows, long kPanels>
  void outputs(long p) const {
    const long depth = padded_to(inner, kPair<T>), column = p * kColumns, width = outer - column;
    Lanes offset[2 * kPanels] = {};
    for (long v = 0; bias && v < 2 * kPanels && v * kLanes < width; v++) {
      offset[v] = load_part(bias + column + v * kLanes, width - v * kLanes);
    }
    const long blocks = (rows + kMostRows - 1) / kMostRows;
    long row = 0;
    for (long b = 0; b < blocks; b++) {
      const long some = (rows - row) / (blocks - b);
      T* to = out + row * outer + column;
      product_of<kMostRows, kPanels>(some, x + row * inner, inner, panels + column * depth, depth,
                                     b == 0 && some > 2 ? kAhead : 0, [&](long r, long v, Lanes sums) {
                                       if (width <= v * kLanes) return;
                                       store_part(to + r * outer + v * kLanes, sums + offset[v], width - v * kLanes);
                                     });
      row += some;
    }
  }
};

template <class T>
void linear(const T* x, const T* panels, const T* bias, T* out, long rows, long inner, long outer) {
  const Layer<T> layer{inputs<Operand<T>>(x, rows * inner), panels, bias, out, rows, inner, outer};
  const long count = padded_to(outer, kColumns) / kColumns;
  if constexpr (kFewRows > 0) {
    if (rows <= kFewRows) {
      return each((count + 1) / 2, [&](long pair) {
        if (2 * pair + 1 < count) layer.template outputs<kFewRows, 2>(2 * pair);
        else layer.template outputs<kFewRows, 1>(2 * pair);
      });
    }
  }
  each(count, [&](long p) { layer.template outputs<kMaxRows, 1>(p); });
}

#endif

// A pair of bf16 or one fp32 is a word. Whole lines of each row are read, and words of kColumns rows lie side by side.
// What rows and columns lack is 0.
template <class T>
void pack(const T* weight, T* panels, long inner, long outer) {
  constexpr long kP = kPair<T>, kLine = 16;
  using Word = std::uint32_t;
  static_assert(kP * sizeof(T) == sizeof(Word));
  const long words = padded_to(inner, kP) / kP, count = padded_to(outer, kColumns) / kColumns;
#pragma omp parallel for
  for (long p = 0; p < count; p++) {
    const T* rows = weight + p * kColumns * inner;
    const long real = std::min(kColumns, outer - p * kColumns);
    char* panel = (char*)(panels + p * kColumns * words * kP);
    Word lines[kColumns][kLine] = {}, turned[kLine][kColumns];
    for (long w = 0; w < words; w += kLine) {
      const long some = std::min(kLine, words - w);
      const long numbers = std::min(some * kP, inner - w * kP);
      for (long c = 0; c < real; c++) {
        lines[c][some - 1] = 0;
        std::memcpy(lines[c], rows + c * inner + w * kP, numbers * sizeof(T));
      }
      for (long k = 0; k < kLine; k++) {
        for (long c = 0; c < kColumns; c++) turned[k][c] = lines[c][k];
      }
      std::memcpy(panel + w * sizeof turned[0], turned, some * sizeof turned[0]);
    }
  }
}

}  // namespace
}  // namespace pdserve

// Returns how many outputs a panel has, or 0 if this CPU has no pdserve_linear: without AVX2 it would be slow.
extern "C" int pdserve_linear_columns() {
#if defined(PDSERVE_HAS_LINEAR)
  return pdserve::kColumns;
#else
  return 0;
#endif
}

// Returns which instructions decide how results are rounded: 3 for AVX512_BF16, 2 for AVX-512 without it, 1 for AVX2,
// 0 for less.
extern "C" int pdserve_instructions() {
#if defined(__AVX512BF16__)
  return 3;
#elif defined(__AVX512F__)
  return 2;
#elif defined(PDSERVE_HAS_LINEAR)
  return 1;
#else
  return 0;
#endif
}

// Packs [outer, inner] into panels of [outer padded to whole panels][inner padded to whole words] values.
extern "C" void pdserve_pack_linear(int bf16, const void* weight, void* panels, long inner, long outer) {
  using namespace pdserve;
  if (bf16) return pack((const Bf16*)weight, (Bf16*)panels, inner, outer);
  pack((const float*)weight, (float*)panels, inner, outer);
}

// Maps [rows, inner] to [rows, outer]. inner is even, and bias may be null.
extern "C" void pdserve_linear(int bf16, const void* x, const void* panels, const void* bias, void* out, long rows,
                               long inner, long outer) {
#if defined(PDSERVE_HAS_LINEAR)
  using namespace pdserve;
  if (bf16) {
    return linear((const Bf16*)x, (const Bf16*)panels, (const Bf16*)bias, (Bf16*)out, rows, inner, outer);
  }
  linear((const float*)x, (const float*)panels, (const float*)bias, (float*)out, rows, inner, outer);
#endif
}
