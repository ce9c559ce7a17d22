// Memory of live requests: buddy blocks out of slabs of large pages, handed from one to the next.
// Random places in thousands of small arrays cost a TLB miss each on pages of 4 KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace rlcore::suffix {

class Pool {
  struct Gone {
    Gone* next;
    uint64_t bytes;
  };

 public:
  // Slabs that are out of use; they go back to the system with it. That takes a while, so the
  // caller lets it go where no lock is held.
  class Dropped {
   public:
    Dropped() = default;
    explicit Dropped(Gone* first) : first_(first) {}
    Dropped(const Dropped&) = delete;
    Dropped& operator=(Dropped&& other) noexcept {
      std::swap(first_, other.first_);
      return *this;
    }
    ~Dropped();

   private:
    Gone* first_ = nullptr;
  };

  Pool() = default;
  // Every block was given back before.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Size of the smallest block of at least `bytes`: 2^k or 3 * 2^k, whole pages if it is large.
  static uint64_t block(uint64_t bytes);
  // `bytes` is the size of a block. std::bad_alloc where there is none.
  void* take(uint64_t bytes);
  void give(void* block, uint64_t bytes) noexcept;
  Dropped dropped() noexcept { return Dropped(std::exchange(gone_, nullptr)); }
  // Held from the system; one slab stays for the next request when all is given back.
  uint64_t nbytes() const { return held_; }

  static constexpr uint64_t kSmallest = 1024;
  static constexpr uint64_t kSlab = uint64_t{4} << 20;

 private:
  static constexpr uint64_t kPage = uint64_t{2} << 20;
  static constexpr uint64_t kLargest = kSlab / 2;  // larger ones have a mapping of their own
  static constexpr int kOrders = 13;               // kSmallest << order, up to a slab

  struct Free {
    Free* next;
    Free** at;  // what points here
  };
  struct Slab {
    char* base;
    std::unique_ptr<uint8_t[]> marks;  // [kSlab / kSmallest], 1 + order where a free block begins
  };

  static char* map(uint64_t bytes, uint64_t unit);
  std::vector<Slab>::iterator slab_of(const char* block);
  void add_slab();
  char* take_order(int order);
  void put(char* block, int order, uint8_t* mark) noexcept;
  void release(char* block, int order) noexcept;
  void drop(char* base, uint64_t bytes) noexcept;

  Free* free_[kOrders] = {};
  std::vector<Slab> slabs_;  // by ascending base
  Gone* gone_ = nullptr;
  uint64_t held_ = 0;
};

}  // namespace rlcore::suffix
