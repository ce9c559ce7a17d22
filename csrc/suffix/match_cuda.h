// One step of a batch on a device: accept, advance and draft of every request in one launch.
//
// Everything lies in device memory already: the forest's block as it is on the host, a record per
// request, fixed room for its stream. `step_request` runs on the host as well, where it is tested.
#pragma once

#include <cstdint>

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

// What cannot be reported from a device is held in range: offsets, accepted lengths, windows. A
// negative token matches nothing. Of several rows with one handle one moves the request.
RL_HD void step_request(const StepJob& job, int64_t i) {
  const Options& o = job.options;
  const int64_t handle = job.handles[i];
  const int64_t index = handle & 0xffffffff;
  job.lengths[i] = -1;
  if (handle < 0 || index >= job.num_requests || job.requests[index].handle != handle) return;
  if (!claim(job.claims + index)) return;
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
    return;
  }

  const int32_t own = open_window(r.window, load_rule(o, job.running));
  const int32_t window = job.windows != nullptr ? job.windows[i] : own;
  const int32_t n =
      draft(history, r.match, live, o.live && !r.full, o,
            static_cast<int32_t>(inside(window, 0, job.width)), job.out + i * job.width);
  r.window.proposed = n;
  job.lengths[i] = n;
  job.requests[index] = r;
}

}  // namespace rlcore::suffix

// Launches the step on `stream`; a cudaError_t. No allocation, no synchronisation.
extern "C" int rlcore_suffix_step(const rlcore::suffix::StepJob* job, void* stream);
