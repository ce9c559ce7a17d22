// One row of logits on the CPU: statistics and gradient, in vectors of kLanes floats. row_host.cpp
// includes this once per instruction set, after common/simd.h.
//
// A step takes two vectors. Of 16-bit elements these are the even and the odd ones of one register
// of words: a shift and a mask instead of shuffles, and no sum or maximum asks for the order.
//
// Rounding: d = x - shift is one subtraction (two fma where temperature is not 1) and is rounded by
// its own size, not by that of x; the relative error of e^d is 2^-24 |d| + 1.5 ulp. Sums: lanes
// over kRun elements, these over a block of kBlock, blocks in double. Or every element after a
// dominant one would be rounded to its last bits.

inline constexpr int64_t kStep = 2 * kLanes;
inline constexpr int64_t kBlock = 4096;  // stays in L1 between its maximum and its sum
inline constexpr int64_t kRun = 32 * kStep;
static_assert(kBlock % kRun == 0);

struct Pair {
  Floats a, b;
};

RL_INLINE Pair load(const float* at) { return {read<Floats>(at), read<Floats>(at + kLanes)}; }
RL_INLINE void store(float* at, Pair v) {
  write(at, v.a);
  write(at + kLanes, v.b);
}

RL_INLINE Pair load(const Bf16* at) {
  const Words both = read<Words>(at);
  return {as_floats(both << 16), as_floats(both & words(0xffff0000u))};
}
// To nearest, ties to even. A NaN stays one if its low 15 bits are 0, as they are in every NaN
// made from bf16 logits and from quieted().
RL_INLINE Words rounded(Words bits) { return bits + words(0x7fffu) + ((bits >> 16) & words(1u)); }
RL_INLINE void store(Bf16* at, Pair v) {
  write(at, (rounded(as_words(v.a)) >> 16) | (rounded(as_words(v.b)) & words(0xffff0000u)));
}

#if RL_LANES == 16
RL_INLINE Pair load(const Fp16* at) {
  return {_mm512_maskz_cvtph_ps(0xffff, read<__m256i>(at)),
          _mm512_maskz_cvtph_ps(0xffff, read<__m256i>(at + kLanes))};
}
RL_INLINE void store(Fp16* at, Pair v) {
  write(at, _mm512_maskz_cvtps_ph(0xffff, v.a, _MM_FROUND_TO_NEAREST_INT));
  write(at + kLanes, _mm512_maskz_cvtps_ph(0xffff, v.b, _MM_FROUND_TO_NEAREST_INT));
}
#elif RL_LANES == 8
RL_INLINE Pair load(const Fp16* at) {
  return {_mm256_cvtph_ps(read<__m128i>(at)), _mm256_cvtph_ps(read<__m128i>(at + kLanes))};
}
RL_INLINE void store(Fp16* at, Pair v) {
  write(at, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  write(at + kLanes, _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
#else
RL_INLINE Floats widened(Words half) {
  const Words normal = ((half & words(0x7fffu)) << 13) + words(112u << 23);
  const Words exponent = half & words(0x7c00u);
  // Infinities and NaN get the largest exponent; a subtraction normalises subnormals.
  const Words special = normal + words(112u << 23);
  const Words small = as_words(as_floats(normal + words(1u << 23)) - as_floats(words(113u << 23)));
  const Words wide = exponent == 0x7c00u ? special : (exponent == 0u ? small : normal);
  return as_floats(wide | ((half & words(0x8000u)) << 16));
}
RL_INLINE Words narrowed(Floats v) {
  const Words sign = as_words(v) & words(0x80000000u);
  const Words magnitude = as_words(v) ^ sign;
  const Words special = v == v ? words(0x7c00u) : words(0x7e00u);
  const Words half = words(126u << 23);  // 0.5, whose last bit is the least subnormal
  const Words small = as_words(as_floats(magnitude) + as_floats(half)) - half;
  const Words normal =
      (magnitude - words(112u << 23) + words(0xfffu) + ((magnitude >> 13) & words(1u))) >> 13;
  const Words kept =
      magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? small : normal);
  return kept | (sign >> 16);
}
RL_INLINE Pair load(const Fp16* at) {
  const Words both = read<Words>(at);
  return {widened(both & words(0xffffu)), widened(both >> 16)};
}
RL_INLINE void store(Fp16* at, Pair v) { write(at, narrowed(v.a) | (narrowed(v.b) << 16)); }
#endif

// The last elements of a row, filled up with -inf.
template <class T>
RL_INLINE Pair load_part(const T* at, int64_t count) {
  T part[kStep];
  for (auto& element : part) element = kMinusInf<T>;
  for (int64_t i = 0; i < count; ++i) part[i] = at[i];
  return load(part);
}

// The largest element that is not NaN; -inf if there is none.
template <class T>
RL_INLINE float maximum(const T* row, int64_t count) {
  Floats a[2] = {floats(-kInf), floats(-kInf)}, b[2] = {a[0], a[0]};
  int64_t i = 0;
  for (; i + 2 * kStep <= count; i += 2 * kStep) {
    for (int u = 0; u < 2; ++u) {
      const Pair v = load(row + i + u * kStep);
      a[u] = v.a > a[u] ? v.a : a[u];
      b[u] = v.b > b[u] ? v.b : b[u];
    }
  }
  for (; i < count; i += kStep) {
    const Pair v = i + kStep <= count ? load(row + i) : load_part(row + i, count - i);
    a[0] = v.a > a[0] ? v.a : a[0];
    b[0] = v.b > b[0] ? v.b : b[0];
  }
  float best = -kInf;
  for (int lane = 0; lane < kLanes; ++lane) {
    for (const Floats* v : {&a[0], &a[1], &b[0], &b[1]})
      best = (*v)[lane] > best ? (*v)[lane] : best;
  }
  return best;
}

template <bool kScaled>
RL_INLINE Floats less(Floats v, const Scale& scale, float shift) {
  if constexpr (!kScaled) return v - shift;
  const Floats held = at_least(floats(-kLargest), v);  // -inf * 0 would be NaN
#if RL_LANES == 4
  // Products without their last bits would be wrong by those of v, not of the difference.
  const Floats high = as_floats(as_words(held) & words(kHighBits));
  return (high * scale.short_high - shift) + (held - high) * scale.short_high +
         held * scale.short_low;
#else
  // The product is exact within the first fma, whose result is small near the top.
  return fused(held, floats(scale.low), fused(held, floats(scale.high), floats(-shift)));
#endif
}

struct Sums {
  Floats sum, dot;
};

// Adds e^d and e^d d, d = x - shift.
template <bool kScaled>
RL_INLINE void add(Floats v, const Scale& scale, float shift, Sums& to) {
  Floats held;
  const Floats e = exp(less<kScaled>(v, scale, shift), held);
  to.sum += e;
  to.dot += e * held;
}

RL_INLINE double total(Floats v) {
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += static_cast<double>(v[i]);
  return sum;
}

template <bool kScaled, class T>
inline RowStats stats_scaled(const T* row, int64_t count, const Scale& scale) {
  RowStats out{-kInf, 0.0, 0.0};
  for (int64_t start = 0; start < count; start += kBlock) {
    const T* block = row + start;
    const int64_t size = count - start < kBlock ? count - start : kBlock;
    const float top = scaled(maximum(block, size), scale);
    if (top > out.top) raise(out, top);
    // Before anything finite the shift is 0: -inf stays -inf and not NaN.
    const float shift = out.top == -kInf ? 0.0f : out.top;
    Sums all = {};
    for (int64_t from = 0; from < size; from += kRun) {
      const int64_t to = size - from < kRun ? size : from + kRun;
      Sums a = {}, b = {};
      int64_t i = from;
      for (; i + kStep <= to; i += kStep) {
        const Pair v = load(block + i);
        add<kScaled>(v.a, scale, shift, a);
        add<kScaled>(v.b, scale, shift, b);
      }
      if (i < to) {
        const Pair v = load_part(block + i, to - i);
        add<kScaled>(v.a, scale, shift, a);
        add<kScaled>(v.b, scale, shift, b);
      }
      all.sum += a.sum + b.sum;
      all.dot += a.dot + b.dot;
    }
    out.sum += total(all.sum);
    out.dot += total(all.dot);
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

template <bool kScaled, bool kLinear>
RL_INLINE Pair slope(Pair v, const Scale& scale, const Slope& s) {
  return {slope<kScaled, kLinear>(v.a, scale, s), slope<kScaled, kLinear>(v.b, scale, s)};
}

// out = e^d (a + b d), d = x - shift. In place where out is row: a pair is read, then written.
template <bool kScaled, bool kLinear, class T>
inline void grad_scaled(const T* row, T* out, int64_t count, const Scale& scale, const Slope& s) {
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    store(out + i, slope<kScaled, kLinear>(load(row + i), scale, s));
  }
  if (i < count) {
    T part[kStep];
    store(part, slope<kScaled, kLinear>(load_part(row + i, count - i), scale, s));
    for (int64_t j = i; j < count; ++j) out[j] = part[j - i];
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
