// Memory of live requests: blocks of powers of two out of large pages, handed from one to the next.
// Random places in thousands of small arrays cost a TLB miss each on pages of 4 KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rlcore::suffix {

class Pool {
 public:
  Pool() = default;
  ~Pool() { clear(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // `bytes` is a power of two, at least kSmallest. std::bad_alloc where there is none.
  void* take(uint64_t bytes);
  void give(void* block, uint64_t bytes) noexcept;
  // Everything goes back to the system: no block may be in use.
  void clear() noexcept;
  uint64_t nbytes() const { return held_; }

  static constexpr uint64_t kSmallest = 1024;

 private:
  static constexpr uint64_t kSlab = uint64_t{4} << 20;
  static constexpr uint64_t kPage = uint64_t{2} << 20;
  static constexpr int kClasses = 65;

  struct Free {
    Free* next;
  };
  struct Slab {
    void* base;
    uint64_t bytes;
  };

  char* map(uint64_t bytes);

  Free* free_[kClasses] = {};
  std::vector<Slab> slabs_;
  char* top_ = nullptr;
  uint64_t left_ = 0;
  uint64_t held_ = 0;
};

}  // namespace rlcore::suffix
