// Host test of csrc/suffix, without Python: match.h alone against brute force, then the batched
// walks and the body of the CUDA kernel against match.h. Built with sanitizers by
// tests/native/test_suffix_native.py.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "suffix/build.h"
#include "suffix/forest.h"
#include "suffix/match_cuda.h"

using namespace rlcore::suffix;

#define CHECK(condition)                                                         \
  if (!(condition)) {                                                            \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                                \
  }

namespace {

using Text = std::vector<int32_t>;

struct Random {
  uint64_t state;
  int32_t below(int32_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(n));
  }
  Text text(int32_t length, int32_t letters) {
    Text t(static_cast<size_t>(length));
    for (auto& x : t) x = below(letters);
    return t;
  }
};

struct Index {
  std::vector<State> states;
  std::vector<Edge> edges;
  History view() const { return {states.data(), edges.data()}; }
};

Index index_of(const std::vector<Text>& responses, const std::vector<int64_t>& weights) {
  Builder builder;
  int64_t tokens = 0;
  for (const auto& r : responses) tokens += static_cast<int64_t>(r.size());
  builder.start(tokens);
  for (size_t i = 0; i < responses.size(); ++i) builder.add(responses[i], weights[i]);
  builder.finish();
  Index index;
  index.states.resize(builder.num_states());
  index.edges.resize(builder.num_edges());
  builder.write(index.states.data(), index.edges.data());
  return index;
}

// (sum of weights, occurrences) of `text`.
std::pair<int64_t, uint32_t> occurrences(const std::vector<Text>& responses,
                                         const std::vector<int64_t>& weights, const Text& text) {
  std::pair<int64_t, uint32_t> sum = {0, 0};
  for (size_t i = 0; i < responses.size(); ++i) {
    const Text& r = responses[i];
    for (size_t at = 0; at + text.size() <= r.size(); ++at) {
      if (!std::equal(text.begin(), text.end(), r.begin() + static_cast<std::ptrdiff_t>(at))) {
        continue;
      }
      sum.first += weights[i];
      ++sum.second;
    }
  }
  return sum;
}

// Match length and best child by counting every string.
void check_against_counting(Random& random) {
  const int32_t letters = 1 + random.below(4);
  std::vector<Text> responses;
  std::vector<int64_t> weights;
  for (int32_t i = random.below(4); i >= 0; --i) {
    responses.push_back(random.text(random.below(25), letters));
    weights.push_back(random.below(3));
  }
  const Index index = index_of(responses, weights);
  const int32_t limit = random.below(2) ? 0x7fffffff : 1 + random.below(5);
  const Text stream = random.text(20, letters + 1);
  Match match = {kRoot, 0};
  for (size_t end = 1; end <= stream.size(); ++end) {
    match = advance(index.view(), match, stream[end - 1], limit);
    Text longest;
    for (size_t from = 0; from <= end; ++from) {
      const Text suffix(stream.begin() + static_cast<std::ptrdiff_t>(from),
                        stream.begin() + static_cast<std::ptrdiff_t>(end));
      if (static_cast<int64_t>(suffix.size()) > limit) continue;
      if (suffix.empty() || occurrences(responses, weights, suffix).second > 0) {
        longest = suffix;
        break;
      }
    }
    CHECK(match.length == static_cast<int32_t>(longest.size()));
    int32_t best = kNoToken;
    std::pair<int64_t, uint32_t> most = {-1, 0};
    for (int32_t token = 0; token < letters; ++token) {
      Text longer = longest;
      longer.push_back(token);
      const auto found = occurrences(responses, weights, longer);
      if (found.second > 0 && found > most) {
        most = found;
        best = token;
      }
    }
    const State& state = index.states[match.state];
    CHECK(state.token == best);
    if (best != kNoToken) CHECK(index.states[state.next].count == most.second);
    if (!longest.empty()) {
      CHECK(state.count == occurrences(responses, weights, longest).second);
    }
  }
}

// A warp takes the step that one thread takes, here both on copies of the requests.
void check_warp(const StepJob& job, const std::vector<DeviceRequest>& requests,
                const std::vector<LiveToken>& text, const std::vector<LiveSlot>& slots) {
  struct Copy {
    std::vector<DeviceRequest> requests;
    std::vector<LiveToken> text;
    std::vector<LiveSlot> slots;
    std::vector<int32_t> out, lengths, claims;
    StepJob job;
  };
  const auto rows = static_cast<size_t>(job.batch), width = static_cast<size_t>(job.width);
  std::vector<Copy> copies(2, {requests, text, slots, std::vector<int32_t>(rows * width, -1),
                               std::vector<int32_t>(rows), std::vector<int32_t>(rows, -1), job});
  for (auto& copy : copies) {
    copy.job.requests = copy.requests.data();
    copy.job.text = copy.text.data();
    copy.job.slots = copy.slots.data();
    copy.job.out = copy.out.data();
    copy.job.lengths = copy.lengths.data();
    copy.job.claims = copy.claims.data();
  }
  for (int64_t i = 0; i < job.batch; ++i) {
    step_request(copies[0].job, i);
    const auto body = [&](rlcore::HostBlock& block, void* shared) {
      step_body(block, *static_cast<StepShared*>(shared), copies[1].job, i);
    };
    rlcore::HostBlock::Fibers(rlcore::kWarp, sizeof(StepShared), body).run();
  }
  CHECK(copies[0].lengths == copies[1].lengths && copies[0].out == copies[1].out);
  for (size_t i = 0; i < requests.size(); ++i) {
    CHECK(std::memcmp(&copies[0].requests[i], &copies[1].requests[i], sizeof(DeviceRequest)) == 0);
  }
}

// The forest, which walks in batches, and the device's body give the same drafts and windows.
void check_batches(Random& random) {
  constexpr size_t kRequests = 40;  // more than walk at once
  Options o;
  o.min_match = 1 + random.below(3);
  o.limit = random.below(2) ? 0 : o.min_match + random.below(5);
  o.min_prob = random.below(3) * 0.2;
  o.live_match = 1 + random.below(3);
  o.candidates = 1 + random.below(random.below(2) ? 4 : 40);
  o.factor = random.below(2) * 1.5;
  o.knee = random.below(2) * 400;
  o.stream = 0;
  const int32_t letters = 1 + random.below(20);
  Text tokens;
  std::vector<int64_t> keys, responses = {0}, prompts = {0};
  std::vector<float> rewards;
  for (int32_t p = 0; p < 5; ++p) {
    keys.push_back(p * 7 - 9);
    for (int32_t r = 0; r < 3; ++r) {
      const Text text = random.text(random.below(200), letters);
      tokens.insert(tokens.end(), text.begin(), text.end());
      responses.push_back(static_cast<int64_t>(tokens.size()));
      rewards.push_back(static_cast<float>(random.below(3)) - 1);
    }
    prompts.push_back(static_cast<int64_t>(rewards.size()));
  }
  Forest forest(o, 2);
  forest.build({keys, tokens, responses, prompts, rewards});
  forest.swap();

  std::vector<int64_t> wanted(kRequests), handles(kRequests);
  for (auto& key : wanted) key = random.below(6) * 7 - 9;
  forest.open(wanted, handles);
  constexpr int32_t kStream = 300;
  constexpr uint32_t kRoom = 512;
  std::vector<DeviceRequest> requests(kRequests);
  std::vector<LiveToken> text(kRequests * kStream);
  std::vector<LiveSlot> slots(kRequests * kRoom);
  std::vector<int64_t> ids(kRequests);
  for (size_t i = 0; i < kRequests; ++i) {
    const History h = forest.current()->history(wanted[i]);
    ids[i] = static_cast<int64_t>(kRequests - 1 - i);
    requests[static_cast<size_t>(ids[i])] = {ids[i], h.states, h.edges, {kRoot, 0}, {}, 0, 0, 0, 0};
  }

  std::vector<int32_t> accepted(kRequests, 0), lengths(kRequests), windows(kRequests);
  for (int32_t round = 0; round < 12; ++round) {
    Text more;
    std::vector<int64_t> offsets = {0};
    for (size_t i = 0; i < kRequests; ++i) {
      const Text one = random.text(round == 0 ? 100 : random.below(12), letters + 1);
      more.insert(more.end(), one.begin(), one.end());
      offsets.push_back(static_cast<int64_t>(more.size()));
    }
    const bool own = random.below(2);
    for (auto& w : windows) w = random.below(o.max_window + 1);
    const int32_t width = own ? load_rule(o, kRequests).budget : o.max_window;
    const size_t cells = kRequests * static_cast<size_t>(width);
    std::vector<int32_t> here(cells, -1), there(cells, -1), there_lengths(kRequests);
    forest.step(handles, accepted, more, offsets, own ? std::span<const int32_t>() : windows, own,
                0, {here.data(), lengths.data(), width});
    std::vector<int32_t> claims(kRequests, -1);
    StepJob job = {.requests = requests.data(),
                   .num_requests = kRequests,
                   .text = text.data(),
                   .slots = slots.data(),
                   .stream = kStream,
                   .mask = kRoom - 1,
                   .handles = ids.data(),
                   .accepted = accepted.data(),
                   .tokens = more.data(),
                   .num_tokens = static_cast<int64_t>(more.size()),
                   .offsets = offsets.data(),
                   .counts = nullptr,
                   .row = 0,
                   .windows = own ? nullptr : windows.data(),
                   .batch = kRequests,
                   .running = kRequests,
                   .width = width,
                   .out = there.data(),
                   .lengths = there_lengths.data(),
                   .claims = claims.data(),
                   .options = o};
    if (round % 4 == 3) check_warp(job, requests, text, slots);
    for (int64_t i = 0; i < job.batch; ++i) step_request(job, i);
    CHECK(lengths == there_lengths);
    CHECK(here == there);
    std::vector<int32_t> sizes(kRequests);
    forest.windows(handles, sizes);
    for (size_t i = 0; i < kRequests; ++i) {
      CHECK(sizes[i] == requests[static_cast<size_t>(ids[i])].window.size);
      accepted[i] = random.below(lengths[i] + 1);
    }
  }
  forest.close(handles);
  CHECK(forest.stats().live_bytes <= Pool::kSlab);
}

// More candidates than lanes, all equally long: the most recent one is followed.
void check_many_candidates() {
  const Index index = index_of({{1000}}, {1});
  Options o;
  o.live_match = 1;
  o.candidates = 40;
  Text tokens;
  for (int32_t k = 0; k < 40; ++k) tokens.insert(tokens.end(), {1, 100 + k});
  tokens.push_back(1);
  const std::vector<DeviceRequest> requests(
      1, {0, index.states.data(), index.edges.data(), {kRoot, 0}, {}, 0, 0, 0, 0});
  const std::vector<LiveToken> text(100);
  const std::vector<LiveSlot> slots(128);
  const int64_t handle = 0, offsets[] = {0, static_cast<int64_t>(tokens.size())};
  std::vector<DeviceRequest> mine = requests;
  std::vector<LiveToken> my_text = text;
  std::vector<LiveSlot> my_slots = slots;
  int32_t out[] = {-1, -1}, length = -1, claim = -1;
  StepJob job = {.requests = mine.data(),
                 .num_requests = 1,
                 .text = my_text.data(),
                 .slots = my_slots.data(),
                 .stream = 100,
                 .mask = 127,
                 .handles = &handle,
                 .accepted = nullptr,
                 .tokens = tokens.data(),
                 .num_tokens = offsets[1],
                 .offsets = offsets,
                 .counts = nullptr,
                 .row = 0,
                 .windows = nullptr,
                 .batch = 1,
                 .running = 1,
                 .width = 2,
                 .out = out,
                 .lengths = &length,
                 .claims = &claim,
                 .options = o};
  check_warp(job, requests, text, slots);
  step_request(job, 0);
  CHECK(length == 2 && out[0] == 139 && out[1] == 1);
}

// What the host would refuse, the device's body holds in range.
void check_device_bounds() {
  const Index index = index_of({{1, 2, 3, 4, 5}}, {1});
  Options o;
  DeviceRequest request = {
      5LL << 32, index.states.data(), index.edges.data(), {kRoot, 0}, {}, 0, 0, 0, 0};
  std::vector<LiveToken> text(4);
  std::vector<LiveSlot> slots(8);
  const std::vector<int64_t> handles = {5LL << 32, 0, -1, 1, 6LL << 32, 5LL << 32};
  const Text tokens = {7, -1, 1, 2, 3};
  const std::vector<int64_t> offsets = {-4, 99, 99, -7, 0, 3, 5};
  const Text windows = {1000, 1, 1, 1, 1, 1};
  const Text accepted = {50, 0, 0, 0, 0, 0};
  std::vector<int32_t> out(18, -1), lengths(6, 77), claims(1, -1);
  const StepJob job = {.requests = &request,
                       .num_requests = 1,
                       .text = text.data(),
                       .slots = slots.data(),
                       .stream = 4,
                       .mask = 7,
                       .handles = handles.data(),
                       .accepted = accepted.data(),
                       .tokens = tokens.data(),
                       .num_tokens = 5,
                       .offsets = offsets.data(),
                       .counts = nullptr,
                       .row = 0,
                       .windows = windows.data(),
                       .batch = 6,
                       .running = 1,
                       .width = 3,
                       .out = out.data(),
                       .lengths = lengths.data(),
                       .claims = claims.data(),
                       .options = o};
  for (int64_t i = 0; i < 6; ++i) step_request(job, i);
  CHECK((lengths == Text{2, -1, -1, -1, -1, -1}));
  CHECK(out[0] == 4 && out[1] == 5 && out[2] == -1);
  CHECK(request.full == 1 && request.size == 4);
}

// A table without a free slot is left alone.
void check_full_table() {
  std::vector<LiveToken> text(3);
  std::vector<LiveSlot> slots(4, {1, 1});
  CHECK(!file_gram({text.data(), slots.data(), 3, 3}, 2, 2));
  CHECK(text[2].prev == -1);
}

// Blocks of all sizes, which must not overlap, and what stays of them in the end.
void check_pool(Random& random) {
  struct Block {
    unsigned char* at;
    uint64_t bytes;
    unsigned char fill;
  };
  Pool pool;
  std::vector<Block> blocks;
  const auto intact = [](const Block& b) {
    return b.at[0] == b.fill && b.at[b.bytes / 2] == b.fill && b.at[b.bytes - 1] == b.fill;
  };
  for (int32_t i = 0; i < 4000; ++i) {
    if (blocks.empty() || random.below(5) < (i < 2000 ? 3 : 2)) {
      const uint64_t bytes = Pool::block(uint64_t{1} << random.below(19)) * (1 + random.below(2));
      const auto fill = static_cast<unsigned char>(random.below(256));
      auto* at = static_cast<unsigned char*>(pool.take(Pool::block(bytes)));
      blocks.push_back({at, Pool::block(bytes), fill});
      std::memset(at, fill, blocks.back().bytes);
    } else {
      std::swap(blocks[static_cast<size_t>(random.below(static_cast<int32_t>(blocks.size())))],
                blocks.back());
      CHECK(intact(blocks.back()));
      pool.give(blocks.back().at, blocks.back().bytes);
      blocks.pop_back();
    }
  }
  uint64_t used = 0;
  for (const auto& b : blocks) used += b.bytes;
  CHECK(pool.nbytes() >= used);
  for (const auto& b : blocks) {
    CHECK(intact(b));
    pool.give(b.at, b.bytes);
  }
  CHECK(pool.nbytes() == Pool::kSlab);
}

void check_block_sizes() {
  for (const auto& [bytes, block] :
       std::vector<std::pair<uint64_t, uint64_t>>{{1, 1024},
                                                  {1025, 2048},
                                                  {2049, 3072},
                                                  {3073, 4096},
                                                  {(2 << 20) + 1, 4 << 20},
                                                  {(4 << 20) + 1, 6 << 20}}) {
    CHECK(Pool::block(bytes) == block);
    CHECK(Pool::block(block) == block);
  }
}

}  // namespace

int main() {
  Random random = {7};
  for (int i = 0; i < 150; ++i) check_against_counting(random);
  for (int i = 0; i < 25; ++i) check_batches(random);
  check_device_bounds();
  check_many_candidates();
  check_full_table();
  check_block_sizes();
  check_pool(random);
  bool refused = false;
  try {
    Options o;
    o.limit = 2;
    Forest(o, 1);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  return 0;
}
