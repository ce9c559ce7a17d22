// The parts of a layer, in vectors of kLanes floats. layer_host.cpp includes this once per
// instruction set, after common/simd.h.

#include "product/product_simd.h"

// y = x / sqrt(mean of squares + eps) * weight; y may be x.
inline void normalise(const float* x, const float* weight, int64_t count, float eps, float* y) {
  const float scale = 1 / std::sqrt(dot(x, x, count) / static_cast<float>(count) + eps);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    write(y + i, read<Floats>(x + i) * scale * read<Floats>(weight + i));
  }
  for (; i < count; ++i) y[i] = x[i] * scale * weight[i];
}

// Turns pairs of elements by the angles of a position.
inline void rotate(float* x, const float* rope, int64_t dim) {
  for (int64_t i = 0; i < dim; i += 2) {
    const float a = x[i], b = x[i + 1], cosine = rope[i], sine = rope[i + 1];
    x[i] = a * cosine - b * sine;
    x[i + 1] = a * sine + b * cosine;
  }
}

// Attention of one query over `count` cached columns; `scores` has room for them and a vector more.
inline void attend(const float* query, const float* keys, const float* values, int64_t count,
                   int64_t dim, float* scores, float* out) {
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  float top = -kInf;
  for (int64_t t = 0; t < count; ++t) {
    scores[t] = dot(query, keys + t * dim, dim) * scale;
    top = scores[t] > top ? scores[t] : top;
  }
  for (int64_t t = count; t % kLanes; ++t) scores[t] = -kInf;
  Floats sums = {};
  for (int64_t t = 0; t < count; t += kLanes) {
    const Floats weights = exp(read<Floats>(scores + t) - top);
    write(scores + t, weights);
    sums += weights;
  }
  const float factor = 1 / sum_of(sums);
  int64_t i = 0;
  for (; i + 2 * kLanes <= dim; i += 2 * kLanes) {
    Floats a = {}, b = {};
    for (int64_t t = 0; t < count; ++t) {
      const float* at = values + t * dim + i;
      a = add_product(floats(scores[t]), read<Floats>(at), a);
      b = add_product(floats(scores[t]), read<Floats>(at + kLanes), b);
    }
    write(out + i, a * factor);
    write(out + i + kLanes, b * factor);
  }
  for (; i < dim; ++i) {
    float sum = 0;
    for (int64_t t = 0; t < count; ++t) sum += scores[t] * values[t * dim + i];
    out[i] = sum * factor;
  }
}

// gate = silu(gate) * up, for rows of gate and up.
inline void gate(float* both, int64_t inner) {
  int64_t i = 0;
  for (; i + kLanes <= inner; i += kLanes) {
    const Floats g = read<Floats>(both + i);
    write(both + i, g / (exp(-g) + 1.0f) * read<Floats>(both + inner + i));
  }
  for (; i < inner; ++i) both[i] = both[i] / (std::exp(-both[i]) + 1.0f) * both[inner + i];
}

// Keys and values of tokens [begin, end) into the cache, their queries into `queries`.
inline void begin_layer(const Layer& layer, const Tokens& tokens, int64_t begin, int64_t end,
                        float* queries) {
  const int64_t rows = end - begin, dim = layer.dim, hidden = layer.hidden;
  const int64_t width = (layer.heads + 2 * layer.kv_heads) * dim;
  const int64_t turned = layer.heads + layer.kv_heads;
  std::vector<float> inputs(static_cast<size_t>(rows * hidden));
  std::vector<float> made(static_cast<size_t>(rows * width));
  for (int64_t row = 0; row < rows; ++row) {
    normalise(tokens.x + (begin + row) * hidden, layer.norm1, hidden, layer.eps,
              inputs.data() + row * hidden);
    if (layer.qkv_bias) std::copy_n(layer.qkv_bias, width, made.data() + row * width);
  }
  multiply({inputs.data(), rows, hidden, 1}, layer.qkv, hidden, width, width, made.data());
  for (int64_t row = 0; row < rows; ++row) {
    float* heads = made.data() + row * width;
    const int64_t position = tokens.positions[begin + row];
    const int64_t slot = tokens.slots[begin + row] * layer.kv_heads;
    for (int64_t head = 0; head < turned; ++head) {
      float* at = heads + head * dim;
      if (layer.qk_norm) normalise(at, layer.qk_norm + head * dim, dim, layer.eps, at);
      rotate(at, tokens.rope + position * dim, dim);
    }
    std::copy_n(heads, layer.heads * dim, queries + (begin + row) * layer.heads * dim);
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
      const int64_t column = ((slot + head) * tokens.capacity + position) * dim;
      std::copy_n(heads + (layer.heads + head) * dim, dim, tokens.keys + column);
      std::copy_n(heads + (turned + head) * dim, dim, tokens.values + column);
    }
  }
}

// The rest of the layer, from the queries on.
inline void end_layer(const Layer& layer, const Tokens& tokens, int64_t begin, int64_t end,
                      const float* queries) {
  const int64_t rows = end - begin, dim = layer.dim, hidden = layer.hidden, inner = layer.inner;
  const int64_t width = layer.heads * dim, repeats = layer.heads / layer.kv_heads;
  std::vector<float> mixed(static_cast<size_t>(rows * width));
  std::vector<float> inputs(static_cast<size_t>(rows * hidden));
  std::vector<float> both(static_cast<size_t>(rows * 2 * inner));
  std::vector<float> scores;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t count = tokens.positions[begin + row] + 1;
    scores.resize(static_cast<size_t>(count + kLanes));
    for (int64_t head = 0; head < layer.heads; ++head) {
      const int64_t slot = tokens.slots[begin + row] * layer.kv_heads + head / repeats;
      const int64_t first = slot * tokens.capacity * dim;
      attend(queries + ((begin + row) * layer.heads + head) * dim, tokens.keys + first,
             tokens.values + first, count, dim, scores.data(),
             mixed.data() + row * width + head * dim);
    }
  }
  float* x = tokens.x + begin * hidden;
  multiply({mixed.data(), rows, width, 1}, layer.out, width, hidden, hidden, x);
  for (int64_t row = 0; row < rows; ++row) {
    normalise(x + row * hidden, layer.norm2, hidden, layer.eps, inputs.data() + row * hidden);
  }
  multiply({inputs.data(), rows, hidden, 1}, layer.gate_up, hidden, 2 * inner, 2 * inner,
           both.data());
  for (int64_t row = 0; row < rows; ++row) gate(both.data() + row * 2 * inner, inner);
  multiply({both.data(), rows, 2 * inner, 1}, layer.down, inner, hidden, hidden, x);
}

inline constexpr Kernels kernels{&begin_layer, &end_layer};
