// Computes act(gate) * up for rows that have gate and up side by side.
#include "activations.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

template <class T, class Act>
void rows_of(const void* gate_up, long rows, long width, void* out) {
  each_if(rows * width > 1 << 14, rows, [&](long r) {
    const T* gate = (const T*)gate_up + r * 2 * width;
    T* to = (T*)out + r * width;
    for (long i = 0; i < width; i += kLanes) {
      const long n = width - i;
      store_part(to + i, Act()(load_part(gate + i, n)) * load_part(gate + width + i, n), n);
    }
  });
}

}  // namespace
}  // namespace pdserve

extern "C" void pdserve_act_and_mul(int bf16, int gelu, const void* gate_up, long rows, long width, void* out) {
  using namespace pdserve;
  const auto run = bf16 ? (gelu ? rows_of<Bf16, Gelu> : rows_of<Bf16, Silu>)
                        : (gelu ? rows_of<float, Gelu> : rows_of<float, Silu>);
  run(gate_up, rows, width, out);
}
