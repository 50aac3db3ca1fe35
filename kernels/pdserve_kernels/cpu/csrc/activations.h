// Has the functions between products, on fp32 lanes. NaN stays NaN.
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

struct Sigmoid {
  Lanes operator()(Lanes x) const { return sigmoid(x); }
};

// log(1 + e^x). With s = y / (2 + y), log(1 + y) is twice the sum of s^n / n over odd n, and s is 1/3 at most.
struct Softplus {
  Lanes operator()(Lanes x) const {
    const Lanes above = x > 0.0f ? x : Lanes{}, y = exponential(x > 0.0f ? -x : x);
    const Lanes s = y / (2.0f + y), q = s * s;
    Lanes p = splat(2.0f / 15);
    for (int n = 13; n > 0; n -= 2) p = p * q + 2.0f / n;
    return above + p * s;
  }
};

// The activation of gpt-oss: a gate up to kClampedAt, and an up within it.
inline constexpr float kClampedSlope = 1.702f, kClampedAt = 7.0f;

inline Lanes up_to(Lanes x, float bound) {
  const Lanes most = splat(bound);
  return x > most ? most : x;
}

inline Lanes within(Lanes x, float bound) {
  const Lanes least = splat(-bound);
  x = up_to(x, bound);
  return x < least ? least : x;
}

inline Lanes clamped_silu(Lanes gate, Lanes up) {
  gate = up_to(gate, kClampedAt);
  up = within(up, kClampedAt);
  return (up + 1.0f) * (gate * sigmoid(gate * kClampedSlope));
}

// The activation of DeepSeek V4: a gate up to kLimitedAt, and an up within it.
inline constexpr float kLimitedAt = 10.0f;

inline Lanes limited_silu(Lanes gate, Lanes up) {
  return Silu()(up_to(gate, kLimitedAt)) * within(up, kLimitedAt);
}

// In the order of compiled_experts.py.
enum Activation {
  kSilu,
  kGelu,
  kExactGelu,
  kRelu,
  kSquaredRelu,
  kClampedSilu,
  kSigmoid,
  kSoftplus,
  kSiluTo7,
  kSiluTo16,
  kLimitedSilu,
};

inline Lanes bounded_silu(Lanes gate, Lanes up, float bound) {
  return up_to(Silu()(gate), bound) * within(up, bound);
}

template <class Act>
Lanes gated(Lanes gate, Lanes up, bool has_gate) {
  return has_gate ? Act()(gate) * up : Act()(up);
}

// Computes what `gate` becomes times `up`, or without gates what `up` becomes.
inline Lanes activated(int activation, Lanes gate, Lanes up, bool has_gate) {
  switch (activation) {
    case kSilu: return gated<Silu>(gate, up, has_gate);
    case kGelu: return gated<Gelu>(gate, up, has_gate);
    case kExactGelu: return gated<ExactGelu>(gate, up, has_gate);
    case kRelu: return gated<Relu>(gate, up, has_gate);
    case kSquaredRelu: return gated<SquaredRelu>(gate, up, has_gate);
    case kSigmoid: return gated<Sigmoid>(gate, up, has_gate);
    case kSoftplus: return gated<Softplus>(gate, up, has_gate);
    case kSiluTo7: return bounded_silu(gate, up, 7.0f);
    case kSiluTo16: return bounded_silu(gate, up, 16.0f);
    case kLimitedSilu: return limited_silu(gate, up);
    default: return clamped_silu(gate, up);
  }
}

}  // namespace pdserve
