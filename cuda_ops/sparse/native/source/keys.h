// Packed coordinates: batch 9 bits | x 18 | y 18 | z 18, from high to low; x, y and z are biased by 2^17.
#pragma once

#include <cstdint>

namespace halopipe {

constexpr int kAxisBits = 18;
constexpr int64_t kAxisMask = (int64_t{1} << kAxisBits) - 1;
constexpr int64_t kBias = int64_t{1} << (kAxisBits - 1);
constexpr int64_t kNumBatches = 512;
constexpr int kShift[3] = {2 * kAxisBits, kAxisBits, 0};  // of x, y and z
constexpr int kBatchShift = 3 * kAxisBits;

inline int64_t coordinate(int64_t key, int axis) { return ((key >> kShift[axis]) & kAxisMask) - kBias; }

inline bool in_range(int64_t coordinate) { return static_cast<uint64_t>(coordinate + kBias) <= kAxisMask; }

inline int64_t with_coordinate(int64_t key, int axis, int64_t value) {
  return (key & ~(kAxisMask << kShift[axis])) | ((value + kBias) << kShift[axis]);
}

// The step of index i along an axis: an odd kernel is centred, an even one starts at 0.
inline int64_t offset_of(int64_t i, int64_t kernel, int64_t dilation) {
  return (i - (kernel % 2 == 1 ? kernel / 2 : 0)) * dilation;
}

}  // namespace halopipe
