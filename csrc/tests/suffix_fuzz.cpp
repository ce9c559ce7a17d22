// The suffix forest driven by bytes: for AFL++ (stdin), or a replay of files and folders of them.
//
//   suffix_fuzz < input            one input
//   suffix_fuzz corpus/ a b c      every file
//
// Two forests get the same calls, one in batches and one request by request, token by token, and
// the body of the CUDA kernel as well: their drafts must agree. Refusals are fine, anything else
// aborts.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <vector>

#include "suffix/forest.h"
#include "suffix/match_cuda.h"

namespace {

using rlcore::suffix::Arena;
using rlcore::suffix::Forest;
using rlcore::suffix::Options;

#define NEED(condition)                                                          \
  if (!(condition)) {                                                            \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    std::abort();                                                                \
  }

class Bytes {
 public:
  explicit Bytes(std::vector<uint8_t> all) : all_(std::move(all)) {}
  bool empty() const { return at_ >= all_.size(); }
  uint8_t next() { return empty() ? 0 : all_[at_++]; }
  int32_t below(int32_t n) { return next() % n; }

 private:
  std::vector<uint8_t> all_;
  size_t at_ = 0;
};

// Mostly small ids, now and then one that is refused.
int32_t token_of(Bytes& in) {
  const uint8_t b = in.next();
  return b == 255 ? -1 : b % 4;
}

struct Batch {
  std::vector<int64_t> handles;
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets = {0};
  std::vector<int32_t> windows;
};

// One request as it lies on a device, and what it holds on to.
struct OnDevice {
  static constexpr int32_t kStream = 512;
  static constexpr uint32_t kSlots = 1024;

  std::shared_ptr<const Arena> arena;
  rlcore::suffix::DeviceRequest request = {};
  std::vector<rlcore::suffix::LiveToken> text;
  std::vector<rlcore::suffix::LiveSlot> slots;

  OnDevice(std::shared_ptr<const Arena> current, int64_t key)
      : arena(std::move(current)), text(kStream), slots(kSlots) {
    static constexpr rlcore::suffix::State kNothing = {
        rlcore::suffix::kNoToken, rlcore::suffix::kNil,
        rlcore::suffix::kNil,     0,
        rlcore::suffix::kNil,     0};
    const auto history = arena ? arena->history(key) : rlcore::suffix::History{&kNothing, nullptr};
    request.states = history.states;
    request.edges = history.edges;
  }

  // Returns the length of the draft in `out`.
  int32_t step(const Options& options, const int32_t* tokens, int64_t count, const int32_t* window,
               int64_t running, std::vector<int32_t>& out) {
    const int64_t handle = 0, offsets[] = {0, count};
    int32_t length = -1, claim = -1;
    const rlcore::suffix::StepJob job = {.requests = &request,
                                         .num_requests = 1,
                                         .text = text.data(),
                                         .slots = slots.data(),
                                         .stream = kStream,
                                         .mask = kSlots - 1,
                                         .handles = &handle,
                                         .accepted = nullptr,
                                         .tokens = tokens,
                                         .num_tokens = count,
                                         .offsets = offsets,
                                         .counts = nullptr,
                                         .row = 0,
                                         .windows = window,
                                         .batch = 1,
                                         .running = running,
                                         .width = static_cast<int32_t>(out.size()),
                                         .out = out.data(),
                                         .lengths = &length,
                                         .claims = &claim,
                                         .options = options};
    rlcore::suffix::step_request(job, 0);
    return length;
  }
};

class Run {
 public:
  explicit Run(Bytes in)
      : in_(std::move(in)), options_(draw_options()), fast_(options_, 1), slow_(options_, 1) {}

  void go() {
    while (!in_.empty()) {
      try {
        act(in_.below(8));
      } catch (const std::invalid_argument&) {
        // A refusal changes nothing, so both forests go on alike.
      }
    }
  }

 private:
  Options draw_options() {
    Options o;
    o.min_match = 1 + in_.below(3);
    o.limit = in_.below(2) ? 0 : o.min_match + in_.below(6);
    o.min_prob = in_.below(4) / 8.0;
    o.max_window = 2 + in_.below(30);
    o.live = in_.below(2);
    o.live_match = 1 + in_.below(3);
    o.candidates = 1 + in_.below(16);
    o.factor = in_.below(3);
    o.knee = in_.below(2) ? 0 : in_.next();
    o.stream = in_.below(2);
    return o;
  }

  void act(int32_t what) {
    switch (what) {
      case 0:
        return build();
      case 1:
        return open();
      case 2:
        return close();
      default:
        return step();
    }
  }

  void build() {
    std::vector<int64_t> keys, responses = {0}, prompts = {0};
    std::vector<int32_t> tokens;
    std::vector<float> rewards;
    for (int32_t p = in_.below(4); p > 0; --p) {
      keys.push_back(in_.below(5));
      for (int32_t r = in_.below(4); r > 0; --r) {
        for (int32_t n = in_.below(40); n > 0; --n) tokens.push_back(token_of(in_));
        responses.push_back(static_cast<int64_t>(tokens.size()) + (in_.next() == 255));
        rewards.push_back(static_cast<float>(in_.below(5)) - 1.0f);
      }
      prompts.push_back(static_cast<int64_t>(rewards.size()));
    }
    for (Forest* f : {&fast_, &slow_}) {
      f->build({keys, tokens, responses, prompts, rewards});
      f->swap();
    }
  }

  void open() {
    const std::vector<int64_t> keys = {in_.below(6), in_.below(6)};
    std::vector<int64_t> a(2), b(2);
    fast_.open(keys, a);
    slow_.open(keys, b);
    NEED(a == b);
    open_.insert(open_.end(), a.begin(), a.end());
    for (size_t i = 0; i < 2; ++i) {
      device_.emplace(a[i], OnDevice(fast_.current(), keys[i]));
    }
  }

  int64_t handle() {
    if (open_.empty() || in_.next() == 255) return in_.next();
    return open_[static_cast<size_t>(in_.next()) % open_.size()];
  }

  void close() {
    const std::vector<int64_t> one = {handle()};
    fast_.close(one);
    slow_.close(one);
    open_.erase(std::find(open_.begin(), open_.end(), one[0]));
    device_.erase(one[0]);
  }

  void step() {
    Batch b;
    for (int32_t n = 1 + in_.below(4); n > 0; --n) {
      b.handles.push_back(handle());
      for (int32_t t = in_.below(9); t > 0; --t) b.tokens.push_back(token_of(in_));
      b.offsets.push_back(static_cast<int64_t>(b.tokens.size()));
      b.windows.push_back(in_.below(options_.max_window + 1));
    }
    const bool own = in_.below(2);
    const int64_t running = in_.below(20);
    const bool at_once = in_.below(4) == 1;
    const size_t rows = b.handles.size();
    if (!at_once) fast_.advance(b.handles, b.tokens, b.offsets);
    const int32_t width =
        fast_.width(static_cast<int64_t>(rows), b.windows, own, std::max<int64_t>(running, 1));
    std::vector<int32_t> tokens(rows * static_cast<size_t>(width)), lengths(rows);
    const Forest::Drafts out = {tokens.data(), lengths.data(), width};
    if (at_once) {
      // A draft that was refused at its end is still to be accepted.
      const std::vector<int32_t> none(rows, 0);
      fast_.step(b.handles, none, b.tokens, b.offsets, b.windows, own,
                 std::max<int64_t>(running, 1), out);
      slow_.accept(b.handles, none);
      accept_there(b, none);
    } else {
      fast_.draft(b.handles, b.windows, own, std::max<int64_t>(running, 1), out);
    }
    std::vector<int32_t> accepted;
    for (size_t i = 0; i < rows; ++i) {
      one_by_one(b, i, own, std::max<int64_t>(running, 1), width,
                 tokens.data() + i * static_cast<size_t>(width), lengths[i]);
      const int32_t n = in_.next();
      accepted.push_back(std::min(n, lengths[i] + (n == 255)));
    }
    std::vector<int32_t> a(rows), c(rows);
    fast_.matches(b.handles, a, c);
    for (size_t i = 0; i < rows; ++i) {
      NEED(a[i] == 0 || a[i] >= options_.min_match);
      NEED(options_.limit == 0 || a[i] <= options_.limit);
    }
    fast_.accept(b.handles, accepted);
    slow_.accept(b.handles, accepted);
    accept_there(b, accepted);
    fast_.windows(b.handles, a);
    slow_.windows(b.handles, c);
    NEED(a == c);
    for (size_t i = 0; i < rows; ++i) NEED(device_.at(b.handles[i]).request.window.size == a[i]);
  }

  void accept_there(const Batch& b, const std::vector<int32_t>& accepted) {
    for (size_t i = 0; i < accepted.size(); ++i) {
      auto& window = device_.at(b.handles[i]).request.window;
      rlcore::suffix::accept(window, accepted[i], options_.max_window);
    }
  }

  void one_by_one(const Batch& b, size_t i, bool own, int64_t running, int32_t width,
                  const int32_t* row, int32_t length) {
    const std::vector<int64_t> handle = {b.handles[i]};
    for (int64_t k = b.offsets[i]; k < b.offsets[i + 1]; ++k) {
      const std::vector<int32_t> token = {b.tokens[static_cast<size_t>(k)]};
      slow_.advance(handle, token, std::vector<int64_t>{0, 1});
    }
    const std::vector<int32_t> window = {b.windows[i]};
    std::vector<int32_t> tokens(static_cast<size_t>(width)), n(1);
    slow_.draft(handle, window, own, running, {tokens.data(), n.data(), width});
    std::vector<int32_t> there(static_cast<size_t>(width), -1);
    OnDevice& device = device_.at(handle[0]);
    const int32_t m =
        device.step(options_, b.tokens.data() + b.offsets[i], b.offsets[i + 1] - b.offsets[i],
                    own ? nullptr : window.data(), running, there);
    if (!device.request.full) NEED(m == length && std::equal(there.begin(), there.end(), row));
    // Without room for the stream it drafts something else; the windows go on as one.
    if (device.request.full) device.request.window.proposed = length;
    NEED(n[0] == length && length <= width);
    NEED(std::equal(tokens.begin(), tokens.end(), row));
    for (int32_t k = 0; k < width; ++k) NEED(k < length ? row[k] >= 0 : row[k] == -1);
  }

  Bytes in_;
  Options options_;
  Forest fast_, slow_;
  std::map<int64_t, OnDevice> device_;
  std::vector<int64_t> open_;
};

void run(std::vector<uint8_t> bytes) {
  try {
    Run(Bytes(std::move(bytes))).go();
  } catch (const std::invalid_argument&) {
    // Options that are refused.
  }
}

// Not through a stream, which remembers that it has ended: AFL++ hands in one input after another.
[[maybe_unused]] std::vector<uint8_t> standard_input() {
  std::vector<uint8_t> bytes;
  uint8_t part[4096];
  for (ssize_t n; (n = ::read(0, part, sizeof(part))) > 0;) {
    bytes.insert(bytes.end(), part, part + n);
  }
  return bytes;
}

std::vector<uint8_t> contents(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  NEED(in.good());
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
#ifdef __AFL_HAVE_MANUAL_CONTROL
    __AFL_INIT();
    while (__AFL_LOOP(1000)) run(standard_input());
#else
    run(standard_input());
#endif
  }
  for (int i = 1; i < argc; ++i) {
    std::vector<std::filesystem::path> files;
    if (std::filesystem::is_directory(argv[i])) {
      for (const auto& entry : std::filesystem::directory_iterator(argv[i])) {
        if (entry.is_regular_file()) files.push_back(entry.path());
      }
    } else {
      files.emplace_back(argv[i]);
    }
    for (const auto& file : files) run(contents(file));
  }
  return 0;
}
