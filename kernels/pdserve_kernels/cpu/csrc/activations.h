// Has the functions between the products of a feed-forward part, on fp32 lanes. NaN stays NaN.
#pragma once
#include "lanes.h"

namespace pdserve {

inline Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

struct Silu {
  Lanes operator()(Lanes x) const { return x * sigmoid(x); }
};

// This is the tanh approximation of gelu: (1 + tanh(u)) / 2 is sigmoid(2 u).
struct Gelu {
  Lanes operator()(Lanes x) const { return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x)); }
};

// Gelu itself, by the error function.
struct ExactGelu {
  Lanes operator()(Lanes x) const {
    for (long i = 0; i < kLanes; i++) x[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
    return x;
  }
};

struct Relu {
  Lanes operator()(Lanes x) const { return x < 0.0f ? Lanes{} : x; }
};

struct SquaredRelu {
  Lanes operator()(Lanes x) const {
    const Lanes above = Relu()(x);
    return above * above;
  }
};

// The activation of gpt-oss: a gate up to kClampedAt, and an up within it.
inline constexpr float kClampedSlope = 1.702f, kClampedAt = 7.0f;

inline Lanes clamped_silu(Lanes gate, Lanes up) {
  const Lanes most = splat(kClampedAt), least = splat(-kClampedAt);
  gate = gate > most ? most : gate;
  up = up > most ? most : up;
  up = up < least ? least : up;
  return (up + 1.0f) * (gate * sigmoid(gate * kClampedSlope));
}

}  // namespace pdserve
