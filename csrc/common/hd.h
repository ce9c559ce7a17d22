// RL_HD marks a function that runs on the host and, under nvcc, on the device too.
#pragma once

#ifdef __CUDACC__
#define RL_HD __host__ __device__ __forceinline__
#define RL_DEVICE __device__ __forceinline__
#else
#define RL_HD inline
#define RL_DEVICE inline
#endif
