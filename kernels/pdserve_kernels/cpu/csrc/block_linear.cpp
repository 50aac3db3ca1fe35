// Computes x @ weight.T + bias in bf16 from weights in blocks, which stay as a GGUF file has them.
//
// Each 32 values of an input row become bytes with one scale. Sums of products of bytes are exact, and each row adds its
// spans in their order, so a row's numbers depend neither on the other rows nor on the number of threads.
#include "block_formats.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

// The panel is prefetched so many bytes ahead, also for a single row.
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

// What a span's values are multiplied by to become bytes, and the bytes to become values again. A span that is not
// finite gets the scale NaN, which makes all of the row's results NaN.
struct SpanScale {
  float inverse, scale;
  explicit SpanScale(float most)
      : inverse(most > 1e-30f ? 127.0f / most : 0.0f),
        // Of NaN and infinity, the difference from itself is NaN.
        scale((most > 1e-30f ? most / 127.0f : 0.0f) + (most - most)) {}
};

constexpr float kRound = 12582912.0f;  // Adding 1.5 * 2^23 rounds to a whole number, in the lower bits.
constexpr int32_t kRoundBits = 0x4b400000;

// Writes a span's bytes and the sum of each half of them. Returns their scale.
#if defined(__AVX2__)
float span_bytes(const Bf16* x, int8_t* bytes, int32_t* sums) {
  const auto* from = (const __m256i*)x;
  const __m256i left = _mm256_loadu_si256(from), right = _mm256_loadu_si256(from + 1);
  // Without their signs, the bits of numbers are in the order of the numbers, and those of NaN come last.
  const __m256i sizes = _mm256_max_epu16(_mm256_slli_epi16(left, 1), _mm256_slli_epi16(right, 1));
  const __m128i most = _mm_max_epu16(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
  const int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(-1))), 0);
  const SpanScale factors(widen(Bf16{uint16_t((~least & 0xffff) >> 1)}));
  const auto rounded = [&](__m128i values) {
    const auto wide = (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(values), 16);
    const __m256 whole = _mm256_fmadd_ps(wide, _mm256_set1_ps(factors.inverse), _mm256_set1_ps(kRound));
    return _mm256_sub_epi32((__m256i)whole, _mm256_set1_epi32(kRoundBits));
  };
  const auto sixteen = [&](__m256i values) {
    return _mm256_packs_epi32(rounded(_mm256_castsi256_si128(values)), rounded(_mm256_extracti128_si256(values, 1)));
  };
  // Packing takes both vectors' lower halves first, so fours of bytes are put in their order.
  const __m256i all = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(sixteen(left), sixteen(right)),
                                                  _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i*)bytes, all);
  const __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), all), _mm256_set1_epi16(1));
  const __m256i eights = _mm256_hadd_epi32(fours, fours), halves = _mm256_hadd_epi32(eights, eights);
  sums[0] = _mm256_extract_epi32(halves, 0);
  sums[1] = _mm256_extract_epi32(halves, 4);
  return factors.scale;
}
#else
float span_bytes(const Bf16* x, int8_t* bytes, int32_t* sums) {
  uint16_t most = 0;
  for (long k = 0; k < kSpan; k++) most = std::max<uint16_t>(most, x[k].bits & 0x7fff);
  const SpanScale factors(widen(Bf16{most}));
  typedef int8_t ByteLanes __attribute__((vector_size(kLanes)));
  for (long k = 0; k < kSpan; k += kLanes) {
    const IntLanes whole = (IntLanes)(load(x + k) * factors.inverse + kRound) - kRoundBits;
    const ByteLanes part = __builtin_convertvector(whole, ByteLanes);
    std::memcpy(bytes + k, &part, sizeof part);
  }
  sums[0] = sums[1] = 0;
  for (long k = 0; k < kSpan; k++) sums[2 * k / kSpan] += bytes[k];
  return factors.scale;
}
#endif

void quantise_span(const Bf16* x, const InputRows& to, int32_t offset, long halves) {
  int32_t sums[2];
  *to.scales = span_bytes(x, to.bytes, sums);
  *to.totals = float(sums[0] + sums[1]) * *to.scales;
  to.starts[0] = -offset * (halves == 1 ? sums[0] + sums[1] : sums[0]);
  if (halves == 2) to.starts[1] = -offset * sums[1];
}

template <class F>
void quantise_row(const Bf16* from, const InputRows& x, long row, long rows, long inner) {
  const Group group = group_of(row, rows);
  for (long s = 0; s < inner / kSpan; s++) {
    const long place = group.first * (inner / kSpan) + s * group.size + row - group.first;
    quantise_span(from + s * kSpan, x.from(place, F::kHalves), F::kOffset, F::kHalves);
  }
}

inline int32_t inputs_of(const InputRows& x, long row, long four) {
  int32_t inputs;
  std::memcpy(&inputs, x.bytes + row * kSpan + 4 * four, 4);
  return inputs;
}

// Computes the exact sums of the products with one scale, for one vector of outputs and each of the rows.
template <class F, long kRows>
inline __attribute__((always_inline)) void exact_sums(const InputRows& x, const uint8_t* span, long half, long v,
                                                      Ints* sums) {
  constexpr long kPart = kFours / F::kHalves;
  const long begin = half * kPart;
#pragma GCC unroll 8
  for (long r = 0; r < kRows; r++) sums[r] = Ints{} + (F::kOffset != 0 ? x.starts[r * F::kHalves + half] : 0);
  if constexpr (kHasPairs && F::kMost > 0) {
    constexpr long kTogether = kFitting<F::kMost>;
#pragma GCC unroll 8
    for (long first = begin; first < begin + kPart; first += kTogether) {
      Pairs pairs[kRows] = {};
#pragma GCC unroll 8
      for (long four = first; four < first + kTogether; four++) {
        const Words weights = F::weights(span, four, v);
#pragma GCC unroll 8
        for (long r = 0; r < kRows; r++) pairs[r] = multiply_pairs(pairs[r], weights, inputs_of(x, r, four));
      }
#pragma GCC unroll 8
      for (long r = 0; r < kRows; r++) sums[r] += widened(pairs[r]);
    }
  } else {
#pragma GCC unroll 8
    for (long four = begin; four < begin + kPart; four++) {
      const Words weights = F::weights(span, four, v);
#pragma GCC unroll 8
      for (long r = 0; r < kRows; r++) sums[r] = F::multiplied(sums[r], weights, inputs_of(x, r, four));
    }
  }
}

// Computes a group of rows of kSome vectors of outputs, from number `first` on. The panel is prefetched `ahead` bytes
// ahead, if that is not 0.
template <class F, long kRows, long kSome>
inline __attribute__((always_inline)) void vectors_product(InputRows x, BlockShape shape, const uint8_t* panel,
                                                           long ahead, long first, Floats (*out)[kVectors]) {
  Floats totals[kRows][kSome] = {};
  for (long at = 0; at < shape.spans(); at++, x = x.from(kRows, F::kHalves)) {
    const uint8_t* chunk = panel + at / F::kChunkSpans * kChunkBytes<F>;
    const long s = at % F::kChunkSpans;
    const uint8_t *span = chunk + s * F::kSpanBytes, *scales = chunk + kScalesAt<F>;
    if (ahead) {
      for (long line = 0; line < F::kSpanBytes; line += kLine) __builtin_prefetch(span + ahead + line);
    }
#pragma GCC unroll 2
    for (long half = 0; half < F::kHalves; half++) {
#pragma GCC unroll 2
      for (long v = 0; v < kSome; v++) {
        Ints sums[kRows];
        exact_sums<F, kRows>(x, span, half, first + v, sums);
        const Floats scale = F::scale(scales, s, half, first + v);
#pragma GCC unroll 8
        for (long r = 0; r < kRows; r++) {
          totals[r][v] += __builtin_convertvector(sums[r], Floats) * (scale * x.scales[r]);
        }
      }
    }
    if constexpr (F::kMinimum) {
#pragma GCC unroll 2
      for (long v = 0; v < kSome; v++) {
        const Floats minimum = F::minimum(scales, s, first + v);
#pragma GCC unroll 8
        for (long r = 0; r < kRows; r++) totals[r][v] += minimum * x.totals[r];
      }
    }
  }
#pragma GCC unroll 8
  for (long r = 0; r < kRows; r++) {
#pragma GCC unroll 2
    for (long v = 0; v < kSome; v++) out[r][first + v] = totals[r][v];
  }
}

// Computes a group of rows of 16 outputs, and calls give(row, sums) for each. One or two rows read the panel once, from end
// to end. The sums of more rows stay in the registers only for one vector of outputs at a time.
template <class F, long kRows, class Give>
void block_product(InputRows x, BlockShape shape, const uint8_t* panel, long ahead, long row, const Give& give) {
  constexpr long kSome = kRows > 2 ? 1 : kVectors;
  Floats totals[kRows][kVectors];
  for (long v = 0; v < kVectors; v += kSome) {
    vectors_product<F, kRows, kSome>(x, shape, panel, v == 0 ? ahead : 0, v, totals);
  }
  for (long r = 0; r < kRows; r++) give(row + r, (const float*)totals[r]);
}

// Computes the groups of kRows rows, then those of fewer.
template <class F, long kRows = kMostRows, class Give>
void block_products(const InputRows& x, long row, long rows, BlockShape shape, const uint8_t* panel,
                    const Give& give) {
  for (; row + kRows <= rows; row += kRows) {
    // Later groups find the panel in a cache.
    const long ahead = row == 0 ? kAhead : 0;
    block_product<F, kRows>(x.from(row * shape.spans(), F::kHalves), shape, panel, ahead, row, give);
  }
  if constexpr (kRows > 1) block_products<F, kRows / 2>(x, row, rows, shape, panel, give);
}

template <class F>
void block_linear(const Bf16* from, const uint8_t* panels, const Bf16* bias, Bf16* out, long rows, BlockShape shape) {
  // The last three rows would be groups of two and one, which take longer than four rows: the last one is there twice.
  const long filled = rows + (rows % 4 == 3);
  const InputRows x = room_for(Keep::kInputs, filled, shape.inner);
  const long bytes = panel_bytes<F>(shape), count = shape.panels();
  together([&] {
    each(filled, [&](long row) {
      quantise_row<F>(from + std::min(row, rows - 1) * shape.inner, x, row, filled, shape.inner);
    });
    each(count, [&](long p) {
      const long column = p * kBlockColumns, width = shape.outer - column;
      float offset[kBlockColumns] = {};
      for (long c = 0; bias && c < std::min(width, kBlockColumns); c++) offset[c] = widen(bias[column + c]);
      block_products<F>(x, 0, filled, shape, panels + p * bytes, [&](long row, const float* sums) {
        if (row == rows) return;
        for (long c = 0; c < std::min(width, kBlockColumns); c += kLanes) {
          store_part(out + row * shape.outer + column + c, load(sums + c) + load(offset + c), width - c);
        }
      });
    });
  });
}

// Computes the sums of a panel's outputs for the rows from number `first` on, of which there are `some`: first is a
// multiple of kMostRows.
template <class F>
void panel_sums(const InputRows& x, long first, long some, long inner, const uint8_t* panel, float* out, long stride) {
  const BlockShape shape{inner, kBlockColumns};
  block_products<F>(x.from(first * shape.spans(), F::kHalves), 0, some, shape, panel,
                    [&](long row, const float* sums) { std::memcpy(out + row * stride, sums, 4 * kBlockColumns); });
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
    case 6: return use(Q5_0{}), true;
    case 7: return use(Q5_1{}), true;
    case 8: return use(Q8_0{}), true;
    case 12: return use(Q4_K{}), true;
    case 13: return use(Q5_K{}), true;
    case 14: return use(Q6_K{}), true;
    case 20: return use(IQ4_NL{}), true;
    case 23: return use(IQ4_XS{}), true;
    case 39: return use(MXFP4{}), true;
    default: return false;
  }
}

template <class F>
constexpr BlockProduct kProduct{quantise_row<F>, panel_sums<F>,
                                [](long inner) { return panel_bytes<F>({inner, kBlockColumns}); }};

}  // namespace

const BlockProduct& block_product(long format) {
  const BlockProduct* found = nullptr;
  with_format(int(format), [&](auto f) { found = &kProduct<decltype(f)>; });
  return *found;
}

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
