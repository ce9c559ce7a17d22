// RMSNorm, RoPE and SwiGLU, forward and backward, in every instruction set of this machine, against
// loops in double. Prints a line for each set; the exit status says whether all agreed.
#include "rows/rows.h"

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

Numbers random(int64_t count, unsigned seed) {
  std::mt19937 source(seed);
  std::normal_distribution<float> normal;
  Numbers made(static_cast<size_t>(count));
  for (float& v : made) v = 2 * normal(source);
  return made;
}

void compare(const char* what, const Numbers& found, const Wide& want) {
  double worst = 0, most = 1e-6;
  for (size_t i = 0; i < want.size(); ++i) {
    worst = std::max(worst, std::abs(static_cast<double>(found[i]) - want[i]));
    most = std::max(most, std::abs(want[i]));
  }
  if (worst <= 3e-6 * most) return;
  std::fprintf(stderr, "%s differs by %g of %g\n", what, worst, most);
  std::exit(1);
}

double at(const Numbers& x, int64_t i) { return static_cast<double>(x[static_cast<size_t>(i)]); }

// x is [5, 3, size] with gaps between its rows.
void check_norm_and_turn(int64_t size) {
  constexpr int64_t kOuter = 5, kInner = 3, kCount = kOuter * kInner;
  const int64_t inner_stride = size + 3, outer_stride = kInner * inner_stride + 2;
  const Numbers x = random(kOuter * outer_stride, 1), weight = random(size, 2);
  const Numbers grad = random(kCount * size, 3), angles = random(kOuter * size, 4);
  const rlcore::rows::Rows rows{x.data(), kInner, outer_stride, inner_stride, size};
  Numbers out(grad), dx(grad), scales(kCount), dweight(weight), turned(grad), back(grad), c, s;
  Wide want, want_dx, want_dweight(static_cast<size_t>(size)), want_turned, want_back;
  rlcore::rows::norm(rows, weight.data(), 0.1F, 0, 7, out.data(), scales.data());
  rlcore::rows::norm(rows, weight.data(), 0.1F, 7, kCount, out.data(), scales.data());
  rlcore::rows::norm_grad(grad.data(), rows, weight.data(), scales.data(), 0, kCount, dx.data(),
                          dweight.data());
  for (int64_t i = 0; i < kOuter * (size / 2); ++i) {
    c.push_back(static_cast<float>(std::cos(at(angles, i))));
    s.push_back(static_cast<float>(std::sin(at(angles, i))));
  }
  if (size % 2 == 0) {
    rlcore::rows::turn(rows, c.data(), s.data(), false, 0, kCount, turned.data());
    rlcore::rows::turn(rows, c.data(), s.data(), true, 0, kCount, back.data());
  }
  for (int64_t row = 0; row < kCount; ++row) {
    const int64_t from = row / kInner * outer_stride + row % kInner * inner_stride;
    double squares = 0, mean = 0;
    for (int64_t i = 0; i < size; ++i) squares += at(x, from + i) * at(x, from + i);
    const double scale = 1 / std::sqrt(squares / static_cast<double>(size) + 0.1F);
    for (int64_t i = 0; i < size; ++i) {
      const double normal = at(x, from + i) * scale, upstream = at(grad, row * size + i);
      want.push_back(normal * at(weight, i));
      want_dweight[static_cast<size_t>(i)] += upstream * normal;
      mean += upstream * at(weight, i) * normal / static_cast<double>(size);
    }
    for (int64_t i = 0; i < size; ++i) {
      const double upstream = at(grad, row * size + i) * at(weight, i);
      want_dx.push_back(scale * (upstream - at(x, from + i) * scale * mean));
    }
    for (int64_t i = 0; size % 2 == 0 && i < size; ++i) {
      const int64_t half = size / 2, angle = row / kInner * half + i % half;
      const double other = at(x, from + (i + half) % size) * (i < half ? -1 : 1);
      want_turned.push_back(at(x, from + i) * at(c, angle) + other * at(s, angle));
      want_back.push_back(at(x, from + i) * at(c, angle) - other * at(s, angle));
    }
  }
  compare("RMSNorm", out, want), compare("its gradient", dx, want_dx);
  compare("its weight's gradient", dweight, want_dweight);
  compare("RoPE", turned, want_turned), compare("its gradient", back, want_back);
}

void check_swiglu(int64_t size) {
  constexpr int64_t kRows = 4;
  Numbers x = random(kRows * 2 * size, 1);
  const Numbers grad = random(kRows * size, 2);
  if (size > 2) x[0] = 200, x[1] = -200, x[2] = 0;
  Numbers out(grad), dx(x);
  for (const int64_t begin : {0, 2}) {
    rlcore::rows::swiglu(x.data(), size, begin, begin + 2, out.data());
    rlcore::rows::swiglu_grad(grad.data(), x.data(), size, begin, begin + 2, dx.data());
  }
  Wide want(out.size()), want_dx(x.size());
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t place = row * 2 * size + i;
      const double gate = at(x, place), up = at(x, place + size), g = at(grad, row * size + i);
      const double share = 1 / (1 + std::exp(-gate));
      want[static_cast<size_t>(row * size + i)] = gate * share * up;
      want_dx[static_cast<size_t>(place)] = g * up * share * (1 + gate * (1 - share));
      want_dx[static_cast<size_t>(place + size)] = g * gate * share;
    }
  }
  compare("SwiGLU", out, want), compare("its gradient", dx, want_dx);
}

}  // namespace

int main() {
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    const bool here = rlcore::use_instruction_set(name);
    for (int64_t size = 1; here && size <= 80; ++size)
      check_norm_and_turn(size), check_swiglu(size);
    std::printf("%s: %s\n", here ? "run" : "not run", name);
  }
}
