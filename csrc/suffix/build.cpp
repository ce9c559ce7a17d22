#include "suffix/build.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace rlcore::suffix {
namespace {

uint32_t hash_way(uint32_t from, int32_t token) {
  uint64_t h = (static_cast<uint64_t>(from) << 32) | static_cast<uint32_t>(token);
  h *= 0x9E3779B97F4A7C15ull;
  return static_cast<uint32_t>(h >> 32);
}

// Entries after the header of a list with `others` children.
uint32_t list_entries(uint32_t others) {
  const uint32_t rest = others - 1;
  if (rest <= kLongestSorted) return others;
  uint32_t slots = 16;
  while (slots * 2 < rest * 3) slots *= 2;
  return 1 + slots;
}

}  // namespace

void Builder::start(int64_t tokens) {
  nodes_.clear();
  extras_.clear();
  nodes_.reserve(static_cast<size_t>(tokens) * 3 / 2 + 16);
  size_t slots = 64;
  while (slots < static_cast<size_t>(tokens)) slots *= 2;
  table_.assign(slots, kNil);
  nodes_.push_back({0, kNil, kNoToken, kNil, kNil, 0, 0});
}

uint32_t* Builder::find(uint32_t from, int32_t token) {
  Node& node = nodes_[from];
  if (node.token == token) return &node.to;
  if (node.extra == kNil) return nullptr;
  const size_t mask = table_.size() - 1;
  for (size_t slot = hash_way(from, token) & mask;; slot = (slot + 1) & mask) {
    const uint32_t at = table_[slot];
    if (at == kNil) return nullptr;
    Extra& e = extras_[at];
    if (e.from == from && e.token == token) return &e.to;
  }
}

void Builder::file(uint32_t extra) {
  const size_t mask = table_.size() - 1;
  size_t slot = hash_way(extras_[extra].from, extras_[extra].token) & mask;
  while (table_[slot] != kNil) slot = (slot + 1) & mask;
  table_[slot] = extra;
}

// `from` has no way out by `token` yet.
void Builder::connect(uint32_t from, int32_t token, uint32_t to) {
  Node& node = nodes_[from];
  if (node.to == kNil) {
    node.token = token;
    node.to = to;
    return;
  }
  const auto extra = static_cast<uint32_t>(extras_.size());
  extras_.push_back({from, token, to, node.extra});
  node.extra = extra;
  if (extras_.size() * 2 > table_.size()) {
    table_.assign(table_.size() * 2, kNil);
    for (uint32_t i = 0; i <= extra; ++i) file(i);
  } else {
    file(extra);
  }
}

// Takes the strings of `child` that are parent + token or shorter out into a state of their own.
uint32_t Builder::split(uint32_t parent, uint32_t child, int32_t token) {
  const auto copy = static_cast<uint32_t>(nodes_.size());
  const Node from = nodes_[child];
  nodes_.push_back({nodes_[parent].length + 1, from.link, from.token, from.to, kNil, 0, 0});
  for (uint32_t e = from.extra; e != kNil; e = extras_[e].next) {
    connect(copy, extras_[e].token, extras_[e].to);
  }
  nodes_[child].link = copy;
  for (uint32_t p = parent; p != kNil; p = nodes_[p].link) {
    uint32_t* to = find(p, token);
    if (to == nullptr || *to != child) break;
    *to = copy;
  }
  return copy;
}

// The state of the longest string that ends with `token` after the one of `last`.
uint32_t Builder::extend(uint32_t last, int32_t token) {
  if (const uint32_t* to = find(last, token)) {
    const uint32_t child = *to;
    return nodes_[child].length == nodes_[last].length + 1 ? child : split(last, child, token);
  }
  const auto made = static_cast<uint32_t>(nodes_.size());
  nodes_.push_back({nodes_[last].length + 1, kRoot, kNoToken, kNil, kNil, 0, 0});
  uint32_t p = last;
  const uint32_t* to = nullptr;
  while (p != kNil && (to = find(p, token)) == nullptr) {
    connect(p, token, made);
    p = nodes_[p].link;
  }
  if (p != kNil) {
    const uint32_t child = *to;
    const bool whole = nodes_[child].length == nodes_[p].length + 1;
    const uint32_t link = whole ? child : split(p, child, token);
    nodes_[made].link = link;
  }
  return made;
}

void Builder::add(std::span<const int32_t> response, int64_t weight) {
  uint32_t last = kRoot;
  for (const int32_t token : response) {
    last = extend(last, token);
    nodes_[last].count += 1;
    nodes_[last].weight += weight;
  }
}

// A string occurs wherever a longer one that it ends occurs.
void Builder::sum_up() {
  int32_t longest = 0;
  for (const Node& n : nodes_) longest = std::max(longest, n.length);
  starts_.assign(static_cast<size_t>(longest) + 2, 0);
  for (const Node& n : nodes_) ++starts_[static_cast<size_t>(longest - n.length) + 1];
  for (size_t i = 1; i < starts_.size(); ++i) starts_[i] += starts_[i - 1];
  order_.resize(nodes_.size());
  for (uint32_t s = 0; s < nodes_.size(); ++s) {
    order_[starts_[static_cast<size_t>(longest - nodes_[s].length)]++] = s;
  }
  for (const uint32_t s : order_) {
    const Node& n = nodes_[s];
    if (n.link == kNil) continue;
    nodes_[n.link].count += n.count;
    nodes_[n.link].weight += n.weight;
  }
}

void Builder::pick_best() {
  best_.resize(nodes_.size());
  best_token_.resize(nodes_.size());
  for (uint32_t s = 0; s < nodes_.size(); ++s) {
    uint32_t best = nodes_[s].to;
    int32_t token = nodes_[s].token;
    for (uint32_t e = nodes_[s].extra; e != kNil; e = extras_[e].next) {
      const Node& a = nodes_[extras_[e].to];
      const Node& b = nodes_[best];
      const bool tie = a.weight == b.weight && a.count == b.count;
      if (tie                    ? extras_[e].token < token
          : a.weight != b.weight ? a.weight > b.weight
                                 : a.count > b.count) {
        best = extras_[e].to;
        token = extras_[e].token;
      }
    }
    best_[s] = best;
    best_token_[s] = token;
  }
}

// A best child follows the longest of the states that have it as their best child.
void Builder::number() {
  constexpr uint32_t kOpen = kNil;
  std::vector<uint32_t>& before = order_;  // old number of the state in front
  before.assign(nodes_.size(), kOpen);
  for (uint32_t s = 0; s < nodes_.size(); ++s) {
    const uint32_t child = best_[s];
    if (child == kNil) continue;
    uint32_t& p = before[child];
    if (p == kOpen || nodes_[s].length > nodes_[p].length) p = s;
  }
  number_.resize(nodes_.size());
  uint32_t next = 0;
  for (uint32_t head = 0; head < nodes_.size(); ++head) {
    if (before[head] != kOpen) continue;
    for (uint32_t s = head;;) {
      number_[s] = next++;
      const uint32_t child = best_[s];
      if (child == kNil || before[child] != s) break;
      s = child;
    }
  }
}

void Builder::finish() {
  sum_up();
  pick_best();
  number();
  num_edges_ = 0;
  for (const Node& n : nodes_) {
    uint32_t others = 0;
    for (uint32_t e = n.extra; e != kNil; e = extras_[e].next) ++others;
    if (others > 0) num_edges_ += 1 + list_entries(others);
  }
}

void Builder::write(State* states, Edge* edges) const {
  uint32_t used = 0;
  for (uint32_t s = 0; s < nodes_.size(); ++s) {
    const Node& n = nodes_[s];
    State& out = states[number_[s]];
    out.token = best_[s] == kNil ? kNoToken : best_token_[s];
    out.next = best_[s] == kNil ? kNil : number_[best_[s]];
    out.link = n.link == kNil ? kNil : number_[n.link];
    out.link_length = n.link == kNil ? 0 : nodes_[n.link].length;
    out.count = n.count;
    out.edges = kNil;
    if (n.extra == kNil) continue;
    uint32_t others = 0;
    for (uint32_t e = n.extra; e != kNil; e = extras_[e].next) ++others;
    out.edges = used;
    write_list(s, others, edges + used);
    used += 1 + list_entries(others);
  }
}

// The `others` children of `s`: all but the best one.
void Builder::write_list(uint32_t s, uint32_t others, Edge* list) const {
  const uint32_t entries = list_entries(others), slots = entries - 1;
  const bool hashed = entries != others;
  list[0] = {static_cast<int32_t>(entries), hashed ? slots - 1 : 0};
  Edge* rest = list + 2;
  if (hashed) std::fill(rest, rest + slots, Edge{kNoToken, kNil});
  const Node& n = nodes_[s];
  Edge most = {kNoToken, kNil};  // with old numbers, as all that comes through `put`
  uint32_t filled = 0;
  const auto put = [&](Edge e) {
    uint32_t at = filled++;
    if (hashed) {
      at = hash_token(e.token) & (slots - 1);
      while (rest[at].token != kNoToken) at = (at + 1) & (slots - 1);
    }
    rest[at] = {e.token, number_[e.to]};
  };
  const auto offer = [&](Edge e) {
    if (e.token == best_token_[s]) return;
    if (most.to == kNil) {
      most = e;
      return;
    }
    const uint32_t a = nodes_[e.to].count, b = nodes_[most.to].count;
    if (a > b || (a == b && e.token < most.token)) std::swap(e, most);
    put(e);
  };
  offer({n.token, n.to});
  for (uint32_t e = n.extra; e != kNil; e = extras_[e].next) {
    offer({extras_[e].token, extras_[e].to});
  }
  list[1] = {most.token, number_[most.to]};
  if (!hashed) {
    std::sort(rest, rest + slots, [](Edge a, Edge b) { return a.token < b.token; });
  }
}

}  // namespace rlcore::suffix
