// The pretend CUDA device: what torch asks of a device, and what pretend's Python side calls.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "nccl.h"

namespace pretend {
namespace {

int checked(DeviceIndex index) {
  TORCH_CHECK(index < num_devices, "CUDA error: invalid device ordinal (", int(index), " of ",
              num_devices, ")");
  return index;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return {kCUDA, current_device}; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override {
    if (device.has_index()) current_device = static_cast<DeviceIndex>(checked(device.index()));
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(num_devices);
  }
  static Stream stream(Device device, StreamId id) {
    const DeviceIndex index = device.has_index() ? device.index() : current_device;
    return Stream(Stream::UNSAFE, Device(kCUDA, index), id);
  }
  Stream getStream(Device device) const override { return stream(device, current_stream); }
  Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(device, new_stream()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(device, new_stream());
  }
  Stream exchangeStream(Stream next) const override {
    const Stream before = stream(next.device(), current_stream);
    current_stream = next.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    std::lock_guard guard(lock);
    static_cast<Event*>(*event)->clock = clocks[stream.id()];
  }
  void block(void* event, const Stream& stream) const override {
    if (event) stream_waits(stream.id(), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {  // the time that a query takes is enough
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->clock);
  }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { synchronize_stream(stream.id()); }
  void synchronizeDevice(DeviceIndex) const override { synchronize_device(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    std::lock_guard guard(lock);
    auto it = blocks.find(static_cast<char*>(data.get()));
    if (it != blocks.end()) it->second.recorded.push_back(stream.id());
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices); }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return pretend::current_device; }
  DeviceIndex getCurrentDevice() const override { return pretend::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchangeDevice(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const DeviceIndex before = pretend::current_device;
    if (index >= 0) pretend::current_device = static_cast<DeviceIndex>(checked(index));
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? pretend::current_device : index);
  }
  void deviceSynchronize(DeviceIndex) const override { synchronize_device(); }
};

// The plain kernel of scaled_dot_product_attention: the fused ones are CUDA code.
int64_t attention_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

using at::CUDAHooksRegistry, at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)  // torch looks for this name

const bool is_registered = [] {
  c10::SetAllocator(kCUDA, &device_allocator, 100);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice);
  std::atexit(&unlink_shared);
  return true;
}();

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_kernel>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
}

}  // namespace
}  // namespace pretend

PYBIND11_MODULE(device, m) {
  using namespace pretend;
  const py::call_guard<py::gil_scoped_release> released;
  m.def("is_used_by_torch", [] { return at::globalContext().hasCUDA(); });
  m.def("device_count", [] { return num_devices; });
  m.def("device_bytes", [] { return device_bytes; });
  m.def("get_device", [] { return int(current_device); });
  m.def("set_device", [](int index) { current_device = DeviceIndex(checked(DeviceIndex(index))); });
  m.def("default_generator", [](int index) { return default_generator(DeviceIndex(index)); });
  m.def("get_stream", [] { return current_stream; });
  m.def("set_stream", [](StreamId id) { current_stream = id; });
  m.def("synchronize", &synchronize_device, released);
  m.def("resize_storage",
        [](const Tensor& t, size_t bytes) { resize_storage(t.storage(), bytes); });
  m.def("share", [](const Tensor& t) { return share(t.storage().mutable_data()); });
  m.def("open_shared", [](const std::string& path, size_t bytes) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, open_shared(path, bytes),
                         &device_allocator, false);
    Tensor t = at::empty({0}, at::TensorOptions(at::kByte).device(Device(kCUDA, current_device)));
    return t.set_(storage);
  });
  m.def("collect_shared", &collect_shared);
  m.def("is_hollow", &is_hollow);
  m.def("empty_cache", [] {
    std::lock_guard guard(lock);
    stats.reserved = stats.allocated;
  });
  m.def("reset_peak", [] {
    std::lock_guard guard(lock);
    stats.peak = stats.allocated;
    stats.reserved_peak = stats.reserved;
    stats.pinned_peak = stats.pinned;
  });
  m.def("stats", [] {
    std::lock_guard guard(lock);
    return std::map<std::string, int64_t>{{"allocated", stats.allocated},
                                          {"peak", stats.peak},
                                          {"reserved", stats.reserved},
                                          {"reserved_peak", stats.reserved_peak},
                                          {"pinned", stats.pinned},
                                          {"pinned_peak", stats.pinned_peak},
                                          {"launches", stats.launches},
                                          {"syncs", stats.syncs},
                                          {"bytes_to_device", stats.bytes_to_device},
                                          {"bytes_to_host", stats.bytes_to_host},
                                          {"copies", static_cast<int64_t>(copies.size())}};
  });
  // After torch.distributed is there, whose Backend is the base.
  m.def("add_nccl", [](py::module_& to) {
    using Ptr = c10::intrusive_ptr<c10d::Backend>;
    py::class_<Nccl, c10::intrusive_ptr<Nccl>, c10d::Backend>(to, "ProcessGroupNCCL")
        .def(py::init([](const py::object& store, int rank, int size, const py::object& options) {
          const py::object gloo = py::module_::import("torch.distributed").attr("ProcessGroupGloo");
          const py::object timeout = options.attr("_timeout");
          return c10::make_intrusive<Nccl>(gloo(store, rank, size, timeout).cast<Ptr>());
        }));
  });
}
