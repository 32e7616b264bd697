// Sets of sites, sorted: of coordinates, of a strided step, of a generative one.
//
// A box kernel is a product of its axes, so the steps move one axis after another.  Along one axis and for one offset
// the moved keys keep their order; the set is the union of such sorted lists, and nothing is sorted anew.
#pragma once

#include "arrays.h"
#include "keys.h"
#include "sorting.h"

namespace halopipe {

// Sorted keys without duplicates.
struct Set {
  int64_t* keys;
  int64_t count;
};

// Union of two sets, written to `all`.
inline Set united(const Set& left, const Set& right, int64_t* all) {
  int64_t i = 0, j = 0, n = 0;
  while (i < left.count && j < right.count) {
    const int64_t a = left.keys[i], b = right.keys[j];
    all[n++] = a < b ? a : b;
    i += a <= b;
    j += b <= a;
  }
  copy(left.keys + i, left.count - i, all + n);
  copy(right.keys + j, right.count - j, all + n + left.count - i);
  return {all, n + left.count - i + right.count - j};
}

// o * stride + offset = site.
struct Strided {
  int64_t stride;
  bool operator()(int64_t& at, int64_t offset) const {
    const int64_t quotient = (at - offset) / stride;
    const bool divisible = quotient * stride == at - offset;
    at = quotient;
    return divisible;
  }
};

// site * stride + offset.
struct Generated {
  int64_t stride;
  bool operator()(int64_t& at, int64_t offset) const {
    at = at * stride + offset;
    return true;
  }
};

// The keys moved along one axis with each offset, where `move` gives the new coordinate and says if there is one;
// written to `to`, which has room for kernel times as many.  How many they are.
template <typename Move>
inline int64_t moved_sites(const int64_t* keys, int64_t count, int axis, int64_t kernel, int64_t dilation,
                           const Move& move, int64_t* to) {
  const Buffer<int64_t> list(count), other(kernel > 1 ? kernel * count : 0);
  Set all{to, 0};
  for (int64_t i = 0; i < kernel; ++i) {
    const int64_t offset = offset_of(i, kernel, dilation);
    Set next{all.count == 0 ? all.keys : list.data(), 0};
    for (int64_t row = 0; row < count; ++row) {
      int64_t at = coordinate(keys[row], axis);
      const bool there = move(at, offset) && in_range(at);
      next.keys[next.count] = with_coordinate(keys[row], axis, there ? at : 0);
      next.count += there;
    }
    all = all.count == 0 ? next : united(all, next, all.keys == to ? other.data() : to);
  }
  if (all.keys != to) copy(all.keys, all.count, to);
  return all.count;
}

// Keys of coordinates [N, 4] in ascending order, the rows they come from, and whether they are sites at all:
// in range, each once.
inline bool sorted_sites(const int32_t* coordinates, int64_t count, int64_t* keys, int64_t* order) {
  const Buffer<Entry> entries(count), other(count);
  bool fine = true;
  for (int64_t row = 0; row < count; ++row) {
    const int32_t* at = coordinates + 4 * row;
    fine &= at[0] >= 0 && at[0] < kNumBatches && in_range(at[1]) && in_range(at[2]) && in_range(at[3]);
    entries.data()[row] = {static_cast<uint64_t>(at[0]) << 54 | static_cast<uint64_t>(at[1] + kBias) << 36 |
                               static_cast<uint64_t>(at[2] + kBias) << 18 | static_cast<uint64_t>(at[3] + kBias),
                           row};
  }
  if (!fine) return false;
  const Entry* sorted = sorted_entries(entries.data(), other.data(), count);
  for (int64_t i = 0; i < count; ++i) {
    keys[i] = static_cast<int64_t>(sorted[i].key);
    order[i] = sorted[i].row;
    fine &= i == 0 || keys[i] != keys[i - 1];
  }
  return fine;
}

}  // namespace halopipe
