#include "suffix/forest.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <numeric>
#include <system_error>
#include <thread>
#include <utility>

#include "common/check.h"
#include "suffix/batch.h"
#include "suffix/build.h"

namespace rlcore::suffix {
namespace {

constexpr uint64_t kLine = 64;
constexpr size_t kAhead = 8;  // requests that are asked for before they are needed
constexpr double kWeightUnit = 65536.0;
constexpr float kLargestReward = 16384.0f;
constexpr int64_t kLongestPrompt = int64_t{1} << 29;
constexpr int64_t kLongestStream = int64_t{1} << 30;

// The history of a prompt without one.
constexpr State kNothing = {kNoToken, kNil, kNil, 0, kNil, 0};

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

void check_offsets(const char* name, std::span<const int64_t> offsets, size_t parts, size_t total) {
  RL_CHECK(offsets.size() == parts + 1, name, ": ", parts + 1, " entries are needed, got ",
           offsets.size());
  RL_CHECK(offsets[0] == 0, name, "[0] ", offsets[0], ": offsets begin with 0");
  for (size_t i = 0; i < parts; ++i) {
    RL_CHECK(offsets[i] <= offsets[i + 1], name, "[", i + 1, "] ", offsets[i + 1],
             ": offsets do not fall, the one before is ", offsets[i]);
  }
  RL_CHECK(offsets[parts] == static_cast<int64_t>(total), name, "[", parts, "] ", offsets[parts],
           ": the last offset is the number of what it cuts, ", total);
}

void check_tokens(std::span<const int32_t> tokens) {
  int32_t signs = 0;
  for (const int32_t t : tokens) signs |= t;
  if (signs >= 0) return;
  for (size_t i = 0; i < tokens.size(); ++i) {
    RL_CHECK(tokens[i] >= 0, "tokens[", i, "] ", tokens[i], ": token ids are 0 or more");
  }
}

}  // namespace

// ---- Arena ---------------------------------------------------------------------------------

std::unique_ptr<Arena> Arena::reserve(uint64_t bytes) {
  bytes = round_up(bytes, 4096);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw std::bad_alloc();
  ::madvise(base, bytes, MADV_HUGEPAGE);  // walks jump about; without it they miss the TLB too
  return std::unique_ptr<Arena>(new Arena(static_cast<char*>(base), bytes));
}

Arena::~Arena() { ::munmap(base_, reserved_); }

char* Arena::take(uint64_t bytes) {
  const uint64_t at = used_.fetch_add(round_up(bytes, kLine));
  if (at + bytes > reserved_) throw std::bad_alloc();
  return base_ + at;
}

void Arena::seal() {
  const uint64_t keep = round_up(used_, 4096);
  if (keep < reserved_) {
    ::munmap(base_ + keep, reserved_ - keep);
    reserved_ = keep;
  }
  Header& h = header();
  h.num_states = h.num_edges = 0;
  for (const Prompt& p : prompts()) {
    h.num_states += p.num_states;
    h.num_edges += p.num_edges;
  }
}

const Prompt* Arena::find(int64_t key) const {
  const auto all = prompts();
  const auto less = [](const Prompt& p, int64_t k) { return p.key < k; };
  const auto at = std::lower_bound(all.begin(), all.end(), key, less);
  return at != all.end() && at->key == key ? &*at : nullptr;
}

History Arena::history(int64_t key) const {
  const Prompt* p = find(key);
  if (p == nullptr) return {&kNothing, nullptr};
  return {reinterpret_cast<const State*>(base_ + p->states),
          reinterpret_cast<const Edge*>(base_ + p->edges)};
}

// ---- Pool -----------------------------------------------------------------------------------

Pool::Dropped::~Dropped() {
  while (first_ != nullptr) {
    const Gone gone = *first_;
    ::munmap(first_, gone.bytes);
    first_ = gone.next;
  }
}

Pool::~Pool() {
  for (const Slab& slab : slabs_) ::munmap(slab.base, kSlab);
  dropped();
}

uint64_t Pool::block(uint64_t bytes) {
  const uint64_t power = std::bit_ceil(std::max(bytes, kSmallest));
  const uint64_t size = power / 4 >= kSmallest && power / 4 * 3 >= bytes ? power / 4 * 3 : power;
  return size > kLargest ? round_up(size, kPage) : size;
}

// Only what begins on a large page becomes one.
char* Pool::map(uint64_t bytes, uint64_t unit) {
  void* got = ::mmap(nullptr, bytes + unit, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) throw std::bad_alloc();
  auto* from = static_cast<char*>(got);
  const uint64_t ahead =
      round_up(reinterpret_cast<uintptr_t>(from), unit) - reinterpret_cast<uintptr_t>(from);
  char* base = from + ahead;
  if (ahead > 0) ::munmap(from, ahead);
  if (ahead < unit) ::munmap(base + bytes, unit - ahead);
  ::madvise(base, bytes, MADV_HUGEPAGE);
  return base;
}

std::vector<Pool::Slab>::iterator Pool::slab_of(const char* block) {
  const auto above = [](const char* at, const Slab& slab) { return at < slab.base; };
  return std::upper_bound(slabs_.begin(), slabs_.end(), block, above) - 1;
}

void Pool::add_slab() {
  if (slabs_.size() == slabs_.capacity()) slabs_.reserve(2 * slabs_.size() + 4);
  auto marks = std::make_unique<uint8_t[]>(kSlab / kSmallest);
  char* base = map(kSlab, kSlab);
  held_ += kSlab;
  put(base, kOrders - 1, marks.get());
  const auto below = [](const Slab& slab, const char* at) { return slab.base < at; };
  const auto at = std::lower_bound(slabs_.begin(), slabs_.end(), base, below);
  slabs_.insert(at, {base, std::move(marks)});
}

void Pool::put(char* block, int order, uint8_t* mark) noexcept {
  Free*& first = free_[order];
  auto* made = new (block) Free{first, &first};
  if (first != nullptr) first->at = &made->next;
  first = made;
  *mark = static_cast<uint8_t>(order + 1);
}

char* Pool::take_order(int order) {
  int from = order;
  while (from < kOrders && free_[from] == nullptr) ++from;
  if (from == kOrders) {
    add_slab();
    from = kOrders - 1;
  }
  Free* got = free_[from];
  free_[from] = got->next;
  if (got->next != nullptr) got->next->at = &free_[from];
  auto* block = reinterpret_cast<char*>(got);
  const Slab& slab = *slab_of(block);
  const auto mark = [&](const char* at) {
    return slab.marks.get() + static_cast<uint64_t>(at - slab.base) / kSmallest;
  };
  *mark(block) = 0;
  while (from > order) {
    --from;
    char* half = block + (kSmallest << from);
    put(half, from, mark(half));
  }
  return block;
}

// Joined with its other half as long as that is free too.
void Pool::release(char* block, int order) noexcept {
  const auto slab = slab_of(block);
  auto at = static_cast<uint64_t>(block - slab->base);
  for (; order < kOrders - 1; ++order) {
    const uint64_t other = at ^ (kSmallest << order);
    uint8_t& mark = slab->marks[other / kSmallest];
    if (mark != order + 1) break;
    mark = 0;
    const auto* gone = reinterpret_cast<const Free*>(slab->base + other);
    *gone->at = gone->next;
    if (gone->next != nullptr) gone->next->at = gone->at;
    at = std::min(at, other);
  }
  if (order == kOrders - 1 && free_[order] != nullptr) {
    drop(slab->base, kSlab);
    slabs_.erase(slab);
  } else {
    put(slab->base + at, order, slab->marks.get() + at / kSmallest);
  }
}

void Pool::drop(char* base, uint64_t bytes) noexcept {
  gone_ = new (base) Gone{gone_, bytes};
  held_ -= bytes;
}

void* Pool::take(uint64_t bytes) {
  if (bytes > kLargest) {
    char* own = map(bytes, kPage);
    held_ += bytes;
    return own;
  }
  const int order = std::countr_zero(bytes / kSmallest);
  if (std::has_single_bit(bytes)) return take_order(order);
  // Three quarters of the next power of two; the last quarter is left to others.
  char* block = take_order(order + 2);
  release(block + bytes, order);
  return block;
}

void Pool::give(void* block, uint64_t bytes) noexcept {
  auto* from = static_cast<char*>(block);
  if (bytes > kLargest) return drop(from, bytes);
  const int order = std::countr_zero(bytes / kSmallest);
  if (std::has_single_bit(bytes)) return release(from, order);
  release(from, order + 1);
  release(from + (kSmallest << (order + 1)), order);
}

// ---- requests ------------------------------------------------------------------------------

struct alignas(64) Forest::Request {
  uint64_t call = 0;
  uint32_t generation = 0;
  bool is_open = false;
  Match match = {kRoot, 0};
  History history;
  Window window = {};
  Live live = {};
  uint32_t filled = 0;   // slots
  int64_t capacity = 0;  // of text
  std::shared_ptr<const Arena> arena;

  // Returns what may be the last hold on an arena.
  std::shared_ptr<const Arena> clear(Pool& pool) noexcept {
    if (live.text != nullptr) pool.give(live.text, text_bytes());
    if (live.slots != nullptr) pool.give(live.slots, slot_bytes());
    live = {};
    capacity = 0;
    filled = 0;
    window = {};
    match = {kRoot, 0};
    return std::move(arena);
  }

  // Room for `more` tokens, at first for `least`. std::bad_alloc leaves what was there.
  void make_room(Pool& pool, int64_t more, int64_t least) {
    const int64_t size = live.size + more;
    RL_CHECK(size <= kLongestStream, "tokens: a stream of ", size, " tokens, at most ",
             kLongestStream);
    if (size > capacity) {
      const auto wanted = static_cast<uint64_t>(std::max(size, least)) * sizeof(LiveToken);
      const uint64_t bytes = Pool::block(wanted);
      void* text = pool.take(bytes);
      if (live.text != nullptr) {
        std::memcpy(text, live.text, static_cast<size_t>(live.size) * sizeof(LiveToken));
        pool.give(live.text, text_bytes());
      }
      live.text = static_cast<LiveToken*>(text);
      capacity = static_cast<int64_t>(bytes / sizeof(LiveToken));
    }
    // Filled to three quarters at most.
    const uint64_t grams = filled + static_cast<uint64_t>(more);
    const uint64_t now = live.slots == nullptr ? 0 : uint64_t{live.mask} + 1;
    if (grams * 4 > now * 3) {
      uint64_t slots = now > 0 ? 2 * now : std::bit_ceil(static_cast<uint64_t>(capacity));
      while (grams * 4 > slots * 3) slots *= 2;
      rehash(pool, slots);
    }
  }

  uint64_t text_bytes() const { return static_cast<uint64_t>(capacity) * sizeof(LiveToken); }
  uint64_t slot_bytes() const { return (uint64_t{live.mask} + 1) * sizeof(LiveSlot); }

 private:
  void rehash(Pool& pool, uint64_t slots) {
    auto* table = static_cast<LiveSlot*>(pool.take(slots * sizeof(LiveSlot)));
    std::memset(table, 0, slots * sizeof(LiveSlot));
    const auto mask = static_cast<uint32_t>(slots - 1);
    for (uint64_t i = 0; live.slots != nullptr && i <= live.mask; ++i) {
      const LiveSlot s = live.slots[i];
      if (s.last == 0) continue;
      uint32_t at = s.tag & mask;
      while (table[at].last != 0) at = (at + 1) & mask;
      table[at] = s;
    }
    if (live.slots != nullptr) pool.give(live.slots, slot_bytes());
    live.slots = table;
    live.mask = mask;
  }
};

// ---- Forest --------------------------------------------------------------------------------

namespace {

Options checked(const Options& o) {
  RL_CHECK(o.min_match >= 1 && o.min_match <= kLiveCap, "min_match ", o.min_match, ": 1 to ",
           kLiveCap);
  RL_CHECK(o.limit == 0 || o.limit >= o.min_match, "limit ", o.limit,
           ": 0 for none, or at least min_match ", o.min_match);
  RL_CHECK(o.min_prob >= 0 && o.min_prob <= 1, "min_prob ", o.min_prob, ": from 0 to 1");
  RL_CHECK(o.max_window >= 1 && o.max_window <= 4096, "max_window ", o.max_window, ": 1 to 4096");
  RL_CHECK(o.start_window >= 1 && o.start_window <= o.max_window, "start_window ", o.start_window,
           ": 1 to max_window ", o.max_window);
  RL_CHECK(o.growth >= 0 && o.growth <= 4096, "growth ", o.growth, ": 0 to 4096");
  RL_CHECK(o.knee >= 0, "knee ", o.knee, ": 0 for unknown, or tokens per forward");
  RL_CHECK(o.candidates >= 1, "candidates ", o.candidates, ": at least 1");
  RL_CHECK(o.stream >= 0 && o.stream <= kLongestStream, "stream ", o.stream, ": 0 to ",
           kLongestStream);
  RL_CHECK(o.live_match >= 1 && o.live_match <= kLiveCap, "live_match ", o.live_match, ": 1 to ",
           kLiveCap);
  RL_CHECK(o.factor >= 0 && o.factor <= 4096, "factor ", o.factor, ": 0 for none, to 4096");
  return o;
}

int checked_threads(int threads) {
  RL_CHECK(threads >= 0, "threads ", threads, ": 0 for all cores, or more");
  if (threads == 0) threads = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(threads, 1);
}

void check_corpus(const Corpus& c) {
  const size_t responses = c.rewards.size();
  check_offsets("prompt_offsets", c.prompt_offsets, c.keys.size(), responses);
  check_offsets("response_offsets", c.response_offsets, responses, c.tokens.size());
  check_tokens(c.tokens);
  for (size_t i = 0; i < responses; ++i) {
    RL_CHECK(std::abs(c.rewards[i]) <= kLargestReward, "rewards[", i, "] ", c.rewards[i],
             ": finite numbers, at most ", kLargestReward, " in magnitude");
  }
  for (size_t p = 0; p < c.keys.size(); ++p) {
    const auto first = static_cast<size_t>(c.prompt_offsets[p]);
    const auto last = static_cast<size_t>(c.prompt_offsets[p + 1]);
    const int64_t tokens = c.response_offsets[last] - c.response_offsets[first];
    RL_CHECK(tokens <= kLongestPrompt, "response_offsets: prompt ", c.keys[p], " has ", tokens,
             " tokens, at most ", kLongestPrompt);
  }
}

// Prompts by ascending key.
std::vector<size_t> order_of(std::span<const int64_t> keys) {
  std::vector<size_t> order(keys.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keys[a] < keys[b]; });
  for (size_t i = 1; i < order.size(); ++i) {
    RL_CHECK(keys[order[i - 1]] != keys[order[i]], "keys[", order[i], "] ", keys[order[i]],
             ": every prompt once");
  }
  return order;
}

int64_t units(float reward) { return std::llrint(static_cast<double>(reward) * kWeightUnit); }

// Builds the history of prompt `p` of the corpus and describes it in `entry`.
void build_prompt(const Corpus& c, size_t p, Builder& builder, Arena& arena, Prompt& entry) {
  const auto first = static_cast<size_t>(c.prompt_offsets[p]);
  const auto last = static_cast<size_t>(c.prompt_offsets[p + 1]);
  int64_t least = 0;
  for (size_t r = first; r < last; ++r) least = std::min(least, units(c.rewards[r]));
  builder.start(c.response_offsets[last] - c.response_offsets[first]);
  for (size_t r = first; r < last; ++r) {
    const auto from = static_cast<size_t>(c.response_offsets[r]);
    const auto to = static_cast<size_t>(c.response_offsets[r + 1]);
    builder.add(c.tokens.subspan(from, to - from), units(c.rewards[r]) - least);
  }
  builder.finish();
  const uint64_t states = round_up(builder.num_states() * sizeof(State), kLine);
  const uint64_t edges = builder.num_edges() * sizeof(Edge);
  char* block = arena.take(states + edges);
  const auto at = static_cast<uint64_t>(block - arena.base());
  entry = {c.keys[p], at, at + states, builder.num_states(), builder.num_edges()};
  builder.write(reinterpret_cast<State*>(block), reinterpret_cast<Edge*>(block + states));
}

}  // namespace

Forest::Forest(const Options& options, int threads)
    : options_(checked(options)), threads_(checked_threads(threads)) {}

Forest::~Forest() {
  for (const auto& r : requests_) r->clear(pool_);
}

Built Forest::build(const Corpus& corpus) {
  const std::lock_guard lock(building_);
  const auto begin = std::chrono::steady_clock::now();
  check_corpus(corpus);
  const std::vector<size_t> order = order_of(corpus.keys);
  const uint64_t prompts = corpus.keys.size(), tokens = corpus.tokens.size();
  // At most 2 states and 3 ways out per token, an edge list at most three times its entries.
  auto arena =
      Arena::reserve(sizeof(Header) + prompts * (sizeof(Prompt) + 512) + tokens * 144 + 4096);
  arena->take(sizeof(Header) + prompts * sizeof(Prompt));
  arena->header().num_prompts = prompts;
  arena->header().num_tokens = tokens;

  std::atomic<size_t> next{0};
  std::mutex failing;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      Builder builder;
      for (size_t i = next++; i < prompts; i = next++) {
        build_prompt(corpus, order[i], builder, *arena, arena->prompts()[i]);
      }
    } catch (...) {
      const std::lock_guard guard(failing);
      failure = std::current_exception();
      next = prompts;
    }
  };
  {
    std::vector<std::jthread> helpers;
    const size_t wanted = std::min<size_t>(static_cast<size_t>(threads_), prompts);
    try {
      for (size_t t = 1; t < wanted; ++t) helpers.emplace_back(work);
    } catch (const std::system_error&) {
      // Fewer threads than asked for do the same work.
    }
    work();
  }
  if (failure) std::rethrow_exception(failure);
  arena->seal();

  const Header& h = arena->header();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  const Built built = {h.num_tokens, h.num_states, h.num_edges, arena->nbytes(), took.count()};
  std::shared_ptr<const Arena> made = std::move(arena);  // then one that was not used, freed last
  const std::lock_guard serve(serving_);
  std::erase_if(arenas_, [](const auto& held) { return held.expired(); });
  arenas_.push_back(made);
  next_.swap(made);
  return built;
}

void Forest::swap() {
  std::shared_ptr<const Arena> old;  // freed after the lock
  const std::lock_guard lock(serving_);
  RL_CHECK(next_ != nullptr, "swap: nothing was built since the last one");
  old = std::exchange(current_, std::move(next_));
}

void Forest::open(std::span<const int64_t> keys, std::span<int64_t> handles) {
  const std::lock_guard lock(serving_);
  if (free_.size() < keys.size()) {
    const size_t all = requests_.size() + keys.size() - free_.size();
    if (all > requests_.capacity()) requests_.reserve(std::max(all, 2 * requests_.capacity()));
    free_.reserve(requests_.capacity());  // so that `close` needs no memory
  }
  while (free_.size() < keys.size()) {
    requests_.push_back(std::make_unique<Request>());
    free_.push_back(static_cast<uint32_t>(requests_.size() - 1));
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint32_t slot = free_.back();
    free_.pop_back();
    Request& r = *requests_[slot];
    r.is_open = true;
    ++num_open_;
    r.arena = current_;
    r.history = current_ ? current_->history(keys[i]) : History{&kNothing, nullptr};
    handles[i] = static_cast<int64_t>((uint64_t{r.generation} << 32) | slot);
  }
}

Forest::Request& Forest::request(std::span<const int64_t> handles, size_t i) {
  const auto handle = static_cast<uint64_t>(handles[i]);
  const uint64_t slot = handle & 0xffffffffu;
  RL_CHECK(slot < requests_.size() && requests_[slot]->generation == handle >> 32 &&
               requests_[slot]->is_open,
           "handles[", i, "] ", handles[i], ": not open (closed, or never given out)");
  return *requests_[slot];
}

// Fills found_. `once`: no handle may be there twice.
void Forest::find(std::span<const int64_t> handles, bool once) {
  found_.resize(handles.size());
  ++call_;
  for (size_t i = 0; i < handles.size(); ++i) {
    Request& r = request(handles, i);
    if (i + kAhead < handles.size()) {
      const uint64_t slot = static_cast<uint64_t>(handles[i + kAhead]) & 0xffffffffu;
      if (slot < requests_.size()) prefetch_state(reinterpret_cast<State*>(requests_[slot].get()));
    }
    RL_CHECK(!once || r.call != call_, "handles[", i, "] ", handles[i], ": every handle once");
    r.call = call_;
    found_[i] = &r;
  }
}

void Forest::close(std::span<const int64_t> handles) {
  // Freed after the lock.
  std::vector<std::shared_ptr<const Arena>> arenas;
  Pool::Dropped dropped;
  const std::lock_guard lock(serving_);
  find(handles, true);
  arenas.reserve(handles.size());
  for (size_t i = 0; i < handles.size(); ++i) {
    Request& r = *found_[i];
    auto arena = r.clear(pool_);
    if (arena != nullptr && arena != current_) arenas.push_back(std::move(arena));
    r.is_open = false;
    --num_open_;
    r.generation = (r.generation + 1) & 0x7fffffffu;
    free_.push_back(static_cast<uint32_t>(handles[i] & 0xffffffff));
  }
  dropped = pool_.dropped();
}

void Forest::make_room(std::span<const int64_t> offsets) {
  if (!options_.live) return;
  for (size_t i = 0; i < found_.size(); ++i) {
    found_[i]->make_room(pool_, offsets[i + 1] - offsets[i], options_.stream);
  }
}

// Appends and files the tokens of every request. The table's lines are asked for some requests
// ahead.
void Forest::append_found(std::span<const int32_t> tokens, std::span<const int64_t> offsets) {
  if (!options_.live || offsets.empty()) return;
  const int32_t gram = options_.live_match;
  tags_.resize(tokens.size());
  const auto append = [&](size_t i) {
    Live& live = found_[i]->live;
    for (int64_t k = offsets[i]; k < offsets[i + 1]; ++k) {
      live.text[live.size] = {tokens[static_cast<size_t>(k)], -1};
      if (++live.size < gram) continue;
      const uint32_t tag = hash_gram(live.text + live.size - gram, gram);
      tags_[static_cast<size_t>(k)] = tag;
      prefetch(live.slots + (tag & live.mask));
    }
  };
  const auto file = [&](size_t i) {
    Request& r = *found_[i];
    int32_t at = r.live.size - static_cast<int32_t>(offsets[i + 1] - offsets[i]);
    for (int64_t k = offsets[i]; k < offsets[i + 1]; ++k, ++at) {
      if (at + 1 >= gram) r.filled += file_gram(r.live, at, tags_[static_cast<size_t>(k)]);
    }
  };
  for (size_t i = 0; i < found_.size() + kAhead; ++i) {
    if (i < found_.size()) append(i);
    if (i >= kAhead) file(i - kAhead);
  }
}

void Forest::advance(std::span<const int64_t> handles, std::span<const int32_t> tokens,
                     std::span<const int64_t> offsets) {
  check_offsets("offsets", offsets, handles.size(), tokens.size());
  check_tokens(tokens);
  Pool::Dropped dropped;  // freed after the lock
  const std::lock_guard lock(serving_);
  find(handles, true);
  make_room(offsets);
  dropped = pool_.dropped();
  walk_found(tokens, offsets, {});
}

void Forest::check_accepted(std::span<const int64_t> handles,
                            std::span<const int32_t> accepted) const {
  RL_CHECK(accepted.size() == handles.size(), "accepted: ", handles.size(),
           " entries are needed, got ", accepted.size());
  for (size_t i = 0; i < accepted.size(); ++i) {
    RL_CHECK(accepted[i] >= 0 && accepted[i] <= found_[i]->window.proposed, "accepted[", i, "] ",
             accepted[i], ": 0 to the length of the last draft, ", found_[i]->window.proposed);
  }
}

void Forest::accept_found(std::span<const int32_t> accepted) {
  for (size_t i = 0; i < found_.size(); ++i) {
    suffix::accept(found_[i]->window, accepted[i], options_.max_window);
  }
}

void Forest::accept(std::span<const int64_t> handles, std::span<const int32_t> accepted) {
  const std::lock_guard lock(serving_);
  find(handles, true);
  check_accepted(handles, accepted);
  accept_found(accepted);
}

void Forest::check_windows(std::span<const int32_t> windows, size_t batch) const {
  RL_CHECK(windows.size() == batch, "windows: ", batch, " entries are needed, got ",
           windows.size());
  for (size_t i = 0; i < windows.size(); ++i) {
    RL_CHECK(windows[i] >= 0 && windows[i] <= options_.max_window, "windows[", i, "] ", windows[i],
             ": 0 to max_window ", options_.max_window);
  }
}

int32_t Forest::width(int64_t batch, std::span<const int32_t> windows, bool own,
                      int64_t running) const {
  if (own) return load_rule(options_, running > 0 ? running : batch).budget;
  check_windows(windows, static_cast<size_t>(batch));
  return windows.empty() ? 0 : *std::max_element(windows.begin(), windows.end());
}

// Advances by `tokens` (empty offsets: not at all) and drafts where `out` has rows.
void Forest::walk_found(std::span<const int32_t> tokens, std::span<const int64_t> offsets,
                        const Drafts& out) {
  append_found(tokens, offsets);
  int32_t unused;
  const auto task = [&](size_t i) {
    Request& r = *found_[i];
    const int32_t* first = offsets.empty() ? nullptr : tokens.data() + offsets[i];
    const int32_t* last = offsets.empty() ? nullptr : tokens.data() + offsets[i + 1];
    const bool drafts = out.tokens != nullptr;
    return Walk::Task{r.history,
                      &r.match,
                      first,
                      last,
                      options_.live ? &r.live : nullptr,
                      drafts ? windows_[i] : 0,
                      out.tokens + static_cast<int64_t>(i) * out.width,
                      drafts ? out.lengths + i : &unused};
  };
  run_walks(found_.size(), options_, task);
  if (out.tokens == nullptr) return;
  for (size_t i = 0; i < found_.size(); ++i) {
    int32_t* row = out.tokens + static_cast<int64_t>(i) * out.width;
    std::fill(row + out.lengths[i], row + out.width, kNoToken);
    found_[i]->window.proposed = out.lengths[i];
  }
}

// Fills windows_.
void Forest::plan_found(std::span<const int32_t> windows, bool own, int64_t running) {
  const auto batch = static_cast<int64_t>(found_.size());
  const Load load = load_rule(options_, running > 0 ? running : batch);
  windows_.resize(found_.size());
  for (size_t i = 0; i < found_.size(); ++i) {
    const int32_t window = open_window(found_[i]->window, load);
    windows_[i] = own ? window : windows[i];
  }
}

void Forest::draft(std::span<const int64_t> handles, std::span<const int32_t> windows, bool own,
                   int64_t running, const Drafts& out) {
  if (!own) check_windows(windows, handles.size());
  const std::lock_guard lock(serving_);
  find(handles, true);
  plan_found(windows, own, running);
  walk_found({}, {}, out);
}

void Forest::step(std::span<const int64_t> handles, std::span<const int32_t> accepted,
                  std::span<const int32_t> tokens, std::span<const int64_t> offsets,
                  std::span<const int32_t> windows, bool own, int64_t running, const Drafts& out) {
  if (!own) check_windows(windows, handles.size());
  check_offsets("offsets", offsets, handles.size(), tokens.size());
  check_tokens(tokens);
  Pool::Dropped dropped;  // freed after the lock
  const std::lock_guard lock(serving_);
  find(handles, true);
  check_accepted(handles, accepted);
  make_room(offsets);
  dropped = pool_.dropped();
  accept_found(accepted);
  plan_found(windows, own, running);
  walk_found(tokens, offsets, out);
}

void Forest::matches(std::span<const int64_t> handles, std::span<int32_t> history,
                     std::span<int32_t> live) {
  const std::lock_guard lock(serving_);
  find(handles, false);
  for (size_t i = 0; i < found_.size(); ++i) {
    const Request& r = *found_[i];
    history[i] = r.match.length >= options_.min_match ? r.match.length : 0;
    live[i] = options_.live && r.live.size > 0 ? find_live(r.live, options_).length : 0;
  }
}

void Forest::windows(std::span<const int64_t> handles, std::span<int32_t> windows) {
  const std::lock_guard lock(serving_);
  find(handles, false);
  for (size_t i = 0; i < found_.size(); ++i) {
    const int32_t size = found_[i]->window.size;
    windows[i] = size > 0 ? size : options_.start_window;
  }
}

Stats Forest::stats() const {
  const std::lock_guard lock(serving_);
  Stats s = {};
  if (current_) {
    const Header& h = current_->header();
    s = {h.num_prompts, h.num_tokens, h.num_states, h.num_edges, 0, 0, 0, 0};
  }
  s.requests = num_open_;
  s.live_bytes = pool_.nbytes();
  for (const auto& held : arenas_) {
    if (const auto arena = held.lock()) s.history_bytes += arena->nbytes();
  }
  for (const auto& r : requests_) {
    if (!r->is_open) continue;
    s.live_tokens += static_cast<uint64_t>(r->live.size);
  }
  return s;
}

uint64_t Forest::nbytes() const {
  const Stats s = stats();
  return s.history_bytes + s.live_bytes;
}

std::shared_ptr<const Arena> Forest::current() const {
  const std::lock_guard lock(serving_);
  return current_;
}

}  // namespace rlcore::suffix
