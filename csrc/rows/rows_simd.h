// Rows in vectors of kLanes floats. rows_host.cpp includes this once per instruction set, after
// common/simd.h.

inline void norm(const Rows& x, const float* weight, float eps, int64_t begin, int64_t end,
                 float* out, float* scales) {
  const int64_t size = x.size;
  for (int64_t row = begin; row < end; ++row) {
    const float* from = x.at(row);
    float* to = out + row * size;
    const float scale = 1 / std::sqrt(dot(from, from, size) / static_cast<float>(size) + eps);
    scales[row] = scale;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      write(to + i, read<Floats>(from + i) * scale * read<Floats>(weight + i));
    }
    for (; i < size; ++i) to[i] = from[i] * scale * weight[i];
  }
}

inline void norm_grad(const float* grad, const Rows& x, const float* weight, const float* scales,
                      int64_t begin, int64_t end, float* dx, float* dweight) {
  const int64_t size = x.size;
  std::fill_n(dweight, size, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    const float *from = x.at(row), *g = grad + row * size, scale = scales[row];
    float* to = dx + row * size;
    Floats sums = {};
    float sum = 0;
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      const Floats product = read<Floats>(g + i) * (read<Floats>(from + i) * scale);
      write(dweight + i, read<Floats>(dweight + i) + product);
      sums += product * read<Floats>(weight + i);
    }
    for (; i < size; ++i) {
      const float product = g[i] * (from[i] * scale);
      dweight[i] += product;
      sum += product * weight[i];
    }
    const float mean = (sum + sum_of(sums)) / static_cast<float>(size);
    for (i = 0; i + kLanes <= size; i += kLanes) {
      const Floats upstream = read<Floats>(g + i) * read<Floats>(weight + i);
      write(to + i, (upstream - read<Floats>(from + i) * (scale * mean)) * scale);
    }
    for (; i < size; ++i) to[i] = (g[i] * weight[i] - from[i] * (scale * mean)) * scale;
  }
}

inline void turn(const Rows& x, const float* cosines, const float* sines, float sign, int64_t begin,
                 int64_t end, float* out) {
  const int64_t half = x.size / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float *a = x.at(row), *b = a + half;
    const float *c = cosines + row / x.inner * half, *s = sines + row / x.inner * half;
    float *first = out + row * x.size, *second = first + half;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const Floats va = read<Floats>(a + i), vb = read<Floats>(b + i);
      const Floats vc = read<Floats>(c + i), vs = read<Floats>(s + i) * sign;
      write(first + i, va * vc - vb * vs);
      write(second + i, vb * vc + va * vs);
    }
    for (; i < half; ++i) {
      first[i] = a[i] * c[i] - b[i] * (s[i] * sign);
      second[i] = b[i] * c[i] + a[i] * (s[i] * sign);
    }
  }
}

// Runs f on vectors of a row; the last one is shorter, so it goes through copies.
template <int N, class F>
RL_INLINE void each_vector(int64_t size, const float* const (&from)[N], float* const (&to)[2],
                           const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Floats in[N], made[2];
    for (int n = 0; n < N; ++n) in[n] = read<Floats>(from[n] + i);
    f(in, made);
    for (int n = 0; n < 2; ++n) {
      if (to[n]) write(to[n] + i, made[n]);
    }
  }
  if (i == size) return;
  Floats in[N] = {}, made[2];
  for (int n = 0; n < N; ++n) {
    for (int64_t t = i; t < size; ++t) in[n][t - i] = from[n][t];
  }
  f(in, made);
  for (int n = 0; n < 2; ++n) {
    for (int64_t t = i; to[n] && t < size; ++t) to[n][t] = made[n][t - i];
  }
}

inline void swiglu(const float* x, int64_t size, int64_t begin, int64_t end, float* out) {
  for (int64_t row = begin; row < end; ++row) {
    const float* gate = x + row * 2 * size;
    each_vector<2>(size, {gate, gate + size}, {out + row * size, nullptr},
                   [](const Floats(&in)[2], Floats(&made)[2]) {
                     made[0] = in[0] / (exp(-in[0]) + 1.0f) * in[1];
                   });
  }
}

inline void swiglu_grad(const float* grad, const float* x, int64_t size, int64_t begin, int64_t end,
                        float* dx) {
  for (int64_t row = begin; row < end; ++row) {
    const float* gate = x + row * 2 * size;
    float* dgate = dx + row * 2 * size;
    each_vector<3>(size, {gate, gate + size, grad + row * size}, {dgate, dgate + size},
                   [](const Floats(&in)[3], Floats(&made)[2]) {
                     const Floats share = 1.0f / (exp(-in[0]) + 1.0f);
                     made[0] = in[2] * in[1] * share * (1.0f + in[0] * (1.0f - share));
                     made[1] = in[2] * in[0] * share;
                   });
  }
}
