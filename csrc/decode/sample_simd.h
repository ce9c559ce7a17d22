// Sampling in vectors of kLanes floats. sample_host.cpp includes this once per instruction set,
// after common/simd.h.

// The largest of the numbers, and its first place; NaN compares as smaller.
inline float largest(const float* x, int64_t count, int64_t* place) {
  Floats tops = floats(-kInf);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = read<Floats>(x + i);
    tops = v > tops ? v : tops;
  }
  float top = -kInf;
  for (int lane = 0; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
  for (; i < count; ++i) top = x[i] > top ? x[i] : top;
  for (*place = 0; *place + 1 < count && x[*place] != top;) ++*place;
  return top;
}

inline void sample(const Logits& logits, int64_t begin, int64_t end, int64_t* tokens,
                   double* logps) {
  const int64_t vocab = logits.vocab;
  std::vector<float> weights(static_cast<size_t>(vocab + kLanes));
  for (int64_t row = begin; row < end; ++row) {
    const float* x = logits.data + row * vocab;
    const float top = largest(x, vocab, tokens + row), scale = logits.scales[row];
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes) {
      Floats held;
      write(weights.data() + i, exp((read<Floats>(x + i) - top) * scale, held));
    }
    if (i < vocab) {
      Floats rest = floats(-kInf), held;
      for (int64_t t = i; t < vocab; ++t) rest[t - i] = (x[t] - top) * scale;
      write(weights.data() + i, exp(rest, held));
    }
    double total = 0;
    for (int64_t t = 0; t < vocab; ++t)
      total += static_cast<double>(weights[static_cast<size_t>(t)]);
    if (logits.greedy && logits.greedy[row]) {
      logps[row] = 0 * total;
      continue;
    }
    const double least = uniform(logits.counters[row]) * total;
    double sum = 0;
    int64_t token = 0;
    for (; token < vocab; ++token) {
      sum += static_cast<double>(weights[static_cast<size_t>(token)]);
      if (sum > least) break;
    }
    tokens[row] = token < vocab ? token : vocab - 1;
    logps[row] = static_cast<double>((x[tokens[row]] - top) * scale) - std::log(total);
  }
}
