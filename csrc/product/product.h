// float32 matrix products on the CPU. Every element of the result is one sum in the order of the
// depth, so that a row's result does not depend on the number of rows.
#pragma once

#include <cstdint>

namespace rlcore::product {

// The left factor, [rows, depth]: element (i, k) is data[i * stride + k * step].
struct Left {
  const float* data;
  int64_t rows, stride, step;
};

// out [rows, width] += x w, with w [depth, width] and out contiguous.
void multiply(const Left& x, const float* w, int64_t depth, int64_t width, float* out);

}  // namespace rlcore::product
