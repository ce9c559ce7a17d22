#include <algorithm>
#include <vector>

#include "common/isa.h"
#include "product/product.h"

namespace rlcore::product {
namespace {

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

#ifdef RL_X86_TARGETS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
namespace avx512 {
#define RL_LANES 16
#include "common/simd.h"
#include "product/product_simd.h"
#undef RL_LANES
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace avx2 {
#define RL_LANES 8
#include "common/simd.h"
#include "product/product_simd.h"
#undef RL_LANES
}  // namespace avx2
#pragma GCC pop_options
#endif
namespace baseline {
#define RL_LANES 4
#include "common/simd.h"
#include "product/product_simd.h"
#undef RL_LANES
}  // namespace baseline
#pragma GCC diagnostic pop

}  // namespace

void multiply(const Left& x, const float* w, int64_t depth, int64_t width, float* out) {
#ifdef RL_X86_TARGETS
  if (isa() == Isa::kAvx512) return avx512::multiply(x, w, depth, width, out);
  if (isa() == Isa::kAvx2) return avx2::multiply(x, w, depth, width, out);
#endif
  return baseline::multiply(x, w, depth, width, out);
}

}  // namespace rlcore::product
