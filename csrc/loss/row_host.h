// The row kernels on the CPU. Every row is one thread's work, so results do not depend on their
// number; they may differ in the last bit between instruction sets.
#pragma once

#include <cstdint>
#include <functional>

#include "loss/logits.h"
#include "loss/policy.h"

namespace rlcore::loss {

// Calls the function for ranges [begin, end) that cover [0, count).
using Range = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t count, const Range&)>;

// top = max x, rounded (-inf where valid is 0), sum = sum e^(x - top), dot = sum e^(x - top)
// (x - top), target = x[token] - top (-inf where the token is not in this shard). -inf logits count
// 0; a row with NaN or +inf has a NaN sum.
void row_stats(const StatsParams& params, const ParallelFor& parallel_for);

// out = (g (onehot - p) - h p (log p + H)) / temperature. A row with g = h = 0 is not read.
void row_grad(const GradParams& params, const ParallelFor& parallel_for);

// The objective of tokens whose log-probs are known, see policy.h.
void policy_tokens(const TokensParams& params, const ParallelFor& parallel_for);

// The objective from whole rows of logits, which become their gradient. A row is written while it
// lies in the cache that its reading has filled: two passes over memory.
void policy_rows(const PolicyRowsParams& params, const ParallelFor& parallel_for);

}  // namespace rlcore::loss
