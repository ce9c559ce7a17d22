// Attention in vectors of kLanes floats. attention_host.cpp includes this once per instruction set,
// after common/simd.h.

#include "product/product_simd.h"

// Keys and values of a unit's group, also transposed; rows of the transposed ones and of scores
// have `width` columns, a multiple of kLanes.
struct Unit {
  const Shape& shape;
  int64_t first_query, first_key, queries, keys, group, repeats, dim, width, step;
  std::vector<float> k, v, k_turned, v_turned;

  Unit(const Shape& s, const Inputs& in, int64_t unit, int64_t g, bool is_backward)
      : shape(s),
        first_query(s.queries[unit]),
        first_key(s.keys[unit]),
        queries(s.queries[unit + 1] - first_query),
        keys(s.keys[unit + 1] - first_key),
        group(g),
        repeats(s.heads / s.groups),
        dim(s.dim),
        width((keys + kLanes - 1) / kLanes * kLanes),
        step(kBlock / repeats < 8 ? 8 : kBlock / repeats) {
    k_turned = turned(in.k);
    if (is_backward) {
      v_turned = turned(in.v);
      k = copy(in.k);
    } else {
      v = copy(in.v);
    }
  }

  int64_t key_at(int64_t i) const { return ((first_key + i) * shape.groups + group) * dim; }
  // The first element of a query's row in q, out and their gradients; head is within the group.
  int64_t query_at(int64_t i, int64_t head) const {
    return ((first_query + i) * shape.heads + group * repeats + head) * dim;
  }

  std::vector<float> copy(const float* x) const {
    std::vector<float> made(static_cast<size_t>(keys * dim));
    for (int64_t i = 0; i < keys; ++i) std::copy_n(x + key_at(i), dim, made.data() + i * dim);
    return made;
  }

  std::vector<float> turned(const float* x) const {
    std::vector<float> made(static_cast<size_t>(width * dim));
    for (int64_t i = 0; i < keys; ++i) {
      const float* from = x + key_at(i);
      for (int64_t d = 0; d < dim; ++d) made[static_cast<size_t>(d * width + i)] = from[d];
    }
    return made;
  }

  // Rows of x for queries [a, b), times `factor`.
  void gather(const float* x, int64_t a, int64_t b, float factor, float* to) const {
    for (int64_t i = a; i < b; ++i) {
      for (int64_t head = 0; head < repeats; ++head, to += dim) {
        const float* from = x + query_at(i, head);
        for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * factor;
      }
    }
  }

  // Number of keys that query i attends to; that number up to whole vectors.
  int64_t seen(int64_t i) const { return keys - queries + i + 1; }
  int64_t seen_width(int64_t i) const { return (seen(i) + kLanes - 1) / kLanes * kLanes; }

  // to [rows, width] = x [rows, dim] w [dim, width], the first `columns`.
  void scores(const float* x, int64_t rows, const std::vector<float>& w, int64_t columns,
              float* to) const {
    for (int64_t row = 0; row < rows; ++row) std::fill_n(to + row * width, columns, 0.0f);
    multiply({x, rows, dim, 1}, w.data(), dim, columns, width, to);
  }
};

inline void forward(const Shape& shape, const Inputs& in, int64_t unit, int64_t group,
                    const Forward& to) {
  const Unit u(shape, in, unit, group, false);
  std::vector<float> q(static_cast<size_t>(u.step * u.repeats * u.dim)), mixed(q.size());
  std::vector<float> weights(static_cast<size_t>(u.step * u.repeats * u.width));
  for (int64_t a = 0; a < u.queries; a += u.step) {
    const int64_t b = std::min(a + u.step, u.queries), rows = (b - a) * u.repeats;
    u.gather(in.q, a, b, shape.scale, q.data());
    u.scores(q.data(), rows, u.k_turned, u.seen_width(b - 1), weights.data());
    float* row = weights.data();
    for (int64_t i = a; i < b; ++i) {
      for (int64_t head = 0; head < u.repeats; ++head, row += u.width) {
        std::fill(row + u.seen(i), row + u.seen_width(b - 1), -kInf);
        Floats tops = floats(-kInf), sums = {};
        for (int64_t t = 0; t < u.seen_width(i); t += kLanes) {
          const Floats score = read<Floats>(row + t);
          tops = score > tops ? score : tops;
        }
        float top = -kInf;
        for (int lane = 0; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
        for (int64_t t = 0; t < u.seen_width(b - 1); t += kLanes) {
          const Floats weight = exp(read<Floats>(row + t) - top);
          write(row + t, weight);
          sums += weight;
        }
        const float sum = sum_of(sums);
        to.lse[u.query_at(i, head) / u.dim] = top + std::log(sum);
        for (int64_t t = 0; t < u.seen_width(b - 1); t += kLanes) {
          write(row + t, read<Floats>(row + t) * (1 / sum));
        }
      }
    }
    std::fill_n(mixed.data(), rows * u.dim, 0.0f);
    multiply({weights.data(), rows, u.width, 1}, u.v.data(), u.seen(b - 1), u.dim, u.dim,
             mixed.data());
    const float* from = mixed.data();
    for (int64_t i = a; i < b; ++i) {
      for (int64_t head = 0; head < u.repeats; ++head, from += u.dim) {
        std::copy_n(from, u.dim, to.out + u.query_at(i, head));
      }
    }
  }
}

inline void backward(const Shape& shape, const Inputs& in, int64_t unit, int64_t group,
                     const Backward& to) {
  const Unit u(shape, in, unit, group, true);
  const auto room = static_cast<size_t>(u.step * u.repeats);
  std::vector<float> q(room * static_cast<size_t>(u.dim)), grad(q), dq(q);
  std::vector<float> weights(room * static_cast<size_t>(u.width)), slopes(weights);
  std::vector<float> dk(static_cast<size_t>(u.keys * u.dim)), dv(dk);
  for (int64_t a = 0; a < u.queries; a += u.step) {
    const int64_t b = std::min(a + u.step, u.queries), rows = (b - a) * u.repeats;
    const int64_t seen = u.seen(b - 1), columns = u.seen_width(b - 1);
    u.gather(in.q, a, b, shape.scale, q.data());
    u.gather(to.grad, a, b, 1, grad.data());
    u.scores(q.data(), rows, u.k_turned, columns, weights.data());
    u.scores(grad.data(), rows, u.v_turned, columns, slopes.data());
    float *weight = weights.data(), *slope = slopes.data();
    for (int64_t i = a; i < b; ++i) {
      for (int64_t head = 0; head < u.repeats; ++head, weight += u.width, slope += u.width) {
        const int64_t at = u.query_at(i, head);
        const float lse = to.lse[at / u.dim], mean = dot(to.grad + at, to.out + at, u.dim);
        std::fill(weight + u.seen(i), weight + columns, -kInf);
        for (int64_t t = 0; t < columns; t += kLanes) {
          const Floats w = exp(read<Floats>(weight + t) - lse);
          write(weight + t, w);
          write(slope + t, w * (read<Floats>(slope + t) - mean));
        }
      }
    }
    std::fill_n(dq.data(), rows * u.dim, 0.0f);
    multiply({slopes.data(), rows, u.width, 1}, u.k.data(), seen, u.dim, u.dim, dq.data());
    multiply({slopes.data(), seen, 1, u.width}, q.data(), rows, u.dim, u.dim, dk.data());
    multiply({weights.data(), seen, 1, u.width}, grad.data(), rows, u.dim, u.dim, dv.data());
    const float* from = dq.data();
    for (int64_t i = a; i < b; ++i) {
      for (int64_t head = 0; head < u.repeats; ++head, from += u.dim) {
        float* there = to.dq + u.query_at(i, head);
        for (int64_t d = 0; d < u.dim; ++d) there[d] = from[d] * shape.scale;
      }
    }
  }
  for (int64_t i = 0; i < u.keys; ++i) {
    std::copy_n(dk.data() + i * u.dim, u.dim, to.dk + u.key_at(i));
    std::copy_n(dv.data() + i * u.dim, u.dim, to.dv + u.key_at(i));
  }
}

inline constexpr Kernels kernels{&forward, &backward};
