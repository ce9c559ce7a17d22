#include <algorithm>
#include <cmath>

#include "common/isa.h"
#include "rows/rows.h"

namespace rlcore::rows {
namespace {

#define RL_KERNELS "rows/rows_simd.h"
#include "common/each_isa.h"

}  // namespace

void norm(const Rows& x, const float* weight, float eps, int64_t begin, int64_t end, float* out,
          float* scales) {
  RL_CHOSEN(norm)(x, weight, eps, begin, end, out, scales);
}

void norm_grad(const float* grad, const Rows& x, const float* weight, const float* scales,
               int64_t begin, int64_t end, float* dx, float* dweight) {
  RL_CHOSEN(norm_grad)(grad, x, weight, scales, begin, end, dx, dweight);
}

void turn(const Rows& x, const float* cosines, const float* sines, bool back, int64_t begin,
          int64_t end, float* out) {
  RL_CHOSEN(turn)(x, cosines, sines, back ? -1.0f : 1.0f, begin, end, out);
}

void swiglu(const float* x, int64_t size, int64_t begin, int64_t end, float* out) {
  RL_CHOSEN(swiglu)(x, size, begin, end, out);
}

void swiglu_grad(const float* grad, const float* x, int64_t size, int64_t begin, int64_t end,
                 float* dx) {
  RL_CHOSEN(swiglu_grad)(grad, x, size, begin, end, dx);
}

}  // namespace rlcore::rows
