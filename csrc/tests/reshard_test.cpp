// Host test of csrc/reshard, without Python: the host's copies and the kernel's body against the
// plainest loops, on random tables, with any split into threads and blocks. Built with sanitizers
// by tests/native/test_reshard_native.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "reshard/copy.h"

using namespace rlcore::reshard;

#define CHECK(condition)                                                         \
  if (!(condition)) {                                                            \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                                \
  }

static uint64_t state = 1;

static int64_t pick(int64_t below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(below));
}

static constexpr int64_t kTypes[][2] = {
#define RLCORE_PAIR(b, t, B, T) {b, t},
    RLCORE_RESHARD_PAIRS(RLCORE_PAIR)
#undef RLCORE_PAIR
};
static constexpr int64_t kPairs = sizeof(kTypes) / sizeof(kTypes[0]);

static double value(int64_t type, const unsigned char* at) {
  switch (type) {
    case kFloat64: {
      double x;
      std::memcpy(&x, at, 8);
      return x;
    }
    case kFloat32: {
      float x;
      std::memcpy(&x, at, 4);
      return x;
    }
    default: {
      uint16_t u;
      std::memcpy(&u, at, 2);
      return type == kBFloat16 ? widen(BFloat16{u}) : widen(Float16{u});
    }
  }
}

// Casts with the processor's own rounding: double to float, then the neighbour of fewer bits that
// is nearest, found by trying both and the even one at a tie.
static uint64_t rounded(int64_t type, double x) {
  const auto f = static_cast<float>(x);
  uint64_t out = 0;
  if (type == kFloat64) {
    const double y = std::isnan(f) ? std::numeric_limits<double>::quiet_NaN() : f;
    std::memcpy(&out, &y, 8);
    return out;
  }
  if (type == kFloat32) {
    const float y = std::isnan(f) ? std::numeric_limits<float>::quiet_NaN() : f;
    std::memcpy(&out, &y, 4);
    return out;
  }
  const auto back = [type](uint32_t bits) {
    const auto u = static_cast<uint16_t>(bits);
    return static_cast<double>(type == kBFloat16 ? widen(BFloat16{u}) : widen(Float16{u}));
  };
  const uint32_t infinity = type == kBFloat16 ? 0x7f80 : 0x7c00;
  if (std::isnan(f)) return type == kBFloat16 ? 0x7fc0 : 0x7e00;
  const double size = std::fabs(static_cast<double>(f));
  const uint32_t sign = std::signbit(f) ? 0x8000 : 0;
  uint32_t low = 0, high = infinity;  // the last that is at most `size`
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (back(middle) <= size ? low : high) = middle;
  }
  if (size >= back(infinity)) return sign | infinity;
  // Infinity stands where the next finite number would be.
  const double above = high == infinity ? 2 * back(low) - back(low - 1) : back(high);
  const double down = size - back(low), up = above - size;
  return sign | (down < up || (down == up && low % 2 == 0) ? low : high);
}

struct Case {
  std::vector<Piece> pieces;
  std::vector<std::vector<unsigned char>> tensors;
  int64_t num_bytes = 0;
  int64_t num_tiles = 0;
  bool hash_after = false;
};

static void add(Case& c, Piece p) {
  p.first_tile = c.num_tiles;
  c.num_tiles += num_tiles(p);
  c.pieces.push_back(p);
}

static void add_gap(Case& c, int64_t start, int64_t end) {
  if (start == end) return;
  add(c, {.size = {1, 1, 1, end - start},
          .bucket_stride = {0, 0, 0, 1},
          .tensor_stride = {},
          .bucket_offset = start,
          .tensor_offset = 0,
          .tensor = kNoTensor,
          .bucket_type = kRaw1,
          .tensor_type = kRaw1,
          .tile_rows = 1,
          .tile_columns = 8 * (1 + pick(20)),
          .hashed = 1,
          .pad = 0,
          .first_tile = 0});
}

// Pieces one behind the other in the bucket, rows contiguous there or every second row, any order
// of strides in the tensor.
static Case random_case(bool hash_after) {
  Case c;
  c.hash_after = hash_after;
  const int64_t count = pick(6);
  for (int64_t i = 0; i < count; ++i) {
    Piece p{};
    const int64_t pair = pick(kPairs);
    p.bucket_type = kTypes[pair][0];
    p.tensor_type = kTypes[pair][1];
    const int64_t ours = item_bytes(p.bucket_type), theirs = item_bytes(p.tensor_type);
    for (int64_t& n : p.size) n = 1 + pick(4);
    if (pick(3) == 0) p.size[2] = 1 + pick(150);
    p.size[3] = 1 + pick(pick(3) ? 40 : 3000);
    const bool even = pick(2) == 0;  // the kernel takes 16 bytes of the bucket at a time
    if (even) {
      p.size[2] = 8 * (1 + pick(4)) + pick(2);
      p.size[3] = 16 * (1 + pick(9));
    }
    if (p.size[0] * p.size[1] * p.size[2] * p.size[3] > 20000) p.size[0] = p.size[1] = 1;
    if (p.size[2] * p.size[3] > 20000) p.size[2] = 1;
    const bool flat = pick(3) == 0;
    if (flat) p.size[0] = p.size[1] = p.size[2] = 1;
    const int64_t unit = hash_after ? ours : even ? 16 : std::max(ours, kWord);
    int64_t row = p.size[3] * ours;
    if (!flat) row = ceil_div(row, unit) * unit;
    // Hashed rows have no rest.
    if (!hash_after && !flat) p.size[3] = row / ours;
    p.bucket_stride[3] = ours;
    for (int d = 2; d >= 0; --d) {
      p.bucket_stride[d] = row;
      row *= p.size[d];
    }
    int64_t order[4] = {0, 1, 2, 3};
    for (int64_t d = 3; d > 0; --d) std::swap(order[d], order[pick(d + 1)]);
    if (pick(2)) {
      for (int64_t d = 0; d < 4; ++d) order[d] = 3 - d;
    }
    if (even && pick(2)) std::swap(order[0], order[std::find(order, order + 4, 2) - order]);
    int64_t step = theirs;
    for (const int64_t d : order) {
      p.tensor_stride[d] = step;
      step *= p.size[d];
      if (pick(4) == 0) step += even && pick(2) ? 16 : theirs;
    }
    p.tensor_offset = pick(3) * (even && pick(2) ? 16 : theirs);
    p.tensor = i;
    p.tile_rows = 1 + pick(pick(2) ? 8 : 64);
    p.tile_columns = 8 * (1 + pick(pick(2) ? 8 : 100));
    if (even && pick(2)) p.tile_rows = ceil_div(p.tile_rows, 8) * 8;
    p.hashed = !hash_after;
    const int64_t start = ceil_div(c.num_bytes, unit) * unit + pick(3) * unit;
    const int64_t end = start + p.bucket_stride[0] * p.size[0];
    if (!hash_after) {
      add_gap(c, ceil_div(c.num_bytes, kWord) * kWord, start);
      const int64_t rest = ceil_div(end, kWord) * kWord - end;
      p.pad = i + 1 == count ? pick(rest + 1) : rest;  // the bucket may end within a word
    }
    p.bucket_offset = start;
    add(c, p);
    c.num_bytes = end + p.pad;
    c.tensors.emplace_back(static_cast<size_t>(p.tensor_offset + step));
    for (auto& byte : c.tensors.back()) byte = static_cast<unsigned char>(pick(256));
  }
  return c;
}

// Calls f(piece, bytes into the bucket, bytes into the tensor) for every element.
template <class F>
static void each(const Case& c, F f) {
  for (const Piece& p : c.pieces) {
    if (p.tensor == kNoTensor) continue;
    for (int64_t i = 0; i < p.size[0] * p.size[1] * p.size[2] * p.size[3]; ++i) {
      int64_t rest = i, there = p.bucket_offset, here = p.tensor_offset;
      for (int d = 3; d >= 0; --d) {
        there += rest % p.size[d] * p.bucket_stride[d];
        here += rest % p.size[d] * p.tensor_stride[d];
        rest /= p.size[d];
      }
      f(p, there, here);
    }
  }
}

static void move_one(int64_t to_type, unsigned char* to, int64_t from_type,
                     const unsigned char* from) {
  const auto bytes = static_cast<size_t>(item_bytes(to_type));
  if (to_type == from_type) {
    std::memcpy(to, from, bytes);
  } else {
    const uint64_t bits = rounded(to_type, value(from_type, from));
    std::memcpy(to, &bits, bytes);
  }
}

static uint64_t plain_sum(const unsigned char* bytes, int64_t num_bytes) {
  uint64_t sum = 0;
  for (int64_t at = 0; at < num_bytes; at += kWord) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, static_cast<size_t>(least(kWord, num_bytes - at)));
    sum += word_value(word, static_cast<uint64_t>(at / kWord));
  }
  return sum;
}

// Parts in any order, some empty.
static void scattered(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  std::vector<int64_t> cuts{0, count};
  for (int64_t k = pick(5); k > 0; --k) cuts.push_back(pick(count + 1));
  std::sort(cuts.begin(), cuts.end());
  for (size_t k = cuts.size() - 1; k > 0; --k) {
    if (cuts[k - 1] < cuts[k]) body(cuts[k - 1], cuts[k]);
  }
}

// What the launcher and the kernel do.
static void on_device(const Job& job) {
  const int64_t blocks = 1 + pick(9);
  uint64_t sum = 0;
  if (job.hash_after && job.pack) {
    std::memset(reinterpret_cast<void*>(job.bucket), 0, static_cast<size_t>(job.num_bytes));
  }
  for (int64_t block = 0; block < blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
#define RLCORE_CASE(b, t, B, T)                                             \
  sum += job.pack ? copy_lane<true, B, T>(job, b, t, block, blocks, thread) \
                  : copy_lane<false, B, T>(job, b, t, block, blocks, thread);
      RLCORE_RESHARD_PAIRS(RLCORE_CASE)
#undef RLCORE_CASE
    }
  }
  if (job.hash_after) {
    sum = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      for (int thread = 0; thread < kThreads; ++thread) {
        sum += sum_lane(job.bucket, job.num_bytes, block, blocks, thread);
      }
    }
  }
  *job.sum = sum;
}

static void check(const Case& c, bool device) {
  const auto size = static_cast<size_t>(c.num_bytes);
  // A host's bucket may lie anywhere.
  const size_t shift = device ? 0 : static_cast<size_t>(pick(3));
  std::vector<Raw16> memory(size / 16 + 2);
  auto* const bucket = reinterpret_cast<unsigned char*>(memory.data()) + shift;
  std::memset(bucket, 0xaa, size);
  auto tensors = c.tensors;
  std::vector<uint64_t> addresses;
  for (auto& tensor : tensors) addresses.push_back(reinterpret_cast<uint64_t>(tensor.data()));
  uint64_t sum = 0;
  Job job{c.pieces.data(),
          static_cast<int64_t>(c.pieces.size()),
          c.num_tiles,
          addresses.data(),
          reinterpret_cast<uint64_t>(bucket),
          c.num_bytes,
          1,
          c.hash_after,
          pairs_of(c.pieces.data(), static_cast<int64_t>(c.pieces.size())),
          &sum};
  check(job, static_cast<int64_t>(tensors.size()));
  const auto run = [&] {
    if (device) {
      on_device(job);
    } else {
      copy(job, scattered);
    }
  };
  std::vector<unsigned char> want(size + 1, 0);
  each(c, [&](const Piece& p, int64_t there, int64_t here) {
    move_one(p.bucket_type, want.data() + there, p.tensor_type,
             c.tensors[static_cast<size_t>(p.tensor)].data() + here);
  });
  run();
  CHECK(std::memcmp(bucket, want.data(), size) == 0);
  CHECK(tensors == c.tensors);
  CHECK(sum == plain_sum(want.data(), c.num_bytes));

  for (auto& tensor : tensors) std::fill(tensor.begin(), tensor.end(), 0x55);
  auto back = tensors;
  each(c, [&](const Piece& p, int64_t there, int64_t here) {
    move_one(p.tensor_type, back[static_cast<size_t>(p.tensor)].data() + here, p.bucket_type,
             want.data() + there);
  });
  job.pack = 0;
  sum = 0;
  run();
  CHECK(tensors == back);
  CHECK(std::memcmp(bucket, want.data(), size) == 0);
  CHECK(sum == plain_sum(want.data(), c.num_bytes));
}

// A table with one wrong number is refused, or harmless: the sanitizers see what leaves the bucket.
// What leaves a tensor is not known to the table.
static bool check_damaged(Case c) {
  if (c.pieces.empty()) return false;
  constexpr int64_t kNumbers[] = {-1,
                                  0,
                                  1,
                                  2,
                                  3,
                                  8,
                                  16,
                                  20,
                                  4096,
                                  int64_t{1} << 40,
                                  std::numeric_limits<int64_t>::max(),
                                  std::numeric_limits<int64_t>::min()};
  Piece& piece = c.pieces[static_cast<size_t>(pick(static_cast<int64_t>(c.pieces.size())))];
  int64_t fields[kFields];
  std::memcpy(fields, &piece, sizeof(piece));
  const int64_t field = pick(kFields + 1);
  const int64_t number = kNumbers[pick(std::size(kNumbers))];
  (field < kFields ? fields[field] : c.num_tiles) = number;
  std::memcpy(&piece, fields, sizeof(piece));
  std::vector<uint64_t> addresses;
  for (auto& tensor : c.tensors) addresses.push_back(reinterpret_cast<uint64_t>(tensor.data()));
  std::vector<unsigned char> bucket(static_cast<size_t>(c.num_bytes));
  uint64_t sum = 0;
  const Job job{c.pieces.data(),
                static_cast<int64_t>(c.pieces.size()),
                c.num_tiles,
                addresses.data(),
                reinterpret_cast<uint64_t>(bucket.data()),
                c.num_bytes,
                1,
                c.hash_after,
                pairs_of(c.pieces.data(), static_cast<int64_t>(c.pieces.size())),
                &sum};
  try {
    check(job, static_cast<int64_t>(c.tensors.size()));
  } catch (const std::invalid_argument&) {
    return true;
  }
  for (const Piece& p : c.pieces) {
    if (p.tensor == kNoTensor) continue;
    auto end = static_cast<double>(p.tensor_offset);
    end += static_cast<double>(item_bytes(p.tensor_type));
    for (int d = 0; d < 4; ++d) {
      end += static_cast<double>(p.size[d] - 1) * static_cast<double>(p.tensor_stride[d]);
    }
    if (end > static_cast<double>(c.tensors[static_cast<size_t>(p.tensor)].size())) return false;
  }
  copy(job, scattered);
  return false;
}

// Every float16 and bfloat16 there is, and floats around every one of them.
static void check_casts() {
  for (uint32_t i = 0; i < 65536; i += 5) {
    const auto u = static_cast<uint16_t>(i);
    const float values[] = {widen(Float16{u}), widen(BFloat16{u})};
    for (const float x : values) {
      for (int step = -2; step <= 2; ++step) {
        const float y = float_of(bits_of(x) + static_cast<uint32_t>(step * 0x7ff));
        CHECK(narrow_float16(y).bits == rounded(kFloat16, y));
        CHECK(narrow_bfloat16(y).bits == rounded(kBFloat16, y));
        const float half = (x + float_of(bits_of(x) + 0x2000)) / 2;  // a tie
        CHECK(narrow_float16(half).bits == rounded(kFloat16, half));
      }
    }
  }
}

static void check_streams() {
  // Large enough that stores go past the cache.
  const int64_t bytes = (16 << 20) + 5;
  std::vector<unsigned char> from(static_cast<size_t>(bytes)), to(from.size() + 16, 1);
  for (auto& byte : from) byte = static_cast<unsigned char>(pick(256));
  const auto serial = [](int64_t n, int64_t, const auto& body) { body(0, n); };
  for (int64_t shift = 0; shift < 10; shift += 3) {
    Case c;
    add(c, {.size = {1, 1, 1, bytes},
            .bucket_stride = {0, 0, 0, 1},
            .tensor_stride = {0, 0, 0, 1},
            .bucket_offset = 0,
            .tensor_offset = 0,
            .tensor = 0,
            .bucket_type = kRaw1,
            .tensor_type = kRaw1,
            .tile_rows = 1,
            .tile_columns = 32 << 10,
            .hashed = 1,
            .pad = 0,
            .first_tile = 0});
    const auto address = reinterpret_cast<uint64_t>(from.data());
    uint64_t sum = 0;
    copy({c.pieces.data(), 1, c.num_tiles, &address, reinterpret_cast<uint64_t>(to.data() + shift),
          bytes, 1, 0, pairs_of(c.pieces.data(), 1), &sum},
         serial);
    CHECK(std::memcmp(to.data() + shift, from.data(), from.size()) == 0);
    CHECK(sum == plain_sum(from.data(), bytes));
    CHECK(sum == sum_of(from.data(), bytes, scattered));
  }
}

// Long rows of floats made narrow, past the cache and not, every kind of float among them.
static void check_narrow() {
  const auto serial = [](int64_t n, int64_t, const auto& body) { body(0, n); };
  for (const int64_t type : {int64_t{kBFloat16}, int64_t{kFloat16}}) {
    for (const int64_t count : {int64_t{9 << 20} + 3, int64_t{4096}, int64_t{31}}) {
      std::vector<uint32_t> from(static_cast<size_t>(count));
      for (auto& bits : from) {
        bits = static_cast<uint32_t>(pick(1 << 16)) << 16 | static_cast<uint32_t>(pick(1 << 16));
        if (pick(4) == 0) bits = bits_of(static_cast<float>(pick(1 << 20)) * 0x1p-18f);
      }
      const int64_t pad = -count * 2 & 7;
      std::vector<Raw16> memory(static_cast<size_t>(count / 8 + 4));
      const int64_t shift = 8 * pick(4);
      auto* const to = reinterpret_cast<unsigned char*>(memory.data()) + shift;
      Case c;
      add(c, {.size = {1, 1, 1, count},
              .bucket_stride = {0, 0, 0, 2},
              .tensor_stride = {0, 0, 0, 4},
              .bucket_offset = 0,
              .tensor_offset = 0,
              .tensor = 0,
              .bucket_type = type,
              .tensor_type = kFloat32,
              .tile_rows = 1,
              .tile_columns = 16 << 10,
              .hashed = 1,
              .pad = pad,
              .first_tile = 0});
      const auto address = reinterpret_cast<uint64_t>(from.data());
      const int64_t bytes = count * 2 + pad;
      uint64_t sum = 0;
      std::memset(to, 0xff, static_cast<size_t>(bytes));
      const int64_t pairs = pairs_of(c.pieces.data(), 1);
      copy({c.pieces.data(), 1, c.num_tiles, &address, reinterpret_cast<uint64_t>(to), bytes, 1, 0,
            pairs, &sum},
           serial);
      for (size_t i = 0; i < from.size(); ++i) {
        uint16_t got = 0;
        std::memcpy(&got, to + 2 * i, 2);
        const float x = float_of(from[i]);
        CHECK(got == (type == kBFloat16 ? narrow_bfloat16(x).bits : narrow_float16(x).bits));
      }
      for (int64_t i = count * 2; i < bytes; ++i) CHECK(to[i] == 0);
      CHECK(sum == plain_sum(to, bytes));
    }
  }
}

int main(int argc, char** argv) {
  state = argc > 1 ? std::stoull(argv[1]) : 1;
  check_casts();
  check_streams();
  check_narrow();
  for (int round = 0; round < 300; ++round) {
    const Case c = random_case(round % 2);
    check(c, false);
    check(c, true);
  }
  int64_t caught = 0;
  for (int round = 0; round < 1000; ++round) caught += check_damaged(random_case(round % 2));
  CHECK(caught > 300);
  return 0;
}
