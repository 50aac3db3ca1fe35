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

// Loads numbers that are not scaled yet. Sign, exponent and fraction stand where fp16 has them, whose exponents are 8 lower.
inline Lanes load(const Fp8* from) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), 8);
  return (Lanes)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16(short(0xbfff)))) * 256.0f;
#elif defined(__AVX2__)
  const __m128i x = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8);
  return (Lanes)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(x, 1), _mm_set1_epi16(short(0xbfff)))) * 256.0f;
#else
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  const IntLanes x = __builtin_convertvector(bytes, IntLanes);
  const IntLanes size = x & 0x7f;
  const auto normal = (Lanes)((size << 20) + (120 << 23));
  const Lanes small = __builtin_convertvector(size, Lanes) * 0x1p-9f;
  return (Lanes)((IntLanes)(size < 8 ? small : normal) | (x & 0x80) << 24);
#endif
}

// Whether numbers become bf16 in registers, by tables of the bytes of the 128 numbers that are not negative.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define PDSERVE_FP8_TABLES 1

struct Fp8Tables {
  __m512i lower[2], upper[2];
  Fp8Tables() {
    alignas(64) uint8_t bytes[2][128];
    for (int code = 0; code < 128; code++) {
      const float value = code < 8 ? code * 0x1p-9f : scale_of(uint8_t(120 + code / 8)) * (1 + code % 8 / 8.0f);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      bytes[0][code] = uint8_t(bits >> 16);
      bytes[1][code] = uint8_t(bits >> 24);
    }
    for (int half = 0; half < 2; half++) {
      lower[half] = _mm512_load_si512(bytes[0] + 64 * half);
      upper[half] = _mm512_load_si512(bytes[1] + 64 * half);
    }
  }
};
inline const Fp8Tables kFp8Tables;

// Writes 64 numbers as bf16, two vectors of them. `order` says which number stands where: bytes are laid side by side
// within each quarter of a vector, of which the first vector takes the lower half.
inline void to_bf16(const Fp8* from, __m512i order, const Fp8Tables& tables, __m512i* to) {
  const __m512i codes = _mm512_permutexvar_epi8(order, _mm512_loadu_si512(from));
  const __m512i lower = _mm512_permutex2var_epi8(tables.lower[0], codes, tables.lower[1]);
  const __m512i sizes = _mm512_permutex2var_epi8(tables.upper[0], codes, tables.upper[1]);
  // sizes | codes & 0x80
  const __m512i upper = _mm512_ternarylogic_epi32(sizes, codes, _mm512_set1_epi8(char(0x80)), 0xf8);
  to[0] = _mm512_unpacklo_epi8(lower, upper);
  to[1] = _mm512_unpackhi_epi8(lower, upper);
}

// Returns the order in which place 32 * v + i of the two vectors has number `number(v, i)`.
template <class Number>
inline __m512i order_of(const Number& number) {
  alignas(64) uint8_t order[64];
  for (int i = 0; i < 32; i++) {
    for (int v = 0; v < 2; v++) order[i / 8 * 16 + 8 * v + i % 8] = uint8_t(number(v, i));
  }
  return _mm512_load_si512(order);
}
inline const __m512i kInOrder = order_of([](int v, int i) { return 32 * v + i; });
// As fp32, numbers of even places and of odd places are a vector each.
inline const __m512i kByHalves = order_of([](int v, int i) { return 32 * v + i % 2 * 16 + i / 2; });
#endif

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
