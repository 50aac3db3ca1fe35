// Sends each row to a few of many experts, and adds what they return.
//
// The rows of a step are sorted by expert, so that the weights of each chosen expert are read once. Every sum is taken in
// one order: a product's over its inputs, and a row's over its experts by their numbers. So a row's result depends neither
// on the other rows nor on the number of threads.
#include "experts.h"

#include "activations.h"
#include "block_product.h"
#include "lent_cores.h"
#include "panel.h"

namespace pdserve {
namespace {

// So many outputs are computed together: whole panels of every form.
constexpr long kUnit = 32;
// So many rows of an expert, which is whole groups of every product.
constexpr long kChunk = 48;
// A step of more rows is computed in parts, whose inputs stay in the caches.
constexpr long kMostAssigned = 4096;
static_assert(kUnit % kColumns == 0 && kUnit % kBlockColumns == 0 && kChunk % kMaxRows == 0 && kChunk % kMostRows == 0);

typedef float Sums[kChunk][kUnit];

// Rows as the products take them, sorted by expert: dense ones, and bytes for each of two formats.
template <class T>
struct Inputs {
  Operand<T>* dense;
  long inner, stride;
  InputRows blocks[2];

  // Returns the bytes of an expert whose first row is number `start`.
  InputRows of(long which, long start) const {
    const long place = start * (inner / kSpan);
    const InputRows& all = blocks[which];
    return {all.bytes + place * kSpan, all.scales + place, all.totals + place, all.starts + 2 * place};
  }
};

// Makes a row the inputs of a weight: number `row` of the `rows` of the expert that begins at number `start`.
template <class T>
void prepare(const T* from, const ExpertWeight& weight, const Inputs<T>& to, long which, long start, long row,
             long rows) {
  if (weight.format < 0) {
    Operand<T>* at = to.dense + (start + row) * to.stride;
    for (long k = 0; k < to.inner; k++) to_operand(from[k], at + k);
    for (long k = to.inner; k < to.stride; k++) to_operand(T{}, at + k);
  } else if constexpr (std::is_same_v<T, Bf16>) {
    block_product(weight.format).quantise(from, to.of(which, start), row, rows, to.inner);
  }
}

// Computes some rows of an expert, from number `first` on, times kUnit columns of a weight, from number unit * kUnit on.
template <class T>
void product(const ExpertWeight& weight, const Inputs<T>& x, long which, long start, long first, long some, long unit,
             long outer, Sums& sums) {
  if (weight.format < 0) {
    const long depth = padded_to(x.inner, kPair<T>), panels = padded_to(outer, kColumns) / kColumns;
    const long begin = unit * (kUnit / kColumns), end = std::min(begin + kUnit / kColumns, panels);
    const T* panel = (const T*)weight.panels + begin * kColumns * depth;
    const Operand<T>* rows = x.dense + (start + first) * x.stride;
    if constexpr (kFewRows > 0) {
      if (some <= kFewRows && end - begin == 2) {
        return product_of<kFewRows, 2>(some, rows, x.stride, panel, depth, 0,
                                       [&](long r, long v, Lanes lanes) { store(sums[r] + v * kLanes, lanes); });
      }
    }
    for (long p = 0; p < end - begin; p++, panel += kColumns * depth) {
      const long blocks = (some + kMaxRows - 1) / kMaxRows;
      for (long b = 0, row = 0; b < blocks; b++) {
        const long count = (some - row) / (blocks - b);
        product_of(count, rows + row * x.stride, x.stride, panel, depth, first == 0 && b == 0 && count > 2 ? kAhead : 0,
                   [&](long r, long v, Lanes lanes) { store(sums[row + r] + p * kColumns + v * kLanes, lanes); });
        row += count;
      }
    }
  } else if constexpr (std::is_same_v<T, Bf16>) {
    const BlockProduct& how = block_product(weight.format);
    const long bytes = how.panel_bytes(x.inner), panels = padded_to(outer, kBlockColumns) / kBlockColumns;
    const long begin = unit * (kUnit / kBlockColumns), end = std::min(begin + kUnit / kBlockColumns, panels);
    for (long p = begin; p < end; p++) {
      how.sums(x.of(which, start), first, some, x.inner, (const uint8_t*)weight.panels + p * bytes,
               sums[0] + (p - begin) * kBlockColumns, kUnit);
    }
  }
}

template <class T>
Lanes bias_part(const void* bias, long column, long width) {
  return bias ? load_part((const T*)bias + column, width) : Lanes{};
}

// The rows of a part of a step, sorted by expert.
struct Sorted {
  long count;              // of assignments to these experts
  int32_t *order, *owner;  // of each place: the assignment, row * chosen + which, and its expert's number among `active`
  int32_t *starts, *active;
  long experts = 0;  // with rows: active[i] has those of the places from starts[i] to starts[i + 1]

  Sorted(const int32_t* chosen, long assigned, long of) {
    auto* room = kept<int32_t>(Keep::kPlaces, 2 * assigned + 3 * of + 2);
    order = room, owner = order + assigned, starts = owner + assigned, active = starts + of + 1;
    int32_t* next = active + of;
    std::memset(next, 0, of * sizeof *next);
    for (long a = 0; a < assigned; a++) if (uint32_t(chosen[a]) < of) next[chosen[a]]++;
    int32_t at = 0;
    for (long e = 0; e < of; e++) {
      const int32_t rows = next[e];
      next[e] = at;
      if (!rows) continue;
      std::fill(owner + at, owner + at + rows, int32_t(experts));
      starts[experts] = at, active[experts++] = int32_t(e);
      at += rows;
    }
    starts[experts] = count = at;
    for (long a = 0; a < assigned; a++) if (uint32_t(chosen[a]) < of) order[next[chosen[a]]++] = int32_t(a);
  }
};

// Which forms the weights of a product have.
struct Forms {
  bool dense = false, blocks = false;
  void add(const ExpertWeight& weight) { (weight.format < 0 ? dense : blocks) = true; }
};

template <class T>
Inputs<T> inputs_for(long rows, long inner, Forms forms, bool two_formats) {
  Inputs<T> to{nullptr, inner, padded_to(inner, kPair<T>), {}};
  if (forms.dense) to.dense = kept<Operand<T>>(Keep::kOperands, rows * to.stride);
  if (forms.blocks) {
    to.blocks[0] = room_for(Keep::kInputs, (two_formats ? 2 : 1) * rows, inner);
    to.blocks[1] = to.blocks[0];
    if (two_formats) to.blocks[1] = to.blocks[0].from(rows * (inner / kSpan), 2);
  }
  return to;
}

// Returns how many units of `outer` columns one task has, so that each thread has a few tasks. Tasks of many units find
// the rows of an expert in a cache.
long units_together(long outer, long tasks_each) {
  const long units = (outer + kUnit - 1) / kUnit;
  return std::max<long>(1, std::min<long>(4, units * tasks_each / (4 * omp_get_max_threads())));
}

template <class T>
void part_of_step(const Experts& all, const ExpertRows& step) {
  const Sorted sorted(step.chosen, step.rows * all.chosen, all.count);
  const auto expert = [&](long i) -> const Expert& { return all.experts[sorted.active[i]]; };
  Forms outside, inside;
  bool two_formats = false;
  for (long i = 0; i < sorted.experts; i++) {
    const Expert& one = expert(i);
    outside.add(one.up), inside.add(one.down);
    if (one.gate.panels) outside.add(one.gate);
    two_formats |= one.gate.panels && one.gate.format >= 0 && one.up.format >= 0 && one.gate.format != one.up.format;
  }
  const bool own_gate = two_formats;
  const long hidden = all.hidden, channels = all.channels;
  const T* x = (const T*)step.x;
  T* middle = kept<T>(Keep::kMiddle, sorted.count * channels);
  const long wide = units_together(channels, sorted.experts), parts = (channels + wide * kUnit - 1) / (wide * kUnit);
  const long broad = units_together(hidden, 1), areas = (hidden + broad * kUnit - 1) / (broad * kUnit);
  const Inputs<T> given = inputs_for<T>(sorted.count, hidden, outside, own_gate);
  const auto prepare_given = [&](long place) {
    const long i = sorted.owner[place], start = sorted.starts[i], rows = sorted.starts[i + 1] - start;
    const long assigned = sorted.order[place];
    const T* from = x + assigned / all.chosen * hidden;
    if (all.weighs_inputs) {
      T* weighed = kept<T>(Keep::kGiven, hidden);
      for (long k = 0; k < hidden; k += kLanes) {
        store_part(weighed + k, load_part(from + k, hidden - k) * step.weights[assigned], hidden - k);
      }
      from = weighed;
    }
    const Expert& one = expert(i);
    prepare(from, one.up, given, 0, start, place - start, rows);
    if (one.gate.panels && one.gate.format != one.up.format) {
      prepare(from, one.gate, given, own_gate ? 1 : 0, start, place - start, rows);
    }
  };
  const auto inner_task = [&](long task) {
    const long i = task / parts, start = sorted.starts[i], rows = sorted.starts[i + 1] - start;
    const Expert& one = expert(i);
    const bool has_gate = one.gate.panels;
    const long gate_inputs = has_gate && own_gate && one.gate.format != one.up.format ? 1 : 0;
    Sums gates, ups;
    for (long unit = task % parts * wide; unit < (task % parts + 1) * wide && unit * kUnit < channels; unit++) {
      for (long first = 0; first < rows; first += kChunk) {
        const long some = std::min(kChunk, rows - first);
        product(one.up, given, 0, start, first, some, unit, channels, ups);
        if (has_gate) product(one.gate, given, gate_inputs, start, first, some, unit, channels, gates);
        for (long c = 0; c < kUnit; c += kLanes) {
          const long column = unit * kUnit + c, width = channels - column;
          if (width <= 0) break;
          const Lanes gate_bias = bias_part<T>(one.gate_bias, column, width), up_bias = bias_part<T>(one.up_bias, column, width);
          for (long r = 0; r < some; r++) {
            const Lanes gate = has_gate ? load(gates[r] + c) + gate_bias : Lanes{};
            store_part(middle + (start + first + r) * channels + column,
                       activated(all.activation, gate, load(ups[r] + c) + up_bias, has_gate), width);
          }
        }
      }
    }
  };
  // The inputs of the second product take the memory of the first one's, so they are made when all of that is done.
  Inputs<T> between{};
  const auto prepare_between = [&](long place) {
    const long i = sorted.owner[place], start = sorted.starts[i];
    prepare(middle + place * channels, expert(i).down, between, 0, start, place - start, sorted.starts[i + 1] - start);
  };
  const auto outer_task = [&](long area) {
    Sums sums;
    float* totals = kept<float>(Keep::kSums, step.rows * kUnit);
    for (long unit = area * broad; unit < (area + 1) * broad && unit * kUnit < hidden; unit++) {
      const long column = unit * kUnit, width = std::min(kUnit, hidden - column);
      for (long row = 0; row < step.rows; row++) {
        for (long c = 0; c < kUnit; c += kLanes) {
          const bool there = step.beside && c < width;
          store(totals + row * kUnit + c,
                there ? load_part((const T*)step.beside + row * hidden + column + c, width - c) : Lanes{});
        }
      }
      for (long i = 0; i < sorted.experts; i++) {
        const long start = sorted.starts[i], rows = sorted.starts[i + 1] - start;
        const Expert& one = expert(i);
        for (long first = 0; first < rows; first += kChunk) {
          const long some = std::min(kChunk, rows - first);
          product(one.down, between, 0, start, first, some, unit, hidden, sums);
          for (long c = 0; c < width; c += kLanes) {
            const Lanes bias = bias_part<T>(one.down_bias, column + c, width - c);
            for (long r = 0; r < some; r++) {
              const long assigned = sorted.order[start + first + r];
              float* to = totals + assigned / all.chosen * kUnit + c;
              const float weight = all.weighs_inputs ? 1.0f : step.weights[assigned];
              store(to, load(to) + (load(sums[r] + c) + bias) * weight);
            }
          }
        }
      }
      for (long row = 0; row < step.rows; row++) {
        for (long c = 0; c < width; c += kLanes) {
          store_part((T*)step.out + row * hidden + column + c, load(totals + row * kUnit + c), width - c);
        }
      }
    }
  };
  together([&] {
    each(sorted.count, prepare_given);
    each<true>(sorted.experts * parts, inner_task);
  });
  between = inputs_for<T>(sorted.count, channels, inside, false);
  together([&] {
    each(sorted.count, prepare_between);
    each<true>(areas, outer_task);
  });
}

template <class T>
void all_rows(const Experts& all, const ExpertRows& step) {
  const long most = std::max<long>(1, kMostAssigned / all.chosen);
  for (long row = 0; row < step.rows; row += most) {
    const long at = row * all.hidden;
    part_of_step<T>(all, {(const T*)step.x + at, step.chosen + row * all.chosen, step.weights + row * all.chosen,
                          step.beside ? (const T*)step.beside + at : nullptr, (T*)step.out + at,
                          std::min(most, step.rows - row)});
  }
}

}  // namespace
}  // namespace pdserve

// Writes for each row the sum of its chosen experts and of what is beside them. Weights in blocks need bf16 rows.
extern "C" void pdserve_experts(int bf16, const void* experts, const void* rows) {
  using namespace pdserve;
  const auto run = bf16 ? all_rows<Bf16> : all_rows<float>;
  run(*(const Experts*)experts, *(const ExpertRows*)rows);
}
