// Has the formats of weights in blocks, as GGUF files store them and as panels keep them.
//
// A panel has kBlockColumns outputs and is read from end to end. It consists of chunks: the weights of one or more spans
// of 32 inputs, and then their scales, side by side for the columns. In a span the inputs of one column lie in fours, so
// that a vector holds four inputs of all columns. Fours of 4 bits share a byte with the fours that are 16 inputs later.
// A chunk is whole lines of the cache. Panels have the size of the blocks that they were made of, but for padding, and
// the scales of Q4_K, which take two bits more each.
//
// The value of a weight u is scale * (u - kOffset), or scale * u + minimum in a format with kMinimum.
#pragma once
#include "block_lanes.h"

namespace pdserve {

inline constexpr long kBlockColumns = 16;
inline constexpr long kSpan = 32;  // inputs with one scale of the activations
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
  static void pack(const uint8_t* block, long column, uint8_t* spans, uint8_t* scales) {
    put_half(block, scales, column);
    put_half(block + 2, scales + 2 * kBlockColumns, column);
    const uint8_t *six = block + 4, *from = block + 16;
    for (long s = 0; s < 8; s++) {
      uint8_t* own = scales + kUnits + s * kSpanScales + column;
      own[0] = s < 4 ? six[s] & 63 : (six[s + 4] & 15) | six[s - 4] >> 6 << 4;
      own[kBlockColumns] = s < 4 ? six[s + 4] & 63 : six[s + 4] >> 4 | six[s] >> 6 << 4;
      for (long k = 0; k < kSpan; k++) {
        put_nibble(spans + s * kSpanBytes, column, k, from[s / 2 * 32 + k] >> s % 2 * 4);
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

}  // namespace pdserve
