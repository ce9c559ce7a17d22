// Memory of the pretend device, pinned host memory, and who has used which bytes of it.
#pragma once

#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>

#include "streams.h"

namespace pretend {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::kCPU;
using c10::kCUDA;

inline size_t number(const char* name, size_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::stoull(value) : otherwise;
}

// Devices that this process sees; CUDA_VISIBLE_DEVICES hides some.
inline const int num_devices = [] {
  const int all = static_cast<int>(number("RLCORE_PRETEND_CUDA_DEVICES", 2));
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return all;
  const std::string names(visible);
  if (names.empty() || names[0] == '-') return 0;
  return std::min<int>(all, 1 + std::count(names.begin(), names.end(), ','));
}();
inline const size_t device_bytes = number("RLCORE_PRETEND_CUDA_BYTES", 80'000'000'000);
// Mode `sizes`: tensors of more elements than this have an address and no contents.
inline const size_t largest_real = [] {
  const char* mode = std::getenv("RLCORE_PRETEND_CUDA");
  const bool sizes = mode && std::string(mode) == "sizes";
  return sizes ? number("RLCORE_PRETEND_CUDA_ELEMENTS", 300'000) : SIZE_MAX;
}();
inline bool is_hollow(const Tensor& t) {
  return t.defined() && static_cast<size_t>(t.numel()) > largest_real;
}

inline thread_local DeviceIndex current_device = 0;

inline struct Stats {
  int64_t allocated, peak, reserved, reserved_peak, pinned, pinned_peak;
  int64_t launches, syncs, bytes_to_device, bytes_to_host;
} stats{};

struct Access {
  size_t begin, end;
  StreamId stream;
  uint64_t time;
  bool writes;
  const char* op;
};

// First page of a block that other processes map.
struct SharedHead {
  std::atomic<int64_t> readers;
  std::atomic<bool> is_freed;
};

struct Block {
  size_t bytes;
  StreamId stream;  // that it was allocated on
  std::vector<Access> accesses;
  std::vector<StreamId> recorded;  // by record_stream
  SharedHead* head = nullptr;
  std::string path;  // of the file behind a shared block
};

constexpr size_t kPage = 4096;
inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

inline std::map<char*, Block> blocks;
inline std::map<char*, Block> limbo;  // freed by the owner while other processes read them
inline std::map<char*, size_t> pinned;

inline void unmap(char* p, Block& block) {
  munmap(p, round_up(block.bytes, kPage));
  stats.allocated -= round_up(block.bytes, 512);
  if (!block.head) return;
  block.head->is_freed = true;
  munmap(block.head, kPage);
  unlink(block.path.c_str());
}

// Free shared blocks that no process reads any more.
inline void collect_shared() {
  std::lock_guard guard(lock);
  for (auto it = limbo.begin(); it != limbo.end();) {
    if (it->second.head->readers > 0) {
      ++it;
      continue;
    }
    unmap(it->first, it->second);
    it = limbo.erase(it);
  }
}

inline void free_block(void* p) {
  std::lock_guard guard(lock);
  auto it = blocks.find(static_cast<char*>(p));
  if (it == blocks.end()) return;
  Block block = std::move(it->second);
  blocks.erase(it);
  for (const Access& a : block.accesses) {
    const auto& known = block.recorded;
    const bool recorded = std::find(known.begin(), known.end(), a.stream) != known.end();
    if (a.stream == block.stream || a.stream == kNccl || recorded ||
        has_seen(clocks[block.stream], a.stream, a.time) || has_seen(host_clock, a.stream, a.time))
      continue;
    fault = c10::str("pretend CUDA: memory of stream ", block.stream, " was freed while ", a.op,
                     " on stream ", a.stream, " may still use it; call record_stream, or wait");
  }
  if (block.head && block.head->readers > 0)
    limbo.emplace(static_cast<char*>(p), std::move(block));
  else
    unmap(static_cast<char*>(p), block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const Device device(kCUDA, current_device);
    if (n == 0) return {nullptr, nullptr, &free_block, device};
    collect_shared();
    std::lock_guard guard(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, stats.allocated + n <= device_bytes,
                     "CUDA out of memory (pretend device): ", n, " bytes wanted, ", stats.allocated,
                     " of ", device_bytes, " are allocated");
    auto* p = static_cast<char*>(mmap(nullptr, round_up(n, kPage), PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    TORCH_CHECK(p != MAP_FAILED, "pretend CUDA: mmap of ", n, " bytes failed");
    // NaN until something is written; more than this might be more than the host has.
    if (n / 8 <= largest_real) std::memset(p, 0xFF, std::min<size_t>(n, 64 << 20));
    blocks.emplace(p, Block{n, current_stream, {}, {}});
    stats.allocated += static_cast<int64_t>(round_up(n, 512));
    stats.peak = std::max(stats.peak, stats.allocated);
    stats.reserved = std::max(stats.reserved, stats.allocated);
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
    return {p, p, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
inline DeviceAllocator device_allocator;

// torch rounds pinned memory up to a power of two.
inline int64_t pinned_size(size_t n) {
  size_t size = 1;
  while (size < n) size *= 2;
  return static_cast<int64_t>(size);
}

inline void free_pinned(void* p) {
  std::lock_guard guard(lock);
  auto it = pinned.find(static_cast<char*>(p));
  stats.pinned -= pinned_size(it->second);
  munmap(p, round_up(it->second, kPage));
  pinned.erase(it);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &free_pinned, kCPU};
    void* p = mmap(nullptr, round_up(n, kPage), PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "pretend CUDA: mmap of ", n, " pinned bytes failed");
    std::lock_guard guard(lock);
    pinned[static_cast<char*>(p)] = n;
    stats.pinned += pinned_size(n);
    stats.pinned_peak = std::max(stats.pinned_peak, stats.pinned);
    return {p, p, &free_pinned, kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
inline PinnedAllocator pinned_allocator;

inline bool is_pinned(const void* p) {
  std::lock_guard guard(lock);
  auto it = pinned.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (it == pinned.begin()) return false;
  --it;
  return p < it->first + it->second;
}

// ---- copies between the device and pinned host memory that are under way

struct Copy {
  Tensor host, contents;
  bool to_host;
  StreamId stream;
  uint64_t time;
};
inline std::vector<Copy> copies;

// Finish the copies that the host has waited for.
inline void finish_copies() {
  std::vector<Copy> done;
  {
    std::lock_guard guard(lock);
    auto waits = [](const Copy& c) { return !has_seen(host_clock, c.stream, c.time); };
    auto end = std::stable_partition(copies.begin(), copies.end(), waits);
    done.assign(std::make_move_iterator(end), std::make_move_iterator(copies.end()));
    copies.erase(end, copies.end());
  }
  c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset);
  for (Copy& c : done) {
    if (c.to_host) {
      c.host.copy_(c.contents);
      continue;
    }
    const Tensor now = c.host.contiguous();
    TORCH_CHECK(!std::memcmp(now.const_data_ptr(), c.contents.const_data_ptr(), now.nbytes()),
                "pretend CUDA: pinned host memory ", c.host.sizes(),
                " was overwritten before its copy to the device was waited for");
  }
}

// End copies to the device that a later copy to the same host memory waits for on its stream.
inline void end_ordered_copies(const Tensor& host, StreamId stream) {
  std::lock_guard guard(lock);
  auto end = [](const Tensor& t) { return static_cast<char*>(t.data_ptr()) + t.nbytes(); };
  std::erase_if(copies, [&](const Copy& c) {
    return !c.to_host && has_seen(clocks[stream], c.stream, c.time) &&
           c.host.data_ptr() < end(host) && host.data_ptr() < end(c.host) &&
           !std::memcmp(c.host.contiguous().const_data_ptr(), c.contents.const_data_ptr(),
                        c.contents.nbytes());
  });
}

// Let a copy to the device see what earlier copies on its stream have brought to host memory.
inline void finish_ordered_copies(const Tensor& host, StreamId stream) {
  std::lock_guard guard(lock);
  auto end = [](const Tensor& t) { return static_cast<char*>(t.data_ptr()) + t.nbytes(); };
  c10::impl::ExcludeDispatchKeyGuard no_grad(c10::autograd_dispatch_keyset);
  for (Copy& c : copies)
    if (c.to_host && has_seen(clocks[stream], c.stream, c.time) && c.host.data_ptr() < end(host) &&
        host.data_ptr() < end(c.host))
      c.host.copy_(c.contents);
}

inline void host_waits(const Clock& clock) {
  {
    std::lock_guard guard(lock);
    ++stats.syncs;
    join(host_clock, clock);
  }
  raise_fault();
  finish_copies();
}

inline void synchronize_stream(StreamId stream) {
  std::unique_lock guard(lock);
  const Clock clock = clocks[stream];
  guard.unlock();
  host_waits(clock);
}

inline void synchronize_device() {
  std::unique_lock guard(lock);
  Clock clock;
  for (const Clock& other : clocks) join(clock, other);
  guard.unlock();
  host_waits(clock);
}

// ---- one launch

class Launch {
 public:
  explicit Launch(const char* op, StreamId stream = current_stream) : op_(op), stream_(stream) {
    raise_fault();
    std::lock_guard guard(lock);
    ++stats.launches;
    join(clocks[stream_], host_clock);
    time = ++clocks[stream_][stream_];
  }
  void reads(const Tensor& t) const { touch(t, false); }
  void writes(const Tensor& t) const { touch(t, true); }

  uint64_t time;

 private:
  void touch(const Tensor& t, bool writes) const {
    if (!t.defined() || !t.is_cuda() || !t.numel() || !t.has_storage()) return;
    std::lock_guard guard(lock);
    auto it = blocks.find(static_cast<char*>(t.storage().mutable_data()));
    if (it == blocks.end()) return;
    size_t last = t.storage_offset();
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    const Access now{
        t.storage_offset() * t.itemsize(), (last + 1) * t.itemsize(), stream_, time, writes, op_};
    auto& accesses = it->second.accesses;
    size_t kept = 0;
    for (const Access& a : accesses) {
      const bool apart = a.end <= now.begin || now.end <= a.begin;
      const bool ordered = has_seen(clocks[stream_], a.stream, a.time);
      TORCH_CHECK(apart || ordered || !(writes || a.writes), "pretend CUDA: ", op_, " on stream ",
                  stream_, writes ? " writes" : " reads", " memory that ", a.op, " on stream ",
                  a.stream, a.writes ? " writes" : " reads",
                  ", and no wait orders them; wait_stream or wait_event is missing");
      const bool covered = now.begin <= a.begin && a.end <= now.end;
      const bool replaced = covered && ordered && (writes || (a.stream == stream_ && !a.writes));
      if (!replaced && !has_seen(host_clock, a.stream, a.time)) accesses[kept++] = a;
    }
    accesses.resize(kept);
    accesses.push_back(now);
  }

  const char* op_;
  StreamId stream_;
};

// ---- blocks that other processes open by a handle, as with CUDA IPC

// Put the block at `p` behind a new file, at the same address. Return the file's path.
inline std::string share(void* p) {
  std::lock_guard guard(lock);
  Block& block = blocks.at(static_cast<char*>(p));
  if (!block.head) {
    const size_t size = round_up(block.bytes, kPage);
    std::string path = "/dev/shm/pretend_cuda.XXXXXX";
    const int file = mkstemp(path.data());
    TORCH_CHECK(file >= 0 && !ftruncate(file, static_cast<off_t>(kPage + size)),
                "pretend CUDA: no shared memory of ", size, " bytes");
    TORCH_CHECK(pwrite(file, p, block.bytes, kPage) == static_cast<ssize_t>(block.bytes));
    const int both = PROT_READ | PROT_WRITE;
    void* head = mmap(nullptr, kPage, both, MAP_SHARED, file, 0);
    void* data = mmap(p, size, both, MAP_SHARED | MAP_FIXED, file, kPage);
    close(file);
    TORCH_CHECK(head != MAP_FAILED && data == p, "pretend CUDA: mmap of shared memory failed");
    block.head = new (head) SharedHead{};
    block.path = path;
  }
  ++block.head->readers;
  return block.path;
}

struct Opened {
  char* begin;
  size_t bytes;
  static void close(void* p) {
    auto* opened = static_cast<Opened*>(p);
    --reinterpret_cast<SharedHead*>(opened->begin)->readers;
    munmap(opened->begin, opened->bytes);
    delete opened;
  }
};

inline c10::DataPtr open_shared(const std::string& path, size_t bytes) {
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const size_t size = kPage + round_up(bytes, kPage);
  auto* p = static_cast<char*>(
      file < 0 ? MAP_FAILED : mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  if (file >= 0) ::close(file);
  auto* head = reinterpret_cast<SharedHead*>(p);
  TORCH_CHECK(p != MAP_FAILED && !head->is_freed && head->readers > 0,
              "CUDA error: invalid resource handle: the handle ", path,
              " is stale, its owner has freed the memory or its reader has closed it");
  return {p + kPage, new Opened{p, size}, &Opened::close, Device(kCUDA, current_device)};
}

inline void unlink_shared() {
  for (auto* found : {&blocks, &limbo})
    for (auto& [p, block] : *found)
      if (block.head) {
        block.head->is_freed = true;
        unlink(block.path.c_str());
      }
}

}  // namespace pretend
