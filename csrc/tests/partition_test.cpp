// Host test of csrc/partition, without Python: hand-made cases, then the promises on many sizes.
// Built with sanitizers by tests/native/test_partition_native.py.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "partition/balanced.h"

using Lists = std::vector<std::vector<int64_t>>;
using rlcore::partition::balanced;

#define CHECK(condition)                                                         \
  if (!(condition)) {                                                            \
    std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
    std::exit(1);                                                                \
  }

static void check_promises(const std::vector<int64_t>& lengths, int64_t parts, bool equal_size) {
  const Lists lists = balanced(lengths, parts, equal_size);
  CHECK(static_cast<int64_t>(lists.size()) == parts);
  std::vector<int> seen(lengths.size(), 0);
  size_t least = lengths.size(), most = 0;
  for (const auto& list : lists) {
    least = std::min(least, list.size());
    most = std::max(most, list.size());
    for (const int64_t i : list) ++seen[static_cast<size_t>(i)];
  }
  for (const int count : seen) CHECK(count == 1);
  if (equal_size) CHECK(most - least <= 1);
  if (lengths.size() >= lists.size()) CHECK(least > 0);
}

int main() {
  CHECK((balanced(std::vector<int64_t>{8, 7, 6, 5, 4}, 2, false) == Lists{{0, 2}, {1, 3, 4}}));
  CHECK((balanced(std::vector<int64_t>{}, 2, false) == Lists{{}, {}}));
  CHECK((balanced(std::vector<int64_t>{3}, 1, true) == Lists{{0}}));
  uint64_t state = 1;
  for (int64_t n = 0; n < 60; ++n) {
    for (int64_t parts = 1; parts < 12; ++parts) {
      std::vector<int64_t> lengths;
      for (int64_t i = 0; i < n; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        lengths.push_back(static_cast<int64_t>(state >> 60));
      }
      check_promises(lengths, parts, false);
      check_promises(lengths, parts, true);
    }
  }
  bool refused = false;
  try {
    balanced(std::vector<int64_t>{-1}, 1, false);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
  return 0;
}
