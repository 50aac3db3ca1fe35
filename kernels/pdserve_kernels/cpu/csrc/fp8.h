// Stores keys and values in FP8: e4m3, and for each token, head and layer the exponent of a power of two that they are
// multiplied by, in a byte behind the numbers of the tile (reference.quantised).
#pragma once
#include "lanes.h"

namespace pdserve {

struct Fp8 {
  uint8_t bits;
};

inline constexpr int kLargestExponent = 7, kLeastExponent = 16, kNotFinite = 255;

// Returns what the numbers are multiplied by. It is infinite, and so their products are not finite, if one of them was
// not finite: they are stored as zeros.
inline float scale_of(uint8_t exponent) {
  const uint32_t bits = uint32_t(exponent) << 23;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Loads numbers that are not scaled yet.
inline Lanes load(const Fp8* from) {
#if defined(__AVX512F__)
  const auto x = (IntLanes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  const auto x = (IntLanes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const IntLanes x = __builtin_convertvector(bytes, IntLanes);
#endif
  const IntLanes size = x & 0x7f;
  const auto normal = (Lanes)((size << 20) + (120 << 23));
  const Lanes small = __builtin_convertvector(size, Lanes) * 0x1p-9f;
  return (Lanes)((IntLanes)(size < 8 ? small : normal) | (x & 0x80) << 24);
}

// Writes numbers and returns their exponent.
template <class T>
uint8_t store_scaled(Fp8* to, const T* from, long count) {
  IntLanes largest{};
  for (long i = 0; i < count; i += kLanes) {
    const auto bits = (IntLanes)load_part(from + i, count - i) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  int most = 0;
  for (long i = 0; i < kLanes; i++) most = largest[i] > most ? largest[i] : most;
  if (most >> 23 == 255) {
    std::memset(to, 0, count);
    return kNotFinite;
  }
  const int above = (most >> 23) - kLargestExponent, exponent = above > kLeastExponent ? above : kLeastExponent;
  const float factor = scale_of(254 - exponent);
  for (long i = 0; i < count; i += kLanes) {
    const Lanes x = load_part(from + i, count - i) * factor;
    const auto bits = (IntLanes)x & 0x7fffffff;
    // Both round to the nearest, ties to even: the second by adding 1.5 * 2^23.
    const IntLanes normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    const IntLanes small = ((IntLanes)((Lanes)bits * 0x1p9f + 12582912.0f)) & 0xff;
    const IntLanes code = (bits < 121 << 23 ? small : normal) | ((IntLanes)x >> 24 & 0x80);
    typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    std::memcpy(to + i, &bytes, count - i < kLanes ? count - i : kLanes);
  }
  return exponent;
}

// Writes scaled numbers as values of type T, which has each of them exactly.
template <class T>
void widen_scaled(const Fp8* from, uint8_t exponent, long count, T* to) {
  const float scale = scale_of(exponent);
  for (long i = 0; i < count; i += kLanes) store_part(to + i, load_part(from + i, count - i) * scale, count - i);
}

}  // namespace pdserve
