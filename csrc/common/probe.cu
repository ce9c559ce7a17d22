// Whether the kernels of this build run on a device: all files are compiled for the same
// architectures, so one kernel speaks for all.
#include <cuda_runtime.h>

#include "common/probe.h"

namespace {

__global__ void nothing() {}

}  // namespace

extern "C" int rlcore_cuda_probe(int device) {
  int before = 0;
  cudaError_t code = cudaGetDevice(&before);
  if (code == cudaSuccess) code = cudaSetDevice(device);
  cudaFuncAttributes attributes;
  if (code == cudaSuccess) code = cudaFuncGetAttributes(&attributes, nothing);
  cudaSetDevice(before);
  cudaGetLastError();  // what was found is returned, it does not stay behind
  return static_cast<int>(code);
}

extern "C" const char* rlcore_cuda_message(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
