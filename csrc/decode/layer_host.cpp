#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/isa.h"
#include "decode/layer.h"
#include "product/product.h"

namespace rlcore::decode {
namespace {

using product::Left;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Kernels {
  void (*begin)(const Layer&, const Tokens&, int64_t begin, int64_t end, float* queries);
  void (*end)(const Layer&, const Tokens&, int64_t begin, int64_t end, const float* queries);
};

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

#ifdef RL_X86_TARGETS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
namespace avx512 {
#define RL_LANES 16
#include "common/simd.h"
#include "decode/layer_simd.h"
#undef RL_LANES
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace avx2 {
#define RL_LANES 8
#include "common/simd.h"
#include "decode/layer_simd.h"
#undef RL_LANES
}  // namespace avx2
#pragma GCC pop_options
#endif
namespace baseline {
#define RL_LANES 4
#include "common/simd.h"
#include "decode/layer_simd.h"
#undef RL_LANES
}  // namespace baseline
#pragma GCC diagnostic pop

const Kernels& kernels() {
#ifdef RL_X86_TARGETS
  if (isa() == Isa::kAvx512) return avx512::kernels;
  if (isa() == Isa::kAvx2) return avx2::kernels;
#endif
  return baseline::kernels;
}

}  // namespace

void run_layer(const Layer& layer, const Tokens& tokens, const ParallelFor& parallel_for) {
  std::vector<float> queries(static_cast<size_t>(tokens.count * layer.heads * layer.dim));
  const Kernels& run = kernels();
  parallel_for(tokens.count,
               [&](int64_t a, int64_t b) { run.begin(layer, tokens, a, b, queries.data()); });
  parallel_for(tokens.count,
               [&](int64_t a, int64_t b) { run.end(layer, tokens, a, b, queries.data()); });
}

}  // namespace rlcore::decode
