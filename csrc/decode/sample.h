// Sampling from logits on the CPU, as rlcore/rollout/torch_engine/sampler.py defines it, without
// filters.
#pragma once

#include <cstdint>

namespace rlcore::decode {

struct Logits {
  const float* data;  // [rows, vocab]
  int64_t vocab;
  const int64_t* counters;  // [rows], of the random numbers
  const float* scales;      // [rows], inverse temperatures
  const bool* greedy;       // [rows], or null
};

// Token and log-prob of rows [begin, end). A log-prob is not finite if the row's logits are not.
void sample(const Logits& logits, int64_t begin, int64_t end, int64_t* tokens, double* logps);

}  // namespace rlcore::decode
