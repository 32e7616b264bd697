// Reductions over runs of rows, and from voxels back to points.
#pragma once

#include <algorithm>

#include "pool.h"
#include "tensors.h"

namespace halopipe {

constexpr int64_t kSegmentPart = 256;  // rows that are summed before they are added: accurate sums of many rows

// x [N, C], starts [B], lengths [B] -> sums [B, C].
inline Tensor segment_sum(const Tensor& x, const Tensor& starts, const Tensor& lengths) {
  return with_floats(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t count = starts.numel(), channels = x.size(1);
    const int64_t *start = elements<int64_t>(starts), *length = elements<int64_t>(lengths);
    Tensor sums = filled<T>({count, channels}, 0);
    const T* from = elements<T>(x);
    T* to = writable<T>(sums);
    for_each(count, [&](int64_t b) {
      std::vector<T> part(channels);
      for (int64_t done = 0; done < length[b]; done += kSegmentPart) {
        std::fill(part.begin(), part.end(), T(0));
        for (int64_t row = start[b] + done; row < start[b] + std::min(length[b], done + kSegmentPart); ++row)
          for (int64_t c = 0; c < channels; ++c) part[c] += from[row * channels + c];
        for (int64_t c = 0; c < channels; ++c) to[b * channels + c] += part[c];
      }
    });
    return sums;
  });
}

// The largest values [B, C] and their rows; 0 and -1 for an empty segment.
inline std::tuple<Tensor, Tensor> segment_max(const Tensor& x, const Tensor& starts, const Tensor& lengths) {
  return with_floats(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t count = starts.numel(), channels = x.size(1);
    const int64_t *start = elements<int64_t>(starts), *length = elements<int64_t>(lengths);
    Tensor largest = filled<T>({count, channels}, 0), origin = filled<int32_t>({count, channels}, -1);
    const T* from = elements<T>(x);
    T* to = writable<T>(largest);
    int32_t* origins = writable<int32_t>(origin);
    for_each(count, [&](int64_t b) {
      for (int64_t row = start[b]; row < start[b] + length[b]; ++row)
        for (int64_t c = 0; c < channels; ++c) {
          const int64_t at = b * channels + c;
          const T candidate = from[row * channels + c];
          const bool better = takes(candidate, to[at], row == start[b]);
          to[at] = better ? candidate : to[at];
          origins[at] = better ? static_cast<int32_t>(row) : origins[at];
        }
    });
    return std::make_tuple(largest, origin);
  });
}

// y [B, C] -> [rows, C]: each row gets its segment's; rows of no segment 0.
inline Tensor segment_expand(const Tensor& y, const Tensor& starts, const Tensor& lengths, int64_t rows) {
  return with_floats(y, [&](auto zero) {
    using T = decltype(zero);
    const int64_t channels = y.size(1);
    const int64_t *start = elements<int64_t>(starts), *length = elements<int64_t>(lengths);
    Tensor spread = filled<T>({rows, channels}, 0);
    const T* from = elements<T>(y);
    T* to = writable<T>(spread);
    for_each(starts.numel(), [&](int64_t b) {
      for (int64_t row = start[b]; row < start[b] + length[b]; ++row)
        std::copy(from + b * channels, from + (b + 1) * channels, to + row * channels);
    });
    return spread;
  });
}

// x [N, C], index [P, E], weight [P, E] -> [P, C]; an index of -1 is absent.
inline Tensor interpolate(const Tensor& x, const Tensor& index, const Tensor& weight) {
  return with_floats(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t points = index.size(0), corners = index.size(1), channels = x.size(1);
    Tensor sums = filled<T>({points, channels}, 0);
    const T *from = elements<T>(x), *share = elements<T>(weight);
    const int32_t* rows = elements<int32_t>(index);
    T* to = writable<T>(sums);
    for_each_part(points, kSegmentPart, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p)
        for (int64_t e = p * corners; e < (p + 1) * corners; ++e) {
          if (rows[e] < 0) continue;
          const T* row = from + rows[e] * channels;
          for (int64_t c = 0; c < channels; ++c) to[p * channels + c] += row[c] * share[e];
        }
    });
    return sums;
  });
}

}  // namespace halopipe
