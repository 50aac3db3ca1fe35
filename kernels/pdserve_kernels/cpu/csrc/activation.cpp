// Computes an activation of rows: of numbers, or of gates that have their ups beside them.
#include "activations.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

template <class T>
void rows_of(int activation, bool has_gate, const void* inner, long rows, long width, void* out) {
  each_if(rows * width > 1 << 14, rows, [&](long r) {
    const T* up = (const T*)inner + r * (has_gate ? 2 : 1) * width + (has_gate ? width : 0);
    T* to = (T*)out + r * width;
    for (long i = 0; i < width; i += kLanes) {
      const long n = width - i;
      const Lanes gate = has_gate ? load_part(up - width + i, n) : Lanes{};
      store_part(to + i, activated(activation, gate, load_part(up + i, n), has_gate), n);
    }
  });
}

}  // namespace
}  // namespace pdserve

extern "C" void pdserve_activate(int bf16, int activation, int has_gate, const void* inner, long rows, long width,
                                 void* out) {
  using namespace pdserve;
  (bf16 ? rows_of<Bf16> : rows_of<float>)(activation, has_gate, inner, rows, width, out);
}
