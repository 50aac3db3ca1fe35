// Computes x @ weight.T + bias in bf16 or fp32.
#include "kept.h"
#include "lent_cores.h"
#include "panel.h"

namespace pdserve {
namespace {

// While several rows are multiplied, the panel is prefetched so many bytes ahead. With one or two rows, the loads
// themselves keep memory busy.
constexpr long kAhead = 4096;

#if defined(__AVX512F__)
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
void linear(const T* from, const T* panels, const T* bias, T* out, long rows, long inner, long outer) {
  const long depth = padded_to(inner, kPair<T>), count = padded_to(outer, kColumns) / kColumns;
  const auto* x = inputs<Operand<T>>(from, rows * inner);
  const long blocks = (rows + kMaxRows - 1) / kMaxRows;
  each(count, [&](long p) {
    const T* panel = panels + p * kColumns * depth;
    const long column = p * kColumns, width = outer - column;
    Lanes offset[2] = {};
    if (bias) {
      offset[0] = load_part(bias + column, width);
      if (width > kLanes) offset[1] = load_part(bias + column + kLanes, width - kLanes);
    }
    long row = 0;
    for (long b = 0; b < blocks; b++) {
      const long some = (rows - row) / (blocks - b);
      T* to = out + row * outer + column;
      product_of(some, x + row * inner, inner, panel, depth, b == 0 && some > 2 ? kAhead : 0,
                 [&](long r, Lanes left, Lanes right) {
                   store_part(to + r * outer, left + offset[0], width);
                   if (width > kLanes) store_part(to + r * outer + kLanes, right + offset[1], width - kLanes);
                 });
      row += some;
    }
  });
}

#endif

template <class T>
void pack(const T* weight, T* panels, long inner, long outer) {
  constexpr long kP = kPair<T>;
  const long depth = padded_to(inner, kP), count = padded_to(outer, kColumns) / kColumns;
#pragma omp parallel for
  for (long p = 0; p < count; p++) {
    for (long k = 0; k < depth; k++) {
      for (long c = 0; c < kColumns; c++) {
        const long column = p * kColumns + c;
        const bool real = column < outer && k < inner;
        panels[p * kColumns * depth + k / kP * kP * kColumns + c * kP + k % kP] = real ? weight[column * inner + k] : T{};
      }
    }
  }
}

}  // namespace
}  // namespace pdserve

// Returns 1 if pdserve_linear is fast on this CPU. With smaller registers the sums of a panel would not stay in them.
extern "C" int pdserve_linear_is_fast() {
#if defined(__AVX512F__)
  return 1;
#else
  return 0;
#endif
}

// Returns which instructions decide how results are rounded: 2 for AVX512_BF16, 1 for AVX-512 without it, 0 for less.
extern "C" int pdserve_instructions() {
#if defined(__AVX512BF16__)
  return 2;
#elif defined(__AVX512F__)
  return 1;
#else
  return 0;
#endif
}

// Packs [outer, inner] into panels of [outer padded to 32][inner] values. inner is even.
extern "C" void pdserve_pack_linear(int bf16, const void* weight, void* panels, long inner, long outer) {
  using namespace pdserve;
  if (bf16) return pack((const Bf16*)weight, (Bf16*)panels, inner, outer);
  pack((const float*)weight, (float*)panels, inner, outer);
}

// Maps [rows, inner] to [rows, outer]. inner is even, and bias may be null.
extern "C" void pdserve_linear(int bf16, const void* x, const void* panels, const void* bias, void* out, long rows,
                               long inner, long outer) {
#if defined(__AVX512F__)
  using namespace pdserve;
  if (bf16) {
    return linear((const Bf16*)x, (const Bf16*)panels, (const Bf16*)bias, (Bf16*)out, rows, inner, outer);
  }
  linear((const float*)x, (const float*)panels, (const float*)bias, (float*)out, rows, inner, outer);
#endif
}
