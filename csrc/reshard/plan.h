// The table of a plan: which bytes of which tensor lie where in a bucket, cut into tiles of about
// equal size, and the checksum of a bucket. Shared by the host and the device.
//
// A piece is a box of up to four dimensions, with byte strides on both sides. Pieces, gaps between
// them included, are numbered by their first tile, so that tile t belongs to the last piece whose
// first_tile is at most t. rlcore/ops/reshard.py builds the table: one row of int64 per piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/hd.h"

namespace rlcore::reshard {

// Dtypes. Equal dtypes on both sides move as raw bytes of their size, whatever they are.
enum Type : int64_t {
  kRaw1,
  kRaw2,
  kRaw4,
  kRaw8,
  kRaw16,
  kFloat64,
  kFloat32,
  kBFloat16,
  kFloat16,
};

RL_HD int64_t item_bytes(int64_t type) {
  return int64_t{1} << ((0x112343210 >> (4 * type)) & 15);  // a nibble per type, no table in memory
}

constexpr int64_t kWord = 8;               // bytes of a checksum's word
constexpr int64_t kNoTensor = -1;          // a gap: packs as zeros
constexpr int64_t kStageBytes = 64 << 10;  // a transposed tile that fits is turned on the chip

struct Piece {
  int64_t size[4];           // two outer dimensions, rows, columns
  int64_t bucket_stride[4];  // bytes
  int64_t tensor_stride[4];  // bytes
  int64_t bucket_offset;     // bytes
  int64_t tensor_offset;     // bytes
  int64_t tensor;            // index of its tensor, or kNoTensor
  int64_t bucket_type;
  int64_t tensor_type;
  int64_t tile_rows;
  int64_t tile_columns;
  int64_t hashed;  // 1: every row of a tile starts at a word and no other piece touches its words
  int64_t pad;     // bytes after the end of a hashed piece that are in its last word and no piece's
  int64_t first_tile;
};
constexpr int64_t kFields = 22;
static_assert(sizeof(Piece) == kFields * 8 && std::is_trivially_copyable_v<Piece>);

// Part of a piece: rows x columns elements, and where they are.
struct Tile {
  int64_t rows, columns;
  int64_t bucket_row, bucket_column;  // byte strides
  int64_t tensor_row, tensor_column;
  int64_t bucket;  // bytes from the start of the bucket
  int64_t tensor;  // bytes from the start of the tensor
  int64_t pad;     // as the piece's, in the last tile only
};

RL_HD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// a / b of numbers that are not negative; a device divides 32 bits several times faster.
RL_HD int64_t quotient(int64_t a, int64_t b) {
  const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  if ((x | y) >> 32) return a / b;
  return static_cast<uint32_t>(x) / static_cast<uint32_t>(y);
}

RL_HD int64_t ceil_div(int64_t a, int64_t b) { return quotient(a + b - 1, b); }

RL_HD int64_t num_tiles(const Piece& p) {
  return p.size[0] * p.size[1] * ceil_div(p.size[2], p.tile_rows) *
         ceil_div(p.size[3], p.tile_columns);
}

// The piece that tile t belongs to.
RL_HD int64_t find_piece(const Piece* pieces, int64_t num_pieces, int64_t t) {
  int64_t low = 0, high = num_pieces;  // the answer is in [low, high)
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (pieces[middle].first_tile <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

RL_HD Tile cut(const Piece& p, int64_t t) {
  int64_t column = t - p.first_tile, at[4] = {};  // of one row there is nothing to divide
  if (p.size[0] * p.size[1] * p.size[2] > 1) {
    const int64_t across = ceil_div(p.size[3], p.tile_columns);
    const int64_t down = ceil_div(p.size[2], p.tile_rows);
    const int64_t band = quotient(column, across), outer = quotient(band, down);
    column -= band * across;
    at[2] = (band - outer * down) * p.tile_rows;
    at[0] = quotient(outer, p.size[1]);
    at[1] = outer - at[0] * p.size[1];
  }
  at[3] = column * p.tile_columns;
  Tile tile{};
  tile.rows = least(p.tile_rows, p.size[2] - at[2]);
  tile.columns = least(p.tile_columns, p.size[3] - at[3]);
  tile.bucket_row = p.bucket_stride[2];
  tile.bucket_column = p.bucket_stride[3];
  tile.tensor_row = p.tensor_stride[2];
  tile.tensor_column = p.tensor_stride[3];
  tile.bucket = p.bucket_offset;
  tile.tensor = p.tensor_offset;
  for (int d = 0; d < 4; ++d) {
    tile.bucket += at[d] * p.bucket_stride[d];
    tile.tensor += at[d] * p.tensor_stride[d];
  }
  tile.pad = at[3] + tile.columns == p.size[3] ? p.pad : 0;
  return tile;
}

// What word number `position` of a bucket, little-endian, adds to its checksum. The checksum is the
// sum of all words' values modulo 2^64, the last word filled up with zeros, plus the value of the
// number of bytes at position -1. So any split into parts gives the same sum. For one position this
// is a one-to-one map: a change within one word always shows. Larger damage (words or ranges
// swapped, zeroed, repeated; a tail that is missing) goes unseen with a chance of about 2^-64, as
// far as trials show: the multiplier depends on the position, and the shifts do not commute with
// the sum. It is no protection against intent.
RL_HD uint64_t word_value(uint64_t word, uint64_t position) {
  const uint64_t key = (position + 1) * 0x9e3779b97f4a7c15u;
  uint64_t y = word ^ key;
  y ^= y >> 29;
  y *= (key >> 32) | 1;
  return y ^ (y >> 32);
}

}  // namespace rlcore::reshard
