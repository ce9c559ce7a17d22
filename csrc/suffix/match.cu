// Suffix forest: the step of a whole batch, one launch.
#include <cuda_runtime.h>

#include "suffix/match_cuda.h"

namespace rlcore::suffix {
namespace {

constexpr int kBlock = kWarp;

// Grid: one block of one warp per request. Most of a request is one chain of dependent loads by one
// lane: requests that wait for memory do not hold up others, as they would in one warp. All lanes
// compare the candidates of the own stream.
__global__ void __launch_bounds__(kBlock) step_kernel(const StepJob job) {
  __shared__ StepShared shared;
  CudaBlock block;
  step_body(block, shared, job, blockIdx.x);
}

}  // namespace
}  // namespace rlcore::suffix

extern "C" int rlcore_suffix_step(const rlcore::suffix::StepJob* job, void* stream) {
  using namespace rlcore::suffix;
  if (job->batch == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(job->batch);
  step_kernel<<<blocks, kBlock, 0, static_cast<cudaStream_t>(stream)>>>(*job);
  return cudaGetLastError();
}
