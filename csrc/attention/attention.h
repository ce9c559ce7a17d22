// Causal attention of packed sequences on the CPU, forward and backward, in float32.
//
// A unit is a range of queries and a range of keys; its last query attends to its last key. Heads
// that share a group's keys follow each other. Every sum has one order, whatever the threads.
#pragma once

#include <cstdint>

namespace rlcore::attention {

struct Shape {
  int64_t heads, groups, dim;
  float scale;
  const int32_t* queries;  // [units + 1] cumulative numbers of queries
  const int32_t* keys;     // [units + 1] cumulative numbers of keys
};

struct Inputs {
  const float* q;  // [all queries, heads, dim]
  const float* k;  // [all keys, groups, dim]
  const float* v;  // the same
};

struct Forward {
  float* out;  // [all queries, heads, dim]
  float* lse;  // [all queries, heads] log of the sum of exponentials of the scores
};

struct Backward {
  const float* out;
  const float* lse;
  const float* grad;  // of out
  float* dq;
  float* dk;
  float* dv;
};

// One unit and group. Calls for different ones may run at the same time.
void forward(const Shape& shape, const Inputs& in, int64_t unit, int64_t group, const Forward& to);
void backward(const Shape& shape, const Inputs& in, int64_t unit, int64_t group,
              const Backward& to);

}  // namespace rlcore::attention
