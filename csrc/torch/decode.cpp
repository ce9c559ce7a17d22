// The ops of a decode step on the CPU, see decode/layer.h and decode/sample.h.
#include <algorithm>
#include <optional>
#include <vector>

#include "decode/layer.h"
#include "decode/sample.h"
#include "product/product.h"
#include "torch/host.h"

namespace {

using namespace rlcore;

void decode_layer(Tensor x, const Tensor& slots, const Tensor& positions, const Tensor& rope,
                  Tensor slab, const Tensor& norm1, const Tensor& qkv,
                  std::optional<Tensor> qkv_bias, std::optional<Tensor> qk_norm, const Tensor& out,
                  const Tensor& norm2, const Tensor& gate_up, const Tensor& down, double eps) {
  RL_CHECK(x.dim() == 2, "x: ", x.dim(), " dimensions; 2 are needed, [tokens, hidden]");
  RL_CHECK(slab.dim() == 5 && slab.size(0) == 2,
           "slab: must be [2, slots, key-value heads, capacity, head size]");
  const int64_t count = x.size(0), hidden = x.size(1), kv_heads = slab.size(2);
  const int64_t capacity = slab.size(3), dim = slab.size(4);
  RL_CHECK(qkv.dim() == 2 && dim > 0 && dim % 2 == 0 && qkv.size(1) % dim == 0,
           "qkv: must be [hidden, heads * head size] with an even head size");
  const int64_t heads = qkv.size(1) / dim - 2 * kv_heads;
  RL_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "qkv: ", heads, " query heads for ",
           kv_heads, " key-value heads");
  RL_CHECK(down.dim() == 2, "down: must be [inner, hidden]");
  const int64_t inner = down.size(0);
  const decode::Layer layer{
      .norm1 = floats_of(norm1, "norm1", hidden),
      .qkv = floats_of(qkv, "qkv", hidden * (heads + 2 * kv_heads) * dim),
      .qkv_bias =
          qkv_bias ? floats_of(*qkv_bias, "qkv_bias", (heads + 2 * kv_heads) * dim) : nullptr,
      .qk_norm = qk_norm ? floats_of(*qk_norm, "qk_norm", (heads + kv_heads) * dim) : nullptr,
      .out = floats_of(out, "out", heads * dim * hidden),
      .norm2 = floats_of(norm2, "norm2", hidden),
      .gate_up = floats_of(gate_up, "gate_up", hidden * 2 * inner),
      .down = floats_of(down, "down", inner * hidden),
      .hidden = hidden,
      .heads = heads,
      .kv_heads = kv_heads,
      .dim = dim,
      .inner = inner,
      .eps = static_cast<float>(eps)};
  floats_of(x, "x", count * hidden);
  floats_of(slab, "slab", slab.numel());
  RL_CHECK(rope.dim() == 3 && rope.size(1) == dim / 2 && rope.size(2) == 2,
           "rope: must be [positions, head size / 2, 2]");
  float* keys = static_cast<float*>(slab.data_ptr());
  const decode::Tokens tokens{.count = count,
                              .slots = ints_of(slots, "slots", count),
                              .positions = ints_of(positions, "positions", count),
                              .rope = floats_of(rope, "rope", rope.numel()),
                              .keys = keys,
                              .values = keys + slab.numel() / 2,
                              .capacity = capacity,
                              .x = static_cast<float*>(x.data_ptr())};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = tokens.slots[i], position = tokens.positions[i];
    RL_CHECK(slot >= 0 && slot < slab.size(1), "slots: ", slot, " of token ", i, "; the slab has ",
             slab.size(1));
    RL_CHECK(position >= 0 && position < capacity && position < rope.size(0),
             "positions: ", position, " of token ", i, "; the slab has ", capacity,
             " columns, rope ", rope.size(0), " rows");
  }
  decode::run_layer(layer, tokens, [](int64_t n, const decode::Range& range) {
    torch::stable::parallel_for(0, n, 1, range);
  });
}

void sample_tokens(const Tensor& logits, const Tensor& counters, const Tensor& scales,
                   std::optional<Tensor> greedy, Tensor tokens, Tensor logps) {
  RL_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits: must be [rows, vocabulary]");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  RL_CHECK(logps.is_cpu() && logps.scalar_type() == ScalarType::Double && logps.is_contiguous() &&
               logps.numel() == rows,
           "logps: must be contiguous float64 on the CPU, one of each row");
  const bool* best = nullptr;
  if (greedy) {
    RL_CHECK(greedy->is_cpu() && greedy->scalar_type() == ScalarType::Bool &&
                 greedy->is_contiguous() && greedy->numel() == rows,
             "greedy: must be contiguous bool on the CPU, one of each row");
    best = static_cast<const bool*>(greedy->data_ptr());
  }
  const decode::Logits from{.data = floats_of(logits, "logits", rows * vocab),
                            .vocab = vocab,
                            .counters = ints_of(counters, "counters", rows),
                            .scales = floats_of(scales, "scales", rows),
                            .greedy = best};
  ints_of(tokens, "tokens", rows);
  auto* to = static_cast<int64_t*>(tokens.data_ptr());
  auto* found = static_cast<double*>(logps.data_ptr());
  torch::stable::parallel_for(
      0, rows, 1, [&](int64_t begin, int64_t end) { decode::sample(from, begin, end, to, found); });
}

// The first `length` columns of slots `come` to slots `to` of a slab, all at once.
void move_slots(Tensor slab, const Tensor& to, const Tensor& come, int64_t length) {
  RL_CHECK(
      slab.dim() == 5 && slab.size(0) == 2 && slab.is_cpu() && slab.is_contiguous(),
      "slab: must be [2, slots, key-value heads, capacity, head size], contiguous, on the CPU");
  const int64_t slots = slab.size(1), heads = slab.size(2), capacity = slab.size(3);
  RL_CHECK(length >= 0 && length <= capacity, "length: ", length, "; the slab has ", capacity);
  const int64_t count = to.numel();
  const int64_t* targets = ints_of(to, "to", count);
  const int64_t* sources = ints_of(come, "come", count);
  for (const int64_t* end : {targets, sources}) {
    for (int64_t i = 0; i < count; ++i) {
      RL_CHECK(end[i] >= 0 && end[i] < slots, "slot ", end[i], ": the slab has ", slots);
    }
  }
  const auto column = static_cast<size_t>(slab.size(4)) * slab.element_size();
  const size_t stride = static_cast<size_t>(capacity) * column;
  const size_t part = static_cast<size_t>(length) * column;
  std::vector<char> held(static_cast<size_t>(count * heads) * part);
  auto* at = static_cast<char*>(slab.data_ptr());
  for (int64_t half = 0; half < 2; ++half, at += static_cast<size_t>(slots * heads) * stride) {
    const auto row = [&](int64_t slot, int64_t head) {
      return at + static_cast<size_t>(slot * heads + head) * stride;
    };
    char* to_held = held.data();
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < heads; ++head, to_held += part) {
        std::copy_n(row(sources[i], head), part, to_held);
      }
    }
    const char* from_held = held.data();
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < heads; ++head, from_held += part) {
        std::copy_n(from_held, part, row(targets[i], head));
      }
    }
  }
}

void add_product(const Tensor& a, const Tensor& b, Tensor out) {
  RL_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0), "a, b: must be [n, k], [k, m]");
  RL_CHECK(a.is_cpu() && a.scalar_type() == ScalarType::Float, "a: must be float32 on the CPU");
  const int64_t rows = a.size(0), depth = a.size(1), width = b.size(1);
  const float* right = floats_of(b, "b", depth * width);
  floats_of(out, "out", rows * width);
  const auto* left = static_cast<const float*>(a.data_ptr());
  auto* to = static_cast<float*>(out.data_ptr());
  torch::stable::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    const product::Left part{left + begin * a.stride(0), end - begin, a.stride(0), a.stride(1)};
    product::multiply(part, right, depth, width, to + begin * width);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rlcore_native, m) {
  m.def(
      "decode_layer(Tensor(a!) x, Tensor slots, Tensor positions, Tensor rope, Tensor(b!) slab, "
      "Tensor norm1, Tensor qkv, Tensor? qkv_bias, Tensor? qk_norm, Tensor out, Tensor norm2, "
      "Tensor gate_up, Tensor down, float eps) -> ()");
  m.def(
      "sample_tokens(Tensor logits, Tensor counters, Tensor scales, Tensor? greedy, "
      "Tensor(a!) tokens, Tensor(b!) logps) -> ()");
  m.def("move_slots(Tensor(a!) slab, Tensor to, Tensor come, int length) -> ()");
  m.def("add_product(Tensor a, Tensor b, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rlcore_native, CPU, m) {
  m.impl("decode_layer", TORCH_BOX(&decode_layer));
  m.impl("sample_tokens", TORCH_BOX(&sample_tokens));
  m.impl("move_slots", TORCH_BOX(&move_slots));
  m.impl("add_product", TORCH_BOX(&add_product));
}
