// One step of a batch on a device: accept, advance and draft of every request in one launch.
//
// Everything lies in device memory already: the forest's block as it is on the host, a record per
// request, fixed room for its stream. `step_request` is the step of one request by one thread, and
// `step_body` that by a warp, whose lanes compare the candidates of the own stream side by side.
// Both run on the host as well, where they are tested.
#pragma once

#include <cstdint>

#include "common/block.h"
#include "suffix/match.h"

namespace rlcore::suffix {

// rlcore/ops/suffix_device.py writes these records: eight int64 each.
struct DeviceRequest {
  int64_t handle;  // -1: free
  const State* states;
  const Edge* edges;
  Match match;
  Window window;
  int32_t size;     // of the stream, as far as there is room
  int32_t full;     // 1: a token did not fit; the own stream is out of use
  int32_t matched;  // tokens of the stream that `match` has read; fewer after a change of history
  int32_t unused;
};
static_assert(sizeof(DeviceRequest) == 64);

struct StepJob {
  DeviceRequest* requests;  // [num_requests]
  int64_t num_requests;
  LiveToken* text;  // [num_requests, stream]
  LiveSlot* slots;  // [num_requests, mask + 1], more than `stream` each
  int32_t stream;
  uint32_t mask;
  const int64_t* handles;   // [batch], the low 32 bits are the request's index
  const int32_t* accepted;  // [batch], nullptr: nothing was drafted
  const int32_t* tokens;    // [num_tokens]
  int64_t num_tokens;
  const int64_t* offsets;  // [batch + 1], nullptr: `row` tokens per request, counts[i] of them new
  const int32_t* counts;   // [batch]
  int64_t row;
  const int32_t* windows;  // [batch], nullptr: the requests' own
  int64_t batch;
  int64_t running;  // -1: no drafts, windows stay as they are
  int32_t width;
  int32_t* out;      // [batch, width], filled with -1
  int32_t* lengths;  // [batch]; -1: the request is not open, or another row has it
  int32_t* claims;   // [num_requests], filled with -1
  Options options;
};

// True for the first that asks, of all threads.
RL_HD bool claim(int32_t* entry) {
#ifdef __CUDA_ARCH__
  return atomicExch(entry, 0) == -1;
#else
  const int32_t before = *entry;
  *entry = 0;
  return before == -1;
#endif
}

RL_HD int64_t inside(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// One token more for the match in the history.
RL_HD void read_token(const History& history, DeviceRequest& r, int32_t token, const Options& o) {
  r.match = token < 0 ? Match{kRoot, 0} : advance(history, r.match, token, longest_match(o));
}

// A request between the parts of its step.
struct StepState {
  DeviceRequest request;
  int64_t index;
  Live live;
  Draft draft;
  int32_t window;
  bool searches;  // the own stream may match longer than the history
};

// All of a step but the search in the own stream; false: the row is done. What cannot be reported
// from a device is held in range: offsets, accepted lengths, windows. A negative token matches
// nothing. Of several rows with one handle one moves the request.
RL_HD bool begin_step(const StepJob& job, int64_t i, StepState& s) {
  const Options& o = job.options;
  const int64_t handle = job.handles[i];
  const int64_t index = handle & 0xffffffff;
  job.lengths[i] = -1;
  if (handle < 0 || index >= job.num_requests || job.requests[index].handle != handle) return false;
  if (!claim(job.claims + index)) return false;
  DeviceRequest r = job.requests[index];
  const History history = {r.states, r.edges};
  Live live = {job.text + index * job.stream, job.slots + index * (int64_t{job.mask} + 1), job.mask,
               r.size};

  if (job.accepted != nullptr) {
    accept(r.window, static_cast<int32_t>(inside(job.accepted[i], 0, r.window.proposed)),
           o.max_window);
  }

  if (r.full) r.matched = live.size;  // the stream's end is not there
  while (r.matched < live.size) read_token(history, r, live.text[r.matched++].token, o);
  int64_t first = i * job.row;
  int64_t last = first;
  if (job.offsets != nullptr) {
    last = inside(job.offsets[i + 1], 0, job.num_tokens);
    first = inside(job.offsets[i], 0, last);
  } else {
    last += inside(job.counts[i], 0, job.row);
  }
  for (int64_t k = first; k < last; ++k) {
    const int32_t token = job.tokens[k];
    read_token(history, r, token, o);
    if (!o.live || r.full) continue;
    if (live.size == job.stream) {
      r.full = 1;
      continue;
    }
    live.text[live.size] = {token, -1};
    if (++live.size >= o.live_match) {
      file_gram(live, live.size - 1, hash_gram(live.text + live.size - o.live_match, o.live_match));
    }
  }
  r.size = r.matched = live.size;
  if (job.running < 0) {
    job.lengths[i] = 0;
    job.requests[index] = r;
    return false;
  }

  const int32_t own = open_window(r.window, load_rule(o, job.running));
  const int32_t asked = job.windows != nullptr ? job.windows[i] : own;
  const int32_t window = static_cast<int32_t>(inside(asked, 0, job.width));
  Draft d = {0, 0};
  if (window > 0) d = draft_history(history, r.match, o, window, job.out + i * job.width);
  s = {r, index, live, d, window, false};
  s.searches = window > 0 && o.live && !r.full && d.matched < longest_live(o);
  return true;
}

RL_HD void finish_step(const StepJob& job, int64_t i, const StepState& s, LiveMatch own) {
  const int32_t n =
      draft_live(s.live, own, s.draft, job.options, s.window, job.out + i * job.width);
  DeviceRequest r = s.request;
  r.window.proposed = n;
  job.lengths[i] = n;
  job.requests[s.index] = r;
}

RL_HD void step_request(const StepJob& job, int64_t i) {
  StepState s;
  if (!begin_step(job, i, s)) return;
  finish_step(job, i, s, s.searches ? find_live(s.live, job.options) : LiveMatch{-1, 0});
}

// What a lane found: the most tokens win, of equals the most recent, which the lowest lane has.
struct LaneMatch {
  int32_t length;
  int32_t lane;
  int32_t end;
};

RL_HD LaneMatch better(LaneMatch a, LaneMatch b) {
  return a.length > b.length || (a.length == b.length && a.lane < b.lane) ? a : b;
}

// `find_live` by a warp: every lane walks the earlier positions and compares one of them.
template <class Block>
RL_DEVICE LiveMatch find_live(Block& block, const Live& live, const Options& o) {
  LiveMatch best = {-1, 0};
  const int32_t end = live.size - 1, lane = block.thread();
  if (live.size < o.live_match) return best;
  const int32_t cap = longest_live(o);
  int32_t at = live.text[end].prev;
  int32_t seen = 0;
  while (at >= 0 && seen < o.candidates && best.length < cap) {
    const int32_t round = o.candidates - seen < kWarp ? o.candidates - seen : kWarp;
    int32_t mine = -1;
    for (int32_t k = 0; k < round && at >= 0; ++k) {
      if (k == lane) mine = at;
      at = live.text[at].prev;
    }
    const int32_t n = mine >= 0 ? same_backwards(live, mine, end, cap) : 0;
    // Shorter: other tokens with the same hash.
    const bool good = mine >= 0 && n >= o.live_match;
    LaneMatch found = {good ? n : 0, lane, mine};
    int32_t count = good;
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      found = better(found, block.shfl_xor(found, mask));
      count += block.shfl_xor(count, mask);
    }
    seen += count;
    if (found.length > best.length) best = {found.end, found.length};
  }
  return best;
}

struct StepShared {
  StepState state;
  bool goes_on;
};

// One block of one warp per request.
template <class Block>
RL_DEVICE void step_body(Block& block, StepShared& shared, const StepJob& job, int64_t i) {
  if (block.thread() == 0) shared.goes_on = begin_step(job, i, shared.state);
  block.sync();
  if (!shared.goes_on) return;
  LiveMatch own = {-1, 0};
  if (shared.state.searches) own = find_live(block, shared.state.live, job.options);
  if (block.thread() == 0) finish_step(job, i, shared.state, own);
}

}  // namespace rlcore::suffix

// Launches the step on `stream`; a cudaError_t. No allocation, no synchronisation.
extern "C" int rlcore_suffix_step(const rlcore::suffix::StepJob* job, void* stream);
