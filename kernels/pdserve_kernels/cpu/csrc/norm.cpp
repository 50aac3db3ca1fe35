// Computes root mean square normalisation, alone or after adding the residual.
#include "lanes.h"
#include "lent_cores.h"

namespace pdserve {
namespace {

template <class T>
void norm_row(const T* x, const T* residual, const T* weight, float eps, long width, T* out, T* total) {
  Lanes squares{};
  for (long i = 0; i < width; i += kLanes) {
    const long n = width - i;
    Lanes v = load_part(x + i, n);
    if (residual) {
      store_part(total + i, v + load_part(residual + i, n), n);
      // The stored, rounded sum is what is normalised.
      v = load_part(total + i, n);
    }
    squares += v * v;
  }
  const float factor = 1.0f / std::sqrt(sum(squares) / width + eps);
  const T* from = residual ? total : x;
  for (long i = 0; i < width; i += kLanes) {
    const long n = width - i;
    store_part(out + i, load_part(from + i, n) * factor * load_part(weight + i, n), n);
  }
}

template <class T>
void norm_rows(const void* x, const void* residual, const void* weight, float eps, long rows, long width, void* out,
               void* total) {
  each_if(rows * width > 1 << 15, rows, [&](long r) {
    const long at = r * width;
    norm_row((const T*)x + at, residual ? (const T*)residual + at : nullptr, (const T*)weight, eps, width,
             (T*)out + at, residual ? (T*)total + at : nullptr);
  });
}

}  // namespace
}  // namespace pdserve

// Computes out = norm(x) * weight. With a residual, it is total = x + residual and out = norm(total) * weight.
extern "C" void pdserve_rms_norm(int bf16, const void* x, const void* residual, const void* weight, float eps,
                                 long rows, long width, void* out, void* total) {
  const auto run = bf16 ? pdserve::norm_rows<pdserve::Bf16> : pdserve::norm_rows<float>;
  run(x, residual, weight, eps, rows, width, out, total);
}
