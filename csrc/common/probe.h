// Questions to the CUDA runtime; defined where nvcc takes part in the build.
#pragma once

extern "C" {

// 0 if the kernels of this build run on `device`, else a cudaError_t.
int rlcore_cuda_probe(int device);

// A cudaError_t in words.
const char* rlcore_cuda_message(int code);
}
