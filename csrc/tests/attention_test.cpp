// Attention forward and backward, in every instruction set of this machine, against loops in
// double. Prints a line for each set; the exit status says whether all agreed.
#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common/isa.h"

namespace {

using Numbers = std::vector<float>;
using Wide = std::vector<double>;

void require(bool holds, const char* what, double found) {
  if (holds) return;
  std::fprintf(stderr, "%s: %g\n", what, found);
  std::exit(1);
}

Numbers random(int64_t count, unsigned seed) {
  std::mt19937 source(seed);
  std::normal_distribution<float> normal;
  Numbers made(static_cast<size_t>(count));
  for (float& v : made) v = normal(source);
  return made;
}

// The largest difference, over the largest number.
double apart(const Numbers& a, const Wide& b) {
  double worst = 0, most = 1e-6;
  for (size_t i = 0; i < b.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(a[i]) - b[i]));
    most = std::max(most, std::abs(b[i]));
  }
  return worst / most;
}

struct Unit {
  int64_t queries, keys;
};

void check(const std::vector<Unit>& units, int64_t heads, int64_t groups, int64_t dim) {
  std::vector<int32_t> queries{0}, keys{0};
  for (const Unit& unit : units) {
    queries.push_back(queries.back() + static_cast<int32_t>(unit.queries));
    keys.push_back(keys.back() + static_cast<int32_t>(unit.keys));
  }
  const int64_t asked = queries.back() * heads * dim, known = keys.back() * groups * dim;
  const Numbers q = random(asked, 1), k = random(known, 2), v = random(known, 3);
  const Numbers grad = random(asked, 4);
  Numbers out(q), lse(static_cast<size_t>(queries.back() * heads)), dq(q), dk(k), dv(v);
  const double scale = 0.3;
  const rlcore::attention::Shape shape{heads,          groups,     dim, static_cast<float>(scale),
                                       queries.data(), keys.data()};
  const rlcore::attention::Inputs in{q.data(), k.data(), v.data()};
  for (int64_t unit = 0; unit < static_cast<int64_t>(units.size()); ++unit) {
    for (int64_t group = 0; group < groups; ++group) {
      rlcore::attention::forward(shape, in, unit, group, {out.data(), lse.data()});
      rlcore::attention::backward(
          shape, in, unit, group,
          {out.data(), lse.data(), grad.data(), dq.data(), dk.data(), dv.data()});
    }
  }

  Wide want(q.size()), want_lse(lse.size()), want_dq(q.size()), want_dk(k.size()),
      want_dv(v.size());
  const auto dot = [&](const Numbers& a, int64_t from, const Numbers& b, int64_t start) {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) {
      sum += static_cast<double>(a[static_cast<size_t>(from + d)]) *
             static_cast<double>(b[static_cast<size_t>(start + d)]);
    }
    return sum;
  };
  const auto add = [&](Wide& to, int64_t start, double factor, const Numbers& b, int64_t from) {
    for (int64_t d = 0; d < dim; ++d) {
      to[static_cast<size_t>(start + d)] +=
          factor * static_cast<double>(b[static_cast<size_t>(from + d)]);
    }
  };
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (int64_t i = 0; i < units[unit].queries; ++i) {
      const int64_t seen = units[unit].keys - units[unit].queries + i + 1;
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t row = (queries[unit] + i) * heads + head, at = row * dim;
        const auto key_at = [&](int64_t t) {
          return ((keys[unit] + t) * groups + head / (heads / groups)) * dim;
        };
        Wide weights;
        double sum = 0, mean = 0;
        for (int64_t t = 0; t < seen; ++t) {
          weights.push_back(std::exp(scale * dot(q, at, k, key_at(t))));
          sum += weights.back();
        }
        want_lse[static_cast<size_t>(row)] = std::log(sum);
        for (int64_t t = 0; t < seen; ++t) {
          double& weight = weights[static_cast<size_t>(t)];
          weight /= sum;
          mean += weight * dot(grad, at, v, key_at(t));
          add(want, at, weight, v, key_at(t));
          add(want_dv, key_at(t), weight, grad, at);
        }
        for (int64_t t = 0; t < seen; ++t) {
          const double slope =
              scale * weights[static_cast<size_t>(t)] * (dot(grad, at, v, key_at(t)) - mean);
          add(want_dq, at, slope, k, key_at(t));
          add(want_dk, key_at(t), slope, q, at);
        }
      }
    }
  }
  require(apart(out, want) < 3e-6, "out differs by", apart(out, want));
  require(apart(lse, want_lse) < 3e-6, "lse differs by", apart(lse, want_lse));
  require(apart(dq, want_dq) < 1e-5, "dq differs by", apart(dq, want_dq));
  require(apart(dk, want_dk) < 1e-5, "dk differs by", apart(dk, want_dk));
  require(apart(dv, want_dv) < 1e-5, "dv differs by", apart(dv, want_dv));
}

}  // namespace

int main() {
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    const bool here = rlcore::use_instruction_set(name);
    std::vector<Unit> all{{0, 0}, {0, 3}, {1, 1}, {1, 40}};
    for (int64_t n = 2; n <= 33; n += 3) all.push_back({n, n}), all.push_back({n / 2, n + 5});
    if (here) check(all, 4, 2, 32), check(all, 3, 3, 6);
    if (here) check({{150, 150}, {70, 129}, {16, 16}}, 6, 1, 17);
    if (here) check({{140, 140}, {33, 97}}, 2, 2, 64);
    if (here) check({{17, 17}}, 160, 1, 4);
    std::printf("%s: %s\n", here ? "run" : "not run", name);
  }
}
