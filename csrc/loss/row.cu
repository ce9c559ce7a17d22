// Row kernels: one block per row.
#include <cuda_runtime.h>

#include <climits>

#include "loss/row.h"
#include "loss/row_cuda.h"

namespace rlcore::loss {
namespace {

// A row of 152k elements keeps 256 threads busy; a short one would leave most without work.
constexpr int kThreads = 256, kFewThreads = 64;
constexpr int64_t kShort = 8192;
static_assert(kThreads % kWarp == 0 && kThreads / kWarp <= kMaxWarps);

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

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocks<T>) rows_kernel(const PolicyRowsParams p) {
  __shared__ RowShared<Statistic<T>> shared;
  CudaBlock block;
  rows_body<T>(block, p, blockIdx.x, shared);
}

// One thread per token.
template <class Real>
__global__ void __launch_bounds__(256) tokens_kernel(const TokensParams p) {
  const int64_t token = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (token < p.count) tokens_body<Real>(p, token);
}

// Launches one of four kernels, one block per row.
template <class Params>
int launch(void (*bf16)(Params), void (*fp16)(Params), void (*fp32)(Params), void (*fp64)(Params),
           const Params& p, void* stream) {
  const Logits& x = p.logits;
  if (x.rows == 0) return cudaSuccess;
  if (x.rows > INT_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = x.dtype == Dtype::kBf16   ? bf16
                      : x.dtype == Dtype::kFp16 ? fp16
                      : x.dtype == Dtype::kFp32 ? fp32
                                                : fp64;
  const int threads = x.width <= kShort ? kFewThreads : kThreads;
  kernel<<<static_cast<unsigned>(x.rows), threads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return cudaGetLastError();
}

}  // namespace
}  // namespace rlcore::loss

using namespace rlcore::loss;

extern "C" int rlcore_row_stats(const StatsParams* p, void* stream) {
  return launch(stats_kernel<Bf16>, stats_kernel<Fp16>, stats_kernel<float>, stats_kernel<double>,
                *p, stream);
}

extern "C" int rlcore_row_grad(const GradParams* p, void* stream) {
  return launch(grad_kernel<Bf16>, grad_kernel<Fp16>, grad_kernel<float>, grad_kernel<double>, *p,
                stream);
}

extern "C" int rlcore_policy_rows(const PolicyRowsParams* p, void* stream) {
  return launch(rows_kernel<Bf16>, rows_kernel<Fp16>, rows_kernel<float>, rows_kernel<double>, *p,
                stream);
}

extern "C" int rlcore_policy_tokens(const TokensParams* p, void* stream) {
  if (p->count == 0) return cudaSuccess;
  const int64_t blocks = (p->count + 255) / 256;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = p->is_double ? tokens_kernel<double> : tokens_kernel<float>;
  kernel<<<static_cast<unsigned>(blocks), 256, 0, static_cast<cudaStream_t>(stream)>>>(*p);
  return cudaGetLastError();
}
