#include "partition/balanced.h"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace rlcore::partition {
namespace {

constexpr int64_t kNone = -1;

// One list under construction. Items hang on a chain through `next` (see State), so that joining
// two lists costs nothing.
struct Bin {
  int64_t sum;
  int64_t count;
  int64_t first;  // smallest index: unique, so that the order of bins is total
  int64_t head;
  int64_t tail;
};

bool heavier(const Bin& a, const Bin& b) {
  if (a.sum != b.sum) return a.sum > b.sum;
  if (a.count != b.count) return a.count > b.count;
  return a.first < b.first;
}

// A partial solution: its bins that hold something, heaviest first. The others are empty.
struct Solution {
  std::vector<Bin> bins;
  int64_t first;  // smallest index inside: unique among the solutions alive
  int64_t spread;
};

bool less_urgent(const Solution& a, const Solution& b) {
  if (a.spread != b.spread) return a.spread < b.spread;
  return a.first > b.first;
}

class Differencing {
 public:
  Differencing(std::span<const int64_t> lengths, size_t parts)
      : lengths_(lengths), parts_(parts), next_(lengths.size() + parts, kNone) {}

  std::vector<std::vector<int64_t>> run(bool equal_size) {
    if (equal_size) {
      add_in_rows();
    } else {
      for (int64_t i = 0; i < size(); ++i) add({single(i)}, i);
    }
    while (heap_.size() > 1) {
      Solution a = pop();
      const Solution b = pop();
      add(join(std::move(a.bins), b.bins), std::min(a.first, b.first));
    }
    return heap_.empty() ? std::vector<std::vector<int64_t>>(parts_) : lists(pop().bins);
  }

 private:
  int64_t size() const { return static_cast<int64_t>(lengths_.size()); }

  // Indices from size() on are fillers of length 0.
  Bin single(int64_t i) const {
    const int64_t length = i < size() ? lengths_[static_cast<size_t>(i)] : 0;
    return {length, 1, i, i, i};
  }

  // One item of every row goes to every list, so the lists stay equal in size.
  void add_in_rows() {
    const auto parts = static_cast<int64_t>(parts_);
    const int64_t filled = (size() + parts - 1) / parts * parts;
    std::vector<Bin> items;
    for (int64_t i = 0; i < filled; ++i) items.push_back(single(i));
    std::sort(items.begin(), items.end(), heavier);
    for (auto row = items.begin(); row != items.end(); row += parts) {
      const auto by_index = [](const Bin& a, const Bin& b) { return a.first < b.first; };
      add({row, row + parts}, std::min_element(row, row + parts, by_index)->first);
    }
  }

  // `bins` are sorted.
  void add(std::vector<Bin> bins, int64_t first) {
    const int64_t least = bins.size() == parts_ ? bins.back().sum : 0;
    const int64_t spread = bins.front().sum - least;
    heap_.push_back({std::move(bins), first, spread});
    std::push_heap(heap_.begin(), heap_.end(), less_urgent);
  }

  Solution pop() {
    std::pop_heap(heap_.begin(), heap_.end(), less_urgent);
    Solution top = std::move(heap_.back());
    heap_.pop_back();
    return top;
  }

  // The heaviest bin of `a` takes the lightest of `b`, and so on. Sorted bins in, sorted bins out.
  std::vector<Bin> join(std::vector<Bin> a, const std::vector<Bin>& b) {
    const size_t filled = a.size();
    const size_t untouched = std::min(filled, parts_ - b.size());
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t partner = parts_ - 1 - j;
      if (partner >= filled) {
        a.push_back(b[j]);
      } else {
        a[partner] = chain(a[partner], b[j]);
      }
    }
    const auto touched = a.begin() + static_cast<std::ptrdiff_t>(untouched);
    std::sort(touched, a.end(), heavier);
    std::inplace_merge(a.begin(), touched, a.end(), heavier);
    return a;
  }

  Bin chain(const Bin& a, const Bin& b) {
    next_[static_cast<size_t>(a.tail)] = b.head;
    return {a.sum + b.sum, a.count + b.count, std::min(a.first, b.first), a.head, b.tail};
  }

  std::vector<std::vector<int64_t>> lists(const std::vector<Bin>& bins) const {
    std::vector<std::vector<int64_t>> out;
    for (const Bin& bin : bins) {
      std::vector<int64_t> list;
      for (int64_t i = bin.head; i != kNone; i = next_[static_cast<size_t>(i)]) {
        if (i < size()) list.push_back(i);
      }
      std::sort(list.begin(), list.end());
      if (!list.empty()) out.push_back(std::move(list));
    }
    std::sort(out.begin(), out.end(), [](auto& a, auto& b) { return a.front() < b.front(); });
    out.resize(parts_);
    return out;
  }

  std::span<const int64_t> lengths_;
  size_t parts_;
  std::vector<int64_t> next_;
  std::vector<Solution> heap_;
};

}  // namespace

std::vector<std::vector<int64_t>> balanced(std::span<const int64_t> lengths, int64_t parts,
                                           bool equal_size) {
  if (parts < 1) throw std::invalid_argument("parts " + std::to_string(parts) + ": at least 1");
  for (const int64_t length : lengths) {
    if (length < 0) {
      throw std::invalid_argument("length " + std::to_string(length) + ": at least 0");
    }
  }
  return Differencing(lengths, static_cast<size_t>(parts)).run(equal_size);
}

}  // namespace rlcore::partition
