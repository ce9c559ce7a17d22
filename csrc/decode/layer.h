// One layer of a decoder-only transformer for new tokens whose earlier keys and values are cached:
// what a decode step on the CPU spends its time with.
//
// A token's results depend on that token and its sequence's cache alone, not on the other tokens of
// the call: every sum has one order, whatever their number.
#pragma once

#include <cstdint>
#include <functional>

namespace rlcore::decode {

// Row-major float32. Queries and keys are interleaved: RoPE turns elements 2i and 2i + 1 of a head.
struct Layer {
  const float* norm1;     // [hidden]
  const float* qkv;       // [hidden, (heads + 2 kv_heads) dim]
  const float* qkv_bias;  // [(heads + 2 kv_heads) dim], or null
  const float* qk_norm;   // [heads + kv_heads, dim], or null
  const float* out;       // [heads dim, hidden]
  const float* norm2;     // [hidden]
  const float* gate_up;   // [hidden, 2 inner]
  const float* down;      // [inner, hidden]
  int64_t hidden, heads, kv_heads, dim, inner;
  float eps;
};

struct Tokens {
  int64_t count;
  const int64_t* slots;      // [count] cache slot
  const int64_t* positions;  // [count], below capacity
  const float* rope;         // [positions, dim / 2, 2] cosine and sine
  float* keys;               // [slots, kv_heads, capacity, dim]
  float* values;             // the same
  int64_t capacity;
  float* x;  // [count, hidden], the layer's input, then its output
};

// Calls the function for ranges [begin, end) that cover [0, count).
using Range = std::function<void(int64_t, int64_t)>;
using ParallelFor = std::function<void(int64_t count, const Range&)>;

// Writes keys and values of all tokens to the cache, then lets each attend to its slot's columns up
// to its own position.
void run_layer(const Layer& layer, const Tokens& tokens, const ParallelFor& parallel_for);

}  // namespace rlcore::decode
