#include <cmath>
#include <limits>
#include <vector>

#include "common/isa.h"
#include "decode/sample.h"

namespace rlcore::decode {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// A number in (0, 1), as splitmix64 makes it from a counter.
inline double uniform(int64_t counter) {
  auto z = static_cast<uint64_t>(counter);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  z ^= z >> 31;
  return (static_cast<double>(z >> 16) + 0.5) * 0x1p-48;
}

#define RL_KERNELS "decode/sample_simd.h"
#include "common/each_isa.h"

}  // namespace

void sample(const Logits& logits, int64_t begin, int64_t end, int64_t* tokens, double* logps) {
  RL_CHOSEN(sample)(logits, begin, end, tokens, logps);
}

}  // namespace rlcore::decode
