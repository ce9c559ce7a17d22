// What every op here needs: checks that end in a Python exception, device dispatch.
//
// The ops are rlcore_native::*. They take the CUDA stream as an int from Python, since torch's
// stable ABI has no way to ask for it that 2.11, 2.12 and 2.13 share. rlcore/ops wraps them: names,
// dtypes and shapes are checked there first, with sentences; what is checked here cannot happen
// from there.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <string>

#include "common/check.h"

#ifdef RLCORE_CUDA
#include "common/probe.h"
#endif

namespace rlcore {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef RLCORE_CUDA
inline void check_launch(int code, const char* op) {
  RL_CHECK(code == 0, op, ": CUDA error ", code, " at the launch: ", rlcore_cuda_message(code));
}
#endif

inline void* stream_of(int64_t stream) { return reinterpret_cast<void*>(stream); }

}  // namespace rlcore
