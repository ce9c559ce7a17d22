// Row kernels. A row is one block's work.
#include <cuda_runtime.h>

#include <climits>

#include "loss/launch.h"
#include "loss/row.h"
#include "loss/row_cuda.h"

namespace rlcore::loss {
namespace {

static_assert(kManyThreads % kWarp == 0 && kManyThreads / kWarp <= kMaxWarps);

// Blocks per multiprocessor, which bound the registers; double is what tests run in.
template <class T>
constexpr int kBlocks = sizeof(T) == 8 ? 2 : 3;

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) stats_kernel(const StatsParams p) {
  __shared__ RowShared<Statistic<T>> shared;
  CudaBlock block;
  stats_body<T>(block, p, blockIdx.x, shared);
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) grad_kernel(const GradParams p) {
  CudaBlock block;
  grad_body<T>(block, p, blockIdx.x);
}

// Double needs more registers than kManyThreads leave.
template <class T>
constexpr int kMostThreads = sizeof(T) == 8 ? kThreads : kManyThreads;

template <class T>
__global__ void __launch_bounds__(kMostThreads<T>, 1) rows_kernel(const PolicyRowsParams p) {
  __shared__ RowShared<Statistic<T>> shared;
  CudaBlock block;
  rows_body<T>(block, p, blockIdx.x, gridDim.x, shared);
}

// One thread per token.
template <class Real>
__global__ void __launch_bounds__(256) tokens_kernel(const TokensParams p) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token < p.count) tokens_body<Real>(p, token);
}

// Launches one of four kernels on a grid of `blocks`.
template <class Params>
int launch(void (*bf16)(Params), void (*fp16)(Params), void (*fp32)(Params), void (*fp64)(Params),
           const Params& p, int64_t blocks, int threads, void* stream) {
  const Logits& x = p.logits;
  if (x.rows == 0) return cudaSuccess;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = x.dtype == Dtype::kBf16   ? bf16
                      : x.dtype == Dtype::kFp16 ? fp16
                      : x.dtype == Dtype::kFp32 ? fp32
                                                : fp64;
  kernel<<<static_cast<unsigned>(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace rlcore::loss

using namespace rlcore::loss;

extern "C" int rlcore_row_stats(const StatsParams* p, void* stream) {
  return launch(stats_kernel<Bf16>, stats_kernel<Fp16>, stats_kernel<float>, stats_kernel<double>,
                *p, p->logits.rows, row_threads(p->logits.width), stream);
}

extern "C" int rlcore_row_grad(const GradParams* p, void* stream) {
  return launch(grad_kernel<Bf16>, grad_kernel<Fp16>, grad_kernel<float>, grad_kernel<double>, *p,
                p->logits.rows, row_threads(p->logits.width), stream);
}

extern "C" int rlcore_policy_rows(const PolicyRowsParams* p, void* stream) {
  int device = 0, processors = 0, l2_bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  }
  if (error != cudaSuccess) return error;
  const Logits& x = p->logits;
  const RowsGrid grid =
      x.dtype == Dtype::kFp64
          ? RowsGrid{x.rows, row_threads(x.width)}
          : rows_grid(x.rows, x.width, x.width * size_of(x.dtype), processors, l2_bytes);
  return launch(rows_kernel<Bf16>, rows_kernel<Fp16>, rows_kernel<float>, rows_kernel<double>, *p,
                grid.blocks, grid.threads, stream);
}

extern "C" int rlcore_policy_tokens(const TokensParams* p, void* stream) {
  if (p->count == 0) return cudaSuccess;
  const int64_t blocks = (p->count + 255) / 256;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = p->is_double ? tokens_kernel<double> : tokens_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), 256, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return cudaGetLastError();
}
