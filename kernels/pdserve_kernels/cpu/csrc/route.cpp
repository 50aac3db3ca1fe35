// Chooses the experts of each row by the outputs of a router, and weighs them.
#include <algorithm>
#include <cmath>
#include <limits>

#include "activations.h"
#include "experts.h"
#include "kept.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

enum Scoring { kSoftmax, kSoftmaxOfChosen, kSigmoid, kSigmoidOfChosen, kRootSoftplus };

constexpr float kNever = -std::numeric_limits<float>::infinity();

// NaN is above all numbers, so that it is chosen and shows. Of equal ones, the first is.
bool above(float a, float b) { return a > b || (a != a && b == b); }

// Returns the number of the highest of `count` values that are not `taken`.
long highest(const float* values, const bool* taken, long count) {
  long best = -1;
  for (long i = 0; i < count; i++) {
    if (!taken[i] && (best < 0 || above(values[i], values[best]))) best = i;
  }
  return best;
}

void apply_softmax(float* values, long count) {
  float most = kNever, total = 0;
  for (long i = 0; i < count; i++) most = above(values[i], most) ? values[i] : most;
  for (long i = 0; i < count; i += kLanes) {
    const long n = std::min(kLanes, count - i);
    store_part(values + i, exponential(load_part(values + i, n) - most), n);
  }
  for (long i = 0; i < count; i++) total += values[i];
  for (long i = 0; i < count; i++) values[i] /= total;
}

void apply_sigmoid(float* values, long count) {
  for (long i = 0; i < count; i += kLanes) {
    const long n = std::min(kLanes, count - i);
    store_part(values + i, sigmoid(load_part(values + i, n)), n);
  }
}

void apply_root_softplus(float* values, long count) {
  for (long i = 0; i < count; i += kLanes) {
    const long n = std::min(kLanes, count - i);
    store_part(values + i, Softplus()(load_part(values + i, n)), n);
  }
  for (long i = 0; i < count; i++) values[i] = std::sqrt(values[i]);
}

// Marks the experts of all groups but the best as taken.
void bar_groups(const Router& rule, const float* compared, bool* taken) {
  const long size = rule.experts / rule.groups;
  float* scores = kept<float>(Keep::kScores, rule.groups);
  bool* kept_groups = kept<bool>(Keep::kKeys, rule.groups);
  for (long g = 0; g < rule.groups; g++) {
    const float* own = compared + g * size;
    float first = kNever, second = kNever;
    for (long i = 0; i < size; i++) {
      if (above(own[i], first)) second = first, first = own[i];
      else if (above(own[i], second)) second = own[i];
    }
    scores[g] = rule.two_best ? first + second : first;
    kept_groups[g] = false;
  }
  for (long n = 0; n < rule.chosen_groups; n++) kept_groups[highest(scores, kept_groups, rule.groups)] = true;
  for (long e = 0; e < rule.experts; e++) taken[e] = !kept_groups[e / size];
}

template <class T>
void route_row(const Router& rule, const T* logits, int32_t* chosen, float* weights) {
  const long count = rule.experts;
  float *scores = kept<float>(Keep::kRows, 2 * count), *compared = scores;
  bool* taken = kept<bool>(Keep::kValues, count);
  for (long e = 0; e < count; e++) scores[e] = widen(logits[e]);
  if (rule.scoring == kSoftmax) apply_softmax(scores, count);
  if (rule.scoring == kSigmoid) apply_sigmoid(scores, count);
  if (rule.scoring == kRootSoftplus) apply_root_softplus(scores, count);
  if (rule.correction) {
    compared = scores + count;
    for (long e = 0; e < count; e++) compared[e] = scores[e] + rule.correction[e];
  }
  std::memset(taken, 0, count);
  if (rule.groups > 1) bar_groups(rule, compared, taken);
  for (long n = 0; n < rule.chosen; n++) {
    chosen[n] = int32_t(highest(compared, taken, count));
    taken[chosen[n]] = true;
    weights[n] = scores[chosen[n]];
  }
  if (rule.scoring == kSoftmaxOfChosen) apply_softmax(weights, rule.chosen);
  if (rule.scoring == kSigmoidOfChosen) apply_sigmoid(weights, rule.chosen);
  float factor = rule.scale;
  if (rule.normalised) {
    float total = 0;
    for (long n = 0; n < rule.chosen; n++) total += weights[n];
    factor /= total + rule.smallest_sum;
  }
  for (long n = 0; n < rule.chosen; n++) weights[n] *= rule.factors ? factor * rule.factors[chosen[n]] : factor;
}

template <class T>
void route(const Router& rule, const void* logits, long rows, int32_t* chosen, float* weights) {
  each_if(rows * rule.experts > 1 << 13, rows, [&](long row) {
    route_row(rule, (const T*)logits + row * rule.experts, chosen + row * rule.chosen, weights + row * rule.chosen);
  });
}

}  // namespace
}  // namespace pdserve

// Maps logits [rows, experts] to the chosen experts and their weights, both [rows, chosen].
extern "C" void pdserve_route(int bf16, const void* rule, const void* logits, long rows, void* chosen, void* weights) {
  using namespace pdserve;
  const auto run = bf16 ? route<Bf16> : route<float>;
  run(*(const Router*)rule, logits, rows, (int32_t*)chosen, (float*)weights);
}
