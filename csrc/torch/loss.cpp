// The loss's ops: logits -> statistics of every row, gradient of every row.
//
// logits [T, W], last dimension contiguous; x = logits / temperature over this rank's real columns
// [0, valid), whose first has the global id `first`. Statistics are fp64 where the logits are,
// else fp32.
#include <cmath>
#include <optional>
#include <vector>

#include "loss/policy.h"
#include "loss/row_host.h"
#ifdef RLCORE_CUDA
#include "loss/row_cuda.h"
#endif
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

// Elements that lie beyond the end of their storage, as after resize_(0), would be read all the
// same.
void check_storage(const Tensor& t, const char* name) {
  if (t.numel() == 0) return;
  int64_t bytes = 0, last = t.storage_offset();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(t.get(), &bytes));
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  RL_CHECK((last + 1) * static_cast<int64_t>(t.element_size()) <= bytes, name, ": its storage of ",
           bytes, " bytes ends before its last element");
}

void check_matrix(const Tensor& t, const char* name) {
  RL_CHECK(t.dim() == 2, name, ": ", t.dim(), " dimensions; 2 are needed, [tokens, vocabulary]");
  RL_CHECK(t.size(1) <= 1 || t.size(0) == 0 || t.stride(1) == 1, name, ": stride ", t.stride(1),
           " in the last dimension; it must be contiguous");
  check_storage(t, name);
}

// Rows that are written must not overlap one another.
void check_writable(const Tensor& t, const char* name) {
  RL_CHECK(t.size(0) <= 1 || t.stride(0) >= t.size(1), name, ": rows of ", t.size(1),
           " columns have stride ", t.stride(0), " and overlap; they are written to");
}

// Elements between `a` and the later `b`, of rows alike: either may be written while the other is
// read if no row of one overlaps a row of the other.
bool are_apart(const Tensor& a, const Tensor& b) {
  const auto bytes = static_cast<int64_t>(a.element_size());
  const int64_t rows = a.size(0), width = a.size(1);
  const int64_t gap = (static_cast<char*>(b.data_ptr()) - static_cast<char*>(a.data_ptr())) / bytes;
  if (gap >= (rows - 1) * a.stride(0) + width) return true;
  const int64_t within = a.stride(0) ? gap % a.stride(0) : 0;
  return a.stride(0) == b.stride(0) && within >= width && a.stride(0) - within >= width;
}

// `out` is where the logits are, row by row, or somewhere else.
void check_no_partial_overlap(const Tensor& out, const Tensor& logits) {
  if (out.numel() == 0) return;
  const bool same = out.data_ptr() == logits.data_ptr();
  const bool later = static_cast<char*>(out.data_ptr()) >= static_cast<char*>(logits.data_ptr());
  RL_CHECK(same ? out.size(0) == 1 || out.stride(0) == logits.stride(0)
                : are_apart(later ? logits : out, later ? out : logits),
           "out: overlaps logits in part; it must be the logits or apart from them");
}

void check_device(const Tensor& t, const Tensor& logits, const char* name) {
  RL_CHECK(t.is_cuda() == logits.is_cuda() && t.is_cpu() == logits.is_cpu() &&
               (t.is_cpu() || t.get_device_index() == logits.get_device_index()),
           name, ": is on another device than logits");
}

ScalarType statistic_of(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A contiguous tensor [tokens] or [kinds, tokens] with the dtype of the logits' statistics.
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
  check_storage(t, name);
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
  check_storage(tokens, "tokens");
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
  check_statistics(lse, logits, "lse", 2);
  check_statistics(entropy, logits, "entropy");
  check_matrix(out, "out");
  check_device(out, logits, "out");
  RL_CHECK(out.scalar_type() == logits.scalar_type(), "out: dtype ", name_of(out.scalar_type()),
           "; logits have ", name_of(logits.scalar_type()));
  RL_CHECK(out.size(0) == logits.size(0) && out.size(1) == logits.size(1), "out: ", out.size(0),
           " x ", out.size(1), "; logits have ", logits.size(0), " x ", logits.size(1));
  check_writable(out, "out");
  check_no_partial_overlap(out, logits);
  return {.logits = x,
          .lse = lse.data_ptr(),
          .entropy = entropy.data_ptr(),
          .grad_logp = optional_statistics(grad_logp, logits, "grad_logp"),
          .grad_entropy = optional_statistics(grad_entropy, logits, "grad_entropy"),
          .out = out.data_ptr(),
          .out_stride = out.stride(0)};
}

struct TokenTensors {
  const Tensor &old_log_probs, &rollout_log_probs;
  const std::optional<Tensor>& ref_log_probs;
  const Tensor &advantage, &weight;
  const std::vector<double>& params;
};

// `like` gives device, number of tokens and dtype.
loss::PolicyInputs policy_inputs(const TokenTensors& x, const Tensor& like) {
  check_statistics(x.old_log_probs, like, "old_log_probs");
  check_statistics(x.rollout_log_probs, like, "rollout_log_probs");
  check_statistics(x.advantage, like, "advantage");
  check_statistics(x.weight, like, "weight");
  return {.old_log_probs = x.old_log_probs.data_ptr(),
          .rollout_log_probs = x.rollout_log_probs.data_ptr(),
          .ref_log_probs = optional_statistics(x.ref_log_probs, like, "ref_log_probs"),
          .advantage = x.advantage.data_ptr(),
          .weight = x.weight.data_ptr()};
}

loss::PolicySettings policy_settings(const TokenTensors& x) {
  RL_CHECK(x.params.size() == loss::kNumPolicyParams, "params: ", x.params.size(), " numbers; ",
           loss::kNumPolicyParams, " are needed, see csrc/loss/policy.h");
  loss::PolicySettings s;
  for (size_t i = 0; i < x.params.size(); ++i) s.value[i] = x.params[i];
  const double mode = s.value[loss::kIsMode], type = s.value[loss::kKlType];
  RL_CHECK(mode == 0 || mode == 1 || mode == 2 || mode == 3, "params: is_mode ", mode,
           "; allowed are 0 none, 1 truncate, 2 mask and 3 both");
  RL_CHECK(type >= 0 && type < static_cast<int>(loss::kNumKlTypes) && type == std::floor(type),
           "params: kl_type ", type, "; allowed are the integers below ",
           static_cast<int>(loss::kNumKlTypes));
  RL_CHECK(s.value[loss::kKlCoef] == 0 || (x.ref_log_probs && type != 0), "params: kl_coef ",
           s.value[loss::kKlCoef], " needs ref_log_probs and a kl_type above 0");
  return s;
}

loss::TokensParams tokens_params(const Tensor& logp, const Tensor& entropy, const TokenTensors& x,
                                 const Tensor& out) {
  const auto dtype = logp.scalar_type();
  RL_CHECK(logp.dim() == 1 && logp.is_contiguous(), "logp: one dimension, contiguous, is needed");
  check_storage(logp, "logp");
  RL_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "logp: dtype ",
           name_of(dtype), "; allowed are float32 and float64");
  check_statistics(entropy, logp, "entropy");
  check_statistics(out, logp, "out", loss::kNumPolicyRows);
  return {.logp = logp.data_ptr(),
          .entropy = entropy.data_ptr(),
          .inputs = policy_inputs(x, logp),
          .settings = policy_settings(x),
          .out = out.data_ptr(),
          .count = logp.size(0),
          .is_double = dtype == ScalarType::Double};
}

loss::PolicyRowsParams rows_params(const Tensor& logits, const Tensor& tokens, int64_t first,
                                   int64_t valid, double temperature, const TokenTensors& x,
                                   const Tensor& stats, const Tensor& out) {
  const auto rows = logits_of(logits, tokens, first, valid, temperature);
  check_writable(logits, "logits");
  check_statistics(stats, logits, "stats", 2);
  check_statistics(out, logits, "out", loss::kNumPolicyRows);
  return {.logits = rows,
          .inputs = policy_inputs(x, logits),
          .settings = policy_settings(x),
          .stats = stats.data_ptr(),
          .out = out.data_ptr()};
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

void policy_tokens_cpu(const Tensor& logp, const Tensor& entropy, const Tensor& old_log_probs,
                       const Tensor& rollout_log_probs, std::optional<Tensor> ref_log_probs,
                       const Tensor& advantage, const Tensor& weight, std::vector<double> params,
                       Tensor out, int64_t /*stream*/) {
  const TokenTensors x{old_log_probs, rollout_log_probs, ref_log_probs, advantage, weight, params};
  loss::policy_tokens(tokens_params(logp, entropy, x, out), parallel_for);
}

void policy_rows_cpu(Tensor logits, const Tensor& tokens, int64_t first, int64_t valid,
                     double temperature, const Tensor& old_log_probs,
                     const Tensor& rollout_log_probs, std::optional<Tensor> ref_log_probs,
                     const Tensor& advantage, const Tensor& weight, std::vector<double> params,
                     Tensor stats, Tensor out, int64_t /*stream*/) {
  const TokenTensors x{old_log_probs, rollout_log_probs, ref_log_probs, advantage, weight, params};
  loss::policy_rows(rows_params(logits, tokens, first, valid, temperature, x, stats, out),
                    parallel_for);
}

#ifdef RLCORE_CUDA

// The launch goes to the logits' device.
torch::stable::accelerator::DeviceGuard guard(const Tensor& on) {
  return torch::stable::accelerator::DeviceGuard(on.get_device_index());
}

void row_stats_cuda(const Tensor& logits, const Tensor& tokens, int64_t first, int64_t valid,
                    double temperature, Tensor out, int64_t stream) {
  const auto p = stats_params(logits, tokens, first, valid, temperature, out);
  const auto device = guard(logits);
  check_launch(rlcore_row_stats(&p, stream_of(stream)), "row_stats");
}

void row_grad_cuda(const Tensor& logits, const Tensor& tokens, int64_t first, int64_t valid,
                   double temperature, const Tensor& lse, const Tensor& entropy,
                   std::optional<Tensor> grad_logp, std::optional<Tensor> grad_entropy, Tensor out,
                   int64_t stream) {
  const auto p = grad_params(logits, tokens, first, valid, temperature, lse, entropy, grad_logp,
                             grad_entropy, out);
  const auto device = guard(logits);
  check_launch(rlcore_row_grad(&p, stream_of(stream)), "row_grad");
}

void policy_tokens_cuda(const Tensor& logp, const Tensor& entropy, const Tensor& old_log_probs,
                        const Tensor& rollout_log_probs, std::optional<Tensor> ref_log_probs,
                        const Tensor& advantage, const Tensor& weight, std::vector<double> params,
                        Tensor out, int64_t stream) {
  const TokenTensors x{old_log_probs, rollout_log_probs, ref_log_probs, advantage, weight, params};
  const auto p = tokens_params(logp, entropy, x, out);
  const auto device = guard(logp);
  check_launch(rlcore_policy_tokens(&p, stream_of(stream)), "policy_tokens");
}

void policy_rows_cuda(Tensor logits, const Tensor& tokens, int64_t first, int64_t valid,
                      double temperature, const Tensor& old_log_probs,
                      const Tensor& rollout_log_probs, std::optional<Tensor> ref_log_probs,
                      const Tensor& advantage, const Tensor& weight, std::vector<double> params,
                      Tensor stats, Tensor out, int64_t stream) {
  const TokenTensors x{old_log_probs, rollout_log_probs, ref_log_probs, advantage, weight, params};
  const auto p = rows_params(logits, tokens, first, valid, temperature, x, stats, out);
  const auto device = guard(logits);
  check_launch(rlcore_policy_rows(&p, stream_of(stream)), "policy_rows");
}

#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def(
      "row_stats(Tensor logits, Tensor tokens, int first, int valid, float temperature, "
      "Tensor(a!) out, int stream) -> ()");
  m.def(
      "row_grad(Tensor logits, Tensor tokens, int first, int valid, float temperature, Tensor lse, "
      "Tensor entropy, Tensor? grad_logp, Tensor? grad_entropy, Tensor(a!) out, int stream) -> ()");
  m.def(
      "policy_tokens(Tensor logp, Tensor entropy, Tensor old_log_probs, Tensor rollout_log_probs, "
      "Tensor? ref_log_probs, Tensor advantage, Tensor weight, float[] params, Tensor(a!) out, "
      "int stream) -> ()");
  m.def(
      "policy_rows(Tensor(a!) logits, Tensor tokens, int first, int valid, float temperature, "
      "Tensor old_log_probs, Tensor rollout_log_probs, Tensor? ref_log_probs, Tensor advantage, "
      "Tensor weight, "
      "float[] params, Tensor(b!) stats, Tensor(c!) out, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) {
  m.impl("row_stats", TORCH_BOX(&row_stats_cpu));
  m.impl("row_grad", TORCH_BOX(&row_grad_cpu));
  m.impl("policy_tokens", TORCH_BOX(&policy_tokens_cpu));
  m.impl("policy_rows", TORCH_BOX(&policy_rows_cpu));
}

#ifdef RLCORE_CUDA
STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CUDA, m) {
  m.impl("row_stats", TORCH_BOX(&row_stats_cuda));
  m.impl("row_grad", TORCH_BOX(&row_grad_cuda));
  m.impl("policy_tokens", TORCH_BOX(&policy_tokens_cuda));
  m.impl("policy_rows", TORCH_BOX(&policy_rows_cuda));
}
#endif
