// The arguments of the row kernels, the same on the CPU and on the device.
//
//   x = logits / temperature over the real columns [0, valid) of this shard
//   p = e^(x - lse),  entropy H = lse - sum p x
//
// Columns from `valid` on are padding: probability 0, gradient 0.
#pragma once

#include <cstdint>

namespace rlcore::loss {

enum class Dtype : int { kBf16, kFp16, kFp32, kFp64 };

constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFp64 ? 8 : dtype == Dtype::kFp32 ? 4 : 2;
}

struct Logits {
  void* data;  // [rows, width], the last dimension is contiguous
  Dtype dtype;
  int64_t rows;
  int64_t width;          // columns, padding included
  int64_t valid;          // columns that are real
  int64_t first;          // global id of column 0
  int64_t stride;         // elements between rows
  const int64_t* tokens;  // [rows] global ids
  double temperature;
};

struct StatsParams {
  Logits logits;
  void* out;  // [4, rows]: top, sum, dot, target, the last three relative to top
};

struct GradParams {
  Logits logits;
  const void* lse;           // [2, rows]: top, log sum e^(x - top)
  const void* entropy;       // [rows]
  const void* grad_logp;     // [rows] or null: zeros
  const void* grad_entropy;  // [rows] or null: zeros
  void* out;                 // [rows, width] in the logits' dtype, may be the logits
  int64_t out_stride;
};

}  // namespace rlcore::loss
