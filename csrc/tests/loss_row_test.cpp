// Host test of csrc/loss: the bodies of the device kernels on fibers, and the CPU's row code, both
// against a plain reference in double. Built with and without sanitizers by
// tests/native/test_loss_native.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <thread>
#include <vector>

#include "common/isa.h"
#include "loss/launch.h"
#include "loss/row.h"
#include "loss/row_host.h"

using namespace rlcore::loss;
using rlcore::HostBlock;

#define CHECK(condition)                                                         \
  if (!(condition)) {                                                            \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                                \
  }

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Random {
  uint64_t state;
  double uniform() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
  }
  double normal() {  // sum of twelve: as good as needed
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform() * static_cast<double>(n)); }
};

template <class T>
constexpr Dtype kDtype = Dtype::kFp64;
template <>
constexpr Dtype kDtype<Bf16> = Dtype::kBf16;
template <>
constexpr Dtype kDtype<Fp16> = Dtype::kFp16;
template <>
constexpr Dtype kDtype<float> = Dtype::kFp32;

// The unit of rounding of an element, and the least positive step.
template <class T>
double rounding() {
  return kDtype<T> == Dtype::kBf16   ? 1.0 / 256
         : kDtype<T> == Dtype::kFp16 ? 1.0 / 2048
         : kDtype<T> == Dtype::kFp32 ? 1e-6
                                     : 1e-12;
}
template <class T>
double least() {
  return kDtype<T> == Dtype::kFp16 ? 6e-8 : kDtype<T> == Dtype::kFp64 ? 1e-300 : 1e-37;
}

// Logits with a row stride, a misaligned start and padding; what lies around them stays as it is.
template <class T>
struct Matrix {
  Matrix(int64_t rows_, int64_t width_, int64_t gap, int64_t offset_, double sentinel)
      : rows(rows_),
        width(width_),
        stride(width_ + gap),
        offset(offset_),
        mark(sentinel),
        data(static_cast<size_t>(rows * stride + offset),
             narrow<T>(static_cast<Statistic<T>>(mark))) {}
  T* at(int64_t row) { return data.data() + offset + row * stride; }
  double get(int64_t row, int64_t column) { return static_cast<double>(widen(at(row)[column])); }
  void set(int64_t row, int64_t column, double v) {
    at(row)[column] = narrow<T>(static_cast<Statistic<T>>(v));
  }
  void check_surroundings() {
    for (int64_t i = 0; i < offset; ++i)
      CHECK(static_cast<double>(widen(data[static_cast<size_t>(i)])) == mark);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = width; c < stride; ++c) CHECK(get(row, c) == mark);
    }
  }
  int64_t rows, width, stride, offset;
  double mark;
  std::vector<T> data;
};

struct Reference {
  double top = -kInf, lse = 0, entropy = 0;
  std::vector<double> logp;
};

template <class T>
Reference reference(Matrix<T>& m, int64_t row, int64_t valid, double temperature) {
  Reference r;
  for (int64_t c = 0; c < valid; ++c) r.top = std::max(r.top, m.get(row, c) / temperature);
  double sum = 0;
  for (int64_t c = 0; c < valid; ++c) sum += std::exp(m.get(row, c) / temperature - r.top);
  r.lse = r.top + std::log(sum);
  for (int64_t c = 0; c < valid; ++c) {
    r.logp.push_back(m.get(row, c) / temperature - r.lse);
    const double p = std::exp(r.logp.back());
    if (p > 0) r.entropy -= p * r.logp.back();
  }
  return r;
}

double gradient(const Reference& r, int64_t column, int64_t token, double g, double h,
                double temperature) {
  const double logp = r.logp[static_cast<size_t>(column)], p = std::exp(logp);
  const double entropy = p > 0 ? h * p * (logp + r.entropy) : 0;
  return (g * ((column == token ? 1 : 0) - p) - entropy) / temperature;
}

bool near(double a, double b, double relative, double absolute) {
  return std::isnan(a) ? std::isnan(b) : std::fabs(a - b) <= absolute + relative * std::fabs(b);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Shape {
  int64_t rows, width, valid, first, gap, offset;
  double temperature, spread, mean = 0;
};

// How the rows are run.
struct Way {
  int threads;  // of a block on fibers; 0: the CPU's code
};

const ParallelFor kSerial = [](int64_t count, const Range& f) { f(0, count); };
const ParallelFor kThreaded = [](int64_t count, const Range& f) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] { f(count * i / 3, count * (i + 1) / 3); });
  }
  for (auto& t : threads) t.join();
};

constexpr int64_t kBlocks = 3;  // of policy_rows; some cases have fewer rows, some more

// One block takes the rows one after the other.
template <class F>
void on_fibers(const Way& way, size_t shared_bytes, int64_t rows, const F& f) {
  HostBlock::Fibers(way.threads, shared_bytes, [&](HostBlock& block, void* shared) {
    for (int64_t row = 0; row < rows; ++row) {
      f(block, shared, row);
      block.sync();
    }
  }).run();
}

template <class T>
void run_stats(const Way& way, const StatsParams& p) {
  if (!way.threads) return row_stats(p, kThreaded);
  using Shared = RowShared<Statistic<T>>;
  on_fibers(way, sizeof(Shared), p.logits.rows, [&](HostBlock& block, void* shared, int64_t row) {
    stats_body<T>(block, p, row, *static_cast<Shared*>(shared));
  });
}

template <class T>
void run_grad(const Way& way, const GradParams& p) {
  if (!way.threads) return row_grad(p, kThreaded);
  on_fibers(way, 0, p.logits.rows,
            [&](HostBlock& block, void*, int64_t row) { grad_body<T>(block, p, row); });
}

template <class T>
void run_rows(const Way& way, const PolicyRowsParams& p) {
  if (!way.threads) return policy_rows(p, kThreaded);
  using Shared = RowShared<Statistic<T>>;
  on_fibers(way, sizeof(Shared), kBlocks, [&](HostBlock& block, void* shared, int64_t first) {
    rows_body<T>(block, p, first, kBlocks, *static_cast<Shared*>(shared));
  });
}

// The settings of a policy that uses everything.
PolicySettings settings() {
  PolicySettings s = {};
  s.value[kClipLow] = 0.2, s.value[kClipHigh] = 0.28, s.value[kClipDual] = 3;
  s.value[kIsMode] = 1, s.value[kIsThreshold] = 2, s.value[kIsMean] = 1.1;
  s.value[kKlType] = kK3, s.value[kKlCoef] = 0.1, s.value[kEntropyCoef] = 0.01;
  s.value[kLogLimit] = 20;
  return s;
}

// One case: random logits of a shape, statistics, gradients and the whole policy, against the
// reference.
template <class T>
struct Case {
  using Real = Statistic<T>;

  Case(const Shape& shape, uint64_t seed)
      : s(shape), random{seed}, m(s.rows, s.width, s.gap, s.offset, 7.0) {
    for (int64_t row = 0; row < s.rows; ++row) {
      for (int64_t c = 0; c < s.width; ++c) m.set(row, c, s.mean + random.normal() * s.spread);
      if (s.valid > 2) m.set(row, random.below(s.valid), -kInf);
      int64_t token = random.below(std::max<int64_t>(s.valid, 1));
      while (s.valid > 2 && m.get(row, token) == -kInf) token = random.below(s.valid);
      tokens.push_back(s.first + token);
      references.push_back(reference(m, row, s.valid, s.temperature));
    }
  }

  Logits logits(Matrix<T>& of) {
    return {of.at(0), kDtype<T>, s.rows,        s.width,      s.valid,
            s.first,  of.stride, tokens.data(), s.temperature};
  }
  double error() const { return sizeof(Real) == 8 ? 1e-11 : 2e-6; }

  void check_stats(const Way& way) {
    std::vector<int64_t> kept = tokens;
    if (s.rows > 1) tokens[1] = s.first + s.valid;  // of another shard
    if (s.rows > 2) tokens[2] = s.first - 1;
    std::vector<Real> out(static_cast<size_t>(4 * s.rows), Real(9)), again = out;
    run_stats<T>(way, {logits(m), out.data()});
    run_stats<T>(way, {logits(m), again.data()});
    CHECK(same_bits(out, again));
    for (int64_t row = 0; row < s.rows; ++row) {
      const auto at = [&](int64_t i) {
        return static_cast<double>(out[static_cast<size_t>(i * s.rows + row)]);
      };
      const Reference& r = references[static_cast<size_t>(row)];
      const int64_t token = tokens[static_cast<size_t>(row)] - s.first;
      CHECK(at(0) == static_cast<double>(static_cast<Real>(r.top)));
      const bool mine = token >= 0 && token < s.valid;
      CHECK(mine || at(3) == -kInf);
      if (!s.valid) {
        CHECK(at(1) == 0 && at(2) == 0);
        continue;
      }
      const double log_sum = std::log(at(1));
      CHECK(near(at(0) + log_sum, r.lse, error(), error()));
      CHECK(near(log_sum - at(2) / at(1), r.entropy, error(), error()));
      if (mine) {
        CHECK(near(at(3) - log_sum, r.logp[static_cast<size_t>(token)], error(), error()));
      }
    }
    m.check_surroundings();
    tokens = kept;
  }

  // `out` against the line g, h of each row.
  void check_gradients(Matrix<T>& out, const std::vector<Real>& g, const std::vector<Real>& h) {
    for (int64_t row = 0; row < s.rows; ++row) {
      const auto i = static_cast<size_t>(row);
      const double gr = static_cast<double>(g[i]), hr = static_cast<double>(h[i]);
      for (int64_t c = 0; c < s.width; ++c) {
        const double expected =
            c < s.valid ? gradient(references[i], c, tokens[i] - s.first, gr, hr, s.temperature)
                        : 0;
        if (c >= s.valid) {
          CHECK(out.get(row, c) == 0);
          continue;
        }
        // log p + H may cancel: the error is one of the terms, by the rounding of log p.
        const double logp = references[i].logp[static_cast<size_t>(c)], p = std::exp(logp);
        const double held = std::max(logp, -100.0);
        const double size =
            (std::fabs(gr) + std::fabs(hr) * (1 + references[i].entropy - held)) / s.temperature;
        const double factor = sizeof(Real) == 8 ? 1e-11 : 1e-6 + 1.2e-7 * (4 - held);
        // Probabilities below 1.2e-38 count as 0 in float.
        const double flushed = sizeof(Real) == 8 ? 0 : 1.2e-38 * size;
        CHECK(near(out.get(row, c), expected, rounding<T>(),
                   factor * size * p + least<T>() + flushed));
      }
    }
    out.check_surroundings();
  }

  void check_grad(const Way& way, bool in_place, int64_t out_gap, int64_t out_offset) {
    std::vector<Real> lse, log_sums, entropy, g, h;
    for (int64_t row = 0; row < s.rows; ++row) {
      const Reference& r = references[static_cast<size_t>(row)];
      lse.push_back(static_cast<Real>(r.top));
      log_sums.push_back(static_cast<Real>(r.lse - static_cast<double>(lse.back())));
      entropy.push_back(static_cast<Real>(references[static_cast<size_t>(row)].entropy));
      g.push_back(static_cast<Real>(row % 3 == 0 ? 0 : random.normal()));
      h.push_back(static_cast<Real>(row % 2 == 0 ? 0 : random.normal()));
    }
    lse.insert(lse.end(), log_sums.begin(), log_sums.end());
    Matrix<T> copy = m, other(s.rows, s.width, out_gap, out_offset, 5.0);
    Matrix<T>& out = in_place ? copy : other;
    Matrix<T>& from = in_place ? copy : m;
    run_grad<T>(
        way, {logits(from), lse.data(), entropy.data(), g.data(), h.data(), out.at(0), out.stride});
    check_gradients(out, g, h);
    Matrix<T> plain = m;
    const std::vector<Real> zero(g.size(), Real(0));
    run_grad<T>(way, {logits(plain), lse.data(), entropy.data(), g.data(), nullptr, plain.at(0),
                      plain.stride});
    check_gradients(plain, g, zero);
  }

  void check_rows(const Way& way) {
    std::vector<Real> old, sampler, ref, advantage, weight;
    for (int64_t row = 0; row < s.rows; ++row) {
      const auto i = static_cast<size_t>(row);
      const double logp = references[i].logp[static_cast<size_t>(tokens[i] - s.first)];
      old.push_back(static_cast<Real>(logp + 0.2 * random.normal()));
      sampler.push_back(static_cast<Real>(static_cast<double>(old[i]) + 0.5 * random.normal()));
      ref.push_back(static_cast<Real>(logp + 0.2 * random.normal()));
      advantage.push_back(static_cast<Real>(random.normal()));
      weight.push_back(static_cast<Real>(row % 4 == 3 ? 0 : 0.5 + random.uniform()));
    }
    Matrix<T> copy = m, again = m;
    std::vector<Real> stats(2 * static_cast<size_t>(s.rows)),
        out(kNumPolicyRows * static_cast<size_t>(s.rows));
    auto stats2 = stats, out2 = out;
    const PolicyInputs inputs{old.data(), sampler.data(), ref.data(), advantage.data(),
                              weight.data()};
    run_rows<T>(way, {logits(copy), inputs, settings(), stats.data(), out.data()});
    run_rows<T>(way, {logits(again), inputs, settings(), stats2.data(), out2.data()});
    CHECK(same_bits(copy.data, again.data));
    CHECK(same_bits(out, out2));
    std::vector<Real> g, h;
    for (int64_t row = 0; row < s.rows; ++row) {
      const auto i = static_cast<size_t>(row), n = static_cast<size_t>(s.rows);
      const Reference& r = references[i];
      const bool trained = weight[i] != 0;
      CHECK(trained || stats[i] == 0);
      if (trained) {
        const double logp = r.logp[static_cast<size_t>(tokens[i] - s.first)];
        CHECK(near(static_cast<double>(stats[i]), logp, error(), error()));
        CHECK(near(static_cast<double>(stats[n + i]), r.entropy, error(), error()));
      }
      const auto expected = policy_token<Real>(
          {stats[i], stats[n + i], old[i], sampler[i], ref[i], advantage[i], weight[i]},
          settings());
      for (int k = 0; k < kNumPolicyRows; ++k) {
        CHECK(expected.row[k] == out[static_cast<size_t>(k) * n + i]);
      }
      g.push_back(expected.row[kGradLogp]);
      h.push_back(expected.row[kGradEntropy]);
    }
    check_gradients(copy, g, h);
  }

  Shape s;
  Random random;
  Matrix<T> m;
  std::vector<int64_t> tokens;
  std::vector<Reference> references;
};

// The CPU's code; blocks of several warps and of one.
constexpr Way kWays[] = {{0}, {64}, {32}};

const Shape kShapes[] = {
    // rows width valid first gap offset temperature spread
    {4, 1, 1, 0, 0, 0, 1.0, 3},
    {4, 2, 1, 7, 1, 1, 1.0, 3},
    {4, 7, 7, 0, 3, 2, 0.7, 1},
    {4, 64, 61, 128, 0, 0, 1.0, 4},
    {4, 130, 130, 0, 5, 3, 1.3, 9},
    {4, 1027, 1021, 0, 1, 1, 0.6, 5},
    {2, 5001, 4999, 9, 7, 5, 1, 2},
    {2, 2100, 2048, 0, 0, 8, 1, 30},
    // far from 0: an ulp of the logits' size would be too much
    {4, 301, 299, 0, 1, 1, 0.6, 3, 40},
    {4, 301, 299, 0, 1, 1, 0.7, 3, -1000},
};

template <class T>
void check_all(const std::vector<Way>& ways) {
  uint64_t seed = 1;
  for (const Shape& shape : kShapes) {
    for (const Way& way : ways) {
      Case<T> c(shape, ++seed);
      c.check_stats(way);
      c.check_grad(way, true, 0, 0);
      c.check_grad(way, false, shape.gap, shape.offset);
      c.check_grad(way, false, shape.gap + 1, shape.offset + 1);
      c.check_rows(way);
    }
  }
  // No columns of one's own, no columns at all, no rows.
  for (const Way& way : ways) {
    for (const Shape& shape : {Shape{2, 5, 0, 9, 0, 0, 1, 1}, Shape{2, 0, 0, 9, 0, 0, 1, 1},
                               Shape{0, 5, 5, 0, 0, 0, 1, 1}}) {
      Case<T>(shape, 1).check_stats(way);
    }
  }
}

// A row with NaN or +inf is NaN throughout; one of -inf alone too; others are as they were.
template <class T>
void check_special(const Way& way) {
  using Real = Statistic<T>;
  constexpr int64_t kRows = 5, kWidth = 100;
  Matrix<T> m(kRows, kWidth, 0, 0, 0.0);
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t c = 0; c < kWidth; ++c)
      m.set(row, c, row == 3 ? -kInf : static_cast<double>(c % 7));
  }
  m.set(1, 70, std::nan(""));
  m.set(2, 31, kInf);
  for (int64_t c = 0; c < kWidth - 1; ++c) m.set(4, c, -kInf);
  const std::vector<int64_t> tokens(kRows, kWidth - 1);
  const Logits x{m.at(0), kDtype<T>, kRows, kWidth, kWidth, 0, kWidth, tokens.data(), 0.9};
  std::vector<Real> out(4 * kRows), lse(2 * kRows), entropy;
  run_stats<T>(way, {x, out.data()});
  for (size_t row = 0; row < kRows; ++row) {
    const Real top = out[row], sum = out[kRows + row], dot = out[2 * kRows + row];
    const Real logp = out[3 * kRows + row] - std::log(sum);
    lse[row] = top, lse[kRows + row] = std::log(sum);
    entropy.push_back(std::log(sum) - dot / sum);
    CHECK(std::isnan(logp) == (row >= 1 && row <= 3));
    CHECK(std::isnan(entropy.back()) == (row >= 1 && row <= 3));
  }
  CHECK(std::fabs(entropy[4]) < 1e-6);  // one column has all
  CHECK(out[3] == -std::numeric_limits<Real>::infinity());
  const std::vector<Real> g(kRows, Real(1)), h(kRows, Real(0.5));
  run_grad<T>(way, {x, lse.data(), entropy.data(), g.data(), h.data(), m.at(0), kWidth});
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t c = 0; c < kWidth; ++c) CHECK(std::isnan(m.get(row, c)) == (row >= 1 && row <= 3));
  }
}

// Conversions of 16 bits, all of them, there and back.
void check_conversions() {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Fp16 half{static_cast<uint16_t>(bits)};
    const Bf16 brain{static_cast<uint16_t>(bits)};
    const float a = widen(half), b = widen(brain);
    CHECK(a != a ? std::isnan(widen(narrow<Fp16>(a))) : narrow<Fp16>(a).bits == bits);
    CHECK(b != b ? std::isnan(widen(narrow<Bf16>(b))) : narrow<Bf16>(b).bits == bits);
  }
  CHECK(widen(Fp16{0x3c00}) == 1 && widen(Fp16{1}) == std::ldexp(1.0f, -24));
  CHECK(narrow<Fp16>(65519.0f).bits == 0x7bff && narrow<Fp16>(65520.0f).bits == 0x7c00);
  CHECK(narrow<Fp16>(1.00048828125f).bits == 0x3c00);  // a tie, to even
  CHECK(narrow<Fp16>(2047.5f * 5.9604645e-8f).bits == 0x0800);
  CHECK(narrow<Bf16>(1.00390625f).bits == 0x3f80 && narrow<Bf16>(1.01171875f).bits == 0x3f82);
}

// Rows in flight of policy_rows, with the threads of each.
void check_grids() {
  struct Device {
    int64_t processors, l2_bytes;
  };
  constexpr Device kH100{132, 50 << 20}, kA100{108, 40 << 20}, kB200{148, 126 << 20};
  const auto is = [](Device on, int64_t width, int64_t bytes, int64_t blocks, int threads) {
    const RowsGrid grid = rows_grid(100000, width, width * bytes, on.processors, on.l2_bytes);
    return grid.blocks == blocks && grid.threads == threads;
  };
  CHECK(is(kH100, 152064, 2, 132, 768));
  CHECK(is(kA100, 152064, 2, 108, 768));
  CHECK(is(kB200, 152064, 2, 296, 384));
  CHECK(is(kH100, 152064, 4, 68, 768));
  CHECK(is(kH100, 65536, 2, 264, 384));
  CHECK(is(kH100, 32000, 2, 396, 256));
  CHECK(is(kH100, 8192, 2, 1584, 64));
  CHECK(is(kH100, 8192, 4, 396, 256));
  CHECK(is(kH100, 4 << 20, 4, 132, 768));  // 2 rows would fit
  CHECK(is(kH100, 0, 2, 1584, 64));
  CHECK(rows_grid(7, 152064, 304128, 132, 50 << 20).blocks == 7);
}

// The CPU's code does not depend on the number of threads.
template <class T>
void check_threads() {
  Case<T> c({7, 3001, 3000, 0, 0, 0, 0.8, 4}, 3);
  std::vector<Statistic<T>> a(28), b(28);
  row_stats({c.logits(c.m), a.data()}, kSerial);
  row_stats({c.logits(c.m), b.data()}, kThreaded);
  CHECK(same_bits(a, b));
}

// The CPU's row code of the instruction set that is chosen.
void check_host() {
  check_all<Bf16>({kWays[0]});
  check_all<Fp16>({kWays[0]});
  check_all<float>({kWays[0]});
  check_special<Bf16>(kWays[0]);
  check_special<Fp16>(kWays[0]);
  check_special<float>(kWays[0]);
  check_threads<Bf16>();
  check_threads<float>();
}

}  // namespace

int main() {
  check_conversions();
  check_grids();
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    const bool here = rlcore::use_instruction_set(name);
    if (here) check_host();
    std::printf("%s: %s\n", here ? "run" : "not run", name);
  }
  const std::vector<Way> device(kWays + 1, std::end(kWays));
  check_all<Bf16>(device);
  check_all<Fp16>(device);
  check_all<float>(device);
  check_all<double>({std::begin(kWays), std::end(kWays)});
  check_special<Bf16>(kWays[1]);
  check_special<Fp16>(kWays[1]);
  check_special<float>(kWays[1]);
  check_special<double>(kWays[0]);
  check_special<double>(kWays[1]);
  return 0;
}
