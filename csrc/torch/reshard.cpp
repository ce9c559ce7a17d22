// The copies' ops. The table and the addresses lie where the kernel reads them: in device memory
// for CUDA, where the host cannot check them: reshard_check looks at a table on its way there.
// rlcore/ops/reshard.py makes them and has checked tensors, bucket and directions.
#include "reshard/copy.h"
#include "torch/checks.h"

#ifdef RLCORE_CUDA
extern "C" int rlcore_reshard_copy(const rlcore::reshard::Job* job, void* stream);
extern "C" int rlcore_reshard_sum(uint64_t bucket, int64_t num_bytes, uint64_t* sum, void* stream);
#endif

namespace {

using rlcore::ScalarType;
using rlcore::Tensor;
using namespace rlcore::reshard;

void check_ints(const Tensor& t, const char* name, int64_t count) {
  RL_CHECK(t.scalar_type() == ScalarType::Long && t.is_contiguous() && t.numel() == count, name,
           ": ", count, " contiguous int64 are needed");
}

void check_bucket(const Tensor& bucket) {
  RL_CHECK(bucket.scalar_type() == ScalarType::Byte && bucket.is_contiguous(),
           "bucket: contiguous uint8 is needed");
}

void check_place(const Tensor& t, const char* name, const Tensor& bucket) {
  RL_CHECK(t.is_cuda() == bucket.is_cuda() && t.get_device_index() == bucket.get_device_index(),
           name, ": not on the bucket's device");
}

// A tensor whose storage was emptied has elements and no address.
void check_there(const Tensor& t, const char* name) {
  RL_CHECK(t.numel() == 0 || t.const_data_ptr() != nullptr, name, ": its storage is empty");
}

Job job_of(const Tensor& table, int64_t num_tiles, const Tensor& tensors, const Tensor& bucket,
           const Tensor& sum, bool pack, bool hash_after, int64_t pairs) {
  RL_CHECK(table.dim() == 2, "table: two dimensions are needed");
  check_ints(table, "table", table.size(0) * kFields);
  check_ints(tensors, "tensors", tensors.numel());
  check_ints(sum, "sum", 1);
  check_bucket(bucket);
  check_place(table, "table", bucket);
  check_place(tensors, "tensors", bucket);
  check_place(sum, "sum", bucket);
  check_there(table, "table");
  check_there(tensors, "tensors");
  check_there(bucket, "bucket");
  check_there(sum, "sum");
  return {
      .pieces = static_cast<const Piece*>(table.const_data_ptr()),
      .num_pieces = table.size(0),
      .num_tiles = num_tiles,
      .tensors = static_cast<const uint64_t*>(tensors.const_data_ptr()),
      .bucket = reinterpret_cast<uint64_t>(bucket.data_ptr()),
      .num_bytes = bucket.numel(),
      .pack = pack,
      .hash_after = hash_after,
      .pairs = pairs,
      .sum = static_cast<uint64_t*>(sum.data_ptr()),
  };
}

void threads(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  torch::stable::parallel_for(0, count, grain, body);
}

void copy_cpu(const Tensor& table, int64_t num_tiles, const Tensor& tensors, Tensor bucket,
              Tensor sum, bool pack, bool hash_after, int64_t pairs, int64_t) {
  const Job job = job_of(table, num_tiles, tensors, bucket, sum, pack, hash_after, pairs);
  check(job, tensors.numel());
  for (int64_t i = 0; i < job.num_pieces; ++i) {
    const int64_t tensor = job.pieces[i].tensor;
    RL_CHECK(tensor == kNoTensor || job.tensors[tensor], "tensors: number ", tensor, " is at 0");
  }
  copy(job, threads);
}

// A table before it goes to a device, where no host looks at it again. Returns its type pairs.
int64_t check_cpu(const Tensor& table, int64_t num_tiles, int64_t num_tensors, int64_t num_bytes) {
  RL_CHECK(table.dim() == 2, "table: two dimensions are needed");
  check_ints(table, "table", table.size(0) * kFields);
  check_there(table, "table");
  Job job{};
  job.pieces = static_cast<const Piece*>(table.const_data_ptr());
  job.num_pieces = table.size(0);
  job.num_tiles = num_tiles;
  job.num_bytes = num_bytes;
  job.pairs = pairs_of(job.pieces, job.num_pieces);
  check(job, num_tensors);
  return job.pairs;
}

void sum_cpu(const Tensor& bucket, Tensor sum, int64_t) {
  check_bucket(bucket);
  check_ints(sum, "sum", 1);
  check_place(sum, "sum", bucket);
  check_there(bucket, "bucket");
  check_there(sum, "sum");
  *static_cast<uint64_t*>(sum.data_ptr()) =
      sum_of(bucket.const_data_ptr(), bucket.numel(), threads);
}

#ifdef RLCORE_CUDA
void copy_cuda(const Tensor& table, int64_t num_tiles, const Tensor& tensors, Tensor bucket,
               Tensor sum, bool pack, bool hash_after, int64_t pairs, int64_t stream) {
  const torch::stable::accelerator::DeviceGuard guard(bucket.get_device_index());
  const Job job = job_of(table, num_tiles, tensors, bucket, sum, pack, hash_after, pairs);
  RL_CHECK(job.bucket % 16 == 0, "bucket: its address is no multiple of 16");
  rlcore::check_launch(rlcore_reshard_copy(&job, rlcore::stream_of(stream)), "reshard copy");
}

void sum_cuda(const Tensor& bucket, Tensor sum, int64_t stream) {
  const torch::stable::accelerator::DeviceGuard guard(bucket.get_device_index());
  check_bucket(bucket);
  check_ints(sum, "sum", 1);
  check_place(sum, "sum", bucket);
  check_there(bucket, "bucket");
  check_there(sum, "sum");
  const auto address = reinterpret_cast<uint64_t>(bucket.data_ptr());
  RL_CHECK(address % 16 == 0, "bucket: its address is no multiple of 16");
  rlcore::check_launch(
      rlcore_reshard_sum(address, bucket.numel(), static_cast<uint64_t*>(sum.data_ptr()),
                         rlcore::stream_of(stream)),
      "reshard sum");
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def(
      "reshard_copy(Tensor table, int num_tiles, Tensor tensors, Tensor(a!) bucket, Tensor(b!) sum,"
      " bool pack, bool hash_after, int pairs, int stream) -> ()");
  m.def("reshard_check(Tensor table, int num_tiles, int num_tensors, int num_bytes) -> int");
  m.def("reshard_sum(Tensor bucket, Tensor(a!) sum, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) {
  m.impl("reshard_copy", TORCH_BOX(&copy_cpu));
  m.impl("reshard_check", TORCH_BOX(&check_cpu));
  m.impl("reshard_sum", TORCH_BOX(&sum_cpu));
}

#ifdef RLCORE_CUDA
STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CUDA, m) {
  m.impl("reshard_copy", TORCH_BOX(&copy_cuda));
  m.impl("reshard_sum", TORCH_BOX(&sum_cuda));
}
#endif
