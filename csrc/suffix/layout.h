// The suffix forest as plain arrays: one block of memory, the same bytes on the CPU and on the GPU.
//
//   Header | Prompt[num_prompts], ascending keys | per prompt: State[num_states], Edge[num_edges]
//
// A prompt's history is a suffix automaton over its responses (no string crosses a response).
// A state stands for all strings with the same set of end positions; the strings are suffixes of
// one another, the longest suffix that is in another state is the state's link. States are numbered
// along best children, so that a draft reads consecutive records. Offsets are from the base, hence
// the block may lie anywhere.
#pragma once

#include <cstdint>
#include <type_traits>

namespace rlcore::suffix {

constexpr uint32_t kNil = 0xffffffffu;  // no state, no edge list
constexpr int32_t kNoToken = -1;
constexpr uint32_t kRoot = 0;

// The text is in the labels: `token` leads to `next`.
struct State {
  int32_t token;        // label of the way to the best child, kNoToken where nothing follows
  uint32_t next;        // best child: largest sum of rewards, then most often, then smallest token
  uint32_t link;        // longest suffix that occurs elsewhere too; kNil at the root
  int32_t link_length;  // its length: a string of this state is longer than that
  uint32_t edges;       // list of the other children in the edge array, or kNil
  uint32_t count;       // occurrences in the history
};
static_assert(sizeof(State) == 24 && std::is_trivially_copyable_v<State>);

// An edge list is a header with the number of entries as its `token`, then the entries: the most
// frequent child (of equals the smaller token), then the rest. The header's `to` = 0: the rest in
// ascending order of tokens; `to` = m > 0: in m + 1 hash slots (a power of two), kNoToken marks a
// free one.
struct Edge {
  int32_t token;
  uint32_t to;
};
static_assert(sizeof(Edge) == 8 && std::is_trivially_copyable_v<Edge>);

constexpr int32_t kLongestSorted = 12;  // where the rest is longer it is hashed

struct Prompt {
  int64_t key;
  uint64_t states;  // byte offset
  uint64_t edges;   // byte offset
  uint32_t num_states;
  uint32_t num_edges;
};
static_assert(sizeof(Prompt) == 32);

struct Header {
  uint64_t num_prompts;
  uint64_t num_tokens;
  uint64_t num_states;
  uint64_t num_edges;
};
static_assert(sizeof(Header) == 32);

// One prompt's history, ready to walk.
struct History {
  const State* states;
  const Edge* edges;
};

}  // namespace rlcore::suffix
