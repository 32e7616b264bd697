// Sets of sites, sorted: of coordinates, of a strided step, of a generative one.
//
// A box kernel is a product of its axes, so the steps move one axis after another.  Along one axis and for one offset
// the moved keys keep their order; the set is the union of such sorted lists, and nothing is sorted anew.
#pragma once

#include "keys.h"
#include "sorting.h"
#include "tensors.h"

namespace halopipe {

// Moves the keys along one axis with each offset, where `move` gives the new coordinate and says if there is one.
template <typename Move>
inline std::vector<int64_t> moved(const std::vector<int64_t>& keys, int axis, int64_t kernel, int64_t dilation,
                                  const Move& move) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < kernel; ++i) {
    const int64_t offset = offset_of(i, kernel, dilation);
    std::vector<int64_t> list(keys.size());
    size_t n = 0;
    for (const int64_t key : keys) {
      int64_t at = coordinate(key, axis);
      const bool there = move(at, offset) && in_range(at);
      list[n] = with_coordinate(key, axis, there ? at : 0);
      n += there;
    }
    list.resize(n);
    all = all.empty() ? std::move(list) : united(all, list);
  }
  return all;
}

inline std::vector<int64_t> listed(const Tensor& keys) {
  const int64_t* from = elements<int64_t>(keys);
  return std::vector<int64_t>(from, from + keys.numel());
}

// Every output whose field holds a site: o * stride + offset = site.
inline Tensor strided_sites(const Tensor& keys, std::vector<int64_t> kernel, std::vector<int64_t> stride,
                            std::vector<int64_t> dilation) {
  const Triple size = triple(kernel), step = triple(stride), spread = triple(dilation);
  std::vector<int64_t> sites = listed(keys);
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t divisor = step[axis];
    sites = moved(sites, axis, size[axis], spread[axis], [divisor](int64_t& at, int64_t offset) {
      const int64_t quotient = (at - offset) / divisor;
      const bool divisible = quotient * divisor == at - offset;
      at = quotient;
      return divisible;
    });
  }
  return copied(sites);
}

// Every site * stride + offset.
inline Tensor generated_sites(const Tensor& keys, std::vector<int64_t> kernel, std::vector<int64_t> stride,
                              std::vector<int64_t> dilation) {
  const Triple size = triple(kernel), step = triple(stride), spread = triple(dilation);
  std::vector<int64_t> sites = listed(keys);
  for (int axis = 0; axis < 3; ++axis) {
    const int64_t factor = step[axis];
    sites = moved(sites, axis, size[axis], spread[axis], [factor](int64_t& at, int64_t offset) {
      at = at * factor + offset;
      return true;
    });
  }
  return copied(sites);
}

// Keys of coordinates [N, 4] in ascending order, the rows they come from, and whether they are sites at all:
// in range, each once.
inline std::tuple<Tensor, Tensor, bool> sorted_sites(const Tensor& coordinates) {
  const int64_t count = coordinates.size(0);
  const int32_t* from = elements<int32_t>(coordinates);
  std::vector<Entry> entries(count);
  bool fine = true;
  for (int64_t row = 0; row < count; ++row) {
    const int32_t* at = from + 4 * row;
    fine &= at[0] >= 0 && at[0] < kNumBatches && in_range(at[1]) && in_range(at[2]) && in_range(at[3]);
    entries[row] = {static_cast<uint64_t>(at[0]) << 54 | static_cast<uint64_t>(at[1] + kBias) << 36 |
                        static_cast<uint64_t>(at[2] + kBias) << 18 | static_cast<uint64_t>(at[3] + kBias),
                    row};
  }
  if (fine) sort_entries(entries);
  Tensor keys = uninitialized<int64_t>({count}), order = uninitialized<int64_t>({count});
  int64_t *key = writable<int64_t>(keys), *row = writable<int64_t>(order);
  for (int64_t i = 0; i < count; ++i) {
    key[i] = static_cast<int64_t>(entries[i].key);
    row[i] = entries[i].row;
    fine &= i == 0 || key[i] != key[i - 1];
  }
  return {keys, order, fine};
}

}  // namespace halopipe
