// Advances and drafts for many requests at once, the same results as match.h one by one. Host only.
//
// A walk over a history is a chain of cache misses. Every walk stops where the next record is not
// near, asks for it, and lets the others go on meanwhile.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

#include "suffix/match.h"

namespace rlcore::suffix {

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// A record may lie across two cache lines, and the ones behind it are next.
inline void prefetch_state(const State* s) {
  const auto at = reinterpret_cast<uintptr_t>(s);
  prefetch(s);
  if ((at & 63) > 40) prefetch(reinterpret_cast<const char*>(s) + 24);
}

class Walk {
 public:
  // One request's part of a batch. `match` moves; `length` is that of the draft.
  struct Task {
    History history;
    Match* match;
    const int32_t* tokens;  // to advance by
    const int32_t* end;
    const Live* live;  // filed up to its end; nullptr: no own match
    int32_t window;    // 0: no draft
    int32_t* out;
    int32_t* length;
  };

  void start(const Task& task, const Options& options) {
    task_ = task;
    options_ = &options;
    at_ = *task.match;
    stage_ = Stage::kAdvance;
    prefetch_state(state());
  }

  // Goes on to the next miss. False: finished.
  bool go() {
    switch (stage_) {
      case Stage::kAdvance:
        return advance();
      case Stage::kList:
        return look_in_list();
      case Stage::kSlot:
        return look_in_slots();
      case Stage::kShrink:
        return shrink();
      case Stage::kFollow:
        return follow();
      case Stage::kOthers:
        return look_at_others();
      case Stage::kFrequent:
        return take_frequent();
      case Stage::kOwn:
        return look_at_own();
    }
    return false;
  }

 private:
  enum class Stage { kAdvance, kList, kSlot, kShrink, kFollow, kOthers, kFrequent, kOwn };

  const State* state() const { return task_.history.states + at_.state; }

  // True: the record is likely in the cache already.
  bool move(uint32_t to) {
    const bool near = to - at_.state <= 2;
    at_.state = to;
    if (!near) prefetch_state(state());
    return near;
  }

  bool wait(Stage stage) {
    stage_ = stage;
    return true;
  }

  bool advance() {
    const int32_t limit = longest_match(*options_);
    while (true) {
      const State& s = *state();
      if (at_.length > limit) {
        if (s.link_length >= limit) {
          move(s.link);
          return wait(Stage::kAdvance);
        }
        at_.length = limit;
      }
      if (task_.tokens == task_.end) break;
      if (s.token == *task_.tokens) {
        ++task_.tokens;
        ++at_.length;
        if (!move(s.next)) return wait(Stage::kAdvance);
      } else if (s.edges != kNil) {
        list_ = task_.history.edges + s.edges;
        prefetch(list_);
        return wait(Stage::kList);
      } else if (!fall_back(s)) {
        return wait(Stage::kAdvance);
      }
    }
    *task_.match = at_;
    if (task_.window <= 0) {
      *task_.length = 0;
      return false;
    }
    return shrink();
  }

  // No way on by the present token. True: the next record is here.
  bool fall_back(const State& s) {
    if (s.link == kNil) {
      at_ = {kRoot, 0};
      ++task_.tokens;
      return true;
    }
    at_.length = s.link_length;
    return move(s.link);
  }

  bool found(uint32_t to) {
    if (to == kNil) {
      if (fall_back(*state())) return advance();
    } else {
      ++task_.tokens;
      ++at_.length;
      if (move(to)) return advance();
    }
    return wait(Stage::kAdvance);
  }

  bool look_in_list() {
    if (list_->to == 0 || list_[1].token == *task_.tokens) return look_in_slots();
    prefetch(list_ + 2 + (hash_token(*task_.tokens) & list_->to));
    return wait(Stage::kSlot);
  }

  bool look_in_slots() { return found(find_edge(list_, 0, *task_.tokens)); }

  bool shrink() {
    while (at_.length >= options_->min_match) {
      const State& s = *state();
      if (s.next != kNil) {
        start_length_ = at_.length;
        window_ = window_for(*options_, task_.window, at_.length);
        least_ = options_->min_prob * s.count;
        return follow();
      }
      at_.length = s.link_length;
      if (!move(s.link)) return wait(Stage::kShrink);
    }
    return drafted();
  }

  bool follow() {
    while (drafted_ < window_) {
      const State& s = *state();
      if (s.next == kNil) break;
      if (least_ > 0 && s.next - at_.state != 1 && !asked_) {
        // Its count decides whether the token is taken.
        asked_ = true;
        prefetch_state(task_.history.states + s.next);
        return wait(Stage::kFollow);
      }
      asked_ = false;
      if (least_ > 0 && task_.history.states[s.next].count < least_) {
        if (drafted_ > 0 || s.edges == kNil) break;
        list_ = task_.history.edges + s.edges;
        prefetch(list_);
        return wait(Stage::kOthers);
      }
      task_.out[drafted_++] = s.token;
      const bool near = s.next - at_.state <= 2;
      at_.state = s.next;
      prefetch(reinterpret_cast<const char*>(state()) + 128);
      if (!near && least_ <= 0) {
        prefetch_state(state());
        return wait(Stage::kFollow);
      }
    }
    return drafted();
  }

  // The first child is too rare: the most frequent one may not be.
  bool look_at_others() {
    prefetch_state(task_.history.states + list_[1].to);
    return wait(Stage::kFrequent);
  }

  bool take_frequent() {
    const Edge other = most_frequent(task_.history, *state());
    if (other.to == kNil || task_.history.states[other.to].count < least_) return drafted();
    task_.out[drafted_++] = other.token;
    at_.state = other.to;
    return follow();
  }

  bool drafted() {
    if (drafted_ == 0) start_length_ = 0;
    if (task_.live != nullptr && task_.live->size >= options_->live_match &&
        start_length_ < longest_live(*options_)) {
      own_at_ = task_.live->text[task_.live->size - 1].prev;
      if (own_at_ >= 0) {
        prefetch(task_.live->text + own_at_);
        return wait(Stage::kOwn);
      }
    }
    return finish();
  }

  bool look_at_own() {
    const Live& live = *task_.live;
    const int32_t cap = longest_live(*options_);
    const int32_t n = same_backwards(live, own_at_, live.size - 1, cap);
    if (n >= options_->live_match) {
      ++seen_;
      if (n > own_.length) own_ = {own_at_, n};
    }
    own_at_ = live.text[own_at_].prev;
    if (own_at_ >= 0 && seen_ < options_->candidates && own_.length < cap) {
      prefetch(live.text + own_at_);
      return wait(Stage::kOwn);
    }
    if (own_.length > start_length_) {
      drafted_ = copy_live(live, own_, window_for(*options_, task_.window, own_.length), task_.out);
    }
    return finish();
  }

  bool finish() {
    *task_.length = drafted_;
    return false;
  }

  Task task_ = {};
  const Options* options_ = nullptr;
  Match at_ = {kRoot, 0};
  Stage stage_ = Stage::kAdvance;
  const Edge* list_ = nullptr;
  int32_t start_length_ = 0;  // of the match that the history drafts from
  int32_t window_ = 0;
  int32_t drafted_ = 0;
  double least_ = 0;
  bool asked_ = false;
  int32_t own_at_ = -1;
  int32_t seen_ = 0;
  LiveMatch own_ = {-1, 0};
};

// Runs `count` tasks, `task(i)` makes the i-th; some at a time.
template <class MakeTask>
void run_walks(size_t count, const Options& options, const MakeTask& task) {
  constexpr size_t kAtOnce = 12;
  std::array<Walk, kAtOnce> walks;
  size_t next = 0, running = 0;
  while (running < kAtOnce && next < count) walks[running++].start(task(next++), options);
  while (running > 0) {
    for (size_t i = 0; i < running;) {
      if (walks[i].go()) {
        ++i;
      } else if (next < count) {
        walks[i] = {};
        walks[i++].start(task(next++), options);
      } else {
        walks[i] = walks[--running];
      }
    }
  }
}

}  // namespace rlcore::suffix
