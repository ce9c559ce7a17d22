// Checks of the tensors of ops that run on the CPU alone.
#pragma once

#include "torch/checks.h"

namespace rlcore {

inline const float* floats_of(const Tensor& t, const char* name, int64_t count) {
  RL_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Float && t.is_contiguous(), name,
           ": must be contiguous float32 on the CPU");
  RL_CHECK(t.numel() == count, name, ": ", t.numel(), " elements; ", count, " are needed");
  return static_cast<const float*>(t.data_ptr());
}

inline float* writable(const Tensor& t, const char* name, int64_t count) {
  floats_of(t, name, count);
  return static_cast<float*>(t.data_ptr());
}

inline const int64_t* ints_of(const Tensor& t, const char* name, int64_t count) {
  RL_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Long && t.is_contiguous(), name,
           ": must be contiguous int64 on the CPU");
  RL_CHECK(t.numel() == count, name, ": ", t.numel(), " elements; ", count, " are needed");
  return static_cast<const int64_t*>(t.data_ptr());
}

}  // namespace rlcore
