#include "loss/row_host.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/isa.h"

namespace rlcore::loss {
namespace {

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

template <class T>
constexpr T kMinusInf = -std::numeric_limits<T>::infinity();
template <>
constexpr Bf16 kMinusInf<Bf16>{0xff80};
template <>
constexpr Fp16 kMinusInf<Fp16>{0xfc00};

// Of a float whose last 12 bits are dropped: products of two such floats are exact.
constexpr uint32_t kHighBits = 0xfffff000u;

// 1 / temperature in two floats, so that x has the rounding of one multiplication in double.
struct Scale {
  explicit Scale(double t)
      : temperature(t), high(static_cast<float>(1 / t)), low(static_cast<float>(1 / t - high)) {
    uint32_t bits;
    std::memcpy(&bits, &high, sizeof bits);
    bits &= kHighBits;
    std::memcpy(&short_high, &bits, sizeof bits);
    short_low = static_cast<float>(1 / t - short_high);
  }
  bool is_one() const { return temperature == 1; }
  double temperature;
  float high, low;
  float short_high, short_low;  // the same, the first part with 12 bits
};

template <class Real>
struct Stats {
  Real top;
  double sum, dot;
};
using RowStats = Stats<float>;

// The gradient of a row: e^d (a + b d) with d = x - shift.
struct Slope {
  float shift, a, b;
};

template <class T>
struct RowKernels {
  RowStats (*stats)(const T* row, int64_t count, const Scale&);
  void (*grad)(const T* row, T* out, int64_t count, const Scale&, const Slope&);
};

// One NaN for all: rounding to bf16 counts on its low bits.
inline float quieted(float v) { return v == v ? v : std::numeric_limits<float>::quiet_NaN(); }

inline float scaled(float v, const Scale& scale) {
  return static_cast<float>(static_cast<double>(v) / scale.temperature);
}

// Moves the sums to a larger maximum.
template <class Real>
void raise(Stats<Real>& s, Real top) {
  if (s.top != -std::numeric_limits<Real>::infinity()) {
    const double gap = static_cast<double>(s.top) - static_cast<double>(top);
    const double factor = std::exp(gap);
    s.dot = (s.dot + s.sum * gap) * factor;
    s.sum *= factor;
  }
  s.top = top;
}

#define RL_KERNELS "loss/row_simd.h"
#include "common/each_isa.h"

template <class T>
const RowKernels<T>& kernels() {
  return RL_CHOSEN(kernels<T>);
}

// Element types as the scalar code sees them.
template <class T>
struct Element {
  using Real = float;
  static Real get(const T* at) { return baseline::load_part(at, 1).a[0]; }
  static void put(T* at, double v) {
    T part[baseline::kStep];
    const auto value = baseline::floats(quieted(static_cast<float>(v)));
    baseline::store(part, {value, value});
    *at = part[0];
  }
  static Stats<Real> stats(const T* row, int64_t count, const Scale& scale) {
    return kernels<T>().stats(row, count, scale);
  }
  static void grad(const T* row, T* out, int64_t count, const Scale& scale, double shift, double a,
                   double b) {
    kernels<T>().grad(row, out, count, scale,
                      Slope{quieted(static_cast<float>(shift)), quieted(static_cast<float>(a)),
                            quieted(static_cast<float>(b))});
  }
};

// Double is what tests differentiate in: plain loops.
template <>
struct Element<double> {
  using Real = double;
  static double get(const double* at) { return *at; }
  static void put(double* at, double v) { *at = v; }
  static Stats<double> stats(const double* row, int64_t count, const Scale& scale) {
    Stats<double> out{-std::numeric_limits<double>::infinity(), 0.0, 0.0};
    for (int64_t i = 0; i < count; ++i) out.top = row[i] > out.top ? row[i] : out.top;
    out.top /= scale.temperature;
    const double shift = out.top == -std::numeric_limits<double>::infinity() ? 0.0 : out.top;
    for (int64_t i = 0; i < count; ++i) {
      const double d = row[i] / scale.temperature - shift, e = std::exp(d);
      out.sum += e;
      if (e != 0) out.dot += e * d;
    }
    return out;
  }
  static void grad(const double* row, double* out, int64_t count, const Scale& scale, double shift,
                   double a, double b) {
    for (int64_t i = 0; i < count; ++i) {
      const double d = row[i] / scale.temperature - shift, e = std::exp(d);
      out[i] = e == 0 ? e * a : e * (a + b * d);  // 0, or NaN of a row without statistics
    }
  }
};

// The column of a row's token in this shard, or -1.
int64_t column(const Logits& x, int64_t row) {
  const int64_t id = x.tokens[row];
  return id >= x.first && id - x.first < x.valid ? id - x.first : -1;
}

// x - top, -inf also where all of a row is.
double relative(double logit, double temperature, double top) {
  return logit == -std::numeric_limits<double>::infinity() ? logit : logit / temperature - top;
}

template <class T>
void stats_rows(const StatsParams& p, int64_t begin, int64_t end) {
  using E = Element<T>;
  using Real = typename E::Real;
  const Logits& x = p.logits;
  const Scale scale(x.temperature);
  Real* out = static_cast<Real*>(p.out);
  for (int64_t row = begin; row < end; ++row) {
    const T* at = static_cast<const T*>(x.data) + row * x.stride;
    const auto s = E::stats(at, x.valid, scale);
    const int64_t token = column(x, row);
    out[row] = s.top;
    out[x.rows + row] = static_cast<Real>(s.sum);
    out[2 * x.rows + row] = static_cast<Real>(s.dot);
    out[3 * x.rows + row] =
        token < 0 ? -std::numeric_limits<Real>::infinity()
                  : static_cast<Real>(relative(static_cast<double>(E::get(at + token)),
                                               x.temperature, static_cast<double>(s.top)));
  }
}

template <class T>
void clear(T* at, int64_t count) {
  if (count > 0) std::memset(static_cast<void*>(at), 0, static_cast<size_t>(count) * sizeof(T));
}

// Writes a row's gradient. `shift` and `log_sum` give log p = x - shift - log_sum: shift is what
// the row is read with, so it is a value of the statistics' type.
template <class T>
void write_grad(const Logits& x, int64_t row, T* out, double shift, double log_sum, double entropy,
                double g, double h) {
  using E = Element<T>;
  if (g == 0 && h == 0) return clear(out, x.width);
  const T* at = static_cast<const T*>(x.data) + row * x.stride;
  const int64_t token = column(x, row);
  const double logit = token < 0 ? 0.0 : static_cast<double>(E::get(at + token));
  const double factor = 1 / (x.temperature * std::exp(log_sum));
  E::grad(at, out, x.valid, Scale(x.temperature), shift, -(g + h * (entropy - log_sum)) * factor,
          -h * factor);
  if (token >= 0) {
    // g (1 - p), where 1 - p would lose what matters of a likely token.
    const double logp = logit / x.temperature - shift - log_sum, p = std::exp(logp);
    const double entropy_part = p == 0 ? 0.0 : h * p * (logp + entropy);
    E::put(out + token, (-g * std::expm1(logp) - entropy_part) / x.temperature);
  }
  clear(out + x.valid, x.width - x.valid);
}

template <class T>
void grad_rows(const GradParams& p, int64_t begin, int64_t end) {
  using Real = typename Element<T>::Real;
  const auto value = [](const void* at, int64_t row) {
    return at ? static_cast<double>(static_cast<const Real*>(at)[row]) : 0.0;
  };
  for (int64_t row = begin; row < end; ++row) {
    write_grad(p.logits, row, static_cast<T*>(p.out) + row * p.out_stride, value(p.lse, row),
               value(p.lse, p.logits.rows + row), value(p.entropy, row), value(p.grad_logp, row),
               value(p.grad_entropy, row));
  }
}

template <class Real>
void put_token(void* out, int64_t count, int64_t token, const TokenOutputs<Real>& result) {
  for (int row = 0; row < kNumPolicyRows; ++row) {
    static_cast<Real*>(out)[row * count + token] = result.row[row];
  }
}

template <class Real>
void policy_range(const TokensParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto x = token_inputs(p.inputs, i, static_cast<const Real*>(p.logp)[i],
                                static_cast<const Real*>(p.entropy)[i]);
    put_token(p.out, p.count, i, policy_token(x, p.settings));
  }
}

template <class T>
void policy_row_range(const PolicyRowsParams& p, int64_t begin, int64_t end) {
  using E = Element<T>;
  using Real = typename E::Real;
  const Logits& x = p.logits;
  const Scale scale(x.temperature);
  Real* stats = static_cast<Real*>(p.stats);
  for (int64_t row = begin; row < end; ++row) {
    T* at = static_cast<T*>(x.data) + row * x.stride;
    auto inputs = token_inputs<Real>(p.inputs, row, 0, 0);
    double shift = 0, log_sum = 0, entropy = 0;
    if (!(inputs.weight == 0)) {
      const auto s = E::stats(at, x.valid, scale);
      const int64_t token = column(x, row);
      const double target = token < 0 ? std::numeric_limits<double>::quiet_NaN()
                                      : static_cast<double>(E::get(at + token)) / x.temperature;
      shift = static_cast<double>(s.top);
      log_sum = std::log(s.sum);
      entropy = log_sum - s.dot / s.sum;
      inputs.logp = static_cast<Real>(target - shift - log_sum);
      inputs.entropy = static_cast<Real>(entropy);
    }
    const auto result = policy_token(inputs, p.settings);
    put_token(p.out, x.rows, row, result);
    stats[row] = inputs.logp;
    stats[x.rows + row] = inputs.entropy;
    write_grad(x, row, at, shift, log_sum, entropy, static_cast<double>(result.row[kGradLogp]),
               static_cast<double>(result.row[kGradEntropy]));
  }
}

// Calls `f` with a null pointer of the element's type.
template <class F>
void dispatch(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kBf16:
      return f(static_cast<Bf16*>(nullptr));
    case Dtype::kFp16:
      return f(static_cast<Fp16*>(nullptr));
    case Dtype::kFp32:
      return f(static_cast<float*>(nullptr));
    case Dtype::kFp64:
      return f(static_cast<double*>(nullptr));
  }
}

}  // namespace

void row_stats(const StatsParams& p, const ParallelFor& parallel_for) {
  dispatch(p.logits.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(p.logits.rows, [&](int64_t a, int64_t b) { stats_rows<T>(p, a, b); });
  });
}

void row_grad(const GradParams& p, const ParallelFor& parallel_for) {
  dispatch(p.logits.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(p.logits.rows, [&](int64_t a, int64_t b) { grad_rows<T>(p, a, b); });
  });
}

void policy_tokens(const TokensParams& p, const ParallelFor& parallel_for) {
  parallel_for(p.count, [&](int64_t a, int64_t b) {
    p.is_double ? policy_range<double>(p, a, b) : policy_range<float>(p, a, b);
  });
}

void policy_rows(const PolicyRowsParams& p, const ParallelFor& parallel_for) {
  dispatch(p.logits.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    parallel_for(p.logits.rows, [&](int64_t a, int64_t b) { policy_row_range<T>(p, a, b); });
  });
}

}  // namespace rlcore::loss
