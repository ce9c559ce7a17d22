// Matrix products in vectors of kLanes floats. Included once per instruction set, after
// common/simd.h.

// A tile of kRows x kVectors accumulators fits into the registers, with a row of weights.
#if RL_LANES == 16
inline constexpr int kRows = 6, kVectors = 4;
#elif RL_LANES == 8
inline constexpr int kRows = 4, kVectors = 2;
#else
inline constexpr int kRows = 4, kVectors = 2;
#endif
// Rows of weights whose part of a tile stays in L1 for all rows of x.
inline constexpr int64_t kPanel = 128;

// out += x w for R rows and V vectors of columns.
template <int R, int V>
RL_INLINE void tile(const Left& x, const float* w, int64_t width, int64_t depth, float* out) {
  Floats sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sums[r][v] = read<Floats>(out + r * width + v * kLanes);
  }
  const float* at = x.data;
  for (int64_t k = 0; k < depth; ++k, at += x.step, w += width) {
    Floats right[V];
    for (int v = 0; v < V; ++v) right[v] = read<Floats>(w + v * kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats left = floats(at[r * x.stride]);
      for (int v = 0; v < V; ++v) sums[r][v] = add_product(left, right[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) write(out + r * width + v * kLanes, sums[r][v]);
  }
}

template <int V, int R = kRows>
inline void tiles(Left x, const float* w, int64_t width, int64_t depth, float* out) {
  for (; x.rows >= R; x.rows -= R, x.data += R * x.stride, out += R * width) {
    tile<R, V>(x, w, width, depth, out);
  }
  if constexpr (R > 1) {
    if (x.rows) tiles<V, R - 1>(x, w, width, depth, out);
  }
}

// The last columns, fewer than a vector, in copies that are filled up to one.
inline void last_columns(const Left& x, const float* w, int64_t width, int64_t depth, int64_t count,
                         float* out) {
  std::vector<float> right(static_cast<size_t>(depth * kLanes));
  std::vector<float> sums(static_cast<size_t>(x.rows * kLanes));
  for (int64_t k = 0; k < depth; ++k) std::copy_n(w + k * width, count, right.data() + k * kLanes);
  for (int64_t r = 0; r < x.rows; ++r)
    std::copy_n(out + r * width, count, sums.data() + r * kLanes);
  tiles<1>(x, right.data(), kLanes, depth, sums.data());
  for (int64_t r = 0; r < x.rows; ++r)
    std::copy_n(sums.data() + r * kLanes, count, out + r * width);
}

// out [rows, width] += x [rows, depth] w [depth, width]; the rows of w and of out are `stride`
// apart.
inline void multiply(const Left& x, const float* w, int64_t depth, int64_t width, int64_t stride,
                     float* out) {
  for (int64_t k = 0; k < depth; k += kPanel) {
    const int64_t count = depth - k < kPanel ? depth - k : kPanel;
    const Left part{x.data + k * x.step, x.rows, x.stride, x.step};
    const float* panel = w + k * stride;
    int64_t column = 0;
    for (; column + kVectors * kLanes <= width; column += kVectors * kLanes) {
      tiles<kVectors>(part, panel + column, stride, count, out + column);
    }
    for (; kVectors > 2 && column + 2 * kLanes <= width; column += 2 * kLanes) {
      tiles<2>(part, panel + column, stride, count, out + column);
    }
    for (; column + kLanes <= width; column += kLanes) {
      tiles<1>(part, panel + column, stride, count, out + column);
    }
    if (column < width)
      last_columns(part, panel + column, stride, count, width - column, out + column);
  }
}
