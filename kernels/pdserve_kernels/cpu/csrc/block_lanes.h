// Multiplies bytes by bytes: the vectors of the products with weights in blocks, as wide as the CPU's instructions.
//
// A vector of kWide sums gets, in each lane, the products of four weights and four inputs at once (VNNI), or in several
// instructions (AVX2, plain C++). All of them are exact, so every CPU computes the same sums.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pdserve {

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
inline constexpr long kWide = 16;
#else
inline constexpr long kWide = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * kWide)));
typedef int32_t Ints __attribute__((vector_size(4 * kWide)));
typedef uint32_t Words __attribute__((vector_size(4 * kWide)));
typedef uint16_t Halves __attribute__((vector_size(2 * kWide)));
typedef uint8_t Bytes __attribute__((vector_size(kWide)));
typedef int8_t SignedBytes __attribute__((vector_size(kWide)));

template <class V>
inline V loaded(const uint8_t* from) {
  V out;
  std::memcpy(&out, from, sizeof out);
  return out;
}

// Widens kWide numbers of 16 bits (IEEE 754), which are the scales of blocks. NaN and infinity stay so.
inline Floats half_floats(const uint8_t* from) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  const Words bits = __builtin_convertvector(loaded<Halves>(from), Words);
  const Words shifted = (bits & 0x7fff) << 13;
  // The exponent's bias differs by 112. The product is right for numbers below the normal ones, too.
  const Words finite = (Words)((Floats)shifted * 0x1p112f);
  const Words special = shifted | 0x7f800000;
  return (Floats)(((shifted >= 0x0f800000 ? special : finite)) | (bits & 0x8000) << 16);
#endif
}

// Widens kWide bytes. GCC converts vectors of bytes to floats one by one.
inline Floats byte_floats(const uint8_t* from) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(loaded<Bytes>(from), Floats);
#endif
}
inline Floats signed_byte_floats(const uint8_t* from) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(loaded<SignedBytes>(from), Floats);
#endif
}

// Returns powers of two by their exponents, which are kWide bytes: 2^-126 for 1, 0 for 0, and infinity for 255.
inline Floats exponent_floats(const uint8_t* from) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)), 23);
#elif defined(__AVX2__)
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)), 23);
#else
  return (Floats)(__builtin_convertvector(loaded<Bytes>(from), Words) << 23);
#endif
}

// Adds to each lane the products of its four weights, 0 to 63 (with VNNI, to 255), and four inputs, -127 to 127.
// Weights of more bits are signed where there is no VNNI: see multiply_signed.
inline Ints multiply(Ints sums, Words weights, int32_t inputs) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(inputs));
#elif defined(__AVXVNNI__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)weights, _mm256_set1_epi32(inputs));
#elif defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4; i++) {
    sums += (Ints)(weights >> (8 * i) & 0xff) * (int32_t)(int8_t)(inputs >> (8 * i));
  }
  return sums;
#endif
}

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__)) || defined(__AVXVNNI__)
// Signed weights are kept as their sum with 128, of which the inputs' sum times 128 is taken away.
inline constexpr int32_t kSignedOffset = 128;
inline Ints multiply_signed(Ints sums, Words weights, int32_t inputs) { return multiply(sums, weights, inputs); }
#else
inline constexpr int32_t kSignedOffset = 0;
// Does the same with signed weights, -128 to 127.
inline Ints multiply_signed(Ints sums, Words weights, int32_t inputs) {
#if defined(__AVX2__)
  // Pairs of products of unsigned bytes would not fit into 16 bits: the weights' signs go to the inputs.
  const __m256i signs = (__m256i)weights;
  const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi32(inputs), signs);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), turned);
  return sums + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int i = 0; i < 4; i++) {
    sums += ((Ints)(weights << (24 - 8 * i)) >> 24) * (int32_t)(int8_t)(inputs >> (8 * i));
  }
  return sums;
#endif
}
#endif

// Returns for each byte, 0 to 15, the byte of a table of 16 that begins at a multiple of 16.
inline Words looked_up(const uint8_t* table, Words places) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
  return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)places);
#elif defined(__AVX2__)
  return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), (__m256i)places);
#else
  uint8_t bytes[sizeof places];
  std::memcpy(bytes, &places, sizeof places);
  for (uint8_t& byte : bytes) byte = table[byte];
  return loaded<Words>(bytes);
#endif
}

// Weights of few bits, at most kMost, are multiplied in 16 bits where there is no VNNI: sums of kFitting pairs of
// products fit, which takes two instructions for four inputs of each lane and not three.
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !(defined(__AVX512VNNI__) && defined(__AVX512BW__))
inline constexpr bool kHasPairs = true;
typedef int16_t Pairs __attribute__((vector_size(4 * kWide)));
inline Pairs multiply_pairs(Pairs pairs, Words weights, int32_t inputs) {
  pairs += (Pairs)_mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(inputs));
  asm("" : "+x"(pairs));  // GCC would put off the additions, and keep all products in memory until then.
  return pairs;
}
inline Ints widened(Pairs pairs) { return (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#else
inline constexpr bool kHasPairs = false;
typedef Ints Pairs;
inline Pairs multiply_pairs(Pairs sums, Words weights, int32_t inputs) { return multiply(sums, weights, inputs); }
inline Ints widened(Pairs sums) { return sums; }
#endif
template <int32_t kMost>
inline constexpr long kFitting = 32767 / (2 * 128 * kMost);

}  // namespace pdserve
