// Has the formats of weights in blocks, as GGUF files store them and as panels keep them.
//
// A panel has kBlockColumns outputs and is read from end to end. It consists of chunks: the weights of one or more spans
// of 32 inputs, and then their scales, side by side for the columns. In a span the inputs of one column lie in fours, so
// that a vector holds four inputs of all columns. Fours of 4 bits share a byte with the fours that are 16 inputs later.
// A chunk is whole lines of the cache. Panels have the size of the blocks that they were made of, but for padding, and
// the scales of Q4_K, Q5_K and IQ4_XS, which take two bits more each.
//
// The value of a weight u is scale * (u - kOffset), or scale * u + minimum in a format with kMinimum.
#pragma once
#include "block_product.h"

namespace pdserve {

inline constexpr long kFours = kSpan / 4;
inline constexpr long kVectors = kBlockColumns / kWide;
inline constexpr long kFourBytes = 4 * kBlockColumns;

inline void put_half(const uint8_t* from, uint8_t* scales, long column) { std::memcpy(scales + 2 * column, from, 2); }

// Puts the lower 4 bits of `weight`, number `k` of 32, into a span's 256 bytes, which were 0.
inline void put_nibble(uint8_t* span, long column, long k, int weight) {
  const long four = k / 4;
  span[four % 4 * kFourBytes + 4 * column + k % 4] |= uint8_t((weight & 15) << (four / 4 * 4));
}

inline Words nibbles(const uint8_t* span, long four, long v) {
  return loaded<Words>(span + four % 4 * kFourBytes + v * 4 * kWide) >> (four / 4 * 4) & 0x0f0f0f0f;
}

// Puts a fifth bit of number `k` of 32 into 64 bytes, which were 0: bit `f` of a byte belongs to the four `f`.
inline void put_fifth(uint8_t* fifths, long column, long k, int bit) {
  fifths[4 * column + k % 4] |= uint8_t((bit & 1) << (k / 4));
}

inline Words fifths(const uint8_t* from, long four, long v) {
  return (loaded<Words>(from + v * 4 * kWide) >> four & 0x01010101) << 4;
}

// What formats have in common whose scales are 16-bit numbers, one for each span.
struct Simple {
  static constexpr long kElements = 32;  // in a block of the file
  static constexpr long kHalves = 1;     // scales in a span
  static constexpr int32_t kOffset = 0;
  static constexpr int32_t kMost = 15;  // the largest weight, or 0 if weights have 8 bits
  static constexpr bool kMinimum = false;
  static constexpr long kChunkSpans = 2;
  static constexpr long kScaleBytes = 2 * kBlockColumns;  // of a block of the file
  static Floats scale(const uint8_t* scales, long span, long, long v) {
    return half_floats(scales + span * kScaleBytes + v * 2 * kWide);
  }
  static Floats minimum(const uint8_t*, long, long) { return Floats{}; }
  static Ints multiplied(Ints sums, Words weights, int32_t inputs) { return multiply(sums, weights, inputs); }
};

// A scale, and 32 bytes.
struct Q8_0 : Simple {
  static constexpr long kFileBytes = 34, kSpanBytes = 512;
  static constexpr int32_t kOffset = kSignedOffset, kMost = 0;
  static Words weights(const uint8_t* span, long four, long v) {
    return loaded<Words>(span + four * kFourBytes + v * 4 * kWide);
  }
  static Ints multiplied(Ints sums, Words weights, int32_t inputs) { return multiply_signed(sums, weights, inputs); }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    put_half(block, scales, column);
    for (long k = 0; k < kSpan; k++) span[k / 4 * kFourBytes + 4 * column + k % 4] = uint8_t(block[2 + k] + kOffset);
  }
};

// A scale, and 32 numbers of 4 bits: the lower bits of each byte, then the upper ones.
struct Q4_0 : Simple {
  static constexpr long kFileBytes = 18, kSpanBytes = 256;
  static constexpr int32_t kOffset = 8;
  static Words weights(const uint8_t* span, long four, long v) { return nibbles(span, four, v); }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    put_half(block, scales, column);
    for (long k = 0; k < kSpan; k++) put_nibble(span, column, k, block[2 + k % 16] >> k / 16 * 4);
  }
};

// A scale, a minimum, and 32 numbers as in Q4_0.
struct Q4_1 : Simple {
  static constexpr long kFileBytes = 20, kSpanBytes = 256, kScaleBytes = 4 * kBlockColumns, kChunkSpans = 1;
  static constexpr bool kMinimum = true;
  static Words weights(const uint8_t* span, long four, long v) { return nibbles(span, four, v); }
  static Floats scale(const uint8_t* scales, long span, long, long v) {
    return half_floats(scales + span * kScaleBytes + v * 2 * kWide);
  }
  static Floats minimum(const uint8_t* scales, long span, long v) {
    return half_floats(scales + span * kScaleBytes + 2 * kBlockColumns + v * 2 * kWide);
  }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    put_half(block, scales, column);
    put_half(block + 2, scales + 2 * kBlockColumns, column);
    for (long k = 0; k < kSpan; k++) put_nibble(span, column, k, block[4 + k % 16] >> k / 16 * 4);
  }
};

// A scale, the fifth bits of 32 numbers, and their lower bits as in Q4_0.
struct Q5_0 : Simple {
  static constexpr long kFileBytes = 22, kSpanBytes = 320;
  static constexpr int32_t kOffset = 16, kMost = 31;
  static Words weights(const uint8_t* span, long four, long v) {
    return nibbles(span, four, v) | fifths(span + 256, four, v);
  }
  static void put(const uint8_t* fifth, const uint8_t* lower, long column, uint8_t* span) {
    for (long k = 0; k < kSpan; k++) {
      put_nibble(span, column, k, lower[k % 16] >> k / 16 * 4);
      put_fifth(span + 256, column, k, fifth[k / 8] >> k % 8);
    }
  }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    put_half(block, scales, column);
    put(block + 2, block + 6, column, span);
  }
};

// A scale, a minimum, and 32 numbers as in Q5_0.
struct Q5_1 : Q4_1 {
  static constexpr long kFileBytes = 24, kSpanBytes = Q5_0::kSpanBytes;
  static constexpr int32_t kMost = 31;
  static Words weights(const uint8_t* span, long four, long v) { return Q5_0::weights(span, four, v); }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    put_half(block, scales, column);
    put_half(block + 2, scales + 2 * kBlockColumns, column);
    Q5_0::put(block + 4, block + 8, column, span);
  }
};

// 256 numbers of 4 bits. Each span has a scale and a minimum of 6 bits, whose units are two 16-bit numbers.
struct Q4_K : Simple {
  static constexpr long kElements = 256, kFileBytes = 144, kSpanBytes = 256, kChunkSpans = 8;
  static constexpr long kUnits = 4 * kBlockColumns, kSpanScales = 2 * kBlockColumns;
  static constexpr long kScaleBytes = kUnits + 8 * kSpanScales;
  static constexpr bool kMinimum = true;
  static Words weights(const uint8_t* span, long four, long v) { return nibbles(span, four, v); }
  static Floats scale(const uint8_t* scales, long span, long, long v) {
    return half_floats(scales + v * 2 * kWide) * byte_floats(scales + kUnits + span * kSpanScales + v * kWide);
  }
  static Floats minimum(const uint8_t* scales, long span, long v) {
    const uint8_t* own = scales + kUnits + span * kSpanScales + kBlockColumns;
    return -half_floats(scales + 2 * kBlockColumns + v * 2 * kWide) * byte_floats(own + v * kWide);
  }
  static void put_scales(const uint8_t* block, long column, uint8_t* scales) {
    put_half(block, scales, column);
    put_half(block + 2, scales + 2 * kBlockColumns, column);
    const uint8_t* six = block + 4;
    for (long s = 0; s < 8; s++) {
      uint8_t* own = scales + kUnits + s * kSpanScales + column;
      own[0] = s < 4 ? six[s] & 63 : (six[s + 4] & 15) | six[s - 4] >> 6 << 4;
      own[kBlockColumns] = s < 4 ? six[s + 4] & 63 : six[s + 4] >> 4 | six[s] >> 6 << 4;
    }
  }
  static void pack(const uint8_t* block, long column, uint8_t* spans, uint8_t* scales) {
    put_scales(block, column, scales);
    for (long s = 0; s < 8; s++) {
      for (long k = 0; k < kSpan; k++) {
        put_nibble(spans + s * kSpanBytes, column, k, block[16 + s / 2 * 32 + k] >> s % 2 * 4);
      }
    }
  }
};

// 256 numbers of 5 bits, with scales and minima as in Q4_K.
struct Q5_K : Q4_K {
  static constexpr long kFileBytes = 176, kSpanBytes = Q5_0::kSpanBytes;
  static constexpr int32_t kMost = 31;
  static Words weights(const uint8_t* span, long four, long v) { return Q5_0::weights(span, four, v); }
  static void pack(const uint8_t* block, long column, uint8_t* spans, uint8_t* scales) {
    put_scales(block, column, scales);
    const uint8_t *fifth = block + 16, *lower = block + 48;
    for (long s = 0; s < 8; s++) {
      uint8_t* span = spans + s * kSpanBytes;
      for (long k = 0; k < kSpan; k++) {
        put_nibble(span, column, k, lower[s / 2 * 32 + k] >> s % 2 * 4);
        put_fifth(span + 256, column, k, fifth[k] >> s);
      }
    }
  }
};

// 256 numbers of 6 bits. Each 16 of them have a signed scale of 8 bits, whose unit is a 16-bit number.
struct Q6_K : Simple {
  static constexpr long kElements = 256, kFileBytes = 210, kSpanBytes = 384, kHalves = 2, kChunkSpans = 8;
  static constexpr long kUnits = 2 * kBlockColumns, kSpanScales = 2 * kBlockColumns;
  static constexpr long kScaleBytes = kUnits + 8 * kSpanScales;
  static constexpr int32_t kOffset = 32, kMost = 63;
  static Words weights(const uint8_t* span, long four, long v) {
    const Words upper = loaded<Words>(span + 256 + four % 2 * kFourBytes + v * 4 * kWide) >> (four / 2 * 2) & 0x03030303;
    return nibbles(span, four, v) | upper << 4;
  }
  static Floats scale(const uint8_t* scales, long span, long half, long v) {
    const uint8_t* own = scales + kUnits + span * kSpanScales + half * kBlockColumns;
    return half_floats(scales + v * 2 * kWide) * signed_byte_floats(own + v * kWide);
  }
  static void pack(const uint8_t* block, long column, uint8_t* spans, uint8_t* scales) {
    const uint8_t *lower = block, *upper = block + 128, *sixteenths = block + 192;
    put_half(block + 208, scales, column);
    for (long s = 0; s < 8; s++) {
      uint8_t *own = scales + kUnits + s * kSpanScales + column, *span = spans + s * kSpanBytes;
      own[0] = sixteenths[2 * s];
      own[kBlockColumns] = sixteenths[2 * s + 1];
      for (long k = 0; k < kSpan; k++) {
        const long four = k / 4;
        put_nibble(span, column, k, lower[s / 4 * 64 + s % 2 * 32 + k] >> s % 4 / 2 * 4);
        const int high = upper[s / 4 * 32 + k] >> s % 4 * 2 & 3;
        span[256 + four % 2 * kFourBytes + 4 * column + k % 4] |= uint8_t(high << (four / 2 * 2));
      }
    }
  }
};

// A scale, and 32 places in a table of numbers, which lie closer together near 0. They are stored as in Q4_0.
struct IQ4_NL : Simple {
  static constexpr long kFileBytes = 18, kSpanBytes = 256;
  static constexpr int32_t kOffset = kSignedOffset, kMost = 0;
  alignas(16) static constexpr uint8_t kTable[16] = {
      uint8_t(-127 + kOffset), uint8_t(-104 + kOffset), uint8_t(-83 + kOffset), uint8_t(-65 + kOffset),
      uint8_t(-49 + kOffset),  uint8_t(-35 + kOffset),  uint8_t(-22 + kOffset), uint8_t(-10 + kOffset),
      uint8_t(1 + kOffset),    uint8_t(13 + kOffset),   uint8_t(25 + kOffset),  uint8_t(38 + kOffset),
      uint8_t(53 + kOffset),   uint8_t(69 + kOffset),   uint8_t(89 + kOffset),  uint8_t(113 + kOffset)};
  static Words weights(const uint8_t* span, long four, long v) { return looked_up(kTable, nibbles(span, four, v)); }
  static Ints multiplied(Ints sums, Words weights, int32_t inputs) { return multiply_signed(sums, weights, inputs); }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    Q4_0::pack(block, column, span, scales);
  }
};

// 256 numbers as in IQ4_NL. Each span has a signed scale of 6 bits, whose unit is a 16-bit number.
struct IQ4_XS : IQ4_NL {
  static constexpr long kElements = 256, kFileBytes = 136, kChunkSpans = 8;
  static constexpr long kUnits = 2 * kBlockColumns, kScaleBytes = kUnits + 8 * kBlockColumns;
  static Floats scale(const uint8_t* scales, long span, long, long v) {
    return half_floats(scales + v * 2 * kWide) * signed_byte_floats(scales + kUnits + span * kBlockColumns + v * kWide);
  }
  static void pack(const uint8_t* block, long column, uint8_t* spans, uint8_t* scales) {
    put_half(block, scales, column);
    const int upper = block[2] | block[3] << 8;
    for (long s = 0; s < 8; s++) {
      const int lower = block[4 + s / 2] >> s % 2 * 4 & 15;
      scales[kUnits + s * kBlockColumns + column] = uint8_t((lower | (upper >> 2 * s & 3) << 4) - 32);
      const uint8_t* from = block + 8 + s * 16;
      for (long k = 0; k < kSpan; k++) {
        put_nibble(spans + s * kSpanBytes, column, k, from[k % 16] >> k / 16 * 4);
      }
    }
  }
};

// The exponent of a power of two (Open Compute Project, 2023), and 32 numbers of 4 bits (e2m1), stored as in Q4_0. The
// table has their doubles, which are whole.
struct MXFP4 : IQ4_NL {
  static constexpr long kFileBytes = 17, kScaleBytes = kBlockColumns, kChunkSpans = 4;
  alignas(16) static constexpr uint8_t kTable[16] = {
      uint8_t(0 + kOffset),  uint8_t(1 + kOffset),  uint8_t(2 + kOffset),  uint8_t(3 + kOffset),
      uint8_t(4 + kOffset),  uint8_t(6 + kOffset),  uint8_t(8 + kOffset),  uint8_t(12 + kOffset),
      uint8_t(0 + kOffset),  uint8_t(-1 + kOffset), uint8_t(-2 + kOffset), uint8_t(-3 + kOffset),
      uint8_t(-4 + kOffset), uint8_t(-6 + kOffset), uint8_t(-8 + kOffset), uint8_t(-12 + kOffset)};
  static Words weights(const uint8_t* span, long four, long v) { return looked_up(kTable, nibbles(span, four, v)); }
  static Floats scale(const uint8_t* scales, long span, long, long v) {
    return exponent_floats(scales + span * kScaleBytes + v * kWide) * 0.5f;
  }
  static void pack(const uint8_t* block, long column, uint8_t* span, uint8_t* scales) {
    scales[column] = block[0];
    for (long k = 0; k < kSpan; k++) put_nibble(span, column, k, block[1 + k % 16] >> k / 16 * 4);
  }
};

}  // namespace pdserve
