// Computes the attention of single tokens straight from the cache's tiles.
//
// A context is cut every kPart positions, each part is attended to by itself, and the parts are added up by their
// maxima and sums (Dao et al., "Flash-Decoding", 2023). The cuts depend only on the context, so the result does not
// depend on the number of threads or on what else is in the batch. All query heads of a KV head are served while a
// part's tiles are in the first-level cache.
#include <algorithm>

#include "attention.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

constexpr long kPart = 256;

// Scores of four heads lie side by side, [position][4], so that one instruction takes all four. Fewer heads leave some
// of them unused.
constexpr int kSlots = 4;

// Prefetches what the next tile will load: tiles are far apart in memory, and no CPU predicts where.
template <class T>
void fetch(const T* from, long count) {
  for (long i = 0; i < count; i += 64 / long(sizeof(T))) __builtin_prefetch(from + i);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Sixteen bf16 values as fp32: half of the work of widening them in their order.
struct EvenOdd {
  Lanes even, odd;
  explicit EvenOdd(const Bf16* from) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)from);
    even = (Lanes)_mm256_slli_epi32(both, 16);
    odd = (Lanes)_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000)));
  }
};

inline void store_in_order(Lanes even, Lanes odd, Lanes* to) {
  const __m256 lower = _mm256_unpacklo_ps((__m256)even, (__m256)odd);
  const __m256 upper = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
  to[0] = (Lanes)_mm256_permute2f128_ps(lower, upper, 0x20);
  to[1] = (Lanes)_mm256_permute2f128_ps(lower, upper, 0x31);
}
#endif

// One part of a context for kHeads query heads of one KV head. A head fills kVectors vectors; 0 takes any head_dim.
template <class T, class S, int kVectors, int kHeads>
struct Part {
  static constexpr int kRoom = kVectors ? kVectors : kMaxHeadDim / kLanes;
  // So many vectors of every head stay in the registers at a time.
  static constexpr int kTogether = kLanes == 16 ? 4 : 2;
  // Whether queries are fp32 where they are multiplied by keys in FP8.
#if defined(PDSERVE_FP8_TABLES)
  static constexpr bool kWidens = !kVectors || !std::is_same_v<T, Bf16>;
#else
  static constexpr bool kWidens = true;
#endif


  const Step& step;
  const Row& row;
  long kv_head, layer, low, high;

  long dim() const { return kVectors ? kVectors * kLanes : step.head_dim; }
  long vectors() const { return kVectors ? kVectors : (step.head_dim + kLanes - 1) / kLanes; }
  template <class X>
  Lanes at(const X* from, long v) const {
    return kVectors ? load(from + v * kLanes) : load_part(from + v * kLanes, step.head_dim - v * kLanes);
  }
  const S* key_at(long position) const {
    const long block = row.blocks[position / step.block_size];
    return tile_of<S>(step, block, kv_head, layer) + position % step.block_size * dim();
  }
  const uint8_t* exponents_at(long position) const {
    const long block = row.blocks[position / step.block_size];
    return exponents_of(step, tile_of<S>(step, block, kv_head, layer)) + position % step.block_size;
  }

  // Calls tile(i, key, count) for each run of `count` positions from low + i whose keys lie together.
  template <class Tile>
  void each_tile(const Tile& tile) const {
    for (long position = low, count; position < high; position += count) {
      count = std::min(high - position, step.block_size - position % step.block_size);
      tile(position - low, key_at(position), count);
    }
  }

  // Computes scores[i][h] = query[h] . key[i] for one tile.
  template <class Q>
  void score(const Q* query, const S* key, long count, float* scores) const {
    for (long i = 0; i < count; i++, key += dim(), scores += kSlots) {
      Lanes dots[kSlots] = {};
#if defined(PDSERVE_FP8_TABLES)
      if constexpr (kVectors && kScaled<S> && std::is_same_v<Q, Bf16>) {
        const Fp8Tables tables = kFp8Tables;
        const __m512i order = kInOrder;
#pragma GCC unroll 16
        for (long v = 0; v < kVectors; v += 4) {
          __m512i pairs[2];
          to_bf16(key + v * kLanes, order, tables, pairs);
#pragma GCC unroll 2
          for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) {
              const auto q = (__m512bh)_mm512_loadu_si512(query + h * dim() + (v + 2 * half) * kLanes);
              dots[h] = (Lanes)_mm512_dpbf16_ps((__m512)dots[h], q, (__m512bh)pairs[half]);
            }
          }
        }
        sums(dots, scores);
        continue;
      }
#endif
#if defined(__AVX512BF16__)
      if constexpr (kVectors && std::is_same_v<S, Bf16>) {
#pragma GCC unroll 16
        for (long v = 0; v < kVectors; v += 2) {
          const auto pairs = (__m512bh)_mm512_loadu_si512(key + v * kLanes);
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; h++) {
            const auto q = (__m512bh)_mm512_loadu_si512(query + h * dim() + v * kLanes);
            dots[h] = (Lanes)_mm512_dpbf16_ps((__m512)dots[h], q, pairs);
          }
        }
        sums(dots, scores);
        continue;
      }
#endif
      for (long v = 0; v < vectors(); v++) {
        const Lanes k = at(key, v);
        for (int h = 0; h < kHeads; h++) dots[h] += at(query + h * dim(), v) * k;
      }
      sums(dots, scores);
    }
  }

  // Computes acc[h] += weights[i][h] * value[i] for one tile.
  void gather(const float* weights, const S* value, long count, Lanes (*acc)[kRoom]) const {
    if constexpr (kVectors == 0) {
      for (long i = 0; i < count; i++) {
        for (long v = 0; v < vectors(); v++) {
          const Lanes x = at(value + i * dim(), v);
          for (int h = 0; h < kHeads; h++) acc[h][v] += weights[i * kSlots + h] * x;
        }
      }
    } else {
      for (long first = 0; first < kVectors; first += kTogether) {
        Lanes sums[kHeads][kTogether];
        for (int h = 0; h < kHeads; h++) {
          for (long v = 0; v < kTogether; v++) sums[h][v] = acc[h][first + v];
        }
        for (long i = 0; i < count; i++) {
#if defined(PDSERVE_FP8_TABLES)
          if constexpr (kScaled<S>) {
            __m512i pairs[2];
            to_bf16(value + i * kVectors * kLanes + first * kLanes, kByHalves, kFp8Tables, pairs);
#pragma GCC unroll 4
            for (long v = 0; v < kTogether; v++) {
              const __m512i both = pairs[v / 2], upper = _mm512_set1_epi32(int(0xffff0000));
              const Lanes x = (Lanes)(v % 2 ? _mm512_and_si512(both, upper) : _mm512_slli_epi32(both, 16));
#pragma GCC unroll 4
              for (int h = 0; h < kHeads; h++) sums[h][v] += weights[i * kSlots + h] * x;
            }
            continue;
          }
#endif
#pragma GCC unroll 4
          for (long v = 0; v < kTogether; v++) {
            const Lanes x = load(value + i * kVectors * kLanes + (first + v) * kLanes);
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) sums[h][v] += weights[i * kSlots + h] * x;
          }
        }
        for (int h = 0; h < kHeads; h++) {
          for (long v = 0; v < kTogether; v++) acc[h][first + v] = sums[h][v];
        }
      }
    }
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // Does the same as operator(), with vectors of elements of even and of odd numbers in turns.
  void even_odd(const T* query, Lanes* acc, float* top, float* total) const {
    alignas(64) float scores[kPart * kSlots + kLanes];
    Lanes wide[kHeads][kVectors];
    for (int h = 0; h < kHeads; h++) {
      for (long v = 0; v < kVectors; v += 2) {
        const EvenOdd q(query + h * dim() + v * kLanes);
        wide[h][v] = q.even;
        wide[h][v + 1] = q.odd;
      }
    }
    const long tile = to_value<S>(step);
    fetch(key_at(low), std::min(high - low, step.block_size) * dim());
    each_tile([&](long i, const T* key, long count) {
      const long next = low + i + count;
      const T* ahead = next < high ? key_at(next) : key;
      for (long j = 0; j < count; j++, key += dim(), ahead += dim()) {
        // A few lines at a time: more at once than the core has under way would stop it.
        fetch(ahead, dim());
        fetch(key + tile, dim());
        Lanes dots[kSlots] = {};
#pragma GCC unroll 16
        for (long v = 0; v < kVectors; v += 2) {
          const EvenOdd k(key + v * kLanes);
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; h++) dots[h] += wide[h][v] * k.even;
#pragma GCC unroll 4
          for (int h = 0; h < kHeads; h++) dots[h] += wide[h][v + 1] * k.odd;
        }
        pdserve::sums(dots, scores + (i + j) * kSlots);
      }
    });
    float tops[kSlots], totals[kSlots];
    soften(scores, high - low, tops, totals);
    constexpr long kAtOnce = kHeads < 4 ? 4 : 2;  // vectors of every head whose sums stay in the registers
    Lanes sums[kHeads][kVectors] = {};
    each_tile([&](long i, const T* key, long count) {
      const T* values = key + tile;
      for (long first = 0; first < kVectors; first += kAtOnce) {
        Lanes part[kHeads][kAtOnce];
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) {
#pragma GCC unroll 4
          for (long v = 0; v < kAtOnce; v++) part[h][v] = sums[h][first + v];
        }
        for (long j = 0; j < count; j++) {
          const float* weights = scores + (i + j) * kSlots;
#pragma GCC unroll 4
          for (long v = 0; v < kAtOnce; v += 2) {
            const EvenOdd x(values + j * dim() + (first + v) * kLanes);
#pragma GCC unroll 4
            for (int h = 0; h < kHeads; h++) {
              part[h][v] += weights[h] * x.even;
              part[h][v + 1] += weights[h] * x.odd;
            }
          }
        }
#pragma GCC unroll 4
        for (int h = 0; h < kHeads; h++) {
#pragma GCC unroll 4
          for (long v = 0; v < kAtOnce; v++) sums[h][first + v] = part[h][v];
        }
      }
    });
    for (int h = 0; h < kHeads; h++) {
      for (long v = 0; v < kVectors; v += 2) store_in_order(sums[h][v], sums[h][v + 1], acc + h * kVectors + v);
      top[h] = tops[h];
      total[h] = totals[h];
    }
  }
#endif

  // Turns scores into weights in place, and writes the maximum and the sum of each head.
  void soften(float* scores, long count, float* top, float* total) const {
    const long all = padded_to(count * kSlots, kLanes);
    for (long i = count * kSlots; i < all; i++) scores[i] = -INFINITY;
    if (step.cap) bound(step, scores, 0, all);
    Lanes best = load(scores) * step.scale;
    for (long i = kLanes; i < all; i += kLanes) best = greater(best, load(scores + i) * step.scale);
    for (long s = 0; s < kSlots; s++) {
      for (long i = s + kSlots; i < kLanes; i += kSlots) best[s] = best[i] > best[s] ? best[i] : best[s];
      for (long i = s + kSlots; i < kLanes; i += kSlots) best[i] = best[s];
    }
    Lanes sums{};
    for (long i = 0; i < all; i += kLanes) {
      const Lanes x = load(scores + i) * step.scale - best;
      const Lanes weights = x == -INFINITY ? Lanes{} : exponential(x);
      store(scores + i, weights);
      sums += weights;
    }
    for (long s = 0; s < kSlots; s++) {
      top[s] = best[s];
      total[s] = sums[s];
      for (long i = s + kSlots; i < kLanes; i += kSlots) total[s] += sums[i];
    }
  }

  // Multiplies the numbers of `count` positions, kSlots of each, by the positions' scales.
  void rescale(float* numbers, const uint8_t* exponents, long count) const {
    long i = 0;
#if defined(__AVX512F__)
    // The scales of sixteen positions, and four of them four times each.
    const __m512i four = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    for (; i + 16 <= count; i += 16) {
      const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(exponents + i)));
      const auto scales = (__m512)_mm512_slli_epi32(wide, 23);
      for (int j = 0; j < 16; j += 4) {
        float* at = numbers + (i + j) * kSlots;
        store(at, load(at) * (Lanes)_mm512_permutexvar_ps(_mm512_add_epi32(four, _mm512_set1_epi32(j)), scales));
      }
    }
#endif
    for (; i < count; i++) {
      const float scale = scale_of(exponents[i]);
      for (int s = 0; s < kSlots; s++) numbers[i * kSlots + s] *= scale;
    }
  }

  // Does the same as operator() for a cache in FP8. A product with a power of two is exact, so it makes no difference
  // whether keys are scaled or scores, and values or weights.
  void scaled(const T* query, Lanes* acc, float* top, float* total) const {
    alignas(64) float scores[kPart * kSlots + kLanes];
    alignas(64) float wide[kWidens ? kHeads * kRoom * kLanes : 1];
    for (int h = 0; kWidens && h < kHeads; h++) {
      for (long v = 0; v < vectors(); v++) store_part(wide + h * dim() + v * kLanes, at(query + h * dim(), v), dim() - v * kLanes);
    }
    const auto queries = [&] {
      if constexpr (kWidens) return (const float*)wide;
      else return query;
    }();
    const long tile = to_value<S>(step);
    each_tile([&](long i, const S* key, long count) {
      const long next = low + i + count;
      if (next < high) fetch(key_at(next), step.block_size * dim());
      fetch(key + tile, count * dim());
      score(queries, key, count, scores + i * kSlots);
      rescale(scores + i * kSlots, exponents_at(low + i), count);
    });
    float tops[kSlots], totals[kSlots];
    soften(scores, high - low, tops, totals);
    Lanes sums[kHeads][kRoom] = {};
    each_tile([&](long i, const S* key, long count) {
      rescale(scores + i * kSlots, exponents_at(low + i) + tile, count);
      gather(scores + i * kSlots, key + tile, count, sums);
    });
    for (int h = 0; h < kHeads; h++) {
      for (long v = 0; v < vectors(); v++) acc[h * vectors() + v] = sums[h][v];
      top[h] = tops[h];
      total[h] = totals[h];
    }
  }

  // Takes the query of kHeads heads. The part's result is acc[kHeads][vectors], top[kHeads] and total[kHeads].
  void operator()(const T* query, Lanes* acc, float* top, float* total) const {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (kVectors && std::is_same_v<S, Bf16>) return even_odd(query, acc, top, total);
#endif
    if constexpr (kScaled<S>) return scaled(query, acc, top, total);
    else return plain(query, acc, top, total);
  }

  void plain(const T* query, Lanes* acc, float* top, float* total) const {
    alignas(64) float scores[kPart * kSlots + kLanes];
    const long tile = to_value<S>(step);
    each_tile([&](long i, const S* key, long count) {
      const long next = low + i + count;
      if (next < high) fetch(key_at(next), step.block_size * dim());
      fetch(key + tile, count * dim());
      score(query, key, count, scores + i * kSlots);
    });
    float tops[kSlots], totals[kSlots];
    soften(scores, high - low, tops, totals);
    Lanes sums[kHeads][kRoom] = {};
    each_tile([&](long i, const S* key, long count) { gather(scores + i * kSlots, key + tile, count, sums); });
    for (int h = 0; h < kHeads; h++) {
      for (long v = 0; v < vectors(); v++) acc[h * vectors() + v] = sums[h][v];
      top[h] = tops[h];
      total[h] = totals[h];
    }
  }
};

// Runs `heads` query heads of one KV head, four at a time.
template <class T, class S, int kVectors>
void part(const Step& step, const Row& row, long kv_head, long layer, long low, long high, const T* query, long heads,
          Lanes* acc, float* top, float* total) {
  const long nv = (step.head_dim + kLanes - 1) / kLanes;
  for (long h = 0; h < heads; h += 4) {
    const T* q = query + h * step.head_dim;
    Lanes* a = acc + h * nv;
    switch (std::min(4L, heads - h)) {
      case 1: Part<T, S, kVectors, 1>{step, row, kv_head, layer, low, high}(q, a, top + h, total + h); break;
      case 2: Part<T, S, kVectors, 2>{step, row, kv_head, layer, low, high}(q, a, top + h, total + h); break;
      case 3: Part<T, S, kVectors, 3>{step, row, kv_head, layer, low, high}(q, a, top + h, total + h); break;
      default: Part<T, S, kVectors, 4>{step, row, kv_head, layer, low, high}(q, a, top + h, total + h);
    }
  }
}

long parts_before(const Tokens& tokens, const Row& row) {
  return first_visible(tokens, row.context - 1) / kPart;
}
long parts_of(const Tokens& tokens, const Row& row) {
  return (row.context + kPart - 1) / kPart - parts_before(tokens, row);
}
long result_floats(const Step& step) {
  const long group = step.heads / step.kv_heads;
  return padded_to(group * (padded_to(step.head_dim, kLanes) + 2), kLanes);
}

}  // namespace

long count_parts(const Step& step, const Tokens& tokens, long* first_part) {
  long parts = 0;
  for (long i = 0; i < step.num_singles; i++) {
    first_part[i] = parts;
    parts += parts_of(tokens, row_of(step, i));
  }
  return first_part[step.num_singles] = parts;
}

long partial_floats(const Step& step, long parts) { return parts * step.kv_heads * result_floats(step); }

template <class T, class S>
void attend_single_tokens(const Step& step, const Tokens& tokens, const T* query, float* partial, const long* first_part) {
  const long dim = step.head_dim, nv = (dim + kLanes - 1) / kLanes, group = step.heads / step.kv_heads;
  const long size = result_floats(step), parts = first_part[step.num_singles];
  each<true>(parts * step.kv_heads, [&](long item) {
    const long at = item / step.kv_heads, kv_head = item % step.kv_heads;
    const long i = std::upper_bound(first_part, first_part + step.num_singles, at) - first_part - 1;
    const Row row = row_of(step, i);
    const long number = parts_before(tokens, row) + at - first_part[i];
    const long low = std::max(number * kPart, first_visible(tokens, row.context - 1));
    const long high = std::min((number + 1) * kPart, row.context);
    const T* q = query + (row.first_token * step.heads + kv_head * group) * dim;
    float* acc = partial + item * size;
    float* top = acc + group * nv * kLanes;
    const auto run = dim == 64    ? part<T, S, 64 / kLanes>
                     : dim == 128 ? part<T, S, 128 / kLanes>
                     : dim == 576 ? part<T, S, 576 / kLanes>
                                  : part<T, S, 0>;
    run(step, row, kv_head, tokens.layer, low, high, q, group, (Lanes*)acc, top, top + group);
  });
  each(step.num_singles, [&](long i) {
    for (long head = 0; head < step.heads; head++) {
      const long kv_head = head / group, g = head % group;
      const auto result = [&](long p) { return partial + (p * step.kv_heads + kv_head) * size; };
      const long tops = group * nv * kLanes;
      float top = tokens.sinks ? tokens.sinks[head] : -INFINITY, total = 0;
      for (long p = first_part[i]; p < first_part[i + 1]; p++) {
        const float one = result(p)[tops + g];
        // NaN passes this comparison, so that it shows in the result.
        top = one <= top ? top : one;
      }
      T* out = (T*)tokens.out + (row_of(step, i).first_token * step.heads + head) * dim;
      if (tokens.sinks) total = std::exp(tokens.sinks[head] - top);
      for (long p = first_part[i]; p < first_part[i + 1]; p++) {
        total += result(p)[tops + group + g] * std::exp(result(p)[tops + g] - top);
      }
      for (long v = 0; v < nv; v++) {
        Lanes sums{};
        for (long p = first_part[i]; p < first_part[i + 1]; p++) {
          sums += load(result(p) + (g * nv + v) * kLanes) * std::exp(result(p)[tops + g] - top);
        }
        store_part(out + v * kLanes, sums / total, dim - v * kLanes);
      }
    }
  });
}

template void attend_single_tokens<float, float>(const Step&, const Tokens&, const float*, float*, const long*);
template void attend_single_tokens<Bf16, Bf16>(const Step&, const Tokens&, const Bf16*, float*, const long*);
template void attend_single_tokens<float, Fp8>(const Step&, const Tokens&, const float*, float*, const long*);
template void attend_single_tokens<Bf16, Fp8>(const Step&, const Tokens&, const Bf16*, float*, const long*);

}  // namespace pdserve
