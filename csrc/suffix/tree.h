// Tree drafts: the most probable continuations of a match, best first. Host only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "suffix/match.h"

namespace rlcore::suffix {

class Tree {
 public:
  // At most `window` nodes below `state` into tokens and parents (-1: the match itself). Returns
  // their number, `depth` is that of the deepest.
  int32_t grow(const History& h, uint32_t state, int32_t window, double min_prob, int32_t* tokens,
               int32_t* parents, int32_t* depth) {
    open_.clear();
    depths_.clear();
    *depth = 0;
    const double least = min_prob * h.states[state].count;
    expand(h, state, -1, least);
    int32_t n = 0;
    while (n < window && !open_.empty()) {
      std::pop_heap(open_.begin(), open_.end(), later);
      const Node node = open_.back();
      open_.pop_back();
      tokens[n] = node.token;
      parents[n] = node.parent;
      depths_.push_back(node.parent < 0 ? 1 : depths_[static_cast<size_t>(node.parent)] + 1);
      *depth = std::max(*depth, depths_.back());
      expand(h, node.state, n++, least);
    }
    return n;
  }

 private:
  struct Node {
    uint32_t count;
    uint32_t state;
    int32_t parent;
    int32_t token;
    bool aside;  // not the branch that a chain takes
  };

  static bool later(const Node& a, const Node& b) {
    if (a.count != b.count) return a.count < b.count;
    if (a.parent != b.parent) return a.parent > b.parent;
    if (a.aside != b.aside) return a.aside;
    return a.token > b.token;
  }

  void add(const History& h, int32_t token, uint32_t state, int32_t parent, bool aside,
           double least) {
    const uint32_t count = h.states[state].count;
    if (count < least) return;
    open_.push_back({count, state, parent, token, aside});
    std::push_heap(open_.begin(), open_.end(), later);
  }

  void expand(const History& h, uint32_t state, int32_t parent, double least) {
    const State& s = h.states[state];
    if (s.next == kNil) return;
    add(h, s.token, s.next, parent, false, least);
    if (s.edges == kNil) return;
    const Edge* list = h.edges + s.edges;
    for (int32_t i = 1; i <= list->token; ++i) {
      if (list[i].token != kNoToken) add(h, list[i].token, list[i].to, parent, true, least);
    }
  }

  std::vector<Node> open_;
  std::vector<int32_t> depths_;
};

}  // namespace rlcore::suffix
