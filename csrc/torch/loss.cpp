// The loss's ops: logits -> statistics of every row, gradient of every row.
//
// logits [T, W], last dimension contiguous; x = logits / temperature over this rank's real columns
// [0, valid), whose first has the global id `first`. Statistics are fp64 where the logits are,
// else fp32.
#include <cmath>
#include <optional>

#include "loss/row_host.h"
#include "torch/checks.h"

namespace {

using namespace rlcore;

const char* name_of(ScalarType dtype) { return torch::headeronly::toString(dtype); }

loss::Dtype dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::BFloat16:
      return loss::Dtype::kBf16;
    case ScalarType::Half:
      return loss::Dtype::kFp16;
    case ScalarType::Float:
      return loss::Dtype::kFp32;
    case ScalarType::Double:
      return loss::Dtype::kFp64;
    default:
      refuse("logits: dtype ", name_of(t.scalar_type()),
             "; allowed are bfloat16, float16, float32 and float64");
  }
}

void check_matrix(const Tensor& t, const char* name) {
  RL_CHECK(t.dim() == 2, name, ": ", t.dim(), " dimensions; 2 are needed, [tokens, vocabulary]");
  RL_CHECK(t.size(1) <= 1 || t.size(0) == 0 || t.stride(1) == 1, name, ": stride ", t.stride(1),
           " in the last dimension; it must be contiguous");
}

void check_device(const Tensor& t, const Tensor& logits, const char* name) {
  RL_CHECK(t.is_cuda() == logits.is_cuda() && t.is_cpu() == logits.is_cpu() &&
               (t.is_cpu() || t.get_device_index() == logits.get_device_index()),
           name, ": is on another device than logits");
}

ScalarType statistic_of(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A contiguous tensor of statistics with `rows` tokens.
void check_statistics(const Tensor& t, const Tensor& logits, const char* name, int64_t kinds = 0) {
  check_device(t, logits, name);
  RL_CHECK(t.scalar_type() == statistic_of(logits), name, ": dtype ", name_of(t.scalar_type()),
           "; ", name_of(statistic_of(logits)), " goes with these logits");
  RL_CHECK(t.dim() == (kinds ? 2 : 1), name, ": ", t.dim(), " dimensions; ", kinds ? 2 : 1,
           " are needed");
  RL_CHECK(t.size(kinds ? 1 : 0) == logits.size(0), name, ": ", t.size(kinds ? 1 : 0),
           " tokens; logits have ", logits.size(0));
  RL_CHECK(!kinds || t.size(0) == kinds, name, ": ", t.size(0), " rows; ", kinds, " are needed");
  RL_CHECK(t.is_contiguous(), name, ": must be contiguous");
}

loss::Logits logits_of(const Tensor& logits, const Tensor& tokens, int64_t first, int64_t valid,
                       double temperature) {
  check_matrix(logits, "logits");
  check_device(tokens, logits, "tokens");
  RL_CHECK(tokens.scalar_type() == ScalarType::Long, "tokens: dtype ",
           name_of(tokens.scalar_type()), "; int64 is needed");
  RL_CHECK(tokens.dim() == 1 && tokens.size(0) == logits.size(0), "tokens: one for each of the ",
           logits.size(0), " rows of logits is needed");
  RL_CHECK(tokens.is_contiguous(), "tokens: must be contiguous");
  RL_CHECK(first >= 0, "first ", first, ": a column's id is not negative");
  RL_CHECK(valid >= 0 && valid <= logits.size(1), "valid ", valid, ": must be within 0 and the ",
           logits.size(1), " columns of logits");
  RL_CHECK(temperature > 0 && std::isfinite(temperature), "temperature ", temperature,
           ": must be above 0 and finite");
  return {.data = logits.data_ptr(),
          .dtype = dtype_of(logits),
          .rows = logits.size(0),
          .width = logits.size(1),
          .valid = valid,
          .first = first,
          .stride = logits.stride(0),
          .tokens = static_cast<const int64_t*>(tokens.data_ptr()),
          .temperature = temperature};
}

loss::StatsParams stats_params(const Tensor& logits, const Tensor& tokens, int64_t first,
                               int64_t valid, double temperature, const Tensor& out) {
  const auto x = logits_of(logits, tokens, first, valid, temperature);
  check_statistics(out, logits, "out", 4);
  return {x, out.data_ptr()};
}

const void* optional_statistics(const std::optional<Tensor>& t, const Tensor& logits,
                                const char* name) {
  if (!t) return nullptr;
  check_statistics(*t, logits, name);
  return t->data_ptr();
}

loss::GradParams grad_params(const Tensor& logits, const Tensor& tokens, int64_t first,
                             int64_t valid, double temperature, const Tensor& lse,
                             const Tensor& entropy, const std::optional<Tensor>& grad_logp,
                             const std::optional<Tensor>& grad_entropy, const Tensor& out) {
  const auto x = logits_of(logits, tokens, first, valid, temperature);
  check_statistics(lse, logits, "lse");
  check_statistics(entropy, logits, "entropy");
  check_matrix(out, "out");
  check_device(out, logits, "out");
  RL_CHECK(out.scalar_type() == logits.scalar_type(), "out: dtype ", name_of(out.scalar_type()),
           "; logits have ", name_of(logits.scalar_type()));
  RL_CHECK(out.size(0) == logits.size(0) && out.size(1) == logits.size(1), "out: ", out.size(0),
           " x ", out.size(1), "; logits have ", logits.size(0), " x ", logits.size(1));
  return {.logits = x,
          .lse = lse.data_ptr(),
          .entropy = entropy.data_ptr(),
          .grad_logp = optional_statistics(grad_logp, logits, "grad_logp"),
          .grad_entropy = optional_statistics(grad_entropy, logits, "grad_entropy"),
          .out = out.data_ptr(),
          .out_stride = out.stride(0)};
}

// torch's own threads, which obey torch.set_num_threads.
void parallel_for(int64_t count, const loss::Range& range) {
  torch::stable::parallel_for(0, count, 1, range);
}

void row_stats_cpu(const Tensor& logits, const Tensor& tokens, int64_t first, int64_t valid,
                   double temperature, Tensor out, int64_t /*stream*/) {
  loss::row_stats(stats_params(logits, tokens, first, valid, temperature, out), parallel_for);
}

void row_grad_cpu(const Tensor& logits, const Tensor& tokens, int64_t first, int64_t valid,
                  double temperature, const Tensor& lse, const Tensor& entropy,
                  std::optional<Tensor> grad_logp, std::optional<Tensor> grad_entropy, Tensor out,
                  int64_t /*stream*/) {
  loss::row_grad(grad_params(logits, tokens, first, valid, temperature, lse, entropy, grad_logp,
                             grad_entropy, out),
                 parallel_for);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def(
      "row_stats(Tensor logits, Tensor tokens, int first, int valid, float temperature, "
      "Tensor(a!) out, int stream) -> ()");
  m.def(
      "row_grad(Tensor logits, Tensor tokens, int first, int valid, float temperature, Tensor lse, "
      "Tensor entropy, Tensor? grad_logp, Tensor? grad_entropy, Tensor(a!) out, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&row_stats_cpu));
  m.impl("row_grad", TORCH_BOX(&row_grad_cpu));
}
