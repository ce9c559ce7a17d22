// The threads of a block as kernel bodies see them, on the device and on the host.
//
// A body is a template over Block and runs once per thread:
//
//   thread(), num_threads()      index within the block, a multiple of kWarp threads
//   sync()                       barrier of the block, orders its memory
//   shfl_xor(value, mask)        value of the lane `lane ^ mask`; every lane of the warp takes part
//
// CudaBlock is a block on the device. HostBlock runs its threads as fibers of one host thread, one
// after the other from barrier to barrier: it shows wrong results, out-of-bounds accesses and
// barriers that not all threads reach, but no races between them: tests/loss_race_test.cpp has a
// Block of real threads.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/hd.h"

namespace rlcore {

inline constexpr int kWarp = 32;
inline constexpr int kMaxWarps = 32;

// `merge` over the values of all threads, in a fixed order; every thread gets the result.
// `scratch` has kMaxWarps elements of shared memory and is free again after the next sync().
template <class Block, class T, class Merge>
RL_DEVICE T reduce(Block& block, T value, T* scratch, const Merge& merge) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    value = merge(value, block.shfl_xor(value, mask));
  }
  const int lane = block.thread() % kWarp, warp = block.thread() / kWarp;
  if (lane == 0) scratch[warp] = value;
  block.sync();
  value = scratch[0];
  for (int i = 1; i < block.num_threads() / kWarp; ++i) value = merge(value, scratch[i]);
  return value;
}

}  // namespace rlcore

#ifdef __CUDACC__

namespace rlcore {

class CudaBlock {
 public:
  RL_DEVICE int thread() const { return static_cast<int>(threadIdx.x); }
  RL_DEVICE int num_threads() const { return static_cast<int>(blockDim.x); }
  RL_DEVICE void sync() { __syncthreads(); }
  template <class T>
  RL_DEVICE T shfl_xor(T value, int mask) {
    static_assert(sizeof(T) % 4 == 0);
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (auto& word : words) word = __shfl_xor_sync(0xffffffffu, word, mask);
    memcpy(&value, words, sizeof(T));
    return value;
  }
};

}  // namespace rlcore

#else

#include <ucontext.h>

#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

namespace rlcore {

// One thread of a block that runs as fibers.
class HostBlock {
 public:
  class Fibers;
  HostBlock(Fibers& fibers, int thread) : fibers_(fibers), thread_(thread) {}
  int thread() const { return thread_; }
  int num_threads() const;
  void sync();
  template <class T>
  T shfl_xor(T value, int mask);

 private:
  Fibers& fibers_;
  int thread_;
};

// Runs `body(block, shared)` on every thread of a block. `shared` are the block's `shared_bytes`,
// aligned to 16, filled with 0xff: reading before a write gives NaN.
class HostBlock::Fibers {
 public:
  using Body = std::function<void(HostBlock&, void*)>;

  Fibers(int num_threads, size_t shared_bytes, Body body) : body_(std::move(body)) {
    if (num_threads % kWarp != 0) std::abort();
    const size_t bytes = (shared_bytes + 15) / 16 * 16 + 16;
    shared_.reset(static_cast<std::byte*>(std::aligned_alloc(16, bytes)));
    std::memset(shared_.get(), 0xff, bytes);
    const auto count = static_cast<size_t>(num_threads);
    slots_.resize(count);
    warps_.resize(count / kWarp, {kWarp});
    block_ = {num_threads};
    fibers_ = std::vector<Fiber>(count);
    for (size_t i = 0; i < count; ++i) start(static_cast<int>(i));
  }

  void run() {
    for (int left = static_cast<int>(fibers_.size()); left > 0;) {
      bool moved = false;
      for (size_t i = 0; i < fibers_.size(); ++i) {
        Fiber& fiber = fibers_[i];
        if (fiber.done || (fiber.waits && fiber.waits->passed == fiber.seen)) continue;
        fiber.waits = nullptr;
        current_ = static_cast<int>(i);
        resume(fiber);
        moved = true;
        if (fiber.done) --left;
      }
      if (!moved) std::abort();  // a barrier that some threads never reach
    }
  }

 private:
  friend class HostBlock;
  static constexpr size_t kStack = size_t{64} << 10;
  static constexpr size_t kSlot = 64;

  struct Barrier {
    int size = 0, arrived = 0;
    int64_t passed = 0;
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<std::byte[]> stack;
    Barrier* waits = nullptr;
    int64_t seen = 0;
    bool done = false;
    void* fake_stack = nullptr;
  };
  struct Slot {
    alignas(16) std::byte bytes[kSlot];
  };

  void start(int index) {
    Fiber& fiber = fibers_[static_cast<size_t>(index)];
    fiber.stack = std::make_unique_for_overwrite<std::byte[]>(kStack);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = &scheduler_;
    // makecontext hands ints on: a pointer goes as two.
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Fibers::entry), 2,
                static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
  }

  static void entry(unsigned high, unsigned low) {
    auto& self = *reinterpret_cast<Fibers*>(uintptr_t{high} << 32 | uintptr_t{low});
    self.entered(nullptr);
    const int index = self.current_;
    HostBlock block(self, index);
    self.body_(block, self.shared_.get());
    self.fibers_[static_cast<size_t>(index)].done = true;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, self.stack_, self.stack_size_);
#endif
  }

  void resume(Fiber& fiber) {
#ifdef __SANITIZE_ADDRESS__
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), kStack);
#endif
    swapcontext(&scheduler_, &fiber.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  // The first thing a fiber does after a switch to it.
  void entered([[maybe_unused]] void* fake) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, &stack_, &stack_size_);
#endif
  }

  void wait(Barrier& barrier) {
    Fiber& fiber = fibers_[static_cast<size_t>(current_)];
    if (++barrier.arrived == barrier.size) {
      barrier.arrived = 0;
      ++barrier.passed;
      return;
    }
    fiber.waits = &barrier;
    fiber.seen = barrier.passed;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fiber.fake_stack, stack_, stack_size_);
#endif
    swapcontext(&fiber.context, &scheduler_);
    entered(fiber.fake_stack);
  }

  Body body_;
  std::unique_ptr<std::byte, decltype(&std::free)> shared_{nullptr, &std::free};
  std::vector<Slot> slots_;
  std::vector<Barrier> warps_;
  Barrier block_;
  std::vector<Fiber> fibers_;
  ucontext_t scheduler_;
  int current_ = 0;
  const void* stack_ = nullptr;  // of the scheduler
  size_t stack_size_ = 0;
};

inline int HostBlock::num_threads() const { return fibers_.block_.size; }
inline void HostBlock::sync() { fibers_.wait(fibers_.block_); }

template <class T>
T HostBlock::shfl_xor(T value, int mask) {
  static_assert(sizeof(T) <= Fibers::kSlot);
  auto& warp = fibers_.warps_[static_cast<size_t>(thread_ / kWarp)];
  std::memcpy(fibers_.slots_[static_cast<size_t>(thread_)].bytes, &value, sizeof value);
  fibers_.wait(warp);
  std::memcpy(&value, fibers_.slots_[static_cast<size_t>(thread_ ^ mask)].bytes, sizeof value);
  fibers_.wait(warp);
  return value;
}

}  // namespace rlcore

#endif
