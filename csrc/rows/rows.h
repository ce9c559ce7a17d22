// Parts of a transformer layer that work on a row at a time, in float32 on the CPU, forward and
// backward: RMSNorm, RoPE, SwiGLU. Each is one pass over memory.
#pragma once

#include <cstdint>

namespace rlcore::rows {

// [outer, inner, size] with neighbouring columns; row r is (r / inner, r % inner).
struct Rows {
  const float* data;
  int64_t inner, outer_stride, inner_stride, size;

  const float* at(int64_t row) const {
    return data + row / inner * outer_stride + row % inner * inner_stride;
  }
};

// All functions do rows [begin, end); what they write is contiguous.

// out = x scale * weight with scale = 1 / sqrt(mean of squares + eps).
void norm(const Rows& x, const float* weight, float eps, int64_t begin, int64_t end, float* out,
          float* scales);
// dweight [size] gets the sum over these rows.
void norm_grad(const float* grad, const Rows& x, const float* weight, const float* scales,
               int64_t begin, int64_t end, float* dx, float* dweight);
// Columns i and i + size / 2 turn by the angles of row r / inner, cos and sin [outer, size / 2]; by
// the opposite angles if `back`.
void turn(const Rows& x, const float* cosines, const float* sines, bool back, int64_t begin,
          int64_t end, float* out);
// x and dx [rows, 2 size]: gate and up; out and grad [rows, size]: silu(gate) * up.
void swiglu(const float* x, int64_t size, int64_t begin, int64_t end, float* out);
void swiglu_grad(const float* grad, const float* x, int64_t size, int64_t begin, int64_t end,
                 float* dx);

}  // namespace rlcore::rows
