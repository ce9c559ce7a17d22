// The device forest's op. rlcore/ops/suffix_device.py makes the tensors and says what is in them.
#include <vector>

#include "suffix/match_cuda.h"
#include "torch/checks.h"

namespace {

using rlcore::ScalarType;
using rlcore::Tensor;
using namespace rlcore::suffix;

void check(const Tensor& t, const char* name, const Tensor& there, ScalarType dtype,
           int64_t count) {
  RL_CHECK(t.is_cpu() == there.is_cpu() && t.get_device_index() == there.get_device_index(), name,
           ": not on the device of requests");
  RL_CHECK(t.scalar_type() == dtype && t.is_contiguous() && t.numel() == count, name, ": ", count,
           " contiguous entries of ", torch::headeronly::toString(dtype), " are needed");
}

template <class T>
T* data(const Tensor& t) {
  return t.numel() == 0 ? nullptr : static_cast<T*>(t.data_ptr());
}

// requests [N, 8] int64; text [N, stream, 2], slots [N, mask + 1, 2] int32; `accepted`, `windows`
// may be empty: none. If `offsets` is empty, tokens are [batch, row] and `counts` [batch]. out and
// claims [N] are filled with -1. options as rlcore/ops/suffix_device.py orders them.
StepJob job_of(const Tensor& requests, const Tensor& text, const Tensor& slots,
               const Tensor& handles, const Tensor& accepted, const Tensor& tokens,
               const Tensor& offsets, const Tensor& counts, const Tensor& windows,
               const Tensor& out, const Tensor& lengths, const Tensor& claims,
               const std::vector<double>& options, int64_t running) {
  const int64_t batch = handles.numel();
  const bool ragged = offsets.numel() != 0;
  RL_CHECK(requests.dim() == 2 && text.dim() == 3 && slots.dim() == 3 && out.dim() == 2,
           "requests, text, slots, out: 2, 3, 3 and 2 dimensions are needed");
  const int64_t count = requests.size(0), stream = text.size(1), room = slots.size(1);
  RL_CHECK(room > stream && (room & (room - 1)) == 0, "slots: a power of two beyond ", stream,
           " is needed, not ", room);
  check(requests, "requests", requests, ScalarType::Long, count * 8);
  check(text, "text", requests, ScalarType::Int, count * stream * 2);
  check(slots, "slots", requests, ScalarType::Int, count * room * 2);
  check(handles, "handles", requests, ScalarType::Long, batch);
  check(accepted, "accepted", requests, ScalarType::Int, accepted.numel() == 0 ? 0 : batch);
  check(tokens, "tokens", requests, ScalarType::Int, tokens.numel());
  check(offsets, "offsets", requests, ScalarType::Long, ragged ? batch + 1 : 0);
  check(counts, "counts", requests, ScalarType::Int, ragged ? 0 : batch);
  RL_CHECK(ragged || batch == 0 || tokens.numel() % batch == 0, "tokens: ", batch,
           " rows of one length are needed, not ", tokens.numel(), " entries");
  check(windows, "windows", requests, ScalarType::Int, windows.numel() == 0 ? 0 : batch);
  check(out, "out", requests, ScalarType::Int, batch * out.size(1));
  check(lengths, "lengths", requests, ScalarType::Int, batch);
  check(claims, "claims", requests, ScalarType::Int, count);
  RL_CHECK(options.size() == 11, "options: 11 numbers are needed, not ", options.size());
  const auto whole = [&](size_t k) { return static_cast<int32_t>(options[k]); };
  Options o;
  o.limit = whole(0);
  o.min_match = whole(1);
  o.min_prob = options[2];
  o.max_window = whole(3);
  o.start_window = whole(4);
  o.growth = whole(5);
  o.knee = whole(6);
  o.live = whole(7);
  o.candidates = whole(8);
  o.live_match = whole(9);
  o.factor = options[10];
  return {
      .requests = data<DeviceRequest>(requests),
      .num_requests = count,
      .text = data<LiveToken>(text),
      .slots = data<LiveSlot>(slots),
      .stream = static_cast<int32_t>(stream),
      .mask = static_cast<uint32_t>(room - 1),
      .handles = data<int64_t>(handles),
      .accepted = data<int32_t>(accepted),
      .tokens = data<int32_t>(tokens),
      .num_tokens = tokens.numel(),
      .offsets = data<int64_t>(offsets),
      .counts = data<int32_t>(counts),
      .row = ragged || batch == 0 ? 0 : tokens.numel() / batch,
      .windows = data<int32_t>(windows),
      .batch = batch,
      .running = running,
      .width = static_cast<int32_t>(out.size(1)),
      .out = data<int32_t>(out),
      .lengths = data<int32_t>(lengths),
      .claims = data<int32_t>(claims),
      .options = o,
  };
}

void step_cpu(Tensor requests, Tensor text, Tensor slots, const Tensor& handles,
              const Tensor& accepted, const Tensor& tokens, const Tensor& offsets,
              const Tensor& counts, const Tensor& windows, Tensor out, Tensor lengths,
              Tensor claims, std::vector<double> options, int64_t running, int64_t) {
  const StepJob job = job_of(requests, text, slots, handles, accepted, tokens, offsets, counts,
                             windows, out, lengths, claims, options, running);
  for (int64_t i = 0; i < job.batch; ++i) step_request(job, i);
}

#ifdef RLCORE_CUDA
void step_cuda(Tensor requests, Tensor text, Tensor slots, const Tensor& handles,
               const Tensor& accepted, const Tensor& tokens, const Tensor& offsets,
               const Tensor& counts, const Tensor& windows, Tensor out, Tensor lengths,
               Tensor claims, std::vector<double> options, int64_t running, int64_t stream) {
  const torch::stable::accelerator::DeviceGuard guard(requests.get_device_index());
  const StepJob job = job_of(requests, text, slots, handles, accepted, tokens, offsets, counts,
                             windows, out, lengths, claims, options, running);
  rlcore::check_launch(rlcore_suffix_step(&job, rlcore::stream_of(stream)), "suffix step");
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def(
      "suffix_step(Tensor(a!) requests, Tensor(b!) text, Tensor(c!) slots, Tensor handles, "
      "Tensor accepted, Tensor tokens, Tensor offsets, Tensor counts, Tensor windows, "
      "Tensor(d!) out, Tensor(e!) lengths, Tensor(f!) claims, float[] options, int running, "
      "int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) { m.impl("suffix_step", TORCH_BOX(&step_cpu)); }

#ifdef RLCORE_CUDA
STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CUDA, m) { m.impl("suffix_step", TORCH_BOX(&step_cuda)); }
#endif
