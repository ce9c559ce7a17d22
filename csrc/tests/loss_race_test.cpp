// Races between the threads of the loss kernels: the bodies run on real threads, and
// ThreadSanitizer reports accesses that no barrier orders. loss_row_test.cpp checks the values.
//
//   loss_race_test              runs every body, and prints how many barriers each one passes
//   loss_race_test BODY NUMBER  runs one body without its barrier NUMBER, which must give a race
#include <pthread.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "loss/row.h"

using namespace rlcore::loss;
using rlcore::kWarp;

namespace {

constexpr int kThreads = 2 * kWarp;  // a reduction over several warps
constexpr int64_t kRows = 2;
constexpr int kMostBarriers = 8;  // that a block passes

template <unsigned kCount>
class Barrier {
 public:
  Barrier() { pthread_barrier_init(&barrier_, nullptr, kCount); }
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

struct Slot {
  alignas(16) unsigned char bytes[64];
};

// What the threads of a block share. Lanes of a warp wait for each other only in shfl_xor. The n-th
// barrier of a block has an object of its own: ThreadSanitizer takes a thread that is late in
// leaving one as ordered behind all that have entered the same object again.
struct BlockState {
  Barrier<kThreads> all[kMostBarriers];
  Barrier<kWarp> warps[kThreads / kWarp];
  Slot slots[kThreads] = {};
  int barriers = 0;  // that thread 0 has passed
};

// The Block of common/block.h.
class ThreadBlock {
 public:
  ThreadBlock(BlockState& state, int thread, int skipped)
      : state_(state), thread_(thread), skipped_(skipped) {}
  int thread() const { return thread_; }
  int num_threads() const { return kThreads; }
  void sync() {
    if (barriers_ == kMostBarriers) std::abort();
    if (++barriers_ != skipped_) state_.all[barriers_ - 1].wait();
    if (thread_ == 0) state_.barriers = barriers_;
  }
  template <class T>
  T shfl_xor(T value, int mask) {
    static_assert(sizeof(T) <= sizeof(Slot));
    auto& warp = state_.warps[thread_ / kWarp];
    std::memcpy(state_.slots[thread_].bytes, &value, sizeof value);
    warp.wait();
    std::memcpy(&value, state_.slots[thread_ ^ mask].bytes, sizeof value);
    warp.wait();
    return value;
  }

 private:
  BlockState& state_;
  int thread_, skipped_, barriers_ = 0;
};

// Runs body(block, i, shared) on all blocks at once. Returns the number of barriers that a block
// passes.
template <class Real, class Body>
int run(int64_t blocks, int skipped, const Body& body) {
  const auto count = static_cast<size_t>(blocks);
  std::vector<BlockState> states(count);
  std::vector<RowShared<Real>> shared(count);
  std::memset(static_cast<void*>(shared.data()), 0xff, count * sizeof(RowShared<Real>));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i) {
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, i, thread] {
        ThreadBlock block(states[i], thread, skipped);
        body(block, static_cast<int64_t>(i), shared[i]);
      });
    }
  }
  for (auto& thread : threads) thread.join();
  return states[0].barriers;
}

// Random logits with padding and the inputs of all three bodies. With an odd `valid` the first row
// is aligned to vectors and the second is not.
template <class T>
struct Case {
  using Real = Statistic<T>;
  Case(Dtype dtype, int64_t valid) {
    const int64_t width = valid + 5, stride = width + 3;
    data.resize(static_cast<size_t>(kRows * stride));
    uint32_t state = 1;
    for (T& x : data) {
      state = state * 1664525u + 1013904223u;
      x = narrow<T>(static_cast<Real>(static_cast<double>(state >> 8) / (1 << 22) - 2));
    }
    for (int64_t row = 0; row < kRows; ++row) tokens.push_back((valid - 1) * (row + 1) / kRows);
    logits = {data.data(), dtype, kRows, width, valid, 0, stride, tokens.data(), 0.8};
    for (Real& x : advantage) x = 1;
  }

  int stats(int skipped) {
    StatsParams p{logits, out};
    return run<Real>(kRows, skipped, [&](auto& block, int64_t row, auto& shared) {
      stats_body<T>(block, p, row, shared);
    });
  }

  // In place, so that the token's logit is overwritten.
  int grad(int skipped) {
    GradParams p{logits, lse, entropy, advantage, advantage, logits.data, logits.stride};
    return run<Real>(kRows, skipped,
                     [&](auto& block, int64_t row, auto&) { grad_body<T>(block, p, row); });
  }

  // One block takes all rows, so that races between a row and the next show.
  int rows(int skipped) {
    PolicyRowsParams p{logits, {lse, lse, nullptr, advantage, advantage}, {}, stat, out};
    p.settings.value[kClipHigh] = p.settings.value[kClipLow] = 0.2;
    p.settings.value[kLogLimit] = 20;
    p.settings.value[kEntropyCoef] = 0.01;
    return run<Real>(1, skipped, [&](auto& block, int64_t first, auto& shared) {
      rows_body<T>(block, p, first, 1, shared);
    });
  }

  std::vector<T> data;
  std::vector<int64_t> tokens;
  Logits logits;
  Real lse[2 * kRows] = {}, entropy[kRows] = {}, advantage[kRows] = {};
  Real stat[2 * kRows] = {}, out[kNumPolicyRows * kRows] = {};
};

template <class T>
int run_body(const std::string& body, int skipped, Dtype dtype, int64_t valid) {
  Case<T> c(dtype, valid);
  const int barriers = body == "stats"  ? c.stats(skipped)
                       : body == "grad" ? c.grad(skipped)
                                        : c.rows(skipped);
  const double value = static_cast<double>(body == "grad" ? widen(c.data[0]) : c.out[0]);
  if (skipped == 0 && !std::isfinite(value)) {
    std::fprintf(stderr, "%s: the output is %g\n", body.c_str(), value);
    std::exit(1);
  }
  return barriers;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3) {
    run_body<float>(argv[1], std::atoi(argv[2]), Dtype::kFp32, 1003);
    return 0;
  }
  for (const char* body : {"stats", "grad", "rows"}) {
    int barriers = 0;
    for (int64_t valid : {37, 1003}) {
      run_body<Bf16>(body, 0, Dtype::kBf16, valid);
      barriers = run_body<float>(body, 0, Dtype::kFp32, valid);
    }
    std::printf("%s %d\n", body, barriers);
  }
  return 0;
}
