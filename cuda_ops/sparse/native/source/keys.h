// Packed coordinates: batch 9 bits | x 18 | y 18 | z 18, from high to low; x, y and z are biased by 2^17.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "tensors.h"

namespace halopipe {

constexpr int kAxisBits = 18;
constexpr int64_t kAxisMask = (int64_t{1} << kAxisBits) - 1;
constexpr int64_t kBias = int64_t{1} << (kAxisBits - 1);
constexpr int64_t kNumBatches = 512;
constexpr int kShift[3] = {2 * kAxisBits, kAxisBits, 0};  // of x, y and z
constexpr int kBatchShift = 3 * kAxisBits;

using Triple = std::array<int64_t, 3>;

inline int64_t coordinate(int64_t key, int axis) { return ((key >> kShift[axis]) & kAxisMask) - kBias; }

inline bool in_range(int64_t coordinate) { return static_cast<uint64_t>(coordinate + kBias) <= kAxisMask; }

inline int64_t with_coordinate(int64_t key, int axis, int64_t value) {
  return (key & ~(kAxisMask << kShift[axis])) | ((value + kBias) << kShift[axis]);
}

inline Triple triple(const std::vector<int64_t>& values) {
  STD_TORCH_CHECK(values.size() == 3, "kernel, stride and dilation have three numbers each");
  return {values[0], values[1], values[2]};
}

// The step of index i along an axis: an odd kernel is centred, an even one starts at 0.
inline int64_t offset_of(int64_t i, int64_t kernel, int64_t dilation) {
  return (i - (kernel % 2 == 1 ? kernel / 2 : 0)) * dilation;
}

// Union of two sorted lists without duplicates.
inline std::vector<int64_t> united(const std::vector<int64_t>& left, const std::vector<int64_t>& right) {
  std::vector<int64_t> all(left.size() + right.size());
  size_t i = 0, j = 0, n = 0;
  while (i < left.size() && j < right.size()) {
    const int64_t a = left[i], b = right[j];
    all[n++] = a < b ? a : b;
    i += a <= b;
    j += b <= a;
  }
  n = std::copy(left.begin() + i, left.end(), all.begin() + n) - all.begin();
  n = std::copy(right.begin() + j, right.end(), all.begin() + n) - all.begin();
  all.resize(n);
  return all;
}

}  // namespace halopipe
