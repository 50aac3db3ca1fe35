// Says what the operations with experts are given. library.py has the same structures.
#pragma once
#include <cstdint>

namespace pdserve {

// A weight: panels of blocks in a format, or of numbers of the kind of the inputs if it is below 0.
struct ExpertWeight {
  const void* panels;
  int64_t format;
};

// One expert. Without a gate, `gate` has no panels. Biases, of the kind of the inputs, may be null.
struct Expert {
  ExpertWeight gate, up, down;
  const void *gate_bias, *up_bias, *down_bias;
};

struct Experts {
  const Expert* experts;
  int64_t count, hidden, channels, chosen;
  int32_t activation, weighs_inputs;
};

struct Router {
  int64_t experts, chosen, groups, chosen_groups;
  int32_t scoring, normalised, two_best;
  float smallest_sum, scale;
  const float *correction, *factors;  // [experts], or null
};

struct ExpertRows {
  const void* x;          // [rows, hidden]
  const int32_t* chosen;  // [rows, chosen]; numbers that are none of the experts count for nothing
  const float* weights;   // [rows, chosen]
  const void* beside;     // [rows, hidden], or null
  void* out;              // [rows, hidden]
  int64_t rows;
};

}  // namespace pdserve
