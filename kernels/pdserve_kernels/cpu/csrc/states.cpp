// Computes layers that keep a state: short convolutions, the gated delta rule, and the scans of Mamba and Mamba 2.
// Tokens are computed one after another, so that a run of many leaves the bits that runs of one token each would.
#include "lanes.h"
#include "lent_cores.h"
#include "states.h"

#include <algorithm>
#include <vector>

namespace pdserve {
namespace {

// What a run begins with and where its state goes.
struct Ends {
  const float* before;
  float* after;
};

float* state_at(const Runs& runs, long block, long head) {
  return (float*)runs.states + block * runs.block_stride + head * runs.head_stride;
}

Ends ends_of(const Runs& runs, long run, long head) {
  const long source = runs.sources[run], destination = runs.destinations[run];
  return {source < 0 ? nullptr : state_at(runs, source, head), state_at(runs, destination, head)};
}

// Returns where the state after token t of the step goes: it stays there, or is the next token's to update.
float* state_after(const Runs& runs, const Ends& ends, long t, long head) {
  const long kept = runs.kept ? runs.kept[t] : -1;
  return kept < 0 ? ends.after : state_at(runs, kept, head);
}

// Returns `size` numbers of the state that a run leaves, from `first` on, with what it begins with.
float* begun(const Ends& ends, long first, long size) {
  float* to = ends.after + first;
  if (!ends.before) {
    std::memset(to, 0, size * sizeof(float));
  } else if (ends.before != ends.after) {
    std::memcpy(to, ends.before + first, size * sizeof(float));
  }
  return to;
}

template <class T>
void clear_outputs(const Runs& runs, long run, long head, long heads, long width, T* out) {
  for (long t = runs.starts[run]; t < runs.starts[run + 1]; t++) {
    std::memset((void*)(out + (t * heads + head) * width), 0, width * sizeof(T));
  }
}

Lanes silu(Lanes x) { return x / (1.0f + exponential(-x)); }

// One head's channels of one run.
template <class T>
void convolve(const Runs& runs, const Conv& conv, long run, long head) {
  const long channels = conv.channels, heads = conv.heads, width = conv.width;
  const long first = runs.starts[run], count = runs.starts[run + 1] - first;
  T* out = (T*)conv.out;
  if (runs.destinations[run] < 0) return clear_outputs(runs, run, head, heads, channels, out);
  const Ends ends = ends_of(runs, run, head);
  const auto row = [&](long t) { return (const T*)conv.x + ((first + t) * heads + head) * channels; };
  const auto weight = [&](long tap) { return (const T*)conv.weight + (tap * heads + head) * channels; };
  for (long c = 0; c < channels; c += kLanes) {
    const long n = channels - c;
    // Token t - width + 1 + tap of the run, which is one of the state's if it is before the run.
    const auto seen = [&](long at) {
      if (at >= 0) return load_part(row(at) + c, n);
      return ends.before ? load_part(ends.before + (at + width - 1) * channels + c, n) : Lanes{};
    };
    for (long t = 0; t < count; t++) {
      Lanes total = seen(t - width + 1) * load_part(weight(0) + c, n);
      for (long tap = 1; tap < width; tap++) total = total + seen(t - width + 1 + tap) * load_part(weight(tap) + c, n);
      if (conv.bias) total = total + load_part((const T*)conv.bias + head * channels + c, n);
      store_part(out + ((first + t) * heads + head) * channels + c, conv.silu ? silu(total) : total, n);
      if (float* const kept = state_after(runs, ends, first + t, head); kept != ends.after) {
        for (long at = 0; at < width - 1; at++) store_part(kept + at * channels + c, seen(t - width + 2 + at), n);
      }
    }
    // Source and destination may be the same block, so the oldest token is written first.
    for (long at = 0; at < width - 1; at++) store_part(ends.after + at * channels + c, seen(count - width + 1 + at), n);
  }
}

constexpr long kPrepared = 16;

// What one value head needs of some tokens that follow each other, each scaled as the rule says.
struct Prepared {
  std::vector<float> keys, queries;
  std::vector<float> factors;  // what the matrix is multiplied by, or each of its rows
  float beta[kPrepared];
  float both[kPrepared];  // the product of query and key
};

template <bool kByChannel, class T>
void prepare(const Delta& delta, long head, long of_group, long first, long count, Prepared& out) {
  const long keys = delta.key_dim, width = 2 * keys + delta.group * delta.value_dim;
  for (long t = 0; t < count; t++) {
    const T* qkv = (const T*)delta.qkv + ((first + t) * delta.heads + head) * width;
    float *query = out.queries.data() + t * keys, *key = out.keys.data() + t * keys;
    Lanes squares[2] = {};
    for (long i = 0; i < keys; i += kLanes) {
      const long n = keys - i;
      for (int which = 0; which < 2; which++) {
        const Lanes x = load_part(qkv + which * keys + i, n);
        squares[which] += x * x;
        store_part((which ? key : query) + i, x, n);
      }
    }
    const float query_scale = 1.0f / std::sqrt(sum(squares[0]) + 1e-6f) / std::sqrt((float)keys);
    const float key_scale = 1.0f / std::sqrt(sum(squares[1]) + 1e-6f);
    // In vectors by hand: a compiler's code for a plain loop rounds otherwise where the two happen to lie close together.
    Lanes both{};
    for (long i = 0; i < keys; i += kLanes) {
      const long n = keys - i;
      const Lanes scaled_query = load_part(query + i, n) * query_scale, scaled_key = load_part(key + i, n) * key_scale;
      store_part(query + i, scaled_query, n);
      store_part(key + i, scaled_key, n);
      both += scaled_query * scaled_key;
    }
    const long at = ((first + t) * delta.heads + head) * delta.group + of_group;
    if constexpr (kByChannel) {
      for (long i = 0; i < keys; i += kLanes) {
        store_part(&out.factors[t * keys + i], exponential(load_part(delta.decay + at * keys + i, keys - i)), keys - i);
      }
    } else {
      out.factors[t] = std::exp(delta.decay[at]);
    }
    out.beta[t] = delta.beta[at];
    out.both[t] = sum(both);
  }
}

// Updates n columns, at most `kVectors` vectors of them, by one token; several vectors are whole. Rows are `values`
// apart, and those before the token may be elsewhere. What the query finds after the update is what it finds before, and its part of the update.
template <int kVectors, bool kByChannel, class T>
void update_columns(const float* before, float* after, long values, long n, const Prepared& of, long t, long keys,
                    const T* value, T* out) {
  const long part = kVectors > 1 ? kLanes : n;
  const float *query = of.queries.data() + t * keys, *key = of.keys.data() + t * keys;
  const float* factors = of.factors.data() + (kByChannel ? t * keys : t);
  const float all = kByChannel ? 1.0f : factors[0];
  Lanes by_key[kVectors] = {}, by_query[kVectors] = {}, change[kVectors];
  for (long i = 0; i < keys; i++) {
    for (int v = 0; v < kVectors; v++) {
      Lanes x = load_part(before + i * values + v * kLanes, part);
      if constexpr (kByChannel) x *= factors[i];
      by_key[v] += x * key[i];
      by_query[v] += x * query[i];
    }
  }
  for (int v = 0; v < kVectors; v++) {
    change[v] = (load_part(value + v * kLanes, part) - by_key[v] * all) * of.beta[t];
    store_part(out + v * kLanes, by_query[v] * all + change[v] * of.both[t], part);
  }
  for (long i = 0; i < keys; i++) {
    const float factor = kByChannel ? factors[i] : all;
    for (int v = 0; v < kVectors; v++) {
      const long at = i * values + v * kLanes;
      store_part(after + at, load_part(before + at, part) * factor + change[v] * key[i], part);
    }
  }
}

constexpr int kWide = 4;

// The matrix of one value head, in one run. Some of its columns stay in the nearest memory for several tokens.
template <bool kByChannel, class T>
void update(const Runs& runs, const Delta& delta, long run, long head, long of_group) {
  const long keys = delta.key_dim, values = delta.value_dim, group = delta.group, heads = delta.heads;
  const long first = runs.starts[run], end = runs.starts[run + 1];
  T* const all = (T*)delta.out;
  const auto out = [&](long t) { return all + ((t * heads + head) * group + of_group) * values; };
  if (runs.destinations[run] < 0) {
    for (long t = first; t < end; t++) std::memset((void*)out(t), 0, values * sizeof(T));
    return;
  }
  const Ends ends = ends_of(runs, run, head);
  const long size = keys * values;
  begun(ends, of_group * size, size);
  const auto value = [&](long t) {
    return (const T*)delta.qkv + (t * heads + head) * (2 * keys + group * values) + 2 * keys + of_group * values;
  };
  const long most = std::min(kPrepared, end - first);
  Prepared prepared{std::vector<float>(most * keys), std::vector<float>(most * keys),
                    std::vector<float>(kByChannel ? most * keys : most), {}, {}};
  for (long begin = first; begin < end; begin += kPrepared) {
    const long count = std::min(kPrepared, end - begin);
    prepare<kByChannel, T>(delta, head, of_group, begin, count, prepared);
    float* matrices[kPrepared + 1];  // before the first of these tokens, and after each
    matrices[0] = (begin == first ? ends.after : state_after(runs, ends, begin - 1, head)) + of_group * size;
    for (long t = 0; t < count; t++) matrices[t + 1] = state_after(runs, ends, begin + t, head) + of_group * size;
    for (long j = 0; j < values;) {
      const bool wide = values - j >= kWide * kLanes;
      for (long t = 0; t < count; t++) {
        const auto update_by = wide ? update_columns<kWide, kByChannel, T> : update_columns<1, kByChannel, T>;
        update_by(matrices[t] + j, matrices[t + 1] + j, values, values - j, prepared, t, keys, value(begin + t) + j,
                  out(begin + t) + j);
      }
      j += wide ? kWide * kLanes : kLanes;
    }
  }
}

// The matrix of one head of a group, in one run.
template <class T>
void scan(const Runs& runs, const Scan& scan, long run, long group, long head) {
  const long dim = scan.head_dim, size = scan.size, heads = scan.heads, width = heads * dim + 2 * size;
  const long first = runs.starts[run], end = runs.starts[run + 1];
  const auto place = [&](long t) { return (t * scan.groups + group) * heads + head; };
  const auto out = [&](long t) { return (T*)scan.out + place(t) * dim; };
  if (runs.destinations[run] < 0) {
    for (long t = first; t < end; t++) std::memset((void*)out(t), 0, dim * sizeof(T));
    return;
  }
  const Ends ends = ends_of(runs, run, group);
  const long own = head * dim * size;
  const float* before = begun(ends, own, dim * size);
  const float rate = scan.rate[group * heads + head], skip = scan.skip[group * heads + head];
  for (long t = first; t < end; t++) {
    const T* row = (const T*)scan.xbc + (t * scan.groups + group) * width;
    const T *x = row + head * dim, *write = row + heads * dim, *read = write + size;
    const float step = scan.steps[place(t)], factor = std::exp(step * rate);
    T* to = out(t);
    float* const after = state_after(runs, ends, t, group) + own;
    for (long i = 0; i < dim; i++) {
      const float input = widen(x[i]), added = step * input;
      Lanes found{};
      for (long j = 0; j < size; j += kLanes) {
        const long n = size - j;
        const long at = i * size + j;
        const Lanes next = load_part(before + at, n) * factor + load_part(write + j, n) * added;
        store_part(after + at, next, n);
        found += next * load_part(read + j, n);
      }
      const Lanes result = splat(sum(found) + skip * input);
      store_part(to + i, result, 1);
    }
    before = after;
  }
}

// Some channels of one head, in one run: each has numbers of its own, which decay at rates of their own.
constexpr long kChannels = 32;

template <class T>
void scan_channels(const Runs& runs, const ChannelScan& scan, long run, long head, long part) {
  const long channels = scan.channels, size = scan.size, from = part * kChannels;
  const long to = std::min(channels, from + kChannels), first = runs.starts[run], end = runs.starts[run + 1];
  const auto place = [&](long t) { return (t * scan.heads + head) * channels; };
  T* const out = (T*)scan.out;
  if (runs.destinations[run] < 0) {
    for (long t = first; t < end; t++) std::memset((void*)(out + place(t) + from), 0, (to - from) * sizeof(T));
    return;
  }
  const Ends ends = ends_of(runs, run, head);
  begun(ends, from * size, (to - from) * size);
  for (long c = from; c < to; c++) {
    const float* rate = scan.rate + (head * channels + c) * size;
    const float skip = scan.skip[head * channels + c];
    const float* before = ends.after + c * size;
    for (long t = first; t < end; t++) {
      float* const after = state_after(runs, ends, t, head) + c * size;
      const float step = scan.steps[place(t) + c], input = widen(((const T*)scan.x)[place(t) + c]);
      const float added = step * input;
      Lanes found{};
      for (long j = 0; j < size; j += kLanes) {
        const long n = size - j;
        const Lanes kept = load_part(before + j, n) * exponential(load_part(rate + j, n) * step);
        const Lanes next = kept + load_part(scan.write + t * size + j, n) * added;
        store_part(after + j, next, n);
        found += next * load_part(scan.read + t * size + j, n);
      }
      before = after;
      store_part(out + place(t) + c, splat(sum(found) + skip * input), 1);
    }
  }
}

}  // namespace
}  // namespace pdserve

extern "C" void pdserve_mamba_scan(int bf16, const pdserve::Runs* runs, const pdserve::ChannelScan* scan) {
  using namespace pdserve;
  const auto run = bf16 ? scan_channels<Bf16> : scan_channels<float>;
  const long parts = (scan->channels + kChannels - 1) / kChannels, each_run = scan->heads * parts;
  each(runs->count * each_run, [&](long i) {
    const long at = i % each_run;
    run(*runs, *scan, i / each_run, at / parts, at % parts);
  });
}

extern "C" void pdserve_mamba2_scan(int bf16, const pdserve::Runs* runs, const pdserve::Scan* scan) {
  using namespace pdserve;
  const auto run = bf16 ? pdserve::scan<Bf16> : pdserve::scan<float>;
  const long each_run = scan->groups * scan->heads;
  each(runs->count * each_run, [&](long i) {
    const long head = i % each_run;
    run(*runs, *scan, i / each_run, head / scan->heads, head % scan->heads);
  });
}

extern "C" void pdserve_causal_conv(int bf16, const pdserve::Runs* runs, const pdserve::Conv* conv) {
  using namespace pdserve;
  const auto run = bf16 ? convolve<Bf16> : convolve<float>;
  each_if(runs->tokens * conv->heads * conv->channels > 1 << 13, runs->count * conv->heads,
          [&](long i) { run(*runs, *conv, i / conv->heads, i % conv->heads); });
}

extern "C" void pdserve_gated_delta_rule(int bf16, const pdserve::Runs* runs, const pdserve::Delta* delta) {
  using namespace pdserve;
  const auto by_head = bf16 ? update<false, Bf16> : update<false, float>;
  const auto by_channel = bf16 ? update<true, Bf16> : update<true, float>;
  const auto run = delta->by_channel ? by_channel : by_head;
  const long each_run = delta->heads * delta->group;
  each(runs->count * each_run, [&](long i) {
    const long head = i % each_run;
    run(*runs, *delta, i / each_run, head / delta->group, head % delta->group);
  });
}
