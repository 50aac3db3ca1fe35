// Computes one layer's attention of one step.
#include "attention.h"
#include "lent_cores.h"

#include <algorithm>

namespace pdserve {
namespace {

template <class T, class S>
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
    prepare<T, S>(step, tokens, query);
    if (step.num_singles) attend_single_tokens<T, S>(step, tokens, query, partial, first_part);
    for (long i = step.num_singles; i < step.num_rows; i++) {
      attend_span<T, S>(step, tokens, row_of(step, i), query, keys, values);
    }
  });
}

}  // namespace
}  // namespace pdserve

// `form` is 0 for fp32, 1 for bf16, and 2 more for a cache in FP8.
extern "C" void pdserve_attend(int form, const pdserve::Step* step, const pdserve::Tokens* tokens) {
  using namespace pdserve;
  switch (form) {
    case 0: return attend<float, float>(*step, *tokens);
    case 1: return attend<Bf16, Bf16>(*step, *tokens);
    case 2: return attend<float, Fp8>(*step, *tokens);
    default: return attend<Bf16, Fp8>(*step, *tokens);
  }
}
