// The ops of RMSNorm, RoPE and SwiGLU on the CPU, see rows/rows.h.
#include "rows/rows.h"

#include <algorithm>

#include "torch/host.h"

namespace {

using namespace rlcore;

// Rows at a time; also those whose sum is one row of dweights, so that no thread changes a bit.
constexpr int64_t kBlock = 256;

rows::Rows rows_of(const Tensor& x) {
  RL_CHECK(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() == 3 &&
               (x.stride(2) == 1 || x.size(2) == 1 || x.numel() == 0),
           "x: must be float32 on the CPU, [outer, inner, size] with neighbouring columns");
  return {static_cast<const float*>(x.data_ptr()), x.size(1), x.stride(0), x.stride(1), x.size(2)};
}

void norm_rows(const Tensor& x, const Tensor& weight, double eps, Tensor out, Tensor scales) {
  const auto from = rows_of(x);
  const int64_t count = x.size(0) * x.size(1);
  const float* factor = floats_of(weight, "weight", from.size);
  float* to = writable(out, "out", count * from.size);
  float* found = writable(scales, "scales", count);
  torch::stable::parallel_for(0, count, kBlock, [&](int64_t begin, int64_t end) {
    rows::norm(from, factor, static_cast<float>(eps), begin, end, to, found);
  });
}

void norm_rows_grad(const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& scales,
                    Tensor dx, Tensor dweights) {
  const auto from = rows_of(x);
  const int64_t count = x.size(0) * x.size(1), blocks = (count + kBlock - 1) / kBlock;
  const float* upstream = floats_of(grad, "grad", count * from.size);
  const float* factor = floats_of(weight, "weight", from.size);
  const float* found = floats_of(scales, "scales", count);
  float* to = writable(dx, "dx", count * from.size);
  float* sums = writable(dweights, "dweights", blocks * from.size);
  torch::stable::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      rows::norm_grad(upstream, from, factor, found, block * kBlock,
                      std::min((block + 1) * kBlock, count), to, sums + block * from.size);
    }
  });
}

void turn_rows(const Tensor& x, const Tensor& cosines, const Tensor& sines, bool back, Tensor out) {
  const auto from = rows_of(x);
  RL_CHECK(from.size % 2 == 0, "x: ", from.size, " columns; must be even");
  const int64_t count = x.size(0) * x.size(1), angles = x.size(0) * (from.size / 2);
  const float *c = floats_of(cosines, "cos", angles), *s = floats_of(sines, "sin", angles);
  float* to = writable(out, "out", count * from.size);
  torch::stable::parallel_for(0, count, kBlock, [&](int64_t begin, int64_t end) {
    rows::turn(from, c, s, back, begin, end, to);
  });
}

void swiglu_rows(const Tensor& x, Tensor out) {
  RL_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x: must be [rows, 2 size]");
  const int64_t count = x.size(0), size = x.size(1) / 2;
  const float* from = floats_of(x, "x", x.numel());
  float* to = writable(out, "out", count * size);
  torch::stable::parallel_for(0, count, kBlock, [&](int64_t begin, int64_t end) {
    rows::swiglu(from, size, begin, end, to);
  });
}

void swiglu_rows_grad(const Tensor& grad, const Tensor& x, Tensor dx) {
  RL_CHECK(x.dim() == 2 && x.size(1) % 2 == 0, "x: must be [rows, 2 size]");
  const int64_t count = x.size(0), size = x.size(1) / 2;
  const float* from = floats_of(x, "x", x.numel());
  const float* upstream = floats_of(grad, "grad", count * size);
  float* to = writable(dx, "dx", x.numel());
  torch::stable::parallel_for(0, count, kBlock, [&](int64_t begin, int64_t end) {
    rows::swiglu_grad(upstream, from, size, begin, end, to);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def("norm_rows(Tensor x, Tensor weight, float eps, Tensor(a!) out, Tensor(b!) scales) -> ()");
  m.def(
      "norm_rows_grad(Tensor grad, Tensor x, Tensor weight, Tensor scales, Tensor(a!) dx, "
      "Tensor(b!) dweights) -> ()");
  m.def("turn_rows(Tensor x, Tensor cos, Tensor sin, bool back, Tensor(a!) out) -> ()");
  m.def("swiglu_rows(Tensor x, Tensor(a!) out) -> ()");
  m.def("swiglu_rows_grad(Tensor grad, Tensor x, Tensor(a!) dx) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) {
  m.impl("norm_rows", TORCH_BOX(&norm_rows));
  m.impl("norm_rows_grad", TORCH_BOX(&norm_rows_grad));
  m.impl("turn_rows", TORCH_BOX(&turn_rows));
  m.impl("swiglu_rows", TORCH_BOX(&swiglu_rows));
  m.impl("swiglu_rows_grad", TORCH_BOX(&swiglu_rows_grad));
}
