// The ops of causal attention over packed sequences on the CPU, see attention/attention.h.
#include "attention/attention.h"

#include "torch/host.h"

namespace {

using namespace rlcore;

// Boundaries of units within [0, count]: how many, and where they are.
int64_t units_of(const Tensor& t, const char* name, int64_t count) {
  RL_CHECK(t.is_cpu() && t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() > 0,
           name, ": must be contiguous int32 on the CPU, one more than there are units");
  const auto* at = static_cast<const int32_t*>(t.data_ptr());
  const int64_t units = t.numel() - 1;
  RL_CHECK(at[0] == 0 && at[units] == count, name, ": from ", at[0], " to ", at[units],
           "; must be from 0 to ", count);
  return units;
}

attention::Shape shape_of(const Tensor& q, const Tensor& k, const Tensor& queries,
                          const Tensor& keys, double scale) {
  RL_CHECK(
      q.dim() == 3 && k.dim() == 3 && q.size(2) == k.size(2) && k.size(1) > 0 &&
          q.size(1) % k.size(1) == 0,
      "q, k: must be [queries, heads, dim] and [keys, groups, dim], heads a multiple of groups");
  const int64_t units = units_of(queries, "cu_query", q.size(0));
  RL_CHECK(units_of(keys, "cu_key", k.size(0)) == units, "cu_key: another number of units");
  const attention::Shape shape{.heads = q.size(1),
                               .groups = k.size(1),
                               .dim = q.size(2),
                               .scale = static_cast<float>(scale),
                               .queries = static_cast<const int32_t*>(queries.data_ptr()),
                               .keys = static_cast<const int32_t*>(keys.data_ptr())};
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t asked = shape.queries[unit + 1] - shape.queries[unit];
    const int64_t known = shape.keys[unit + 1] - shape.keys[unit];
    RL_CHECK(asked >= 0 && asked <= known, "unit ", unit, ": ", asked, " queries for ", known,
             " keys");
  }
  return shape;
}

template <class F>
void for_each(const attention::Shape& shape, const Tensor& queries, const F& run) {
  const int64_t tasks = (queries.numel() - 1) * shape.groups;
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) run(task / shape.groups, task % shape.groups);
  });
}

void attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_query,
            const Tensor& cu_key, double scale, Tensor out, Tensor lse) {
  const auto shape = shape_of(q, k, cu_query, cu_key, scale);
  const attention::Inputs in{floats_of(q, "q", q.numel()), floats_of(k, "k", k.numel()),
                             floats_of(v, "v", k.numel())};
  const attention::Forward to{writable(out, "out", q.numel()),
                              writable(lse, "lse", q.size(0) * q.size(1))};
  for_each(shape, cu_query,
           [&](int64_t unit, int64_t group) { attention::forward(shape, in, unit, group, to); });
}

void attend_grad(const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& cu_query, const Tensor& cu_key, double scale, const Tensor& out,
                 const Tensor& lse, Tensor dq, Tensor dk, Tensor dv) {
  const auto shape = shape_of(q, k, cu_query, cu_key, scale);
  const attention::Inputs in{floats_of(q, "q", q.numel()), floats_of(k, "k", k.numel()),
                             floats_of(v, "v", k.numel())};
  const attention::Backward to{.out = floats_of(out, "out", q.numel()),
                               .lse = floats_of(lse, "lse", q.size(0) * q.size(1)),
                               .grad = floats_of(grad, "grad", q.numel()),
                               .dq = writable(dq, "dq", q.numel()),
                               .dk = writable(dk, "dk", k.numel()),
                               .dv = writable(dv, "dv", k.numel())};
  for_each(shape, cu_query,
           [&](int64_t unit, int64_t group) { attention::backward(shape, in, unit, group, to); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor cu_query, Tensor cu_key, float scale, "
      "Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "attend_grad(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor cu_query, Tensor cu_key, "
      "float scale, Tensor out, Tensor lse, Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) {
  m.impl("attend", TORCH_BOX(&attend));
  m.impl("attend_grad", TORCH_BOX(&attend_grad));
}
