// Copies on the host. A tile goes row by row; what cannot be moved as it is (casts, strides) is
// made in a small buffer first, so that every byte of the bucket is written once, past the cache
// where there is much of it, and summed on the way.
#include <algorithm>
#include <atomic>

#include "common/check.h"
#include "reshard/copy.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define RL_X86 1
#include <immintrin.h>
#define RL_INLINE __attribute__((always_inline)) inline
#else
#define RL_INLINE inline
#endif

namespace rlcore::reshard {
namespace {

constexpr int64_t kRun = 2048;  // elements made at a time in a long row
// From here on stores go past the cache: what is written is out of it before it is read.
constexpr int64_t kStreamBytes = 16 << 20;
constexpr int64_t kGrain = 8;  // tiles for which a thread is worth waking

using Bytes = unsigned char*;
using ConstBytes = const unsigned char*;

template <class T>
RL_INLINE T get(ConstBytes at) {
  T x;
  std::memcpy(&x, at, sizeof(T));
  return x;
}

template <class T>
RL_INLINE void put(Bytes at, T x) {
  std::memcpy(at, &x, sizeof(T));
}

#ifdef RL_X86
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
}

#define RL_AVX2 __attribute__((target("avx2,f16c")))

__attribute__((target("avx2"), always_inline)) inline __m256i words_value(__m256i word,
                                                                          __m256i key) {
  __m256i y = _mm256_xor_si256(word, key);
  y = _mm256_xor_si256(y, _mm256_srli_epi64(y, 29));
  const __m256i factor = _mm256_or_si256(_mm256_srli_epi64(key, 32), _mm256_set1_epi64x(1));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(y, 32), factor);
  y = _mm256_add_epi64(_mm256_mul_epu32(y, factor), _mm256_slli_epi64(high, 32));
  return _mm256_xor_si256(y, _mm256_srli_epi64(y, 32));
}

// Whole runs of 64 bytes of `move`; returns the bytes done and adds to `sum`.
template <bool kWrite, bool kSum, bool kStream>
RL_AVX2 int64_t move_wide(Bytes to, ConstBytes from, int64_t bytes, uint64_t position,
                          uint64_t& sum) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const auto golden = [](uint64_t n) { return static_cast<int64_t>(n * kGolden); };
  __m256i key = _mm256_setr_epi64x(golden(position + 1), golden(position + 2), golden(position + 3),
                                   golden(position + 4));
  const __m256i step = _mm256_set1_epi64x(golden(4));
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    for (int half = 0; half < 2; ++half) {
      const int64_t i = at + 32 * half;
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      if constexpr (kWrite && kStream) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), x);
      } else if constexpr (kWrite) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), x);
      }
      if constexpr (kSum) {
        sums[half] = _mm256_add_epi64(sums[half], words_value(x, key));
        key = _mm256_add_epi64(key, step);
      }
    }
  }
  if constexpr (kSum) {
    alignas(32) uint64_t parts[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(parts), _mm256_add_epi64(sums[0], sums[1]));
    sum += parts[0] + parts[1] + parts[2] + parts[3];
  }
  return at;
}
#endif

// Copies bytes from `from` to `to`, without kWrite nothing, and with kSum returns the sum of the
// words' values, the first being number `position`; the last may be short.
template <bool kWrite, bool kSum>
uint64_t move(Bytes to, ConstBytes from, int64_t bytes, uint64_t position, bool stream) {
  uint64_t sum = 0;
  int64_t at = 0;
  const auto one = [&] {
    const auto word = get<uint64_t>(from + at);
    if constexpr (kWrite) put(to + at, word);
    if constexpr (kSum) sum += word_value(word, position + static_cast<uint64_t>(at / kWord));
    at += kWord;
  };
#ifdef RL_X86
  if (bytes >= 128 && has_avx2()) {
    const auto address = reinterpret_cast<uint64_t>(to);
    stream = kWrite && stream && address % kWord == 0;
    if (stream) {
      while ((address + static_cast<uint64_t>(at)) % 32) one();
    }
    const uint64_t first = position + static_cast<uint64_t>(at / kWord);
    at += stream ? move_wide<kWrite, kSum, true>(to + at, from + at, bytes - at, first, sum)
                 : move_wide<kWrite, kSum, false>(to + at, from + at, bytes - at, first, sum);
  }
#endif
  while (at + kWord <= bytes) one();
  if (at < bytes) {
    uint64_t word = 0;
    std::memcpy(&word, from + at, static_cast<size_t>(bytes - at));
    if constexpr (kWrite) std::memcpy(to + at, &word, static_cast<size_t>(bytes - at));
    if constexpr (kSum) sum += word_value(word, position + static_cast<uint64_t>(at / kWord));
  }
  return sum;
}

#ifdef RL_X86
// Sixteen floats as the halves of theirs that `narrow_bfloat16` and `narrow_float16` make.
template <class B>
__attribute__((target("avx2,f16c"), always_inline)) inline __m256i narrow16(ConstBytes from) {
  __m256i half[2];
  for (int k = 0; k < 2; ++k) {
    const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(from) + 8 * k);
    const __m256 odd = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    if constexpr (std::is_same_v<B, BFloat16>) {
      const __m256i u = _mm256_castps_si256(x);
      const __m256i even = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
      const __m256i up = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), even);
      const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
      const __m256 y = _mm256_blendv_ps(_mm256_castsi256_ps(up), nan, odd);
      half[k] = _mm256_srli_epi32(_mm256_castps_si256(y), 16);
    } else {
      const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
      const __m128i y = _mm256_cvtps_ph(_mm256_blendv_ps(x, nan, odd),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      half[k] = _mm256_castsi128_si256(y);
    }
  }
  if constexpr (std::is_same_v<B, Float16>) {
    return _mm256_inserti128_si256(half[0], _mm256_castsi256_si128(half[1]), 1);
  }
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(half[0], half[1]), 0xd8);
}

// Casts `count` floats, a multiple of 32, and returns the sum of the words' values, the first being
// number `position`. One pass: the sum's arithmetic runs while memory is waited for.
template <class B, bool kStream>
RL_AVX2 uint64_t narrow_move_wide(Bytes to, ConstBytes from, int64_t count, uint64_t position) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  const auto golden = [](uint64_t n) { return static_cast<int64_t>(n * kGolden); };
  __m256i key = _mm256_setr_epi64x(golden(position + 1), golden(position + 2), golden(position + 3),
                                   golden(position + 4));
  const __m256i step = _mm256_set1_epi64x(golden(4));
  __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < count; i += 32) {
    for (int half = 0; half < 2; ++half) {
      const int64_t j = i + 16 * half;
      const __m256i x = narrow16<B>(from + 4 * j);
      auto* const there = reinterpret_cast<__m256i*>(to + 2 * j);
      if constexpr (kStream) {
        _mm256_stream_si256(there, x);
      } else {
        _mm256_storeu_si256(there, x);
      }
      sums[half] = _mm256_add_epi64(sums[half], words_value(x, key));
      key = _mm256_add_epi64(key, step);
    }
  }
  alignas(32) uint64_t parts[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), _mm256_add_epi64(sums[0], sums[1]));
  return parts[0] + parts[1] + parts[2] + parts[3];
}

RL_AVX2 int64_t narrow_wide(Float16* to, ConstBytes from, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(from + 4 * i));
    const __m256i odd = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m128i nan =
        _mm_packs_epi32(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
    const __m128i half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m128i y = _mm_blendv_epi8(half, _mm_set1_epi16(0x7e00), nan);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), y);
  }
  return i;
}
#endif

#ifdef RL_X86
RL_AVX2 int64_t widen_wide(float* to, ConstBytes from, int64_t count) {
  int64_t i = 0;
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  for (; i + 8 <= count; i += 8) {
    const __m256 x =
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i)));
    _mm256_storeu_ps(to + i, _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  return i;
}

// to[c * rows + r] = from[r * columns + c] for elements of 2 and 4 bytes: blocks of 8 x 8 and 4
// x 4.
void turn_block(uint16_t* to, const uint16_t* from, int64_t rows, int64_t columns) {
  __m128i a[8], b[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * columns));
  }
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
    a[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
  }
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
  }
  for (int i = 0; i < 8; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * rows), b[i]);
}

void turn_block(uint32_t* to, const uint32_t* from, int64_t rows, int64_t columns) {
  __m128i a[4], b[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * columns));
  }
  for (int i = 0; i < 2; ++i) {
    b[2 * i] = _mm_unpacklo_epi32(a[i], a[i + 2]);
    b[2 * i + 1] = _mm_unpackhi_epi32(a[i], a[i + 2]);
  }
  for (int i = 0; i < 2; ++i) {
    a[2 * i] = _mm_unpacklo_epi32(b[i], b[i + 2]);
    a[2 * i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
  }
  for (int i = 0; i < 4; ++i) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * rows), a[i]);
}
#endif

// to[c * rows + r] = from[r * columns + c].
template <class T>
void turn(T* __restrict to, const T* __restrict from, int64_t rows, int64_t columns) {
  int64_t r = 0;
#ifdef RL_X86
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  if constexpr (sizeof(T) == sizeof(Bits)) {
    constexpr int64_t kSide = 16 / sizeof(T);
    for (; r + kSide <= rows; r += kSide) {
      int64_t c = 0;
      for (; c + kSide <= columns; c += kSide) {
        turn_block(reinterpret_cast<Bits*>(to) + c * rows + r,
                   reinterpret_cast<const Bits*>(from) + r * columns + c, rows, columns);
      }
      for (; c < columns; ++c) {
        for (int64_t i = r; i < r + kSide; ++i) to[c * rows + i] = from[i * columns + c];
      }
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
}

// `count` neighbours, cast.
template <class To, class From>
RL_INLINE void cast(To* __restrict to, ConstBytes from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    to[i] = convert<To>(get<From>(from + i * static_cast<int64_t>(sizeof(From))));
  }
}

#ifdef RL_X86
// The same text, for wider vectors.
template <class To, class From>
RL_AVX2 void cast_wide(To* __restrict to, ConstBytes from, int64_t count) {
  int64_t done = 0;
  if constexpr (std::is_same_v<To, Float16> && std::is_same_v<From, float>) {
    done = narrow_wide(to, from, count);
  } else if constexpr (std::is_same_v<To, float> && std::is_same_v<From, Float16>) {
    done = widen_wide(to, from, count);
  }
  cast<To, From>(to + done, from + done * static_cast<int64_t>(sizeof(From)), count - done);
}
#endif

// `count` elements, `step` bytes apart, cast into a row.
template <class To, class From>
void gather(To* __restrict to, ConstBytes from, int64_t step, int64_t count) {
  if (step != static_cast<int64_t>(sizeof(From))) {
    for (int64_t i = 0; i < count; ++i) to[i] = convert<To>(get<From>(from + i * step));
    return;
  }
#ifdef RL_X86
  if (has_avx2()) return cast_wide<To, From>(to, from, count);
#endif
  cast<To, From>(to, from, count);
}

template <class T>
void scatter(Bytes to, int64_t step, const T* __restrict from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) put(to + i * step, from[i]);
}

// rows x columns elements at `from` become columns x rows in `to`, cast on the way.
template <class To, class From>
void transpose(To* __restrict to, To* __restrict straight, ConstBytes from, int64_t from_row,
               int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r) {
    gather<To, From>(straight + r * columns, from + r * from_row,
                     static_cast<int64_t>(sizeof(From)), columns);
  }
  turn(to, straight, rows, columns);
}

// Asks for a row that is read next and that no hardware foresees, being far from this one.
void foresee(ConstBytes row, int64_t bytes) {
#ifdef __GNUC__
  for (int64_t at = 0; at < std::min<int64_t>(bytes, 4096); at += 64) __builtin_prefetch(row + at);
#endif
}

struct Place {
  Bytes bucket;
  Bytes tensor;
  Bytes stage;  // twice kStageBytes
  bool stream;
};

// A run of a bucket's row, made at `from`, into the bucket. `pad` as in the piece.
template <class B>
uint64_t write_run(const Place& place, const Piece& piece, const Tile& tile, int64_t row,
                   int64_t first, const void* from, int64_t count, int64_t pad) {
  const auto source = static_cast<ConstBytes>(from);
  const int64_t bytes = count * static_cast<int64_t>(sizeof(B));
  const int64_t offset = tile.bucket + row * tile.bucket_row + first * tile.bucket_column;
  Bytes to = place.bucket + offset;
  if (piece.hashed) {
    std::memset(to + bytes, 0, static_cast<size_t>(pad));
    return move<true, true>(to, source, bytes, static_cast<uint64_t>(offset / kWord), place.stream);
  }
  if (tile.bucket_column == static_cast<int64_t>(sizeof(B))) {
    std::memcpy(to, source, static_cast<size_t>(bytes));
  } else {
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(to + i * tile.bucket_column, source + i * static_cast<int64_t>(sizeof(B)),
                  sizeof(B));
    }
  }
  return 0;
}

template <class B, class T>
bool fits(const Tile& tile) {
  constexpr auto kItem = static_cast<int64_t>(std::max(sizeof(B), sizeof(T)));
  return tile.rows * tile.columns * kItem <= kStageBytes;
}

template <class B, class T>
uint64_t pack_tile(const Place& place, const Piece& piece, const Tile& tile) {
  auto* const stage = reinterpret_cast<B*>(place.stage);
  const bool across = tile.tensor_column == static_cast<int64_t>(sizeof(T));
  const bool down = tile.tensor_row == static_cast<int64_t>(sizeof(T));
  uint64_t sum = 0;
  if (!across && down && fits<B, T>(tile)) {
    auto* const straight = reinterpret_cast<B*>(place.stage + kStageBytes);
    transpose<B, T>(stage, straight, place.tensor, tile.tensor_column, tile.columns, tile.rows);
    for (int64_t r = 0; r < tile.rows; ++r) {
      sum +=
          write_run<B>(place, piece, tile, r, 0, stage + r * tile.columns, tile.columns, tile.pad);
    }
    return sum;
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    ConstBytes row = place.tensor + r * tile.tensor_row;
    if (across && r + 1 < tile.rows) {
      foresee(row + tile.tensor_row, tile.columns * static_cast<int64_t>(sizeof(T)));
    }
    if (across && std::is_same_v<B, T>) {
      sum += write_run<B>(place, piece, tile, r, 0, row, tile.columns, tile.pad);
      continue;
    }
    int64_t done = 0;
#ifdef RL_X86
    if constexpr (std::is_same_v<T, float> && sizeof(B) == 2) {
      if (across && piece.hashed && has_avx2()) {
        done = tile.columns / 32 * 32;
        const int64_t offset = tile.bucket + r * tile.bucket_row;
        const auto position = static_cast<uint64_t>(offset / kWord);
        Bytes to = place.bucket + offset;
        sum += place.stream && reinterpret_cast<uint64_t>(to) % 32 == 0
                   ? narrow_move_wide<B, true>(to, row, done, position)
                   : narrow_move_wide<B, false>(to, row, done, position);
        if (done == tile.columns) std::memset(to + 2 * done, 0, static_cast<size_t>(tile.pad));
      }
    }
#endif
    for (int64_t c = done; c < tile.columns; c += kRun) {
      const int64_t count = std::min(kRun, tile.columns - c);
      gather<B, T>(stage, row + c * tile.tensor_column, tile.tensor_column, count);
      const int64_t pad = c + count == tile.columns ? tile.pad : 0;
      sum += write_run<B>(place, piece, tile, r, c, stage, count, pad);
    }
  }
  return sum;
}

// The sum of a run of a bucket's row that is there.
template <class B>
uint64_t sum_run(const Place& place, const Tile& tile, int64_t row) {
  const int64_t offset = tile.bucket + row * tile.bucket_row;
  const int64_t bytes = tile.columns * static_cast<int64_t>(sizeof(B)) + tile.pad;
  return move<false, true>(nullptr, place.bucket + offset, bytes,
                           static_cast<uint64_t>(offset / kWord), false);
}

template <class B, class T>
uint64_t unpack_tile(const Place& place, const Piece& piece, const Tile& tile) {
  constexpr auto kItem = static_cast<int64_t>(sizeof(T));
  auto* const stage = reinterpret_cast<T*>(place.stage);
  const bool across = tile.tensor_column == kItem, down = tile.tensor_row == kItem;
  const bool straight = tile.bucket_column == static_cast<int64_t>(sizeof(B));
  ConstBytes first = place.bucket + tile.bucket;
  uint64_t sum = 0;
  if (!across && down && straight && fits<B, T>(tile)) {
    if (piece.hashed) {
      for (int64_t r = 0; r < tile.rows; ++r) sum += sum_run<B>(place, tile, r);
    }
    auto* const other = reinterpret_cast<T*>(place.stage + kStageBytes);
    transpose<T, B>(stage, other, first, tile.bucket_row, tile.rows, tile.columns);
    for (int64_t c = 0; c < tile.columns; ++c) {
      move<true, false>(place.tensor + c * tile.tensor_column,
                        reinterpret_cast<ConstBytes>(stage + c * tile.rows), tile.rows * kItem, 0,
                        place.stream);
    }
    return sum;
  }
  for (int64_t r = 0; r < tile.rows; ++r) {
    ConstBytes from = first + r * tile.bucket_row;
    Bytes to = place.tensor + r * tile.tensor_row;
    if (straight && r + 1 < tile.rows) {
      foresee(from + tile.bucket_row, tile.columns * static_cast<int64_t>(sizeof(B)));
    }
    if (across && straight && std::is_same_v<B, T> && tile.pad == 0) {
      const int64_t offset = tile.bucket + r * tile.bucket_row;
      const auto position = static_cast<uint64_t>(offset / kWord);
      const int64_t bytes = tile.columns * kItem;
      sum += piece.hashed ? move<true, true>(to, from, bytes, position, place.stream)
                          : move<true, false>(to, from, bytes, 0, place.stream);
      continue;
    }
    if (piece.hashed) sum += sum_run<B>(place, tile, r);
    for (int64_t c = 0; c < tile.columns; c += kRun) {
      const int64_t count = std::min(kRun, tile.columns - c);
      gather<T, B>(stage, from + c * tile.bucket_column, tile.bucket_column, count);
      if (across) {
        move<true, false>(to + c * kItem, reinterpret_cast<ConstBytes>(stage), count * kItem, 0,
                          place.stream);
      } else {
        scatter(to + c * tile.tensor_column, tile.tensor_column, stage, count);
      }
    }
  }
  return sum;
}

uint64_t gap(const Job& job, const Tile& tile) {
  Bytes at = reinterpret_cast<Bytes>(job.bucket) + tile.bucket;
  if (job.pack) std::memset(at, 0, static_cast<size_t>(tile.columns));
  const auto position = static_cast<uint64_t>(tile.bucket / kWord);
  return move<false, true>(nullptr, at, tile.columns, position, false);
}

template <class B, class T>
uint64_t run_tile(const Job& job, const Place& place, const Piece& piece, const Tile& tile) {
  return job.pack ? pack_tile<B, T>(place, piece, tile) : unpack_tile<B, T>(place, piece, tile);
}

// Tiles [begin, end), of one thread.
uint64_t run(const Job& job, int64_t begin, int64_t end) {
  alignas(64) unsigned char stage[2 * kStageBytes];
  uint64_t sum = 0;
  int64_t at = find_piece(job.pieces, job.num_pieces, begin);
  Place place{reinterpret_cast<Bytes>(job.bucket), nullptr, stage, job.num_bytes >= kStreamBytes};
  for (int64_t t = begin; t < end; ++t) {
    while (at + 1 < job.num_pieces && job.pieces[at + 1].first_tile <= t) ++at;
    const Piece& piece = job.pieces[at];
    const Tile tile = cut(piece, t);
    if (piece.tensor == kNoTensor) {
      sum += gap(job, tile);
      continue;
    }
    place.tensor = reinterpret_cast<Bytes>(job.tensors[piece.tensor]) + tile.tensor;
    switch (piece.bucket_type * 16 + piece.tensor_type) {
#define RLCORE_CASE(b, t, B, T)                     \
  case b * 16 + t:                                  \
    sum += run_tile<B, T>(job, place, piece, tile); \
    break;
      RLCORE_RESHARD_PAIRS(RLCORE_CASE)
#undef RLCORE_CASE
      default:
        break;  // `check` has looked
    }
  }
#ifdef RL_X86
  _mm_sfence();  // what went past the cache is there for other threads
#endif
  return sum;
}

bool known(int64_t bucket_type, int64_t tensor_type) {
  if (bucket_type < 0 || bucket_type > kFloat16 || tensor_type < 0 || tensor_type > kFloat16) {
    return false;
  }
  switch (bucket_type * 16 + tensor_type) {
#define RLCORE_CASE(b, t, B, T) case b * 16 + t:
    RLCORE_RESHARD_PAIRS(RLCORE_CASE)
#undef RLCORE_CASE
    return true;
    default:
      return false;
  }
}

}  // namespace

uint64_t sum_of(const void* bytes, int64_t num_bytes, const ParallelFor& parallel_for) {
  constexpr int64_t kPart = 32 << 10;
  std::atomic<uint64_t> sum = 0;
  parallel_for(ceil_div(num_bytes, kPart), kGrain, [&](int64_t begin, int64_t end) {
    const auto* const from = static_cast<ConstBytes>(bytes) + begin * kPart;
    const int64_t count = std::min(end * kPart, num_bytes) - begin * kPart;
    const auto position = static_cast<uint64_t>(begin * kPart / kWord);
    sum += move<false, true>(nullptr, from, count, position, false);
  });
  return sum;
}

void check(const Job& job, int64_t num_tensors) {
  constexpr int64_t kMost = int64_t{1} << 48;  // of any number: products of two fit 128 bits
  __extension__ using Long = __int128;
  RL_CHECK(job.num_tiles >= 0 && job.num_tiles <= kMost, "num_tiles ", job.num_tiles,
           ": from 0 to 2^48");
  Long tiles = 0;
  for (int64_t i = 0; i < job.num_pieces; ++i) {
    const Piece& p = job.pieces[i];
    const bool hole = p.tensor == kNoTensor;
    RL_CHECK(hole || (p.tensor >= 0 && p.tensor < num_tensors), "piece ", i, ": tensor ", p.tensor,
             " of ", num_tensors);
    RL_CHECK(hole ? p.bucket_type == kRaw1 : known(p.bucket_type, p.tensor_type), "piece ", i,
             ": no copy between dtypes ", p.bucket_type, " and ", p.tensor_type);
    const int64_t item = item_bytes(p.bucket_type), theirs = item_bytes(hole ? 0 : p.tensor_type);
    RL_CHECK(p.bucket_offset >= 0 && p.bucket_offset % item == 0, "piece ", i, ": bucket_offset ",
             p.bucket_offset, ", a multiple of ", item, " is needed");
    RL_CHECK(p.tensor_offset >= 0 && p.tensor_offset % theirs == 0, "piece ", i, ": tensor_offset ",
             p.tensor_offset, ", a multiple of ", theirs, " is needed");
    RL_CHECK(
        p.tile_rows >= 1 && p.tile_rows <= kMost && p.tile_columns >= 1 && p.tile_columns <= kMost,
        "piece ", i, ": tiles of ", p.tile_rows, " x ", p.tile_columns, ", from 1 to 2^48");
    Long end = static_cast<Long>(p.bucket_offset) + item;
    bool words = p.bucket_offset % kWord == 0;
    for (int d = 0; d < 4; ++d) {
      const int64_t step = p.bucket_stride[d], other = p.tensor_stride[d];
      RL_CHECK(p.size[d] >= 1 && p.size[d] <= kMost && (!hole || d == 3 || p.size[d] == 1),
               "piece ", i, ": size ", p.size[d], " of dimension ", d);
      RL_CHECK(step >= 0 && step <= kMost && step % item == 0 && other >= 0 && other <= kMost &&
                   other % theirs == 0,
               "piece ", i, ": strides ", step, " and ", other, " of dimension ", d);
      end += static_cast<Long>(p.size[d] - 1) * step;
      words = words && (p.size[d] == 1 || (d == 3 ? step == item : step % kWord == 0));
    }
    words = words && (p.tile_columns >= p.size[3] || p.tile_columns * item % kWord == 0);
    RL_CHECK(p.pad >= 0 && p.pad < kWord && end + p.pad <= job.num_bytes, "piece ", i,
             ": ends outside of the bucket of ", job.num_bytes, " bytes");
    RL_CHECK(words || !(hole || p.hashed), "piece ", i,
             ": hashed, and its rows start within words");
    RL_CHECK(p.first_tile == tiles, "piece ", i, ": first_tile ", p.first_tile, ", ",
             static_cast<int64_t>(tiles), " come before it");
    for (Long part = 1; const int64_t n : {p.size[0], p.size[1], ceil_div(p.size[2], p.tile_rows),
                                           ceil_div(p.size[3], p.tile_columns)}) {
      part *= n;
      RL_CHECK(part <= job.num_tiles, "num_tiles ", job.num_tiles, ": piece ", i, " has more");
    }
    tiles += num_tiles(p);
  }
  RL_CHECK(tiles == job.num_tiles, "num_tiles ", job.num_tiles, ": the pieces have ",
           static_cast<int64_t>(tiles));
  const int64_t pairs = pairs_of(job.pieces, job.num_pieces);
  RL_CHECK(job.pairs == pairs, "pairs ", job.pairs, ": the pieces have ", pairs);
}

void copy(const Job& job, const ParallelFor& parallel_for) {
  if (job.hash_after && job.pack) {
    std::memset(reinterpret_cast<void*>(job.bucket), 0, static_cast<size_t>(job.num_bytes));
  }
  std::atomic<uint64_t> sum = 0;
  parallel_for(job.num_tiles, kGrain,
               [&](int64_t begin, int64_t end) { sum += run(job, begin, end); });
  *job.sum = job.hash_after
                 ? sum_of(reinterpret_cast<const void*>(job.bucket), job.num_bytes, parallel_for)
                 : sum.load();
}

}  // namespace rlcore::reshard
