// C functions over SGLang's NGRAM trie and suffix automaton, for ctypes: flat arrays in and out.
// Compiled by install.py against the headers of the sglang wheel, nothing of which is kept here.
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "ngram.h"

using sglang::ngram::Ngram;

namespace {

std::string last_error;

template <typename F>
int guarded(F&& f) {
  try {
    f();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return 1;
  }
}

std::vector<std::vector<int32_t>> rows(const int32_t* tokens, const int64_t* offsets, int64_t n) {
  std::vector<std::vector<int32_t>> out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    out[static_cast<size_t>(i)].assign(tokens + offsets[i], tokens + offsets[i + 1]);
  }
  return out;
}

}  // namespace

extern "C" {

const char* sgl_error() { return last_error.c_str(); }

void* sgl_new(int64_t capacity, int64_t depth, int64_t breadth, int64_t nodes, int by_frequency,
              int64_t automaton_nodes) {
  sglang::ngram::Param p{};
  p.enable = true;
  p.min_bfs_breadth = 1;
  p.max_bfs_breadth = static_cast<size_t>(breadth);
  p.max_trie_depth = static_cast<size_t>(depth);
  p.draft_token_num = static_cast<size_t>(nodes);
  p.external_sam_budget = static_cast<size_t>(automaton_nodes);
  p.external_corpus_max_tokens = size_t{1} << 40;
  p.match_type = by_frequency ? "PROB" : "BFS";
  Ngram* made = nullptr;
  guarded([&] { made = new Ngram(static_cast<size_t>(capacity), p); });
  return made;
}

void sgl_delete(void* self) { delete static_cast<Ngram*>(self); }

int sgl_insert(void* self, const int32_t* tokens, const int64_t* offsets, int64_t n) {
  return guarded([&] {
    static_cast<Ngram*>(self)->asyncInsert(rows(tokens, offsets, n));
    static_cast<Ngram*>(self)->synchronize();
  });
}

int sgl_load(void* self, const int32_t* tokens, const int64_t* offsets, int64_t n) {
  return guarded([&] {
    auto* ngram = static_cast<Ngram*>(self);
    ngram->startExternalCorpusLoad();
    for (const auto& row : rows(tokens, offsets, n)) ngram->appendExternalCorpusTokens(row);
    ngram->finishExternalCorpusLoad("history");
  });
}

int sgl_match(void* self, const int64_t* ids, const int32_t* tokens, const int64_t* offsets,
              const int64_t* lengths, int64_t n, int32_t* out_tokens, uint8_t* out_mask) {
  return guarded([&] {
    const auto result = static_cast<Ngram*>(self)->batchMatch(
        std::vector<int64_t>(ids, ids + n), rows(tokens, offsets, n),
        std::vector<size_t>(lengths, lengths + n));
    std::memcpy(out_tokens, result.token.data(), result.token.size() * sizeof(int32_t));
    std::memcpy(out_mask, result.mask.data(), result.mask.size());
  });
}

int sgl_erase(void* self, const int64_t* ids, int64_t n) {
  return guarded(
      [&] { static_cast<Ngram*>(self)->eraseMatchState(std::vector<int64_t>(ids, ids + n)); });
}

}  // extern "C"
