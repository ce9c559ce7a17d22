// Vectors of RL_LANES floats, the width of a register.
//
// A file includes this once per instruction set, inside a namespace and a region of that target, so
// there is no include guard and nothing is included from here. GCC's and Clang's vector extension
// keeps all but a few lines free of intrinsics.

inline constexpr int kLanes = RL_LANES;

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

RL_INLINE Floats floats(float v) { return v - Floats{}; }
RL_INLINE Words words(uint32_t v) { return v - Words{}; }
RL_INLINE Floats as_floats(Words v) { return reinterpret_cast<Floats>(v); }
RL_INLINE Words as_words(Floats v) { return reinterpret_cast<Words>(v); }

template <class V, class T>
RL_INLINE V read(const T* at) {
  V v;
  __builtin_memcpy(&v, at, sizeof v);
  return v;
}
template <class V, class T>
RL_INLINE void write(T* at, V v) {
  __builtin_memcpy(at, &v, sizeof v);
}

// The larger one; of a NaN `v` and a number, v. One instruction, which GCC does not find where
// `least` is constant.
RL_INLINE Floats at_least(Floats least, Floats v) {
#if RL_LANES == 16
  return _mm512_maskz_max_ps(0xffff, least, v);
#elif RL_LANES == 8
  return _mm256_max_ps(least, v);
#else
  return least > v ? least : v;
#endif
}

#if RL_LANES != 4
// a b + c, rounded once whatever the compiler is told.
RL_INLINE Floats fused(Floats a, Floats b, Floats c) {
#if RL_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#else
  return _mm256_fmadd_ps(a, b, c);
#endif
}
#endif

// e^d for d <= 88; 0 below -87.7; NaN for NaN. `held` is d from -88 up: a finite factor for the
// terms d e^d, also where d is -inf.
RL_INLINE Floats exp(Floats d, Floats& held) {
  constexpr float kLog2e = 1.44269504088896341f;
#if RL_LANES != 4
  constexpr float kLn2 = 0.693147180559945309f;
#endif
  // 1.5 * 2^23 rounds to an integer, 127 biases it: the low bits are those of the exponent, and
  // for -88 they are 0, the exponent of 0.
  constexpr float kRound = 12582912.0f + 127.0f;
  held = at_least(floats(-88.0f), d);
  const Floats shifted = held * kLog2e + kRound;
#if RL_LANES == 4
  // Without a fused product: a part of ln 2 whose product is exact, and the rest of it.
  constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
  const Floats r = (held - (shifted - kRound) * kHigh) - (shifted - kRound) * kLow;
#else
  const Floats r = fused(shifted - kRound, floats(-kLn2), held);
#endif
  // Minimax on [-ln 2 / 2, ln 2 / 2], relative error 3.1e-9 before rounding.
  Floats p = r * 1.38145986e-3f + 8.36871702e-3f;
  p = p * r + 4.16683881e-2f;
  p = p * r + 1.66665206e-1f;
  p = p * r + 4.99999934e-1f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return p * as_floats(as_words(shifted) << 23);
}

// The same for every d: e^88 above 88, and NaN for NaN.
RL_INLINE Floats exp(Floats d) {
  Floats held;
  return exp(d > floats(88.0f) ? floats(88.0f) : d, held);
}

RL_INLINE float sum_of(Floats v) {
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
  return v[0];
}

// a b + c
RL_INLINE Floats add_product(Floats a, Floats b, Floats c) {
#if RL_LANES == 4
  return a * b + c;
#else
  return fused(a, b, c);
#endif
}

RL_INLINE float dot(const float* a, const float* b, int64_t count) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    sums = add_product(read<Floats>(a + i), read<Floats>(b + i), sums);
  }
  float sum = sum_of(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}
