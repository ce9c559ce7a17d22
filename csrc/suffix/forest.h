// The suffix forest: histories by prompt in one block of memory per epoch, and live requests on
// them. No Python, no torch.
//
// All calls may be made from several threads: `build` excludes only other builds, the calls that
// touch requests exclude one another. Bad arguments are std::invalid_argument and change nothing.
// The arrays of a call must not be written to until it returns.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "suffix/match.h"
#include "suffix/pool.h"

namespace rlcore::suffix {

// One block of layout.h. Freed whole, however much is in it.
class Arena {
 public:
  // Address space for `bytes`, not memory. std::bad_alloc where there is none.
  static std::unique_ptr<Arena> reserve(uint64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The next `bytes` bytes, aligned to a cache line. Several threads may ask.
  char* take(uint64_t bytes);
  // Gives what was not taken back, and fills in what the header says of the whole.
  void seal();

  char* base() const { return base_; }
  Header& header() const { return *reinterpret_cast<Header*>(base_); }
  std::span<Prompt> prompts() const {
    return {reinterpret_cast<Prompt*>(base_ + sizeof(Header)), header().num_prompts};
  }
  // An empty history for a key that is not there.
  History history(int64_t key) const;
  const Prompt* find(int64_t key) const;
  uint64_t nbytes() const { return used_; }

 private:
  Arena(char* base, uint64_t reserved) : base_(base), reserved_(reserved) {}

  char* base_;
  uint64_t reserved_;
  std::atomic<uint64_t> used_{0};
};

// Responses of many prompts. Offsets begin with 0 and end with the length of what they cut.
struct Corpus {
  std::span<const int64_t> keys;              // [P]
  std::span<const int32_t> tokens;            // [N]
  std::span<const int64_t> response_offsets;  // [R + 1], in tokens
  std::span<const int64_t> prompt_offsets;    // [P + 1], in responses
  std::span<const float> rewards;             // [R]
};

struct Built {
  uint64_t tokens;
  uint64_t states;
  uint64_t edges;
  uint64_t bytes;
  double seconds;
};

struct Stats {
  uint64_t prompts;
  uint64_t tokens;
  uint64_t states;
  uint64_t edges;
  uint64_t history_bytes;  // of all blocks that are still held
  uint64_t live_bytes;
  uint64_t live_tokens;
  int64_t requests;
};

class Forest {
 public:
  // threads: for `build`; 0: as many as there are cores.
  Forest(const Options& options, int threads);
  ~Forest();

  const Options& options() const { return options_; }

  Built build(const Corpus& corpus);
  void swap();

  void open(std::span<const int64_t> keys, std::span<int64_t> handles);
  void close(std::span<const int64_t> handles);
  void advance(std::span<const int64_t> handles, std::span<const int32_t> tokens,
               std::span<const int64_t> offsets);
  void accept(std::span<const int64_t> handles, std::span<const int32_t> accepted);

  // The width of a batch of drafts. Empty `windows`: the requests' own; running <= 0: the batch.
  int32_t width(int64_t batch, std::span<const int32_t> windows, bool own, int64_t running) const;
  // Rows of `width` tokens, -1 after the draft.
  struct Drafts {
    int32_t* tokens;
    int32_t* lengths;
    int32_t width;
  };
  void draft(std::span<const int64_t> handles, std::span<const int32_t> windows, bool own,
             int64_t running, const Drafts& out);
  void step(std::span<const int64_t> handles, std::span<const int32_t> accepted,
            std::span<const int32_t> tokens, std::span<const int64_t> offsets,
            std::span<const int32_t> windows, bool own, int64_t running, const Drafts& out);
  void matches(std::span<const int64_t> handles, std::span<int32_t> history,
               std::span<int32_t> live);
  void windows(std::span<const int64_t> handles, std::span<int32_t> windows);

  uint64_t nbytes() const;
  Stats stats() const;
  // The current block, for a copy to a device; nullptr before the first swap.
  std::shared_ptr<const Arena> current() const;

 private:
  struct Request;

  Request& request(std::span<const int64_t> handles, size_t i);
  void find(std::span<const int64_t> handles, bool once);
  void make_room(std::span<const int64_t> offsets);
  void accept_found(std::span<const int32_t> accepted);
  void append_found(std::span<const int32_t> tokens, std::span<const int64_t> offsets);
  void plan_found(std::span<const int32_t> windows, bool own, int64_t running);
  void walk_found(std::span<const int32_t> tokens, std::span<const int64_t> offsets,
                  const Drafts& out);
  void check_accepted(std::span<const int64_t> handles, std::span<const int32_t> accepted) const;
  void check_windows(std::span<const int32_t> windows, size_t batch) const;

  const Options options_;
  const int threads_;
  std::mutex building_;
  mutable std::mutex serving_;
  std::shared_ptr<const Arena> current_;
  std::shared_ptr<const Arena> next_;
  std::vector<std::weak_ptr<const Arena>> arenas_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::vector<uint32_t> free_;
  std::vector<Request*> found_;  // of the running call, as the next two
  std::vector<int32_t> windows_;
  std::vector<uint32_t> tags_;
  Pool pool_;
  int64_t num_open_ = 0;
  uint64_t call_ = 0;
};

}  // namespace rlcore::suffix
