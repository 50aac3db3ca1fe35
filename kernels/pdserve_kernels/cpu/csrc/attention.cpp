// Computes one layer's attention of one step.
#include "attention.h"
#include "lent_cores.h"

#include <algorithm>

namespace pdserve {
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
  together([&] {
    prepare(step, tokens, query);
    if (step.num_singles) attend_single_tokens(step, tokens, query, partial, first_part);
    for (long i = step.num_singles; i < step.num_rows; i++) {
      attend_span(step, tokens, row_of(step, i), query, keys, values);
    }
  });
}

}  // namespace
}  // namespace pdserve

extern "C" void pdserve_attend(int bf16, const pdserve::Step* step, const pdserve::Tokens* tokens) {
  const auto run = bf16 ? pdserve::attend<pdserve::Bf16> : pdserve::attend<float>;
  run(*step, *tokens);
}
