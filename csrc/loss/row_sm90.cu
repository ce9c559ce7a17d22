// The policy on rows that stay on chip: one cluster per row, a part of it in each block's shared
// memory. sm_90 and later have clusters; elsewhere the launcher says that it is not supported.
#include <cuda_runtime.h>

#include <climits>

#include "loss/row.h"
#include "loss/row_cuda.h"

namespace rlcore::loss {
namespace {

constexpr int kThreads = 512;   // one block fills a multiprocessor's shared memory
constexpr int kMaxCluster = 8;  // what every device with clusters has
constexpr int64_t kMaxPart = 200 << 10;
static_assert(kThreads % kWarp == 0 && kThreads / kWarp <= kMaxWarps);

template <class T>
__global__ void __launch_bounds__(kThreads, 1) rows_on_chip_kernel(const PolicyRowsParams p) {
#if __CUDA_ARCH__ >= 900
  __shared__ RowShared<Statistic<T>> shared;
  extern __shared__ uint4 copy[];
  CudaCluster block;
  rows_body<T>(block, p, blockIdx.x / static_cast<unsigned>(block.num_ranks()), shared,
               reinterpret_cast<T*>(copy));
#endif
}

template <class T>
int launch(const PolicyRowsParams& p, void* stream) {
  int ranks = 1;
  const auto bytes = [&] {
    return part_size<T>(p.logits.valid, ranks) * static_cast<int64_t>(sizeof(T)) + 16;
  };
  while (ranks < kMaxCluster && bytes() > kMaxPart) ranks *= 2;
  if (bytes() > kMaxPart || p.logits.rows > INT_MAX / ranks) return cudaErrorInvalidValue;
  const auto kernel = rows_on_chip_kernel<T>;
  const cudaError_t sized = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes()));
  if (sized != cudaSuccess) return sized;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(p.logits.rows * ranks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes());
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace
}  // namespace rlcore::loss

extern "C" int rlcore_policy_rows_on_chip(const rlcore::loss::PolicyRowsParams* p, void* stream) {
  using namespace rlcore::loss;
  if (p->logits.rows == 0) return cudaSuccess;
  int device = 0, major = 0;
  cudaError_t found = cudaGetDevice(&device);
  if (found == cudaSuccess) {
    found = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (found != cudaSuccess) return found;
  if (major < 9) return cudaErrorNotSupported;
  switch (p->logits.dtype) {
    case Dtype::kBf16:
      return launch<Bf16>(*p, stream);
    case Dtype::kFp16:
      return launch<Fp16>(*p, stream);
    case Dtype::kFp32:
      return launch<float>(*p, stream);
    default:
      return launch<double>(*p, stream);
  }
}
