// Computes one layer's attention of one step.
#include "attention.h"

#include <algorithm>

namespace pdserve {

void* kept(Keep use, size_t bytes) {
  struct Memory {
    void* at = nullptr;
    size_t bytes = 0;
    ~Memory() { std::free(at); }
  };
  static thread_local Memory memories[size_t(Keep::kCount)];
  Memory& memory = memories[size_t(use)];
  if (memory.bytes < bytes) {
    std::free(memory.at);
    memory.bytes = (bytes + 4095) / 4096 * 4096;
    memory.at = std::aligned_alloc(4096, memory.bytes);
    if (!memory.at) std::abort();
  }
  return memory.at;
}

namespace {

template <class T>
void attend(const Step& step, const Tokens& tokens) {
  T* query = kept<T>(Keep::kQuery, step.num_tokens * step.heads * step.head_dim);
  long* first_part = kept<long>(Keep::kParts, step.num_singles + 1);
  float* partial = kept<float>(Keep::kPartial, partial_floats(step, count_parts(step, tokens, first_part)));
  long most = 0;
  for (long i = step.num_singles; i < step.num_rows; i++) {
    most = std::max(most, panel_values(step, tokens, row_of(step, i)));
  }
  auto* keys = kept<Operand<T>>(Keep::kKeys, most);
  auto* values = kept<Operand<T>>(Keep::kValues, most);
#pragma omp parallel
  {
    prepare(step, tokens, query);
    if (step.num_singles) attend_single_tokens(step, tokens, query, partial, first_part);
    for (long i = step.num_singles; i < step.num_rows; i++) {
      attend_span(step, tokens, row_of(step, i), query, keys, values);
    }
  }
}

}  // namespace
}  // namespace pdserve

extern "C" void pdserve_attend(int bf16, const pdserve::Step* step, const pdserve::Tokens* tokens) {
  const auto run = bf16 ? pdserve::attend<pdserve::Bf16> : pdserve::attend<float>;
  run(*step, *tokens);
}
