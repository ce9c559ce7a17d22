// The row kernels' bodies, one block per row, over the Block concept.
//
// Everything on a row happens in base 2 and straight on the raw logits l:
//
//   y = l c - s,  c = log2(e) / temperature,  s = top c        one fma per element
//   sum = sum 2^y,  dot = sum 2^y y                            of the maximum `top`
//   gradient = 2^y (a + b y)                                   a line per row
//
// c and s are rounded. What that does to all elements alike is taken back once per row, in double
// (finish, line_of): the largest element has weight 1 exactly, whatever c is. What remains is an
// error of 3e-8 |x - top|.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_fp16.h>
#endif

#include "common/block.h"
#include "common/hd.h"
#include "loss/logits.h"
#include "loss/policy.h"

#ifdef __CUDACC__
#define RL_UNROLL _Pragma("unroll")
#else
#define RL_UNROLL
#endif

namespace rlcore::loss {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

template <class T>
struct StatisticOf {
  using Type = float;
};
template <>
struct StatisticOf<double> {
  using Type = double;
};
template <class T>
using Statistic = typename StatisticOf<T>::Type;

RL_HD float bits_to_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float v;
  memcpy(&v, &bits, sizeof v);
  return v;
#endif
}
RL_HD uint32_t float_to_bits(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
#endif
}

RL_HD double widen(double v) { return v; }
RL_HD float widen(float v) { return v; }
RL_HD float widen(Bf16 v) { return bits_to_float(uint32_t{v.bits} << 16); }
RL_HD float widen(Fp16 v) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(v.bits));
#else
  const int exponent = v.bits >> 10 & 31, mantissa = v.bits & 1023;
  const float sign = v.bits >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return sign * (mantissa ? NAN : INFINITY);
  return sign * std::ldexp(static_cast<float>(exponent ? mantissa + 1024 : mantissa),
                           exponent ? exponent - 25 : -24);
#endif
}

template <class T>
RL_HD T narrow(Statistic<T> v);
template <>
RL_HD double narrow<double>(double v) {
  return v;
}
template <>
RL_HD float narrow<float>(float v) {
  return v;
}
template <>
RL_HD Bf16 narrow<Bf16>(float v) {
  const uint32_t bits = float_to_bits(v);
  if (v != v) return {0x7fc0};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
RL_HD Fp16 narrow<Fp16>(float v) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(v))};
#else
  const auto sign = static_cast<uint16_t>(std::signbit(v) ? 0x8000 : 0);
  const float size = std::fabs(v);
  if (v != v) return {0x7e00};
  if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
  int exponent;
  std::frexp(size, &exponent);
  if (exponent < -13 || size == 0) exponent = -13;  // subnormals keep the least exponent
  const auto mantissa = static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent)));
  return {static_cast<uint16_t>(sign | ((exponent + 13) * 1024 + mantissa))};
#endif
}

RL_HD float exp_2(float v) {
#ifdef __CUDA_ARCH__
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(v));
  return out;
#else
  return std::exp2(v);
#endif
}
RL_HD double exp_2(double v) { return exp2(v); }
RL_HD float fused(float a, float b, float c) { return fmaf(a, b, c); }
RL_HD double fused(double a, double b, double c) { return fma(a, b, c); }
RL_HD float larger(float a, float b) { return fmaxf(a, b); }
RL_HD double larger(double a, double b) { return fmax(a, b); }

template <class Real>
RL_HD constexpr Real minus_infinity() {
  return -std::numeric_limits<Real>::infinity();
}

template <class Real>
RL_HD Real rate_of(double temperature) {
  return static_cast<Real>(1.4426950408889634074 / temperature);
}

// A factor that is finite where 2^y is 0.
template <class Real>
RL_HD Real held(Real y) {
  return larger(y, Real(-2000));
}

// The shift that goes with a maximum: 0 before anything finite was seen, so that -inf stays -inf.
template <class Real>
RL_HD Real shift_of(Real top, Real rate) {
  return top == minus_infinity<Real>() ? Real(0) : top * rate;
}

// The sums over some elements, with their maximum `top` among the raw logits. NaN is in no maximum
// but in the sum.
template <class Sum, class Real>
struct Moments {
  Real top;
  Sum sum, dot;
};

// Moves the sums to a maximum that is as large or larger. NaN stays NaN.
template <class Sum, class Real>
RL_HD void raise(Moments<Sum, Real>& m, Real top, Real rate) {
  const bool empty = m.top == minus_infinity<Real>();  // the sum is 0, or NaN and stays so
  const Sum gap =
      empty ? Sum(0)
            : static_cast<Sum>(shift_of(m.top, rate)) - static_cast<Sum>(shift_of(top, rate));
  const Sum factor = empty ? Sum(0) : exp_2(gap);
  m.dot = (m.dot + m.sum * gap) * factor;
  m.sum *= factor;
  m.top = top;
}

// Moments of a row in double.
template <class Real>
using RowMoments = Moments<double, Real>;

// Two 16-bit elements in a word, the first one low.
template <class T>
RL_HD uint32_t narrow_pair(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t word;
  if constexpr (std::is_same_v<T, Bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
#else
  return uint32_t{narrow<T>(low).bits} | uint32_t{narrow<T>(high).bits} << 16;
#endif
}

// 16 bytes, the widest access.
template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / static_cast<int>(sizeof(T));
  uint32_t word[4];

  RL_HD Statistic<T> get(int i) const {
    if constexpr (sizeof(T) == 2) {
      return widen(T{static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16))});
    } else if constexpr (sizeof(T) == 4) {
      return bits_to_float(word[i]);
    } else {
      const uint64_t bits = uint64_t{word[2 * i + 1]} << 32 | word[2 * i];
      double v;
      memcpy(&v, &bits, sizeof v);
      return v;
    }
  }

  // Every element v becomes f(v).
  template <class F>
  RL_HD void apply(const F& f) {
    RL_UNROLL
    for (int w = 0; w < 4; ++w) {
      if constexpr (sizeof(T) == 2) {
        word[w] = narrow_pair<T>(f(get(2 * w)), f(get(2 * w + 1)));
      } else if constexpr (sizeof(T) == 4) {
        word[w] = float_to_bits(f(get(w)));
      } else if (w < 2) {
        const double v = f(get(w));
        memcpy(&word[2 * w], &v, sizeof v);
      }
    }
  }
};

template <class T>
RL_HD Vector<T> load(const Vector<T>* at) {
#ifdef __CUDA_ARCH__
  const uint4 v = *reinterpret_cast<const uint4*>(at);
  return {{v.x, v.y, v.z, v.w}};
#else
  return *at;
#endif
}

// What is written leaves L2 before what is to be read again.
template <class T>
RL_HD void store(Vector<T>* at, const Vector<T>& v) {
#ifdef __CUDA_ARCH__
  __stcs(reinterpret_cast<uint4*>(at), make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
#else
  *at = v;
#endif
}

template <class T>
RL_HD int64_t misalignment(const T* at) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) % 16 / sizeof(T));
}

// A part of a row: elements before the first 16-byte boundary, whole vectors, the rest.
template <class T>
struct Span {
  RL_HD Span(const T* start, int64_t size) : at(start), count(size) {
    const int64_t off = misalignment(start);
    head = off ? Vector<T>::kSize - off : 0;
    head = head < count ? head : count;
    vectors = (count - head) / Vector<T>::kSize;
  }
  RL_HD const Vector<T>* vector(int64_t i) const {
    return reinterpret_cast<const Vector<T>*>(at + head) + i;
  }
  // Elements that are in no vector: index of the i-th.
  RL_HD int64_t single(int64_t i) const { return i < head ? i : i + vectors * Vector<T>::kSize; }
  RL_HD int64_t singles() const { return count - vectors * Vector<T>::kSize; }
  const T* at;
  int64_t count, head, vectors;
};

// Vectors that a thread has in flight. Doubles take the registers of two.
template <class T>
inline constexpr int kFlight = sizeof(T) == 8 ? 1 : 4;

template <class Real>
RL_HD void add(Moments<Real, Real>& m, Real logit, Real rate, Real shift) {
  const Real y = fused(logit, rate, -shift), e = exp_2(y);
  m.sum += e;
  m.dot = fused(e, held(y), m.dot);
}

template <int kCount, class T>
RL_HD void add(Moments<Statistic<T>, Statistic<T>>& m, const Vector<T> (&v)[kCount],
               Statistic<T> rate) {
  Statistic<T> top = m.top;
  RL_UNROLL
  for (int i = 0; i < kCount * Vector<T>::kSize; ++i) {
    top = larger(top, v[i / Vector<T>::kSize].get(i % Vector<T>::kSize));
  }
  if (top > m.top) raise(m, top, rate);
  const Statistic<T> shift = shift_of(top, rate);
  // Summed apart first: after a dominant element every single one would be rounded to its last bit.
  Moments<Statistic<T>, Statistic<T>> few{top, 0, 0};
  RL_UNROLL
  for (int i = 0; i < kCount * Vector<T>::kSize; ++i) {
    add(few, v[i / Vector<T>::kSize].get(i % Vector<T>::kSize), rate, shift);
  }
  m.sum += few.sum;
  m.dot += few.dot;
}

// This thread's share of the moments.
template <class T, class Block>
RL_DEVICE RowMoments<Statistic<T>> share(Block& block, const Span<T>& span, Statistic<T> rate) {
  using Real = Statistic<T>;
  Moments<Real, Real> m{minus_infinity<Real>(), 0, 0};
  const int64_t step = block.num_threads();
  int64_t i = block.thread();
  for (; i + (kFlight<T> - 1) * step < span.vectors; i += kFlight<T> * step) {
    Vector<T> v[kFlight<T>];
    RL_UNROLL
    for (int k = 0; k < kFlight<T>; ++k) v[k] = load(span.vector(i + k * step));
    add(m, v, rate);
  }
  for (; i < span.vectors; i += step) {
    const Vector<T> v[1] = {load(span.vector(i))};
    add(m, v, rate);
  }
  for (int64_t j = block.thread(); j < span.singles(); j += step) {
    const Real logit = widen(span.at[span.single(j)]);
    if (logit > m.top) raise(m, logit, rate);
    add(m, logit, rate, shift_of(m.top, rate));
  }
  return {m.top, static_cast<double>(m.sum), static_cast<double>(m.dot)};
}

// What a row's moments say, with x = l / temperature and d = x - x_top.
struct RowFacts {
  double x_top;  // not rounded
  double sum;    // sum e^d
  double dot;    // sum e^d d
  double unit;   // d = y unit + start: of the line's y and this row's shift
  double start;
};

template <class Real>
RL_HD RowFacts finish(const RowMoments<Real>& m, Real rate, double temperature) {
  if (m.top == minus_infinity<Real>()) {
    return {minus_infinity<double>(), m.sum, m.dot, 0.0, 0.0};
  }
  const double unit = 1 / (static_cast<double>(rate) * temperature);
  const double y_top = static_cast<double>(m.top) * static_cast<double>(rate) -
                       static_cast<double>(shift_of(m.top, rate));
  const double scale = exp2(-y_top);
  return {static_cast<double>(m.top) / temperature, m.sum * scale,
          (m.dot - y_top * m.sum) * scale * unit, unit, -y_top * unit};
}

// The gradient of a row: 2^y (a + b y), y = l rate - shift.
template <class Real>
struct Line {
  Real shift, a, b;
};

// From log p = y unit + start and p = 2^y scale.
template <class Real>
RL_HD Line<Real> line_of(Real shift, double unit, double start, double scale, double temperature,
                         double g, double h, double entropy) {
  const double k = scale / temperature;
  return {shift, static_cast<Real>(-k * (g + h * (entropy + start))),
          static_cast<Real>(-k * h * unit)};
}

// The gradient at the row's token. 1 - p would lose what matters of a likely one.
RL_HD double token_gradient(double logp, double entropy, double g, double h, double temperature) {
  const double p = exp(logp);
  const double entropy_part = p == 0 ? 0.0 : h * p * (logp + entropy);
  return (-g * expm1(logp) - entropy_part) / temperature;
}

// Writes the gradients of a row to `out`. `from` may be `out`.
template <class T, class Block>
RL_DEVICE void write_line(Block& block, const Span<T>& from, T* out, const Line<Statistic<T>>& line,
                          Statistic<T> rate) {
  using Real = Statistic<T>;
  const auto one = [&](Real logit) {
    const Real y = fused(logit, rate, -line.shift);
    return exp_2(y) * fused(line.b, held(y), line.a);
  };
  const int64_t step = block.num_threads();
  if (misalignment(out) != misalignment(from.at)) {  // no common boundary
    for (int64_t i = block.thread(); i < from.count; i += step) {
      out[i] = narrow<T>(one(widen(from.at[i])));
    }
    return;
  }
  auto* to = reinterpret_cast<Vector<T>*>(out + from.head);
  int64_t i = block.thread();
  for (; i + (kFlight<T> - 1) * step < from.vectors; i += kFlight<T> * step) {
    Vector<T> v[kFlight<T>];
    RL_UNROLL
    for (int k = 0; k < kFlight<T>; ++k) v[k] = load(from.vector(i + k * step));
    RL_UNROLL
    for (int k = 0; k < kFlight<T>; ++k) {
      v[k].apply(one);
      store(to + i + k * step, v[k]);
    }
  }
  for (; i < from.vectors; i += step) {
    Vector<T> v = load(from.vector(i));
    v.apply(one);
    store(to + i, v);
  }
  for (int64_t j = block.thread(); j < from.singles(); j += step) {
    out[from.single(j)] = narrow<T>(one(widen(from.at[from.single(j)])));
  }
}

template <class T, class Block>
RL_DEVICE void write_zeros(Block& block, T* out, int64_t count) {
  const Span<T> span(out, count);
  auto* to = reinterpret_cast<Vector<T>*>(out + span.head);
  for (int64_t i = block.thread(); i < span.vectors; i += block.num_threads()) {
    store(to + i, Vector<T>{});
  }
  for (int64_t j = block.thread(); j < span.singles(); j += block.num_threads()) {
    out[span.single(j)] = T{};
  }
}

// The column of a token in this shard, or -1.
RL_HD int64_t column(const Logits& x, int64_t id) {
  return id >= x.first && id - x.first < x.valid ? id - x.first : -1;
}

template <class T>
RL_HD T* row_at(const Logits& x, int64_t row) {
  return static_cast<T*>(x.data) + row * x.stride;
}

struct Sums {
  double sum, dot;
};

// Shared memory of a block.
template <class Real>
struct RowShared {
  Real tops[kMaxWarps];
  Sums sums[kMaxWarps];
  Line<Real> line;
  double token_gradient;
  bool zero;
};

// The moments of a row from the threads' shares, the same in every thread. The maximum is reduced
// first, so a thread calls exp2 in double once, and not in every merge.
template <class Real, class Block>
RL_DEVICE RowMoments<Real> join(Block& block, RowMoments<Real> m, Real rate,
                                RowShared<Real>& shared) {
  const Real top = reduce(block, m.top, shared.tops, [](Real a, Real b) { return larger(a, b); });
  raise(m, top, rate);
  const Sums all = reduce(block, Sums{m.sum, m.dot}, shared.sums,
                          [](Sums a, Sums b) { return Sums{a.sum + b.sum, a.dot + b.dot}; });
  return {top, all.sum, all.dot};
}

// row_stats of one row.
template <class T, class Block>
RL_DEVICE void stats_body(Block& block, const StatsParams& p, int64_t row,
                          RowShared<Statistic<T>>& shared) {
  using Real = Statistic<T>;
  const Logits& x = p.logits;
  const Real rate = rate_of<Real>(x.temperature);
  const T* at = row_at<T>(x, row);
  const int64_t id = x.tokens[row];
  const auto part = share<T>(block, Span<T>(at, x.valid), rate);
  const int64_t token = column(x, id);
  const T element = token < 0 ? T{} : at[token];  // used after `join`, which hides the latency
  const auto m = join(block, part, rate, shared);
  if (block.thread() != 0) return;
  const RowFacts facts = finish(m, rate, x.temperature);
  Real* out = static_cast<Real*>(p.out) + row;
  const Real top = static_cast<Real>(facts.x_top);
  // The sums go with the rounded maximum.
  const bool finite = facts.x_top > minus_infinity<double>();
  const double offset = finite ? facts.x_top - static_cast<double>(top) : 0.0;
  const double scale = exp(offset);
  const double logit = token < 0 ? minus_infinity<double>() : static_cast<double>(widen(element));
  out[0] = top;
  out[x.rows] = static_cast<Real>(facts.sum * scale);
  out[2 * x.rows] = static_cast<Real>((facts.dot + offset * facts.sum) * scale);
  out[3 * x.rows] = static_cast<Real>(logit == minus_infinity<double>()
                                          ? logit  // and not NaN where the top is -inf
                                          : logit / x.temperature - static_cast<double>(top));
}

// row_grad of one row. The token's element is written last, by thread 0.
template <class T, class Block>
RL_DEVICE void grad_body(Block& block, const GradParams& p, int64_t row) {
  using Real = Statistic<T>;
  const Logits& x = p.logits;
  const auto value = [&](const void* at) {
    return at ? static_cast<double>(static_cast<const Real*>(at)[row]) : 0.0;
  };
  const double g = value(p.grad_logp), h = value(p.grad_entropy);
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  if (g == 0 && h == 0) return write_zeros(block, out, x.width);
  const double top = value(p.lse), entropy = value(p.entropy);
  const double log_sum = static_cast<double>(static_cast<const Real*>(p.lse)[x.rows + row]);
  const Real rate = rate_of<Real>(x.temperature);
  const int64_t token = column(x, x.tokens[row]);
  const T* at = row_at<T>(x, row);
  const double logit = token < 0 ? 0.0 : static_cast<double>(widen(at[token]));
  block.sync();  // thread 0 has read what another one may overwrite
  const double unit = 1 / (static_cast<double>(rate) * x.temperature);
  const Real shift = static_cast<Real>(top / unit);
  const double y_top = top / unit - static_cast<double>(shift);
  const auto line = line_of(shift, unit, -y_top * unit - log_sum, exp2(-y_top) * exp(-log_sum),
                            x.temperature, g, h, entropy);
  write_line<T>(block, Span<T>(at, x.valid), out, line, rate);
  write_zeros(block, out + x.valid, x.width - x.valid);
  block.sync();
  if (block.thread() == 0 && token >= 0) {
    out[token] = narrow<T>(static_cast<Real>(
        token_gradient(logit / x.temperature - top - log_sum, entropy, g, h, x.temperature)));
  }
}

template <class Real>
RL_DEVICE void put_token(void* out, int64_t count, int64_t token,
                         const TokenOutputs<Real>& result) {
  for (int row = 0; row < kNumPolicyRows; ++row) {
    static_cast<Real*>(out)[row * count + token] = result.row[row];
  }
}

// policy_tokens of one token.
template <class Real>
RL_DEVICE void tokens_body(const TokensParams& p, int64_t token) {
  const auto x = token_inputs(p.inputs, token, static_cast<const Real*>(p.logp)[token],
                              static_cast<const Real*>(p.entropy)[token]);
  put_token(p.out, p.count, token, policy_token(x, p.settings));
}

// policy_rows of one row. Calls may follow each other without a barrier: between a row's last use
// of a part of `shared` and the next row's first lies a barrier of `join`.
template <class T, class Block>
RL_DEVICE void policy_row(Block& block, const PolicyRowsParams& p, int64_t row,
                          RowShared<Statistic<T>>& shared) {
  using Real = Statistic<T>;
  const Logits& x = p.logits;
  T* at = row_at<T>(x, row);
  Real* stats = static_cast<Real*>(p.stats);
  auto inputs = token_inputs<Real>(p.inputs, row, 0, 0);
  if (inputs.weight == 0) {
    write_zeros(block, at, x.width);
    if (block.thread() == 0) {
      put_token(p.out, x.rows, row, policy_token(inputs, p.settings));
      stats[row] = stats[x.rows + row] = 0;
    }
    return;
  }
  const Real rate = rate_of<Real>(x.temperature);
  const Span<T> span(at, x.valid);
  const int64_t id = x.tokens[row];
  const auto part = share<T>(block, span, rate);
  const int64_t token = column(x, id);
  const T element = token < 0 ? T{} : at[token];
  const auto m = join(block, part, rate, shared);
  if (block.thread() == 0) {
    const RowFacts facts = finish(m, rate, x.temperature);
    const double log_sum = log(facts.sum), entropy = log_sum - facts.dot / facts.sum;
    const double logp =
        token < 0 ? std::numeric_limits<double>::quiet_NaN()
                  : static_cast<double>(widen(element)) / x.temperature - facts.x_top - log_sum;
    inputs.logp = static_cast<Real>(logp);
    inputs.entropy = static_cast<Real>(entropy);
    const auto result = policy_token(inputs, p.settings);
    const double g = static_cast<double>(result.row[kGradLogp]);
    const double h = static_cast<double>(result.row[kGradEntropy]);
    shared.zero = g == 0 && h == 0;
    shared.line = line_of(shift_of(m.top, rate), facts.unit, facts.start - log_sum,
                          exp2(facts.start / facts.unit) / facts.sum, x.temperature, g, h, entropy);
    shared.token_gradient = token_gradient(logp, entropy, g, h, x.temperature);
    put_token(p.out, x.rows, row, result);
    stats[row] = inputs.logp;
    stats[x.rows + row] = inputs.entropy;
  }
  block.sync();  // the token's logit is read, the line is known
  if (shared.zero) return write_zeros(block, at, x.width);
  write_line<T>(block, span, at, shared.line, rate);
  write_zeros(block, at + x.valid, x.width - x.valid);
  block.sync();
  if (block.thread() == 0 && token >= 0) {
    at[token] = narrow<T>(static_cast<Real>(shared.token_gradient));
  }
}

// policy_rows of every `step`-th row from `first` on.
template <class T, class Block>
RL_DEVICE void rows_body(Block& block, const PolicyRowsParams& p, int64_t first, int64_t step,
                         RowShared<Statistic<T>>& shared) {
  for (int64_t row = first; row < p.logits.rows; row += step) {
    policy_row<T>(block, p, row, shared);
  }
}

}  // namespace rlcore::loss
