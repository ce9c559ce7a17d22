// Launchers of the copies: a kernel for each type pair of a plan, one for the checksum of a bucket.
#include <cuda_runtime.h>

#include "reshard/copy.h"

namespace {

using namespace rlcore::reshard;

// Integer sums: the order of the blocks does not matter.
__device__ void add(uint64_t part, uint64_t* sum) {
  static_assert(sizeof(unsigned long long) == sizeof(uint64_t));
  unsigned long long x = part;
  for (int lanes = 16; lanes; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(sum), x);
}

// Grid: blocks of kThreads, at most one per tile; a block owns a run of tiles.
template <bool kPack, class B, class T>
__global__ void __launch_bounds__(kThreads, 2)
    copy_kernel(const Job job, int64_t bucket_type, int64_t tensor_type) {
  add(copy_lane<kPack, B, T>(job, bucket_type, tensor_type, blockIdx.x, gridDim.x,
                             static_cast<int>(threadIdx.x)),
      job.sum);
}

// Grid: blocks of kThreads; a block owns every gridDim.x-th run of kThreads words.
__global__ void __launch_bounds__(kThreads)
    sum_kernel(uint64_t bucket, int64_t num_bytes, uint64_t* sum) {
  add(sum_lane(bucket, num_bytes, blockIdx.x, gridDim.x, static_cast<int>(threadIdx.x)), sum);
}

// Blocks for `work` items: enough to fill the device, at most one per item.
cudaError_t grid(int64_t work, unsigned* blocks) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  *blocks = static_cast<unsigned>(least(work > 0 ? work : 1, static_cast<int64_t>(processors) * 8));
  return error;
}

}  // namespace

// Sums the words of a bucket on the device into `sum`, which is set. Returns a cudaError_t.
extern "C" int rlcore_reshard_sum(uint64_t bucket, int64_t num_bytes, uint64_t* sum, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  unsigned blocks = 0;
  cudaError_t error = grid(ceil_div(num_bytes, kWord * kThreads), &blocks);
  if (error == cudaSuccess) error = cudaMemsetAsync(sum, 0, sizeof(*sum), queue);
  if (error != cudaSuccess) return error;
  sum_kernel<<<blocks, kThreads, 0, queue>>>(bucket, num_bytes, sum);
  return cudaGetLastError();
}

// Runs a job whose pointers, but for the struct itself, are of the device. Returns a cudaError_t.
extern "C" int rlcore_reshard_copy(const rlcore::reshard::Job* job, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  unsigned blocks = 0;
  cudaError_t error = grid(job->num_tiles, &blocks);
  if (error == cudaSuccess) error = cudaMemsetAsync(job->sum, 0, sizeof(*job->sum), queue);
  if (error == cudaSuccess && job->hash_after && job->pack) {
    error = cudaMemsetAsync(reinterpret_cast<void*>(job->bucket), 0,
                            static_cast<size_t>(job->num_bytes), queue);
  }
  if (error != cudaSuccess) return error;
  int64_t bit = 1;
#define RLCORE_CASE(b, t, B, T)                                             \
  if (job->pairs & bit) {                                                   \
    if (job->pack) {                                                        \
      copy_kernel<true, B, T><<<blocks, kThreads, 0, queue>>>(*job, b, t);  \
    } else {                                                                \
      copy_kernel<false, B, T><<<blocks, kThreads, 0, queue>>>(*job, b, t); \
    }                                                                       \
  }                                                                         \
  bit *= 2;
  RLCORE_RESHARD_PAIRS(RLCORE_CASE)
#undef RLCORE_CASE
  error = cudaGetLastError();
  if (error != cudaSuccess || !job->hash_after) return error;
  return rlcore_reshard_sum(job->bucket, job->num_bytes, job->sum, stream);
}
