// Copies between tensors and a bucket, in one pass that also sums the checksum.
//
// `copy` is the host's, tile by tile over threads that the caller hands in. `copy_lane` is what one
// thread of the kernel does, with the same result; the tests run it on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#include "reshard/convert.h"
#include "reshard/plan.h"

// Type pairs (bucket's, tensor's) that a tile may have.
#define RLCORE_RESHARD_PAIRS(X)             \
  X(kRaw1, kRaw1, uint8_t, uint8_t)         \
  X(kRaw2, kRaw2, uint16_t, uint16_t)       \
  X(kRaw4, kRaw4, uint32_t, uint32_t)       \
  X(kRaw8, kRaw8, uint64_t, uint64_t)       \
  X(kRaw16, kRaw16, Raw16, Raw16)           \
  X(kFloat64, kFloat32, double, float)      \
  X(kFloat64, kBFloat16, double, BFloat16)  \
  X(kFloat64, kFloat16, double, Float16)    \
  X(kFloat32, kFloat64, float, double)      \
  X(kFloat32, kBFloat16, float, BFloat16)   \
  X(kFloat32, kFloat16, float, Float16)     \
  X(kBFloat16, kFloat64, BFloat16, double)  \
  X(kBFloat16, kFloat32, BFloat16, float)   \
  X(kBFloat16, kFloat16, BFloat16, Float16) \
  X(kFloat16, kFloat64, Float16, double)    \
  X(kFloat16, kFloat32, Float16, float)     \
  X(kFloat16, kBFloat16, Float16, BFloat16)

namespace rlcore::reshard {

struct Job {
  const Piece* pieces;
  int64_t num_pieces;
  int64_t num_tiles;
  const uint64_t* tensors;  // addresses by Piece::tensor
  uint64_t bucket;          // address; a multiple of 16 on the device
  int64_t num_bytes;        // of the bucket
  int64_t pack;             // 1: tensors to bucket, 0: bucket to tensors
  int64_t hash_after;       // 1: no piece is hashed, the bucket is zeroed before and summed after
  uint64_t* sum;            // of the words' values; set, not added to
};

// Calls `body(begin, end)` on parts of [0, count) that cover it, on any threads; returns when all
// are done. A part has at least `grain` items if there are that many.
using ParallelFor = std::function<void(int64_t count, int64_t grain,
                                       const std::function<void(int64_t begin, int64_t end)>&)>;

// Throws std::invalid_argument for a table that no plan of `num_tensors` tensors has: a job that
// passes stays inside its bucket. Only sizes of tensors are not known here. The table is read on
// the host; addresses are not looked at.
void check(const Job& job, int64_t num_tensors);

// Runs a job that `check` has seen on the host.
void copy(const Job& job, const ParallelFor& parallel_for);

// The sum of the values of all words of a buffer.
uint64_t sum_of(const void* bytes, int64_t num_bytes, const ParallelFor& parallel_for);

// ---- one thread of the kernel

constexpr int kThreads = 256;

template <class T>
RL_HD T load(uint64_t address) {
  return *reinterpret_cast<const T*>(address);
}

template <class T>
RL_HD void store(uint64_t address, T x) {
  *reinterpret_cast<T*>(address) = x;
}

struct alignas(16) Wide {
  uint64_t low, high;
};

// The bytes [0, count) of a word, the others zero; and back.
RL_HD uint64_t load_word(uint64_t address, int64_t count) {
  if (count == kWord) return load<uint64_t>(address);
  uint64_t word = 0;
  for (int64_t b = 0; b < count; ++b) {
    word |= static_cast<uint64_t>(load<uint8_t>(address + static_cast<uint64_t>(b))) << (8 * b);
  }
  return word;
}

RL_HD void store_word(uint64_t address, int64_t count, uint64_t word) {
  if (count == kWord) return store(address, word);
  for (int64_t b = 0; b < count; ++b) {
    store(address + static_cast<uint64_t>(b), static_cast<uint8_t>(word >> (8 * b)));
  }
}

// Rows of 16-byte units, aligned on both sides: four in flight per thread.
template <bool kPack>
RL_HD uint64_t wide_lane(const Tile& tile, uint64_t bucket, uint64_t tensor, int64_t row_bytes,
                         int thread) {
  constexpr int kUnroll = 4;
  const int64_t units = row_bytes / 16;
  uint64_t sum = 0;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const int64_t offset = tile.bucket + row * tile.bucket_row;
    const uint64_t there = bucket + static_cast<uint64_t>(offset);
    const uint64_t here = tensor + static_cast<uint64_t>(row * tile.tensor_row);
    const uint64_t from = kPack ? here : there, to = kPack ? there : here;
    for (int64_t first = thread; first < units; first += kUnroll * kThreads) {
      Wide x[kUnroll] = {};
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = first + k * kThreads;
        if (i < units) x[k] = load<Wide>(from + static_cast<uint64_t>(i) * 16);
      }
#ifdef __CUDACC__
#pragma unroll
#endif
      for (int k = 0; k < kUnroll; ++k) {
        const int64_t i = first + k * kThreads;
        if (i >= units) continue;
        store(to + static_cast<uint64_t>(i) * 16, x[k]);
        const auto word = static_cast<uint64_t>(offset / kWord + 2 * i);
        sum += word_value(x[k].low, word) + word_value(x[k].high, word + 1);
      }
    }
  }
  return sum;
}

// Any tile of a hashed piece: a thread makes or takes apart a word of the bucket at a time.
template <bool kPack, class B, class T>
RL_HD uint64_t words_lane(const Tile& tile, uint64_t bucket, uint64_t tensor, int thread) {
  constexpr int kItem = static_cast<int>(sizeof(B)), kCount = static_cast<int>(kWord) / kItem;
  using Bits = std::conditional_t<
      kItem == 1, uint8_t,
      std::conditional_t<kItem == 2, uint16_t, std::conditional_t<kItem == 4, uint32_t, uint64_t>>>;
  const int64_t bytes = tile.columns * kItem;
  const int64_t words = ceil_div(bytes, kWord);
  uint64_t sum = 0;
  for (int64_t i = thread; i < tile.rows * words; i += kThreads) {
    const int64_t row = quotient(i, words), start = (i - row * words) * kWord;
    const int64_t offset = tile.bucket + row * tile.bucket_row + start;
    const int count = static_cast<int>(least(kWord, bytes - start)) / kItem;
    // The last word may have bytes behind the end of the piece.
    const int64_t own = count < kCount ? count * kItem + tile.pad : kWord;
    const uint64_t there = bucket + static_cast<uint64_t>(offset);
    const uint64_t here =
        tensor + static_cast<uint64_t>(row * tile.tensor_row + start / kItem * tile.tensor_column);
    uint64_t word = kPack ? 0 : load_word(there, own);
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int j = 0; j < kCount; ++j) {
      if (j >= count) continue;
      const uint64_t address = here + static_cast<uint64_t>(j * tile.tensor_column);
      Bits bits;
      B y;
      if constexpr (kPack) {
        y = convert<B>(load<T>(address));
        memcpy(&bits, &y, sizeof(B));
        word |= static_cast<uint64_t>(bits) << (8 * kItem * j);
      } else {
        bits = static_cast<Bits>(word >> (8 * kItem * j));
        memcpy(&y, &bits, sizeof(B));
        store(address, convert<T>(y));
      }
    }
    if constexpr (kPack) store_word(there, own, word);
    sum += word_value(word, static_cast<uint64_t>(offset / kWord));
  }
  return sum;
}

// The same for elements of two words.
template <bool kPack>
RL_HD uint64_t pairs_lane(const Tile& tile, uint64_t bucket, uint64_t tensor, int thread) {
  uint64_t sum = 0;
  for (int64_t i = thread; i < tile.rows * tile.columns; i += kThreads) {
    const int64_t row = quotient(i, tile.columns), column = i - row * tile.columns;
    const int64_t offset = tile.bucket + row * tile.bucket_row + column * 16;
    const uint64_t there = bucket + static_cast<uint64_t>(offset);
    const uint64_t here =
        tensor + static_cast<uint64_t>(row * tile.tensor_row + column * tile.tensor_column);
    const auto x = load<Raw16>(kPack ? here : there);
    store(kPack ? there : here, x);
    const auto word = static_cast<uint64_t>(offset / kWord);
    sum += word_value(x.low, word) + word_value(x.high, word + 1);
  }
  return sum;
}

// Any tile of a piece that shares words with another: element by element, no sum.
template <bool kPack, class B, class T>
RL_HD void elements_lane(const Tile& tile, uint64_t bucket, uint64_t tensor, int thread) {
  for (int64_t i = thread; i < tile.rows * tile.columns; i += kThreads) {
    const int64_t row = quotient(i, tile.columns), column = i - row * tile.columns;
    const uint64_t there = bucket + static_cast<uint64_t>(tile.bucket + row * tile.bucket_row +
                                                          column * tile.bucket_column);
    const uint64_t here =
        tensor + static_cast<uint64_t>(row * tile.tensor_row + column * tile.tensor_column);
    if constexpr (kPack) {
      store(there, convert<B>(load<T>(here)));
    } else {
      store(here, convert<T>(load<B>(there)));
    }
  }
}

template <bool kPack>
RL_HD uint64_t gap_lane(const Tile& tile, uint64_t bucket, int thread) {
  uint64_t sum = 0;
  for (int64_t at = thread * kWord; at < tile.columns; at += kThreads * kWord) {
    const uint64_t address = bucket + static_cast<uint64_t>(tile.bucket + at);
    const int64_t count = least(kWord, tile.columns - at);
    const uint64_t word = kPack ? 0 : load_word(address, count);
    if constexpr (kPack) store_word(address, count, word);
    sum += word_value(word, static_cast<uint64_t>((tile.bucket + at) / kWord));
  }
  return sum;
}

template <bool kPack, class B, class T>
RL_HD uint64_t tile_lane(const Piece& piece, const Tile& tile, uint64_t bucket, uint64_t tensor,
                         int thread) {
  if (!piece.hashed) {
    elements_lane<kPack, B, T>(tile, bucket, tensor, thread);
    return 0;
  }
  if constexpr (std::is_same_v<B, Raw16>) {
    return pairs_lane<kPack>(tile, bucket, tensor, thread);
  } else {
    return words_lane<kPack, B, T>(tile, bucket, tensor, thread);
  }
}

// Are the rows of a tile of raw bytes made of 16-byte units, aligned on both sides?
RL_HD bool is_wide(const Piece& piece, const Tile& tile, uint64_t bucket, uint64_t tensor,
                   int64_t item) {
  const int64_t rows = tile.rows > 1 ? tile.bucket_row | tile.tensor_row : 0;
  const auto bits = static_cast<uint64_t>(tile.bucket | (tile.columns * item) | rows);
  return piece.hashed && tile.tensor_column == item && ((bits | bucket | tensor) & 15) == 0;
}

// Grid: any number of blocks of kThreads, of which each takes an equal run of tiles. Returns this
// thread's part of the sum.
template <bool kPack>
RL_HD uint64_t copy_lane(const Job& job, int64_t block, int64_t num_blocks, int thread) {
  const int64_t share = ceil_div(job.num_tiles, num_blocks);
  const int64_t first = block * share, end = least(first + share, job.num_tiles);
  if (first >= end) return 0;
  int64_t at = find_piece(job.pieces, job.num_pieces, first);
  uint64_t sum = 0;
  for (int64_t t = first; t < end; ++t) {
    while (at + 1 < job.num_pieces && job.pieces[at + 1].first_tile <= t) ++at;
    const Piece& piece = job.pieces[at];
    const Tile tile = cut(piece, t);
    if (piece.tensor == kNoTensor) {
      sum += gap_lane<kPack>(tile, job.bucket, thread);
      continue;
    }
    const uint64_t tensor = job.tensors[piece.tensor] + static_cast<uint64_t>(tile.tensor);
    const int64_t item = item_bytes(piece.bucket_type);
    if (piece.bucket_type == piece.tensor_type && is_wide(piece, tile, job.bucket, tensor, item)) {
      sum += wide_lane<kPack>(tile, job.bucket, tensor, tile.columns * item, thread);
      continue;
    }
    switch (piece.bucket_type * 16 + piece.tensor_type) {
#define RLCORE_CASE(b, t, B, T)                                             \
  case b * 16 + t:                                                          \
    sum += tile_lane<kPack, B, T>(piece, tile, job.bucket, tensor, thread); \
    break;
      RLCORE_RESHARD_PAIRS(RLCORE_CASE)
#undef RLCORE_CASE
      default:
        break;
    }
  }
  return sum;
}

// The same grid: this thread's part of the sum over a bucket's words.
RL_HD uint64_t sum_lane(uint64_t bucket, int64_t num_bytes, int64_t block, int64_t num_blocks,
                        int thread) {
  uint64_t sum = 0;
  const int64_t whole = num_bytes / kWord;
  for (int64_t i = block * kThreads + thread; i < whole; i += num_blocks * kThreads) {
    const auto word = static_cast<uint64_t>(i);
    sum += word_value(load<uint64_t>(bucket + word * kWord), word);
  }
  if (block == 0 && thread == 0 && num_bytes % kWord) {
    const auto last = static_cast<uint64_t>(whole);
    sum += word_value(load_word(bucket + last * kWord, num_bytes % kWord), last);
  }
  return sum;
}

}  // namespace rlcore::reshard
