// Balanced partition of sample lengths: the pure C++ behind rlcore/ops/partition.py.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace rlcore::partition {

// Splits the indices of `lengths` into `parts` lists with nearly equal sums by the largest
// differencing method of Karmarkar and Karp. With `equal_size` the lists differ by at most one in
// size. Lists are ascending and ordered by their first index, empty ones last; ties are broken by
// index, so the result is the same on every machine, and the same as the Python reference.
// Throws std::invalid_argument if parts < 1 or a length is negative.
std::vector<std::vector<int64_t>> balanced(std::span<const int64_t> lengths, int64_t parts,
                                           bool equal_size);

}  // namespace rlcore::partition
