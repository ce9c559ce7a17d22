// One row of logits on the CPU: statistics and gradient, in vectors of kLanes floats.
//
// row_host.cpp includes this once per instruction set, inside a namespace and a region of that
// target, so there is no include guard and nothing is included from here. GCC's and Clang's vector
// extension keeps the text free of intrinsics: kLanes is the register's width on that target.
//
// Rounding: d = x - shift is one fma (two where temperature is not 1), relative error of e^d is
// 2^-24 |d| + 2 ulp. Sums: lanes of a block in the element's type, blocks in double.

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

inline constexpr int kUnroll = 4;  // independent chains, or latency is what is seen
inline constexpr int64_t kStep = kLanes * kUnroll;
inline constexpr int64_t kBlock = 2048;  // a block stays in L1 between its maximum and sum
static_assert(kBlock % kStep == 0);

RL_INLINE Floats floats(float v) { return v - Floats{}; }

// e^d for d <= 88; 0 below -87.33, where the result would be subnormal; NaN for NaN.
// `held` is d from -87.33 up: a finite factor for the terms d e^d, also where d is -inf.
RL_INLINE Floats exp(Floats d, Floats& held) {
  constexpr float kLeast = -87.33f, kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
  // 1.5 * 2^23 rounds to an integer, 127 biases it: the low bits are those of the exponent.
  constexpr float kRound = 12582912.0f + 127.0f;
  const Floats least = floats(kLeast);
  held = d < least ? least : d;  // NaN stays
  const Floats shifted = held * kLog2e + kRound;
  const Floats r = held - (shifted - kRound) * kLn2;
  // Minimax on [-ln 2 / 2, ln 2 / 2], relative error 3.1e-9 before rounding.
  Floats p = r * 1.38145986e-3f + 8.36871702e-3f;
  p = p * r + 4.16683881e-2f;
  p = p * r + 1.66665206e-1f;
  p = p * r + 4.99999934e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Floats power = reinterpret_cast<Floats>(reinterpret_cast<Words>(shifted) << 23);
  return d < least ? Floats{} : p * power;
}

// Element types: load kLanes as floats, store kLanes floats.
RL_INLINE Floats load(const float* at) {
  Floats v;
  __builtin_memcpy(&v, at, sizeof v);
  return v;
}
RL_INLINE void store(float* at, Floats v) { __builtin_memcpy(at, &v, sizeof v); }

RL_INLINE Floats load(const Bf16* at) {
  Halves h;
  __builtin_memcpy(&h, at, sizeof h);
  return reinterpret_cast<Floats>(__builtin_convertvector(h, Words) << 16);
}
RL_INLINE void store(Bf16* at, Floats v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words even = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words kept = (v == v ? even : Words{} + 0x7fc00000u) >> 16;
  const Halves h = __builtin_convertvector(kept, Halves);
  __builtin_memcpy(at, &h, sizeof h);
}

RL_INLINE Floats load(const Fp16* at) {
  Halves h;
  __builtin_memcpy(&h, at, sizeof h);
  const Words bits = __builtin_convertvector(h, Words);
  const Words magnitude = (bits & 0x7fffu) << 13;
  const Words exponent = magnitude & 0x0f800000u;
  const Words normal = magnitude + (112u << 23);
  // Infinities and NaN get the largest exponent; subnormals are normalised by a subtraction.
  const Words special = normal + (112u << 23);
  const Words small = reinterpret_cast<Words>(reinterpret_cast<Floats>(normal + (1u << 23)) -
                                              reinterpret_cast<Floats>(Words{} + (113u << 23)));
  const Words wide = exponent == 0x0f800000u ? special : (exponent == 0u ? small : normal);
  return reinterpret_cast<Floats>(wide | ((bits & 0x8000u) << 16));
}
RL_INLINE void store(Fp16* at, Floats v) {
  const Words bits = reinterpret_cast<Words>(v);
  const Words sign = bits & 0x80000000u;
  const Words magnitude = bits ^ sign;
  const Words special = v == v ? Words{} + 0x7c00u : Words{} + 0x7e00u;
  const Words half = Words{} + (126u << 23);  // 0.5, whose last bit is the least subnormal
  const Words small = reinterpret_cast<Words>(reinterpret_cast<Floats>(magnitude) +
                                              reinterpret_cast<Floats>(half)) -
                      half;
  const Words normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const Words kept =
      (magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? small : normal)) |
      (sign >> 16);
  const Halves h = __builtin_convertvector(kept, Halves);
  __builtin_memcpy(at, &h, sizeof h);
}

template <class T>
RL_INLINE void fill(T* to, T value, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

// The last lanes of a row, filled up with `rest`.
template <class T>
RL_INLINE Floats load_part(const T* at, int64_t count, T rest) {
  T part[kLanes];
  fill(part, rest, kLanes);
  __builtin_memcpy(part, at, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}

RL_INLINE float largest(Floats v) {
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
RL_INLINE double total(Floats v) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += static_cast<double>(v[i]);
  return sum;
}

// The largest element that is not NaN; -inf if there is none.
template <class T>
RL_INLINE float maximum(const T* row, int64_t count) {
  Floats best[kUnroll];
  for (auto& b : best) b = floats(-kInf);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int u = 0; u < kUnroll; ++u) {
      const Floats v = load(row + i + u * kLanes);
      best[u] = v > best[u] ? v : best[u];
    }
  }
  for (; i < count; i += kLanes) {
    const Floats v =
        i + kLanes <= count ? load(row + i) : load_part(row + i, count - i, kMinusInf<T>);
    best[0] = v > best[0] ? v : best[0];
  }
  for (int u = 1; u < kUnroll; ++u) best[0] = best[u] > best[0] ? best[u] : best[0];
  return largest(best[0]);
}

template <bool kScaled>
RL_INLINE Floats less(Floats v, const Scale& scale, float shift) {
  if constexpr (!kScaled) return v - shift;
  const Floats least = floats(-kLargest);  // -inf * 0 would be NaN
  const Floats held = v < least ? least : v;
  return held * scale.high + (held * scale.low - shift);
}

// Adds sum e^d and sum e^d d of a block, d = x - shift.
template <bool kScaled, class T>
RL_INLINE void add_block(const T* row, int64_t count, const Scale& scale, float shift, double& sum,
                         double& dot) {
  Floats sums[kUnroll] = {}, dots[kUnroll] = {};
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    for (int u = 0; u < kUnroll; ++u) {
      const Floats d = less<kScaled>(load(row + i + u * kLanes), scale, shift);
      Floats held;
      const Floats e = exp(d, held);
      sums[u] += e;
      dots[u] += e * held;
    }
  }
  for (; i < count; i += kLanes) {
    const Floats v =
        i + kLanes <= count ? load(row + i) : load_part(row + i, count - i, kMinusInf<T>);
    const Floats d = less<kScaled>(v, scale, shift);
    Floats held;
    const Floats e = exp(d, held);
    sums[0] += e;
    dots[0] += e * held;
  }
  for (int u = 0; u < kUnroll; ++u) {
    sum += total(sums[u]);
    dot += total(dots[u]);
  }
}

template <bool kScaled, class T>
inline RowStats stats_scaled(const T* row, int64_t count, const Scale& scale) {
  RowStats out{-kInf, 0.0, 0.0};
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t size = count - start < kBlock ? count - start : kBlock;
    const float top = scaled(maximum(row + start, size), scale);
    if (top > out.top) raise(out, top);
    // Before anything finite the shift is 0: -inf stays -inf and not NaN.
    const float shift = out.top == -kInf ? 0.0f : out.top;
    add_block<kScaled>(row + start, size, scale, shift, out.sum, out.dot);
  }
  return out;
}

template <class T>
inline RowStats stats(const T* row, int64_t count, const Scale& scale) {
  return scale.is_one() ? stats_scaled<false>(row, count, scale)
                        : stats_scaled<true>(row, count, scale);
}

template <bool kScaled, bool kLinear>
RL_INLINE Floats slope(Floats v, const Scale& scale, const Slope& s) {
  Floats held;
  const Floats e = exp(less<kScaled>(v, scale, s.shift), held);
  if constexpr (kLinear) return e * (held * s.b + s.a);
  return e * s.a;
}

// out = e^d (a + b d), d = x - shift. In place where out is row: a vector is read, then written.
template <bool kScaled, bool kLinear, class T>
inline void grad_scaled(const T* row, T* out, int64_t count, const Scale& scale, const Slope& s) {
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    Floats results[kUnroll];
    for (int u = 0; u < kUnroll; ++u)
      results[u] = slope<kScaled, kLinear>(load(row + i + u * kLanes), scale, s);
    for (int u = 0; u < kUnroll; ++u) store(out + i + u * kLanes, results[u]);
  }
  for (; i + kLanes <= count; i += kLanes)
    store(out + i, slope<kScaled, kLinear>(load(row + i), scale, s));
  if (i < count) {
    T part[kLanes];
    store(part, slope<kScaled, kLinear>(load_part(row + i, count - i, kMinusInf<T>), scale, s));
    __builtin_memcpy(out + i, part, static_cast<size_t>(count - i) * sizeof(T));
  }
}

template <class T>
inline void grad(const T* row, T* out, int64_t count, const Scale& scale, const Slope& s) {
  if (s.b != 0.0f) {
    scale.is_one() ? grad_scaled<false, true>(row, out, count, scale, s)
                   : grad_scaled<true, true>(row, out, count, scale, s);
  } else {
    scale.is_one() ? grad_scaled<false, false>(row, out, count, scale, s)
                   : grad_scaled<true, false>(row, out, count, scale, s);
  }
}

template <class T>
inline constexpr RowKernels<T> kernels{&stats<T>, &grad<T>};
