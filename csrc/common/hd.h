// RL_HD marks a function that runs on the host and, under nvcc, on the device too. RL_UNROLL goes
// before a loop of few and constant steps whose arrays must stay in registers.
#pragma once

#ifdef __CUDACC__
#define RL_HD __host__ __device__ __forceinline__
#define RL_DEVICE __device__ __forceinline__
#define RL_UNROLL _Pragma("unroll")
#else
#define RL_HD inline
#define RL_DEVICE inline
#define RL_UNROLL
#endif
