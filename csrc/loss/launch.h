// How many threads take a row, and how many rows are in flight.
#pragma once

#include <algorithm>
#include <cstdint>

namespace rlcore::loss {

// A row of 152k elements keeps 256 threads busy; a short one would leave most without work.
inline constexpr int kThreads = 256, kFewThreads = 64;
inline constexpr int64_t kShort = 8192;

inline int row_threads(int64_t width) { return width <= kShort ? kFewThreads : kThreads; }

// Threads of policy_rows on a multiprocessor, in one block or several: their registers fill it.
inline constexpr int kManyThreads = 768;

struct RowsGrid {
  int64_t blocks;  // rows in flight; a block takes one row after the other
  int threads;
};

// policy_rows reads a row twice. The second read is from L2 if the rows in flight fit there, else
// from memory: 3 passes instead of 2. Wide rows therefore get more threads in fewer blocks.
//
// Counted for an H100 (132 multiprocessors, 50 MiB of L2) and rows of 304 KB (152,064 in bf16):
//
//   3 blocks of 256 threads    396 rows   120 MB    second read from memory
//   1 block of 768 threads     132 rows    40 MB    from L2
//
// Both have 24 warps and 48 KB of loads in flight per multiprocessor. Besides loading, a block sums
// and writes from L2, at most 11 of the 24 us that memory takes for its row. The others hide that:
// loads of 13/24 of the multiprocessors, 3.5 MB, saturate 3.35 TB/s up to a latency of 1 us.
// Written lines leave L2 first (`store`): half of a row is needed on average, so 25 MiB would do,
// as where each half of L2 has its own copy of a line. tools/kernel_report.py counts all this.
inline RowsGrid rows_grid(int64_t rows, int64_t width, int64_t row_bytes, int64_t processors,
                          int64_t l2_bytes) {
  const int64_t fit = l2_bytes / 5 * 4 / std::max<int64_t>(row_bytes, 1);
  for (const int threads : {row_threads(width), kThreads, kManyThreads / 2, kManyThreads}) {
    const int64_t blocks = processors * (kManyThreads / threads);
    if (blocks <= fit) return {std::min(rows, blocks), threads};
  }
  // Rows of megabytes: multiprocessors stay idle, up to where a third pass costs less.
  return {std::min(rows, 4 * fit >= processors ? fit : processors), kManyThreads};
}

}  // namespace rlcore::loss
