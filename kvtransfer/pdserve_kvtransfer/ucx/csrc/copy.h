// Copies a block and computes its digest on the way. The copy reads each byte once and writes past the caches, because
// nothing needs the bytes there before the next decode step. On CPUs without AVX2 libc copies the block, and then
// xxhash reads the copy.
//
// The digest is XXH3 (Collet, 2019), 64 bits, with a seed. This file has its variant for more than 240 bytes, which
// goes over stripes of 64 bytes with eight accumulators and a secret made of the seed.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// xxhash's own functions, or null.
struct Xxhash {
    uint64_t (*digest)(const void *bytes, size_t length, uint64_t seed);
    void (*secret)(void *secret, uint64_t seed);
};

#if defined(__x86_64__)

#define PDSERVE_AVX2 __attribute__((target("avx2")))

constexpr uint64_t kPrime32[3] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[5] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                  0x27D4EB2F165667C5};
constexpr uint64_t kLongest = 240;  // XXH3 has other variants for inputs up to this length.
constexpr uint64_t kSecret = 192, kStripe = 64, kSpan = 1024;
constexpr uint64_t kStripes = kSpan / kStripe;

bool streams(const void *to) { return __builtin_cpu_supports("avx2") && reinterpret_cast<uintptr_t>(to) % 32 == 0; }

PDSERVE_AVX2 inline __m256i load(const char *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }

PDSERVE_AVX2 inline void stream(char *to, __m256i what) { _mm256_stream_si256(reinterpret_cast<__m256i *>(to), what); }

// Adds half a stripe to half of the accumulators.
PDSERVE_AVX2 inline __m256i accumulated(__m256i sums, __m256i data, __m256i key) {
    const __m256i keyed = _mm256_xor_si256(data, key);
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    const __m256i neighbour = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(_mm256_add_epi64(sums, neighbour), product);
}

PDSERVE_AVX2 inline __m256i scrambled(__m256i sums, __m256i key) {
    const __m256i prime = _mm256_set1_epi64x(kPrime32[0]);
    sums = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), key);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(sums, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(sums, prime), _mm256_slli_epi64(high, 32));
}

uint64_t number_at(const char *from) {
    uint64_t number;
    std::memcpy(&number, from, sizeof number);
    return number;
}

uint64_t folded(uint64_t one, uint64_t other) {
    const unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t *sums, const char *secret, uint64_t length) {
    uint64_t digest = length * kPrime64[0];
    for (int i = 0; i < 8; i += 2)
        digest += folded(sums[i] ^ number_at(secret + 8 * i), sums[i + 1] ^ number_at(secret + 8 * i + 8));
    digest = (digest ^ digest >> 37) * 0x165667919E3779F9;
    return digest ^ digest >> 32;
}

// `to` must be aligned to 32 bytes.
PDSERVE_AVX2 void copy_streaming(char *to, const char *from, uint64_t length) {
    uint64_t at = 0;
    for (; at + kStripe <= length; at += kStripe) {
        stream(to + at, load(from + at));
        stream(to + at + 32, load(from + at + 32));
    }
    std::memcpy(to + at, from + at, length - at);
    _mm_sfence();
}

// Copies as copy_streaming does, and returns the digest. `length` must be greater than kLongest.
PDSERVE_AVX2 uint64_t copy_digesting(char *to, const char *from, uint64_t length, uint64_t seed, const Xxhash &xxhash) {
    char secret[kSecret];
    xxhash.secret(secret, seed);
    alignas(32) uint64_t sums[8] = {kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2],
                                    kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]};
    __m256i low = _mm256_load_si256(reinterpret_cast<__m256i *>(sums));
    __m256i high = _mm256_load_si256(reinterpret_cast<__m256i *>(sums + 4));
    uint64_t at = 0;
    // The last stripe ends with the last byte, and may overlap the one before it.
    for (uint64_t stripe = 0; at < length - 1 - (length - 1) % kStripe; at += kStripe) {
        const __m256i first = load(from + at), second = load(from + at + 32);
        stream(to + at, first);
        stream(to + at + 32, second);
        low = accumulated(low, first, load(secret + 8 * stripe));
        high = accumulated(high, second, load(secret + 8 * stripe + 32));
        if (++stripe < kStripes) continue;
        stripe = 0;
        low = scrambled(low, load(secret + kSecret - kStripe));
        high = scrambled(high, load(secret + kSecret - kStripe + 32));
    }
    std::memcpy(to + at, from + at, length - at);
    const char *last = from + length - kStripe, *key = secret + kSecret - kStripe - 7;
    low = accumulated(low, load(last), load(key));
    high = accumulated(high, load(last + 32), load(key + 32));
    _mm_sfence();
    _mm256_store_si256(reinterpret_cast<__m256i *>(sums), low);
    _mm256_store_si256(reinterpret_cast<__m256i *>(sums + 4), high);
    return merged(sums, secret + 11, length);
}

#endif

// Copies a block. Returns the digest of the copy, or 0 if there is no xxhash.
uint64_t copy(char *to, const char *from, uint64_t length, uint64_t seed, const Xxhash &xxhash) {
#if defined(__x86_64__)
    if (streams(to)) {
        if (xxhash.digest == nullptr) return copy_streaming(to, from, length), 0;
        if (xxhash.secret != nullptr && length > kLongest) return copy_digesting(to, from, length, seed, xxhash);
    }
#endif
    std::memcpy(to, from, length);
    return xxhash.digest == nullptr ? 0 : xxhash.digest(to, length, seed);
}

}  // namespace
