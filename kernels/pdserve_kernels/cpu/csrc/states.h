// Says what the operations with states are given. library.py has the same structures.
#pragma once
#include <cstdint>

namespace pdserve {

// The runs of a step, and the states of one layer: numbers of fp32, counted from `states`.
struct Runs {
  const int32_t* starts;
  const int32_t* sources;
  const int32_t* destinations;
  const int32_t* kept;  // of each token of the step, or null
  void* states;
  int64_t count;
  int64_t tokens;
  int64_t block_stride;
  int64_t head_stride;
};

struct Conv {
  const void* x;
  const void* weight;
  const void* bias;
  void* out;
  int64_t heads;
  int64_t channels;
  int64_t width;
  int32_t silu;
};

struct Delta {
  const void* qkv;
  const float* decay;
  const float* beta;
  void* out;
  int64_t heads;
  int64_t group;
  int64_t key_dim;
  int64_t value_dim;
  int32_t by_channel;  // whether each channel of a key has a decay, and not each value head
};

struct Scan {
  const void* xbc;
  const float* steps;
  const float* rate;
  const float* skip;
  void* out;
  int64_t groups;
  int64_t heads;
  int64_t head_dim;
  int64_t size;
};

struct ChannelScan {
  const void* x;
  const float* steps;
  const float* write;
  const float* read;
  const float* rate;
  const float* skip;
  void* out;
  int64_t heads;
  int64_t channels;
  int64_t size;
};

}  // namespace pdserve
