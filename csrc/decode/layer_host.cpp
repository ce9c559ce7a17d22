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

#define RL_KERNELS "decode/layer_simd.h"
#include "common/each_isa.h"

}  // namespace

void run_layer(const Layer& layer, const Tokens& tokens, const ParallelFor& parallel_for) {
  std::vector<float> queries(static_cast<size_t>(tokens.count * layer.heads * layer.dim));
  const Kernels& run = RL_CHOSEN(kernels);
  parallel_for(tokens.count,
               [&](int64_t a, int64_t b) { run.begin(layer, tokens, a, b, queries.data()); });
  parallel_for(tokens.count,
               [&](int64_t a, int64_t b) { run.end(layer, tokens, a, b, queries.data()); });
}

}  // namespace rlcore::decode
