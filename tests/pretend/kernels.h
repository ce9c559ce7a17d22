// Kernels of the dispatch key CUDA: the CPU's, over the memory of the pretend device.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include <functional>

#include "memory.h"

namespace pretend {

using c10::IValue;
using torch::jit::Stack;

// ---- random numbers: a generator of the device around one of the CPU

struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();

  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "pretend CUDA: no generator offsets"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

inline const at::Generator& default_generator(DeviceIndex index) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < num_devices; ++i) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

// ---- the same memory, seen as a tensor of the CPU

inline Tensor on_cpu(const Tensor& t) {
  const auto& storage = t.storage();
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                    c10::DataPtr(storage.mutable_data(), kCPU), c10::GetCPUAllocator(), true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

inline Tensor empty_like_on(const Tensor& t, DeviceIndex index) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(Device(kCUDA, index)));
}

// Replace every tensor among `count` values from `first` on; `f` also gets the value's place.
inline void map_tensors(Stack& stack, size_t first, size_t count,
                        const std::function<Tensor(const Tensor&, size_t)>& f) {
  for (size_t i = 0; i < count; ++i) {
    IValue& value = stack[first + i];
    if (value.isTensor()) {
      value = f(value.toTensor(), i);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& t : value.toTensorVector()) made.push_back(f(t, i));
      value = made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const std::optional<Tensor> t : value.toOptionalTensorList())
        made.push_back(t ? std::optional<Tensor>(f(*t, i)) : std::nullopt);
      value = made;
    }
  }
}

// ---- any operator

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack), name_(schema_.name()) {}

  void run() {
    take_arguments();
    at::AutoDispatchBelowADInplaceOrView below;
    if (is_view()) {
      op_.callBoxed(stack_);
      map_returns([&](const Tensor& t) { return from_cpu(t); });
      return;
    }
    // Results whose size depends on contents.
    static const std::vector<std::string> waiting = {
        "nonzero",    "masked_select",     "equal", "_unique2", "is_nonzero",
        "unique_dim", "unique_consecutive"};
    const Launch launch(name_.c_str());
    map_pairs(launch);
    if (std::find(waiting.begin(), waiting.end(), name_.substr(6)) != waiting.end())
      synchronize_stream(current_stream);
    if (is_hollow_) {
      run_hollow(launch);
      return;
    }
    op_.callBoxed(stack_);
    map_returns([&](const Tensor& t) {
      const Tensor made = from_cpu(t);
      launch.writes(made);
      return made;
    });
    for (const Pair& p : pairs_) keep_resize(p, launch);
  }

 private:
  struct Pair {
    Tensor device, cpu;
    bool is_written;
  };

  bool is_view() const {
    for (const auto& r : schema_.returns())
      if (r.alias_info() && !r.alias_info()->isWrite()) return true;
    return false;
  }

  void take_arguments() {
    const size_t count = schema_.arguments().size();
    first_ = stack_.size() - count;
    const bool indexes = name_ == "aten::index" || name_ == "aten::_index_put_impl_" ||
                         name_ == "aten::index_put" || name_ == "aten::_unsafe_index";
    const bool takes_numbers = op_.hasTag(at::Tag::pointwise) || indexes ||
                               name_.find("fill") != std::string::npos ||
                               name_.find("_foreach_") != std::string::npos;
    std::string stranger;
    map_tensors(stack_, first_, count, [&](const Tensor& t, size_t i) {
      if (!t.defined()) return t;
      if (t.is_cuda()) {
        TORCH_CHECK(pairs_.empty() || t.get_device() == index_, different(), "cuda:", index_,
                    " and cuda:", int(t.get_device()));
        index_ = t.get_device();
        is_hollow_ |= is_hollow(t);
        const auto* alias = schema_.arguments()[i].alias_info();
        pairs_.push_back({t, on_cpu(t), alias && alias->isWrite()});
        return pairs_.back().cpu;
      }
      const bool is_number = t.dim() == 0 && takes_numbers;
      const bool is_index = indexes && i == 1;
      if (t.is_cpu() && !is_number && !is_index && !t.unsafeGetTensorImpl()->is_wrapped_number() &&
          stranger.empty())
        stranger = c10::str("a CPU tensor ", t.sizes(), " ", t.dtype());
      return t;
    });
    TORCH_CHECK(stranger.empty() || pairs_.empty(), different(), stranger, " and cuda:", index_);
    for (size_t i = 0; i < count; ++i) {
      IValue& value = stack_[first_ + i];
      if (value.isDevice() && value.toDevice().is_cuda()) {
        if (pairs_.empty() && value.toDevice().has_index()) index_ = value.toDevice().index();
        value = Device(kCPU);
      } else if (value.isGenerator()) {
        auto generator = value.toGenerator();
        TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator ",
                    "but found '", generator.device().type(), "'");
        value = generator.get<Generator>()->cpu;
      } else if (value.isNone() && is_generator(i)) {
        value = default_generator(index_).get<Generator>()->cpu;
      }
    }
  }

  std::string different() const {
    return "Expected all tensors to be on the same device (" + name_ + "), but found ";
  }
  bool is_generator(size_t i) const {
    return schema_.arguments()[i].type()->str().find("Generator") != std::string::npos;
  }

  void map_pairs(const Launch& launch) const {
    for (const Pair& p : pairs_) p.is_written ? launch.writes(p.device) : launch.reads(p.device);
  }

  void map_returns(const std::function<Tensor(const Tensor&)>& f) {
    const size_t count = schema_.returns().size();
    map_tensors(stack_, stack_.size() - count, count,
                [&](const Tensor& t, size_t) { return t.defined() ? f(t) : t; });
  }

  // The device tensor of a result: an argument, a view of one, or a copy in new memory.
  Tensor from_cpu(const Tensor& t) const {
    if (!t.is_cpu()) return t;
    for (const Pair& p : pairs_) {
      if (p.cpu.is_same(t)) return p.device;
      if (p.cpu.storage().unsafeGetStorageImpl() != t.storage().unsafeGetStorageImpl()) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(p.device.storage()), p.device.key_set(), t.dtype());
      auto* impl = view.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return view;
    }
    const Tensor made = empty_like_on(t, index_);
    if (made.numel()) on_cpu(made).copy_(t);
    return made;
  }

  // An `out` argument may have got another size, and so other memory.
  static void keep_resize(const Pair& p, const Launch& launch) {
    const bool moved = p.device.storage().data() != p.cpu.storage().data();
    if (!moved && p.device.sizes() == p.cpu.sizes()) return;
    p.device.resize_(p.cpu.sizes());
    if (moved && p.cpu.numel()) on_cpu(p.device).copy_(p.cpu);
    launch.writes(p.device);
  }

  // Shapes alone, by the kernels of `meta`. A small result of hollow tensors is zero.
  void run_hollow(const Launch& launch) {
    std::vector<std::pair<Tensor, Tensor>> metas;
    map_tensors(stack_, first_, schema_.arguments().size(), [&](const Tensor& t, size_t) {
      if (!t.defined()) return t;
      const Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
      for (const Pair& p : pairs_)
        if (p.cpu.is_same(t)) metas.emplace_back(meta, p.device);
      return meta;
    });
    for (size_t i = first_; i < stack_.size(); ++i)
      if (stack_[i].isDevice()) stack_[i] = Device(at::kMeta);
    op_.callBoxed(stack_);
    auto zero = [](const Tensor& t) {
      if (t.numel() && !is_hollow(t)) on_cpu(t).zero_();
    };
    map_returns([&](const Tensor& t) {
      for (auto& [meta, device] : metas)
        if (meta.is_same(t)) return device;
      const Tensor made = empty_like_on(t, index_);
      zero(made);
      launch.writes(made);
      return made;
    });
    for (size_t i = 0; i < pairs_.size(); ++i) {
      if (!pairs_[i].is_written) continue;
      for (auto& [meta, device] : metas)
        if (device.is_same(pairs_[i].device) && device.sizes() != meta.sizes())
          device.resize_(meta.sizes());
      zero(pairs_[i].device);
      launch.writes(pairs_[i].device);
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  const std::string& name_;
  size_t first_ = 0;
  std::vector<Pair> pairs_;
  DeviceIndex index_ = current_device;
  bool is_hollow_ = false;
};

inline void any_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, *stack).run();
}

// ---- operators about memory

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout>, std::optional<Device> device,
                    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                            std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                            std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = device_allocator.allocate(bytes);
  const size_t kept = std::min(bytes, storage.nbytes());
  if (kept / 8 <= largest_real && kept) std::memcpy(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

inline const Tensor& resize(const Tensor& t, at::IntArrayRef size,
                            std::optional<at::MemoryFormat>) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t need = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && need > t.storage().nbytes()) resize_storage(t.storage(), need);
  return t;
}

inline Tensor& set_storage(Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  TORCH_CHECK(storage.device_type() == kCUDA, "set_: a storage on ", storage.device(),
              " for a tensor on ", t.device());
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return t;
}

inline Tensor& set_source(Tensor& t, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / t.itemsize());
  return set_storage(t, std::move(storage), 0, {count}, {});
}

inline Tensor& set_tensor(Tensor& t, const Tensor& other) {
  return set_storage(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

inline Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  const bool to_host = to.is_cpu(), to_device = from.is_cpu();
  if (to.numel() == 0 || from.is_meta()) return to;
  const Launch launch("copy_");
  launch.reads(from);
  launch.writes(to);
  at::AutoDispatchBelowADInplaceOrView below;
  const StreamId stream = current_stream;
  if (to_host) stats.bytes_to_host += static_cast<int64_t>(from.nbytes());
  if (to_device) stats.bytes_to_device += static_cast<int64_t>(to.nbytes());
  if (is_hollow(to) || is_hollow(from)) {
    if (to_host && !is_hollow(to)) to.zero_();
    if ((to_host || to_device) && !non_blocking) synchronize_stream(stream);
    return to;
  }
  if (to_device) finish_ordered_copies(from, stream);
  const Tensor source = to_device ? from : on_cpu(from);
  if (to_host && non_blocking && is_pinned(to.storage().data())) {
    end_ordered_copies(to, stream);
    Tensor contents = at::empty_like(to, to.options().pinned_memory(false)).copy_(source);
    if (to.is_non_overlapping_and_dense())
      std::memset(to.mutable_data_ptr(), 0xFF, to.nbytes());  // until the copy is waited for
    std::lock_guard guard(lock);
    copies.push_back({to, std::move(contents), true, stream, launch.time});
    return to;
  }
  (to_host ? to : on_cpu(to)).copy_(source);
  if (to_device && non_blocking && is_pinned(from.storage().data())) {
    std::lock_guard guard(lock);
    const auto kept = at::MemoryFormat::Contiguous;
    const auto options = from.options().pinned_memory(false);
    Tensor contents = at::empty_like(from, options, kept).copy_(from);
    copies.push_back({from, std::move(contents), false, stream, launch.time});
  } else if (to_host || (to_device && !non_blocking)) {
    synchronize_stream(stream);
  }
  return to;
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy(target, from, non_blocking);
}

inline at::Scalar item(const Tensor& t) {
  Launch("_local_scalar_dense").reads(t);
  synchronize_stream(current_stream);
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(on_cpu(t));
}

inline void record_stream(Tensor& t, at::Stream stream) {
  std::lock_guard guard(lock);
  auto it = blocks.find(static_cast<char*>(t.storage().mutable_data()));
  if (it != blocks.end()) it->second.recorded.push_back(stream.id());
}

}  // namespace pretend
