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

// Type pairs (bucket's, tensor's) that a piece may have. Gaps belong to the first.
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
  int64_t pairs;            // bits of the type pairs that the pieces have, by `pairs_of`
  uint64_t* sum;            // of the words' values; set, not added to
};

// Is a piece of these types' pair?
RL_HD bool is_of(const Piece& piece, int64_t bucket_type, int64_t tensor_type) {
  if (piece.tensor == kNoTensor) return bucket_type == kRaw1;
  return piece.bucket_type == bucket_type && piece.tensor_type == tensor_type;
}

// Bit k for pair number k of RLCORE_RESHARD_PAIRS: a device runs one kernel for each that is set.
inline int64_t pairs_of(const Piece* pieces, int64_t num_pieces) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < num_pieces; ++i) {
    int64_t bit = 1;
#define RLCORE_CASE(b, t, B, T)             \
  if (is_of(pieces[i], b, t)) pairs |= bit; \
  bit *= 2;
    RLCORE_RESHARD_PAIRS(RLCORE_CASE)
#undef RLCORE_CASE
  }
  return pairs;
}

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

// N elements that lie together, moved by accesses of up to 16 bytes.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Run {
  T items[N];
};

template <class B>
using Unit = Run<B, 16 / static_cast<int>(sizeof(B))>;  // 16 bytes of the bucket

// What a unit at `offset` in the bucket adds to the checksum.
template <class B>
RL_HD uint64_t unit_value(const Unit<B>& unit, int64_t offset) {
  uint64_t words[2];
  memcpy(words, &unit, sizeof(words));
  const auto at = static_cast<uint64_t>(offset / kWord);
  return word_value(words[0], at) + word_value(words[1], at + 1);
}

// Rows of `units` units whose elements lie together on both sides, in any number of rows: up to
// 64 bytes in flight per thread.
template <bool kPack, class B, class T>
RL_HD uint64_t straight_lane(const Tile& tile, uint64_t bucket, uint64_t tensor, int64_t units,
                             int thread) {
  constexpr int kCount = 16 / static_cast<int>(sizeof(B));
  using Here = Run<T, kCount>;
  constexpr int kUnroll = sizeof(Here) <= 16 ? 4 : static_cast<int>(64 / sizeof(Here));
  const int64_t count = tile.rows * units;
  uint64_t sum = 0;
  for (int64_t first = thread; first < count; first += kUnroll * kThreads) {
    Unit<B> x[kUnroll];
    Here y[kUnroll];
    int64_t offset[kUnroll];
    uint64_t here[kUnroll];
    RL_UNROLL
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t i = first + k * kThreads;
      if (i >= count) continue;
      const int64_t row = tile.rows > 1 ? quotient(i, units) : 0, unit = i - row * units;
      offset[k] = tile.bucket + row * tile.bucket_row + unit * 16;
      here[k] = tensor + static_cast<uint64_t>(row * tile.tensor_row + unit * sizeof(Here));
      if constexpr (kPack) {
        y[k] = load<Here>(here[k]);
      } else {
        x[k] = load<Unit<B>>(bucket + static_cast<uint64_t>(offset[k]));
      }
    }
    RL_UNROLL
    for (int k = 0; k < kUnroll; ++k) {
      if (first + k * kThreads >= count) continue;
      RL_UNROLL
      for (int j = 0; j < kCount; ++j) {
        if constexpr (kPack) {
          x[k].items[j] = convert<B>(y[k].items[j]);
        } else {
          y[k].items[j] = convert<T>(x[k].items[j]);
        }
      }
      if constexpr (kPack) {
        store(bucket + static_cast<uint64_t>(offset[k]), x[k]);
      } else {
        store(here[k], y[k]);
      }
      sum += unit_value<B>(x[k], offset[k]);
    }
  }
  return sum;
}

// Blocks that a thread turns in its registers: a unit of the bucket across, and as many rows, up
// to 64 bytes.
template <class B, class T>
constexpr int turned_rows() {
  const int columns = 16 / static_cast<int>(sizeof(B));
  const int rows = 64 / columns / static_cast<int>(sizeof(B) < sizeof(T) ? sizeof(T) : sizeof(B));
  return rows < columns ? rows : columns;
}

// A tile whose columns lie together in the tensor and whose rows lie together in the bucket. A warp
// takes 8 blocks across and 4 down, so that it moves whole 32-byte sectors on either side.
template <bool kPack, class B, class T>
RL_HD uint64_t turned_lane(const Tile& tile, uint64_t bucket, uint64_t tensor, int thread) {
  constexpr int kRows = turned_rows<B, T>(), kColumns = 16 / static_cast<int>(sizeof(B));
  using Here = Run<T, kRows>;
  const int64_t down = tile.rows / kRows, across = tile.columns / kColumns;
  const int64_t warps = ceil_div(across, 8);
  uint64_t sum = 0;
  for (int64_t i = thread; i < ceil_div(down, 4) * warps * 32; i += kThreads) {
    const int64_t warp = i / 32, lane = i % 32, band = quotient(warp, warps);
    const int64_t r = band * 4 + lane / 8, c = (warp - band * warps) * 8 + lane % 8;
    if (r >= down || c >= across) continue;
    const int64_t offset = tile.bucket + r * kRows * tile.bucket_row + c * 16;
    const uint64_t here = tensor + static_cast<uint64_t>(r * static_cast<int64_t>(sizeof(Here)) +
                                                         c * kColumns * tile.tensor_column);
    Unit<B> x[kRows];
    Here y[kColumns];
    RL_UNROLL
    for (int k = 0; k < (kPack ? kColumns : kRows); ++k) {
      if constexpr (kPack) {
        y[k] = load<Here>(here + static_cast<uint64_t>(k * tile.tensor_column));
      } else {
        x[k] = load<Unit<B>>(bucket + static_cast<uint64_t>(offset + k * tile.bucket_row));
      }
    }
    RL_UNROLL
    for (int k = 0; k < kRows; ++k) {
      RL_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        if constexpr (kPack) {
          x[k].items[j] = convert<B>(y[j].items[k]);
        } else {
          y[j].items[k] = convert<T>(x[k].items[j]);
        }
      }
      if constexpr (kPack) {
        store(bucket + static_cast<uint64_t>(offset + k * tile.bucket_row), x[k]);
      }
      sum += unit_value<B>(x[k], offset + k * tile.bucket_row);
    }
    if constexpr (!kPack) {
      RL_UNROLL
      for (int k = 0; k < kColumns; ++k) {
        store(here + static_cast<uint64_t>(k * tile.tensor_column), y[k]);
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
    RL_UNROLL
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

// Are the rows of a tile made of units that lie at multiples of 16 bytes in the bucket?
RL_HD bool in_units(const Tile& tile, uint64_t bucket, int64_t item) {
  const auto bits = static_cast<uint64_t>(tile.bucket | (tile.columns * item) |
                                          (tile.rows > 1 ? tile.bucket_row : 0));
  return ((bits | bucket) & 15) == 0;
}

// Do the elements of each row lie together in the tensor, from a multiple of `bytes` on?
RL_HD bool is_straight(const Tile& tile, uint64_t tensor, int64_t item, size_t bytes) {
  const uint64_t bits = tensor | static_cast<uint64_t>(tile.rows > 1 ? tile.tensor_row : 0);
  return tile.tensor_column == item && (bits & (bytes - 1)) == 0;
}

// Do the elements of each column, `rows` at a time?
RL_HD bool is_turned(const Tile& tile, uint64_t tensor, int64_t item, int64_t rows, size_t bytes) {
  const uint64_t bits = tensor | static_cast<uint64_t>(tile.tensor_column);
  return tile.tensor_row == item && tile.rows % rows == 0 && (bits & (bytes - 1)) == 0;
}

template <bool kPack, class B, class T>
RL_HD uint64_t tile_lane(const Piece& piece, const Tile& tile, uint64_t bucket, uint64_t tensor,
                         int thread) {
  constexpr int64_t kItem = sizeof(B), kThere = sizeof(T);
  constexpr int kRows = turned_rows<B, T>();
  if (!piece.hashed) {
    elements_lane<kPack, B, T>(tile, bucket, tensor, thread);
    return 0;
  }
  if (in_units(tile, bucket, kItem)) {
    const int64_t units = tile.columns * kItem / 16;
    if (is_straight(tile, tensor, kThere, alignof(Run<T, 16 / kItem>))) {
      constexpr bool kSame = std::is_same_v<B, T>;
      using There = std::conditional_t<kSame, Raw16, B>;
      using Here = std::conditional_t<kSame, Raw16, T>;
      return straight_lane<kPack, There, Here>(tile, bucket, tensor, units, thread);
    }
    if constexpr (kItem > 1) {  // of single bytes a unit has too many for the registers
      if (is_turned(tile, tensor, kThere, kRows, alignof(Run<T, kRows>))) {
        return turned_lane<kPack, B, T>(tile, bucket, tensor, thread);
      }
    }
  }
  if constexpr (kItem == 16) {
    return pairs_lane<kPack>(tile, bucket, tensor, thread);
  } else {
    return words_lane<kPack, B, T>(tile, bucket, tensor, thread);
  }
}

// The tiles of one type pair. Grid: any number of blocks of kThreads, of which each takes an equal
// run of tiles. Returns this thread's part of the sum.
template <bool kPack, class B, class T>
RL_HD uint64_t copy_lane(const Job& job, int64_t bucket_type, int64_t tensor_type, int64_t block,
                         int64_t num_blocks, int thread) {
  const int64_t share = ceil_div(job.num_tiles, num_blocks);
  const int64_t first = block * share, end = least(first + share, job.num_tiles);
  if (first >= end) return 0;
  int64_t at = find_piece(job.pieces, job.num_pieces, first);
  uint64_t sum = 0;
  for (int64_t t = first; t < end; ++t) {
    while (at + 1 < job.num_pieces && job.pieces[at + 1].first_tile <= t) ++at;
    const Piece& piece = job.pieces[at];
    const int64_t last = least(end, piece.first_tile + num_tiles(piece)) - 1;
    if (!is_of(piece, bucket_type, tensor_type)) {
      t = last;
      continue;
    }
    Tile tile = cut(piece, t);
    if (piece.size[0] * piece.size[1] * piece.size[2] == 1) {  // of one row all tiles at once
      const Tile right = cut(piece, last);
      tile.columns = (last - t) * piece.tile_columns + right.columns;
      tile.pad = right.pad;
      t = last;
    }
    if (piece.tensor == kNoTensor) {
      sum += gap_lane<kPack>(tile, job.bucket, thread);
    } else {
      const uint64_t tensor = job.tensors[piece.tensor] + static_cast<uint64_t>(tile.tensor);
      sum += tile_lane<kPack, B, T>(piece, tile, job.bucket, tensor, thread);
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
