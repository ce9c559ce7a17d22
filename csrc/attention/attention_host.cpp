#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention.h"
#include "common/isa.h"
#include "product/product.h"

namespace rlcore::attention {
namespace {

using product::Left;

constexpr float kInf = std::numeric_limits<float>::infinity();
// Rows of scores that are computed at a time: a query of each head of the group is a row.
constexpr int64_t kBlock = 64;

struct Kernels {
  void (*forward)(const Shape&, const Inputs&, int64_t, int64_t, const Forward&);
  void (*backward)(const Shape&, const Inputs&, int64_t, int64_t, const Backward&);
};

#define RL_KERNELS "attention/attention_simd.h"
#include "common/each_isa.h"

}  // namespace

void forward(const Shape& shape, const Inputs& in, int64_t unit, int64_t group, const Forward& to) {
  RL_CHOSEN(kernels).forward(shape, in, unit, group, to);
}

void backward(const Shape& shape, const Inputs& in, int64_t unit, int64_t group,
              const Backward& to) {
  RL_CHOSEN(kernels).backward(shape, in, unit, group, to);
}

}  // namespace rlcore::attention
