// Matrix products, a layer and the sampling of a decode step, in every instruction set of this
// machine, against loops in double. Prints a line for each set; the exit status says whether all
// agreed.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common/isa.h"
#include "decode/layer.h"
#include "decode/sample.h"
#include "product/product.h"

namespace {

using rlcore::decode::Layer;
using rlcore::decode::Tokens;

using Numbers = std::vector<float>;

void require(bool holds, const char* what, double found) {
  if (holds) return;
  std::fprintf(stderr, "%s: %g\n", what, found);
  std::exit(1);
}

Numbers random(int64_t count, unsigned seed, float scale = 1) {
  std::mt19937 source(seed);
  std::normal_distribution<float> normal;
  Numbers made(static_cast<size_t>(count));
  for (float& v : made) v = scale * normal(source);
  return made;
}

// The largest difference, over the largest number.
double apart(const Numbers& a, const std::vector<double>& b) {
  double worst = 0, most = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
    most = std::max(most, std::abs(b[i]));
  }
  return worst / most;
}

// out + x w; x is [rows, depth], or transposed in memory.
void check_product(int64_t rows, int64_t depth, int64_t width, bool is_transposed) {
  const Numbers x = random(rows * depth, 1), w = random(depth * width, 2);
  const Numbers start = random(rows * width, 3);
  const int64_t stride = is_transposed ? 1 : depth, step = is_transposed ? rows : 1;
  std::vector<double> want(start.begin(), start.end());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < depth; ++k) {
      const double left = static_cast<double>(x[static_cast<size_t>(i * stride + k * step)]);
      for (int64_t j = 0; j < width; ++j) {
        want[static_cast<size_t>(i * width + j)] +=
            left * static_cast<double>(w[static_cast<size_t>(k * width + j)]);
      }
    }
  }
  Numbers out = start;
  rlcore::product::multiply({x.data(), rows, stride, step}, w.data(), depth, width, out.data());
  require(apart(out, want) < 2e-6, "a product differs by", apart(out, want));
  for (int64_t row = 0; row < rows; ++row) {  // alone it has the same bits
    Numbers one(start.begin() + row * width, start.begin() + (row + 1) * width);
    rlcore::product::multiply({x.data() + row * stride, 1, stride, step}, w.data(), depth, width,
                              one.data());
    require(std::equal(one.begin(), one.end(), out.begin() + row * width),
            "a row of a product differs alone", static_cast<double>(row));
  }
}

struct Sizes {
  int64_t hidden, heads, kv_heads, dim, inner;
  bool has_bias, has_norm;
};

struct Model {
  Sizes s;
  Numbers norm1, qkv, bias, qk_norm, out, norm2, gate_up, down, rope;

  explicit Model(const Sizes& sizes, int64_t positions) : s(sizes) {
    const int64_t width = (s.heads + 2 * s.kv_heads) * s.dim;
    norm1 = random(s.hidden, 11), norm2 = random(s.hidden, 12);
    qkv = random(s.hidden * width, 13, 0.2f), bias = random(width, 14);
    qk_norm = random((s.heads + s.kv_heads) * s.dim, 15);
    out = random(s.heads * s.dim * s.hidden, 16, 0.2f);
    gate_up = random(s.hidden * 2 * s.inner, 17, 0.2f);
    down = random(s.inner * s.hidden, 18, 0.2f);
    for (int64_t i = 0; i < positions * s.dim / 2; ++i) {
      const double angle = 0.37 * static_cast<double>(i);
      rope.push_back(static_cast<float>(std::cos(angle)));
      rope.push_back(static_cast<float>(std::sin(angle)));
    }
  }

  Layer layer() const {
    return {.norm1 = norm1.data(),
            .qkv = qkv.data(),
            .qkv_bias = s.has_bias ? bias.data() : nullptr,
            .qk_norm = s.has_norm ? qk_norm.data() : nullptr,
            .out = out.data(),
            .norm2 = norm2.data(),
            .gate_up = gate_up.data(),
            .down = down.data(),
            .hidden = s.hidden,
            .heads = s.heads,
            .kv_heads = s.kv_heads,
            .dim = s.dim,
            .inner = s.inner,
            .eps = 1e-5f};
  }
};

using Wide = std::vector<double>;

Wide normalised(const double* x, const float* weight, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * x[i];
  const double scale = 1 / std::sqrt(sum / static_cast<double>(count) + 1e-5);
  Wide made;
  for (int64_t i = 0; i < count; ++i) made.push_back(x[i] * scale * static_cast<double>(weight[i]));
  return made;
}

Wide times(const Wide& x, const float* w, int64_t width) {
  Wide made(static_cast<size_t>(width));
  for (size_t k = 0; k < x.size(); ++k) {
    for (size_t j = 0; j < made.size(); ++j) {
      made[j] += x[k] * static_cast<double>(w[k * made.size() + j]);
    }
  }
  return made;
}

// Keys and values of a slot by position, as the reference keeps them.
struct History {
  std::vector<Wide> keys, values;
};

// The layer's output of one token, whose position is the length of its history.
Wide reference(const Model& m, const Wide& x, History& history) {
  const Sizes& s = m.s;
  const auto dim = static_cast<size_t>(s.dim), heads = static_cast<size_t>(s.heads);
  const auto kv_heads = static_cast<size_t>(s.kv_heads);
  const size_t position = history.keys.size();
  Wide qkv = times(normalised(x.data(), m.norm1.data(), s.hidden), m.qkv.data(),
                   (s.heads + 2 * s.kv_heads) * s.dim);
  if (s.has_bias) {
    for (size_t i = 0; i < qkv.size(); ++i) qkv[i] += static_cast<double>(m.bias[i]);
  }
  for (size_t head = 0; head < heads + kv_heads; ++head) {
    double* at = qkv.data() + head * dim;
    if (s.has_norm) {
      const Wide scaled = normalised(at, m.qk_norm.data() + head * dim, s.dim);
      std::copy(scaled.begin(), scaled.end(), at);
    }
    for (size_t i = 0; i < dim; i += 2) {
      const double a = at[i], b = at[i + 1];
      const auto cosine = static_cast<double>(m.rope[position * dim + i]);
      const auto sine = static_cast<double>(m.rope[position * dim + i + 1]);
      at[i] = a * cosine - b * sine, at[i + 1] = a * sine + b * cosine;
    }
  }
  const auto part = [&](size_t from, size_t to) {
    return Wide(qkv.begin() + static_cast<int64_t>(from * dim),
                qkv.begin() + static_cast<int64_t>(to * dim));
  };
  history.keys.push_back(part(heads, heads + kv_heads));
  history.values.push_back(part(heads + kv_heads, heads + 2 * kv_heads));
  Wide mixed(heads * dim);
  for (size_t head = 0; head < heads; ++head) {
    const size_t from = head / (heads / kv_heads) * dim;
    Wide scores;
    double top = -1e300, sum = 0;
    for (const Wide& key : history.keys) {
      double score = 0;
      for (size_t i = 0; i < dim; ++i) score += qkv[head * dim + i] * key[from + i];
      scores.push_back(score / std::sqrt(static_cast<double>(dim)));
      top = std::max(top, scores.back());
    }
    for (double& score : scores) sum += score = std::exp(score - top);
    for (size_t t = 0; t < scores.size(); ++t) {
      for (size_t i = 0; i < dim; ++i) {
        mixed[head * dim + i] += scores[t] / sum * history.values[t][from + i];
      }
    }
  }
  Wide y = x;
  const Wide attended = times(mixed, m.out.data(), s.hidden);
  for (size_t i = 0; i < y.size(); ++i) y[i] += attended[i];
  const Wide both =
      times(normalised(y.data(), m.norm2.data(), s.hidden), m.gate_up.data(), 2 * s.inner);
  Wide gated;
  for (size_t i = 0; i < static_cast<size_t>(s.inner); ++i) {
    gated.push_back(both[i] / (1 + std::exp(-both[i])) * both[static_cast<size_t>(s.inner) + i]);
  }
  const Wide more = times(gated, m.down.data(), s.hidden);
  for (size_t i = 0; i < y.size(); ++i) y[i] += more[i];
  return y;
}

// Slot 2 decodes two tokens a step, as with drafts, slot 0 one; both in one call and each alone.
void check_layer(const Sizes& s) {
  constexpr int64_t kSlots = 3, kCapacity = 21, kSteps = 10;
  const Model m(s, kCapacity);
  const int64_t slab = kSlots * s.kv_heads * kCapacity * s.dim;
  Numbers keys(static_cast<size_t>(slab)), values(keys), keys_alone(keys), values_alone(keys);
  const auto whole = [](int64_t n, const rlcore::decode::Range& range) { range(0, n); };
  const auto halves = [](int64_t n, const rlcore::decode::Range& range) {
    range(0, n / 2), range(n / 2, n);
  };
  History history[2];
  for (int64_t step = 0; step < kSteps; ++step) {
    const int64_t slots[] = {0, 2, 2}, positions[] = {step, 2 * step, 2 * step + 1};
    const Numbers input = random(3 * s.hidden, 100 + static_cast<unsigned>(step));
    Wide want;
    for (int64_t token = 0; token < 3; ++token) {
      const auto from = input.begin() + token * s.hidden;
      const Wide made = reference(m, Wide(from, from + s.hidden), history[token > 0]);
      want.insert(want.end(), made.begin(), made.end());
    }
    Numbers x = input, alone = input;
    const auto run = [&](Numbers& at, int64_t first, int64_t count, Numbers& k, Numbers& v,
                         const rlcore::decode::ParallelFor& parallel_for) {
      rlcore::decode::run_layer(m.layer(),
                                Tokens{.count = count,
                                       .slots = slots + first,
                                       .positions = positions + first,
                                       .rope = m.rope.data(),
                                       .keys = k.data(),
                                       .values = v.data(),
                                       .capacity = kCapacity,
                                       .x = at.data() + first * s.hidden},
                                parallel_for);
    };
    run(x, 0, 3, keys, values, halves);
    for (int64_t token = 0; token < 3; ++token)
      run(alone, token, 1, keys_alone, values_alone, whole);
    require(apart(x, want) < 1e-5, "a layer differs by", apart(x, want));
    require(x == alone, "a token differs alone in step", static_cast<double>(step));
  }
  require(keys == keys_alone && values == values_alone, "the cache differs", 0);
}

// Thousands of tokens of one row: their shares are the probabilities, and so are the log-probs.
void check_sample(int64_t vocab, float scale) {
  constexpr int64_t kRows = 4000;
  const Numbers one = random(vocab, 7, 2);
  Numbers rows, scales(kRows, scale);
  std::vector<int64_t> counters;
  for (int64_t i = 0; i < kRows; ++i) {
    rows.insert(rows.end(), one.begin(), one.end());
    counters.push_back(static_cast<int64_t>(static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15));
  }
  std::vector<char> greedy(kRows);
  greedy[3] = 1;
  std::vector<int64_t> tokens(kRows);
  Wide logps(kRows);
  const rlcore::decode::Logits logits{rows.data(), vocab, counters.data(), scales.data(),
                                      reinterpret_cast<const bool*>(greedy.data())};
  for (const int64_t begin : {int64_t{0}, kRows / 2}) {
    rlcore::decode::sample(logits, begin, begin + kRows / 2, tokens.data(), logps.data());
  }
  Wide weights;
  double total = 0;
  for (const float x : one) {
    weights.push_back(std::exp(static_cast<double>(x) * static_cast<double>(scale)));
    total += weights.back();
  }
  const auto best = std::max_element(weights.begin(), weights.end()) - weights.begin();
  require(tokens[3] == best && logps[3] == 0, "a greedy token", static_cast<double>(tokens[3]));
  Wide counts(weights.size());
  for (size_t i = 0; i < kRows; ++i) {
    const auto token = static_cast<size_t>(tokens[i]);
    if (i != 3)
      require(std::abs(logps[i] - std::log(weights[token] / total)) < 2e-6, "a log-prob", logps[i]);
    counts[token] += 1;
  }
  for (size_t t = 0; t < weights.size(); ++t) {
    const double share = weights[t] / total, spread = std::sqrt(share * (1 - share) / kRows);
    require(std::abs(counts[t] / kRows - share) < 5 * spread + 1e-3, "a share", counts[t] / kRows);
  }
}

}  // namespace

int main() {
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    const bool here = rlcore::use_instruction_set(name);
    for (int64_t rows = 1; here && rows <= 13; ++rows) check_product(rows, 7, 70, rows % 2);
    for (int64_t width = 1; here && width <= 131; width += 5)
      check_product(9, 130, width, width % 2);
    if (here) check_product(40, 300, 64, false), check_product(2, 1, 1, true);
    if (here) check_layer({32, 4, 2, 8, 48, false, true});
    if (here) check_layer({40, 3, 1, 6, 37, true, false});
    if (here) check_layer({128, 4, 4, 64, 100, true, true});
    if (here) check_layer({17, 2, 2, 34, 16, false, false});
    for (int64_t vocab = 1; here && vocab <= 40; vocab += 3) check_sample(vocab, 0.5F);
    std::printf("%s: %s\n", here ? "run" : "not run", name);
  }
  return 0;
}
