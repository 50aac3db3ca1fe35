// Computes x @ weight.T + bias in bf16 from weights in blocks, which stay as a GGUF file has them.
//
// Each 32 values of an input row become bytes with one scale. Sums of products of bytes are exact, and each row adds its
// spans in their order, so a row's numbers depend neither on the other rows nor on the number of threads.
#include <algorithm>

#include "block_formats.h"
#include "kept.h"
#include "lanes.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

// So many rows' sums stay in the registers.
constexpr long kMostRows = kWide == 16 ? 8 : 2;
// While several rows are multiplied, the panel is prefetched so many bytes ahead. With one or two rows, the loads
// themselves keep memory busy.
constexpr long kAhead = 4096;

struct BlockShape {
  long inner, outer;
  long spans() const { return inner / kSpan; }
  long panels() const { return (outer + kBlockColumns - 1) / kBlockColumns; }
};

constexpr long kLine = 64;  // bytes of a line of the cache

template <class F>
inline constexpr long kScalesAt = F::kChunkSpans * F::kSpanBytes;
template <class F>
inline constexpr long kChunkBytes =
    (kScalesAt<F> + F::kChunkSpans * kSpan / F::kElements * F::kScaleBytes + kLine - 1) / kLine * kLine;

template <class F>
long panel_bytes(BlockShape shape) {
  return (shape.spans() + F::kChunkSpans - 1) / F::kChunkSpans * kChunkBytes<F>;
}

// Rows are multiplied in groups of so many: groups of kMostRows, then one of each smaller power of two that fits.
struct Group {
  long first, size;
};

Group group_of(long row, long rows) {
  long first = rows - rows % kMostRows, size = kMostRows;
  if (row < first) return {row / kMostRows * kMostRows, kMostRows};
  while (true) {
    size /= 2;
    if (!(rows & size)) continue;
    if (row < first + size) return {first, size};
    first += size;
  }
}

// Rows as bytes. A group's rows lie side by side, span by span: bytes [spans][rows][32], and for each span and row its
// scale, the sum of its values, and where the sums of bytes begin so that the weights' offset is taken away.
struct InputRows {
  int8_t* bytes;
  float *scales, *totals;
  int32_t* starts;

  InputRows from(long place, long halves) const {
    return {bytes + place * kSpan, scales + place, totals + place, starts + place * halves};
  }
};

InputRows room_for(long rows, long inner) {
  const long spans = rows * inner / kSpan;
  auto* room = (uint8_t*)kept(Keep::kInputs, size_t(spans) * (kSpan + 2 * sizeof(float) + 2 * sizeof(int32_t)));
  auto* scales = (float*)(room + spans * kSpan);
  return {(int8_t*)room, scales, scales + spans, (int32_t*)(scales + 2 * spans)};
}

// A span that is not finite gets the scale NaN, which makes all of the row's results NaN.
void quantise_span(const Bf16* x, const InputRows& to, int32_t offset, long halves) {
  constexpr float kRound = 12582912.0f;  // Adding 1.5 * 2^23 rounds to a whole number, in the lower bits.
  const Lanes left = load(x), right = load(x + kLanes);
  const float most = maximum(greater(greater(left, -left), greater(right, -right)));
  // Of NaN and infinity, the difference from itself is NaN.
  const float spoilt = sum((left - left) + (right - right));
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  const float scale = (most > 1e-30f ? most / 127.0f : 0.0f) + spoilt;
  const IntLanes first = (IntLanes)(left * inverse + kRound) - 0x4b400000;
  const IntLanes second = (IntLanes)(right * inverse + kRound) - 0x4b400000;
  typedef int8_t ByteLanes __attribute__((vector_size(16)));
  const ByteLanes parts[2] = {__builtin_convertvector(first, ByteLanes), __builtin_convertvector(second, ByteLanes)};
  std::memcpy(to.bytes, parts, sizeof parts);
  int32_t sums[2] = {};
  for (long k = 0; k < kSpan; k++) sums[k / kLanes] += to.bytes[k];
  *to.scales = scale;
  *to.totals = float(sums[0] + sums[1]) * scale;
  to.starts[0] = -offset * (halves == 1 ? sums[0] + sums[1] : sums[0]);
  if (halves == 2) to.starts[1] = -offset * sums[1];
}

template <class F>
void quantise_row(const Bf16* from, const InputRows& x, long row, long rows, BlockShape shape) {
  const Group group = group_of(row, rows);
  for (long s = 0; s < shape.spans(); s++) {
    const long place = group.first * shape.spans() + s * group.size + row - group.first;
    quantise_span(from + row * shape.inner + s * kSpan, x.from(place, F::kHalves), F::kOffset, F::kHalves);
  }
}

// Computes a group of rows of 16 outputs, of which `width` exist. The panel is prefetched `ahead` bytes ahead.
template <class F, long kRows>
void block_product(InputRows x, BlockShape shape, const uint8_t* panel, long ahead, Lanes bias, Bf16* out, long width) {
  constexpr long kPart = kFours / F::kHalves;
  Floats totals[kRows][kVectors] = {};
  for (long at = 0; at < shape.spans(); at++, x = x.from(kRows, F::kHalves)) {
    const uint8_t* chunk = panel + at / F::kChunkSpans * kChunkBytes<F>;
    const long s = at % F::kChunkSpans;
    const uint8_t *span = chunk + s * F::kSpanBytes, *scales = chunk + kScalesAt<F>;
#pragma GCC unroll 2
    for (long half = 0; half < F::kHalves; half++) {
      Ints sums[kRows][kVectors] = {};
      if constexpr (F::kOffset != 0) {
#pragma GCC unroll 8
        for (long r = 0; r < kRows; r++) {
          for (long v = 0; v < kVectors; v++) sums[r][v] = Ints{} + x.starts[r * F::kHalves + half];
        }
      }
#pragma GCC unroll 8
      for (long four = half * kPart; four < (half + 1) * kPart; four++) {
        for (long v = 0; v < kVectors; v++) {
          const Words weights = F::weights(span, four, v);
          if constexpr (kRows > 2) __builtin_prefetch(span + ahead + four * F::kSpanBytes / kFours);
#pragma GCC unroll 8
          for (long r = 0; r < kRows; r++) {
            int32_t inputs;
            std::memcpy(&inputs, x.bytes + r * kSpan + 4 * four, 4);
            sums[r][v] = F::multiplied(sums[r][v], weights, inputs);
          }
        }
      }
      for (long v = 0; v < kVectors; v++) {
        const Floats scale = F::scale(scales, s, half, v);
#pragma GCC unroll 8
        for (long r = 0; r < kRows; r++) {
          totals[r][v] += __builtin_convertvector(sums[r][v], Floats) * (scale * x.scales[r]);
        }
      }
    }
    if constexpr (F::kMinimum) {
      for (long v = 0; v < kVectors; v++) {
        const Floats minimum = F::minimum(scales, s, v);
#pragma GCC unroll 8
        for (long r = 0; r < kRows; r++) totals[r][v] += minimum * x.totals[r];
      }
    }
  }
  for (long r = 0; r < kRows; r++) {
    Lanes result;
    std::memcpy(&result, totals[r], sizeof result);
    store_part(out + r * shape.outer, result + bias, width);
  }
}

// Computes the groups of kRows rows, then those of fewer.
template <class F, long kRows = kMostRows>
void block_products(const InputRows& x, long row, long rows, BlockShape shape, const uint8_t* panel, Lanes bias,
                    Bf16* out, long width) {
  for (; row + kRows <= rows; row += kRows) {
    // Later groups find the panel in a cache.
    const long ahead = row == 0 ? kAhead : 0;
    block_product<F, kRows>(x.from(row * shape.spans(), F::kHalves), shape, panel, ahead, bias,
                            out + row * shape.outer, width);
  }
  if constexpr (kRows > 1) block_products<F, kRows / 2>(x, row, rows, shape, panel, bias, out, width);
}

template <class F>
void block_linear(const Bf16* from, const uint8_t* panels, const Bf16* bias, Bf16* out, long rows, BlockShape shape) {
  const InputRows x = room_for(rows, shape.inner);
  const long bytes = panel_bytes<F>(shape), count = shape.panels();
  together([&] {
    each(rows, [&](long row) { quantise_row<F>(from, x, row, rows, shape); });
    each(count, [&](long p) {
      const long column = p * kBlockColumns, width = shape.outer - column;
      const Lanes offset = bias ? load_part(bias + column, width) : Lanes{};
      block_products<F>(x, 0, rows, shape, panels + p * bytes, offset, out + column, width);
    });
  });
}

template <class F>
void pack_blocks(const uint8_t* blocks, uint8_t* panels, BlockShape shape) {
  const long count = shape.inner / F::kElements, spans = F::kElements / kSpan, bytes = panel_bytes<F>(shape);
  constexpr long kChunkBlocks = F::kChunkSpans * kSpan / F::kElements;
#pragma omp parallel for
  for (long p = 0; p < shape.panels(); p++) {
    uint8_t* panel = panels + p * bytes;
    std::memset(panel, 0, bytes);
    for (long column = p * kBlockColumns; column < std::min(shape.outer, (p + 1) * kBlockColumns); column++) {
      const uint8_t* row = blocks + column * count * F::kFileBytes;
      for (long b = 0; b < count; b++) {
        uint8_t* chunk = panel + b / kChunkBlocks * kChunkBytes<F>;
        const long at = b % kChunkBlocks;
        F::pack(row + b * F::kFileBytes, column % kBlockColumns, chunk + at * spans * F::kSpanBytes,
                chunk + kScalesAt<F> + at * F::kScaleBytes);
      }
    }
  }
}

// Widens rows of the weight, which is how an embedding is looked up.
template <class F>
void block_rows(const uint8_t* panels, const int64_t* wanted, long count, BlockShape shape, Bf16* out) {
  constexpr long kPart = kFours / F::kHalves;
  const long bytes = panel_bytes<F>(shape);
  each_if(count * shape.inner > 1 << 14, count, [&](long i) {
    const uint8_t* panel = panels + wanted[i] / kBlockColumns * bytes;
    const long column = wanted[i] % kBlockColumns, v = column / kWide, lane = column % kWide;
    for (long at = 0; at < shape.spans(); at++) {
      const uint8_t* chunk = panel + at / F::kChunkSpans * kChunkBytes<F>;
      const uint8_t* scales = chunk + kScalesAt<F>;
      const long s = at % F::kChunkSpans;
      float values[kSpan];
      for (long four = 0; four < kFours; four++) {
        const Words weights = F::weights(chunk + s * F::kSpanBytes, four, v);
        const float scale = F::scale(scales, s, four / kPart, v)[lane];
        const float minimum = F::kMinimum ? F::minimum(scales, s, v)[lane] : 0.0f;
        for (long k = 0; k < 4; k++) {
          values[4 * four + k] = scale * int8_t((weights[lane] >> (8 * k)) - F::kOffset) + minimum;
        }
      }
      for (long k = 0; k < kSpan; k += kLanes) store(out + i * shape.inner + at * kSpan + k, load(values + k));
    }
  });
}

// Calls `use` with the format that has this number in GGUF files. Returns whether there is one.
template <class Use>
bool with_format(int format, const Use& use) {
  switch (format) {
    case 2: return use(Q4_0{}), true;
    case 3: return use(Q4_1{}), true;
    case 8: return use(Q8_0{}), true;
    case 12: return use(Q4_K{}), true;
    case 14: return use(Q6_K{}), true;
    default: return false;
  }
}

}  // namespace
}  // namespace pdserve

// Returns the bytes of the panels of a weight [outer, inner], or 0 if this format or number of inputs has none.
extern "C" long pdserve_block_panels_bytes(int format, long inner, long outer) {
  using namespace pdserve;
  long bytes = 0;
  with_format(format, [&](auto f) {
    using F = decltype(f);
    const BlockShape shape{inner, outer};
    if (inner > 0 && inner % F::kElements == 0) bytes = shape.panels() * panel_bytes<F>(shape);
  });
  return bytes;
}

// Packs the blocks of [outer, inner], row after row, into panels, which begin at a multiple of 64.
extern "C" void pdserve_pack_blocks(int format, const void* blocks, void* panels, long inner, long outer) {
  using namespace pdserve;
  with_format(format, [&](auto f) {
    pack_blocks<decltype(f)>((const uint8_t*)blocks, (uint8_t*)panels, {inner, outer});
  });
}

// Maps bf16 [rows, inner] to bf16 [rows, outer]. The bias may be null.
extern "C" void pdserve_block_linear(int format, const void* x, const void* panels, const void* bias, void* out,
                                     long rows, long inner, long outer) {
  using namespace pdserve;
  with_format(format, [&](auto f) {
    block_linear<decltype(f)>((const Bf16*)x, (const uint8_t*)panels, (const Bf16*)bias, (Bf16*)out, rows,
                              {inner, outer});
  });
}

// Writes rows of the weight, of which `wanted` has the numbers, as bf16 [count, inner].
extern "C" void pdserve_block_rows(int format, const void* panels, const void* wanted, long count, long inner,
                                   long outer, void* out) {
  using namespace pdserve;
  with_format(format, [&](auto f) {
    block_rows<decltype(f)>((const uint8_t*)panels, (const int64_t*)wanted, count, {inner, outer}, (Bf16*)out);
  });
}
