// Match, draft and window of one request over plain arrays. Runs on the host and on the device.
#pragma once

#include <cstdint>

#include "common/hd.h"
#include "suffix/layout.h"

namespace rlcore::suffix {

struct Options {
  int32_t limit = 7;         // longest match that is looked at; 0: no limit
  int32_t min_match = 3;     // shortest match that drafts
  double min_prob = 0.3;     // a draft stops before its path is rarer than this; 0: off
  int32_t max_window = 32;   // longest draft
  int32_t start_window = 2;  // window of a new request, and after a rejection
  int32_t growth = 2;        // added when all that was proposed was accepted
  int32_t knee = 0;          // tokens per forward where compute begins to bound; 0: unknown
  int32_t live = 1;          // match the request's own stream too
  int32_t candidates = 16;   // earlier places of the own stream that are compared
  int32_t live_match = 3;    // shortest own match that drafts
  int32_t stream = 4096;     // tokens that a stream has room for at first
  double factor = 0.0;       // a draft is at most this many times as long as its match; 0: off
};

constexpr int32_t kLiveCap = 64;  // longest own match that is measured where there is no limit

RL_HD int32_t longest_match(const Options& o) { return o.limit > 0 ? o.limit : 0x7fffffff; }
RL_HD int32_t longest_live(const Options& o) {
  const int32_t cap = o.limit > 0 ? o.limit : kLiveCap;
  return cap > o.live_match ? cap : o.live_match;
}

// ---- history -------------------------------------------------------------------------------

struct Match {
  uint32_t state;
  int32_t length;
};

RL_HD uint32_t hash_token(int32_t token) {
  const uint32_t x = static_cast<uint32_t>(token) * 0x9E3779B1u;
  return x ^ (x >> 15);
}

RL_HD uint32_t find_edge(const Edge* edges, uint32_t list, int32_t token) {
  const Edge head = edges[list];
  const Edge* entry = edges + list + 1;
  if (entry->token == token) return entry->to;
  ++entry;
  if (head.to == 0) {
    for (int32_t i = 0; i + 1 < head.token; ++i) {
      if (entry[i].token == token) return entry[i].to;
    }
    return kNil;
  }
  // Free slots are left by the build; the bound is for files that were made by hand.
  uint32_t slot = hash_token(token) & head.to;
  for (uint32_t tries = 0; tries <= head.to; ++tries) {
    const Edge e = entry[slot];
    if (e.token == token) return e.to;
    if (e.token == kNoToken) return kNil;
    slot = (slot + 1) & head.to;
  }
  return kNil;
}

RL_HD uint32_t find_child(const History& h, const State& s, int32_t token) {
  if (s.token == token) return s.next;
  return s.edges == kNil ? kNil : find_edge(h.edges, s.edges, token);
}

// The longest suffix of the match, `limit` tokens at most.
RL_HD Match cut(const History& h, Match m, int32_t limit) {
  if (m.length <= limit) return m;
  while (h.states[m.state].link_length >= limit) m.state = h.states[m.state].link;
  m.length = limit;
  return m;
}

// One token more: the longest suffix of match + token that occurs.
RL_HD Match advance(const History& h, Match m, int32_t token, int32_t limit) {
  for (;;) {
    const State s = h.states[m.state];
    const uint32_t to = find_child(h, s, token);
    if (to != kNil) return cut(h, {to, m.length + 1}, limit);
    if (s.link == kNil) return {kRoot, 0};
    m = {s.link, s.link_length};
  }
}

// The longest suffix that continues, at least `min_match` tokens; length 0 where there is none.
RL_HD Match shrink(const History& h, Match m, int32_t min_match) {
  while (m.length >= min_match) {
    const State& s = h.states[m.state];
    if (s.next != kNil) return m;
    m = {s.link, s.link_length};
  }
  return {kRoot, 0};
}

// The most frequent of the children that are not the best one; `to` is kNil where there is none.
RL_HD Edge most_frequent(const History& h, const State& s) {
  return s.edges == kNil ? Edge{kNoToken, kNil} : h.edges[s.edges + 1];
}

// Best children from `state` on, `window` at most. The product of the branch probabilities
// count(child) / count(parent) along a path is count(end) / count(start). Rewards may pick a first
// child that is too rare for `min_prob`; then the most frequent one is taken instead.
RL_HD int32_t follow(const History& h, uint32_t state, int32_t window, double min_prob,
                     int32_t* out) {
  State s = h.states[state];
  const double least = min_prob * s.count;
  int32_t n = 0;
  if (window > 0 && s.next != kNil && h.states[s.next].count < least) {
    const Edge other = most_frequent(h, s);
    if (other.to == kNil || h.states[other.to].count < least) return 0;
    out[n++] = other.token;
    s = h.states[other.to];
  }
  while (n < window && s.next != kNil) {
    const int32_t token = s.token;
    s = h.states[s.next];
    if (s.count < least) break;
    out[n++] = token;
  }
  return n;
}

// ---- the request's own stream --------------------------------------------------------------

struct LiveSlot {
  uint32_t tag;   // hash of the gram
  uint32_t last;  // 1 + where it ended last; 0: free
};

// A position: its token, and the earlier position where the same `live_match` tokens end.
struct LiveToken {
  int32_t token;
  int32_t prev;  // -1: none
};

// The stream, and a hash table from `live_match` tokens to the last position where they end.
struct Live {
  LiveToken* text;
  LiveSlot* slots;
  uint32_t mask;  // slots - 1
  int32_t size;
};

RL_HD uint32_t hash_gram(const LiveToken* first, int32_t count) {
  uint64_t h = 0x2545F4914F6CDD1Dull;
  for (int32_t i = 0; i < count; ++i) {
    h = (h ^ static_cast<uint32_t>(first[i].token)) * 0x9E3779B97F4A7C15ull;
    h ^= h >> 32;
  }
  return static_cast<uint32_t>(h);
}

// Files position `at` under the tokens that end there (hash `tag`). True: a slot was taken. There
// is always a free one; the bound is for memory that something else wrote to.
RL_HD bool file_gram(const Live& live, int32_t at, uint32_t tag) {
  uint32_t slot = tag & live.mask;
  for (uint32_t tries = 0; tries <= live.mask; ++tries) {
    LiveSlot& s = live.slots[slot];
    if (s.last == 0) {
      s = {tag, static_cast<uint32_t>(at) + 1};
      live.text[at].prev = -1;
      return true;
    }
    if (s.tag == tag) {
      live.text[at].prev = static_cast<int32_t>(s.last) - 1;
      s.last = static_cast<uint32_t>(at) + 1;
      return false;
    }
    slot = (slot + 1) & live.mask;
  }
  live.text[at].prev = -1;
  return false;
}

struct LiveMatch {
  int32_t end;     // position of the last token of the match, -1: none
  int32_t length;  // 0: none
};

// How many tokens that end at `at` and at `end` are the same, `cap` at most.
RL_HD int32_t same_backwards(const Live& live, int32_t at, int32_t end, int32_t cap) {
  int32_t n = 0;
  while (n < cap && n <= at && live.text[at - n].token == live.text[end - n].token) ++n;
  return n;
}

// Among the last `candidates` earlier positions where the same `live_match` tokens end: the longest
// match backwards, the most recent of equals.
RL_HD LiveMatch find_live(const Live& live, const Options& o) {
  LiveMatch best = {-1, 0};
  const int32_t end = live.size - 1;
  if (live.size < o.live_match) return best;
  const int32_t cap = longest_live(o);
  int32_t at = live.text[end].prev;
  int32_t seen = 0;
  while (at >= 0 && seen < o.candidates) {
    const int32_t n = same_backwards(live, at, end, cap);
    // Shorter: other tokens with the same hash.
    if (n >= o.live_match) {
      ++seen;
      if (n > best.length) best = {at, n};
      if (n == cap) break;
    }
    at = live.text[at].prev;
  }
  return best;
}

// What followed there; beyond the end of the stream, what the draft itself begins with.
RL_HD int32_t copy_live(const Live& live, LiveMatch m, int32_t window, int32_t* out) {
  for (int32_t i = 0; i < window; ++i) {
    const int32_t from = m.end + 1 + i;
    out[i] = from < live.size ? live.text[from].token : out[from - live.size];
  }
  return window;
}

// ---- draft ---------------------------------------------------------------------------------

RL_HD int32_t window_for(const Options& o, int32_t window, int32_t length) {
  if (o.factor <= 0) return window;
  const double most = o.factor * length;
  return most < window ? static_cast<int32_t>(most) : window;
}

// A draft of `count` tokens, and the length of the match that it continues; 0: none.
struct Draft {
  int32_t count;
  int32_t matched;
};

// The history's draft. `window` is above 0.
RL_HD Draft draft_history(const History& h, Match m, const Options& o, int32_t window,
                          int32_t* out) {
  const Match from = shrink(h, m, o.min_match);
  if (from.length == 0) return {0, 0};
  const int32_t n = follow(h, from.state, window_for(o, window, from.length), o.min_prob, out);
  return {n, n > 0 ? from.length : 0};
}

// The own stream's draft over the history's where that matches longer or the history has none.
// Returns the number of tokens.
RL_HD int32_t draft_live(const Live& live, LiveMatch own, Draft d, const Options& o, int32_t window,
                         int32_t* out) {
  if (own.length <= d.matched) return d.count;
  return copy_live(live, own, window_for(o, window, own.length), out);
}

// The better draft of both. `indexed`: the own stream is filed up to its end. Returns the number of
// tokens.
RL_HD int32_t draft(const History& h, Match m, const Live& live, bool indexed, const Options& o,
                    int32_t window, int32_t* out) {
  if (window <= 0) return 0;
  const Draft d = draft_history(h, m, o, window, out);
  if (!indexed || d.matched >= longest_live(o)) return d.count;
  return draft_live(live, find_live(live, o), d, o, window, out);
}

// ---- window --------------------------------------------------------------------------------

struct Window {
  int32_t size;      // 0: not drafted yet
  int32_t proposed;  // length of the last draft, until it is accepted
  int32_t start;     // the load rule at the last draft
  int32_t growth;
};

// What the number of running requests leaves to each: all drafts of a batch together stay under the
// knee, and far below it windows start and grow larger.
struct Load {
  int32_t budget;
  int32_t start;
  int32_t growth;
};

RL_HD Load load_rule(const Options& o, int64_t running) {
  if (o.knee <= 0 || running <= 0) return {o.max_window, o.start_window, o.growth};
  int64_t budget = o.knee / running - 1;
  if (budget > o.max_window) budget = o.max_window;
  if (budget < 1) budget = 1;
  const int32_t step = static_cast<int32_t>(budget / 4) & ~1;
  return {static_cast<int32_t>(budget), step > o.start_window ? step : o.start_window,
          step > o.growth ? step : o.growth};
}

// Notes the load and returns the window to draft with.
RL_HD int32_t open_window(Window& w, const Load& load) {
  if (w.size == 0) w.size = load.start;
  w.start = load.start;
  w.growth = load.growth;
  return w.size < load.budget ? w.size : load.budget;
}

RL_HD void accept(Window& w, int32_t accepted, int32_t max_window) {
  if (w.proposed > 0) {
    if (accepted >= w.proposed) {
      w.size = w.size + w.growth < max_window ? w.size + w.growth : max_window;
    } else {
      w.size = w.start;
    }
  }
  w.proposed = 0;
}

}  // namespace rlcore::suffix
