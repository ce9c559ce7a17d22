// Builds a suffix automaton online and writes it as the records of layout.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "suffix/match.h"

namespace rlcore::suffix {

// One prompt at a time; the memory is kept from prompt to prompt.
class Builder {
 public:
  // Forgets what was built, makes room for `tokens` tokens.
  void start(int64_t tokens);
  // One response. Its weight counts once for every occurrence of a string in it.
  void add(std::span<const int32_t> response, int64_t weight);
  // Numbers states and sizes the edge lists; the next two functions say how much `write` writes.
  void finish();
  uint32_t num_states() const { return static_cast<uint32_t>(nodes_.size()); }
  uint32_t num_edges() const { return num_edges_; }
  void write(State* states, Edge* edges) const;

 private:
  struct Node {
    int32_t length;
    uint32_t link;
    int32_t token;   // first way out, in the node itself: most nodes have no other
    uint32_t to;     // kNil: none
    uint32_t extra;  // chain of the other ways out
    uint32_t count;
    int64_t weight;
  };
  struct Extra {
    uint32_t from;
    int32_t token;
    uint32_t to;
    uint32_t next;
  };

  uint32_t* find(uint32_t from, int32_t token);
  void connect(uint32_t from, int32_t token, uint32_t to);
  void file(uint32_t extra);
  uint32_t split(uint32_t parent, uint32_t child, int32_t token);
  uint32_t extend(uint32_t last, int32_t token);
  void sum_up();
  void pick_best();
  void number();
  void write_list(uint32_t s, uint32_t others, Edge* list) const;

  std::vector<Node> nodes_;
  std::vector<Extra> extras_;
  std::vector<uint32_t> table_;  // extra by (from, token)
  std::vector<uint32_t> best_;   // best child
  std::vector<int32_t> best_token_;
  std::vector<uint32_t> order_;   // by descending length; then old number by new number
  std::vector<uint32_t> number_;  // new number by old number
  std::vector<uint32_t> starts_;
  uint32_t num_edges_ = 0;
};

}  // namespace rlcore::suffix
