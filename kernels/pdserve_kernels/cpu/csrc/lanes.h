// Has fp32 lanes, loaded from and stored to bf16 or fp32: as many as one register of AVX-512 or AVX2 has. They are the
// compiler's vector extension, so any CPU runs this code. Wider ones than the registers would stay in memory.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pdserve {

struct Bf16 {
  uint16_t bits;
};

#if defined(__AVX512F__)
inline constexpr long kLanes = 16;
#else
inline constexpr long kLanes = 8;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * kLanes)));

inline Lanes splat(float x) { return x - Lanes{}; }

inline float widen(float x) { return x; }
inline float widen(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline Lanes load(const float* from) {
  Lanes out;
  std::memcpy(&out, from, sizeof out);
  return out;
}
inline Lanes load(const Bf16* from) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#elif defined(__AVX2__)
  // GCC widens the two halves of a vector by themselves.
  return (Lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  HalfBits bits;
  std::memcpy(&bits, from, sizeof bits);
  return (Lanes)(__builtin_convertvector(bits, BitLanes) << 16);
#endif
}

// Rounds to the nearest, ties to even. NaN stays NaN.
inline HalfBits narrow(Lanes x) {
#if defined(__AVX512BF16__)
  const auto rounded = _mm512_cvtneps_pbh((__m512)x);
  HalfBits out;
  std::memcpy(&out, &rounded, sizeof out);
  return out;
#else
  const BitLanes bits = (BitLanes)x;
  const BitLanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : BitLanes{} + 0x7fc0, HalfBits);
#endif
}

inline void store(float* to, Lanes x) { std::memcpy(to, &x, sizeof x); }
inline void store(Bf16* to, Lanes x) {
  const HalfBits bits = narrow(x);
  std::memcpy(to, &bits, sizeof bits);
}

// Loads the first n lanes. The others are zero.
template <class T>
inline Lanes load_part(const T* from, long n) {
  if (n >= kLanes) return load(from);
  T padded[kLanes] = {};
  std::memcpy(padded, from, n * sizeof(T));
  return load(padded);
}
template <class T>
inline void store_part(T* to, Lanes x, long n) {
  if (n >= kLanes) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(to, padded, n * sizeof(T));
}

inline float sum(Lanes x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float total = 0;
  for (int i = 0; i < kLanes; i++) total += x[i];
  return total;
#endif
}

// Writes the sum of each of four vectors, in order.
inline void sums(const Lanes* x, float* to) {
#if defined(__AVX512F__)
  const __m512 a = (__m512)x[0], b = (__m512)x[1], c = (__m512)x[2], d = (__m512)x[3];
  const auto ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
  const auto cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
  const auto abcd = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
  const auto half = _mm512_castps512_ps256(abcd) + _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)abcd, 1));
  _mm_storeu_ps(to, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  const auto pair = [](Lanes left, Lanes right) { return _mm256_hadd_ps((__m256)left, (__m256)right); };
  const __m256 half = _mm256_hadd_ps(pair(x[0], x[1]), pair(x[2], x[3]));
  _mm_storeu_ps(to, _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1));
#else
  for (int i = 0; i < 4; i++) to[i] = sum(x[i]);
#endif
}

inline Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }

inline float maximum(Lanes x) {
  float best = x[0];
  for (int i = 1; i < kLanes; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// Returns e^x within 2 units in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. NaN stays NaN.
inline Lanes exponential(Lanes x) {
  x = x > 88.0f ? splat(88.0f) : x;
  x = x < -87.0f ? splat(-87.0f) : x;
  // Adding and taking away 1.5 * 2^23 rounds to a whole number.
  const Lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (Lanes)((__builtin_convertvector(n, IntLanes) + 127) << 23);
}

}  // namespace pdserve
