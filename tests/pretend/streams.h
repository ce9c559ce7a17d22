// Streams, events and the order of work on the pretend device.
//
// Kernels run at once, on the host. What a GPU would run later is kept as a vector clock: each
// launch gets a time on its stream, and each stream, event and the host know up to which launch of
// every other stream they have waited. Two accesses to the same bytes that no wait orders are an
// error, whichever ran first here.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

namespace pretend {

using Clock = std::vector<uint64_t>;  // of each stream, the last launch that has been waited for
using c10::StreamId;

constexpr StreamId kNccl = 1;  // the stream of all collectives; 0 is the default stream

inline std::recursive_mutex lock;
inline std::vector<Clock> clocks(2, Clock(2));
inline Clock host_clock(2);
inline thread_local StreamId current_stream = 0;
inline std::string fault;  // found where nothing can be raised; raised at the next launch or sync

inline void join(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

inline bool has_seen(const Clock& clock, StreamId stream, uint64_t time) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= time;
}

inline StreamId new_stream() {
  std::lock_guard guard(lock);
  clocks.emplace_back(clocks.size() + 1);
  return static_cast<StreamId>(clocks.size() - 1);
}

inline void raise_fault() {
  std::lock_guard guard(lock);
  if (fault.empty()) return;
  std::string text;
  text.swap(fault);
  TORCH_CHECK(false, text);
}

inline void stream_waits(StreamId stream, const Clock& clock) {
  std::lock_guard guard(lock);
  join(clocks[stream], clock);
}

struct Event {
  Clock clock;
};

}  // namespace pretend
