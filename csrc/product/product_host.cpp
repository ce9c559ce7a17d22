#include <algorithm>
#include <vector>

#include "common/isa.h"
#include "product/product.h"

namespace rlcore::product {
namespace {

#define RL_KERNELS "product/product_simd.h"
#include "common/each_isa.h"

}  // namespace

void multiply(const Left& x, const float* w, int64_t depth, int64_t width, float* out) {
  RL_CHOSEN(multiply)(x, w, depth, width, width, out);
}

}  // namespace rlcore::product
