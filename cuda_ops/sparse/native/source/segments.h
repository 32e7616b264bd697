// Reductions over runs of rows, and from voxels back to points.
#pragma once

#include "calls.h"
#include "pool.h"

namespace halopipe {

constexpr int64_t kSegmentPart = 256;  // rows that are summed before they are added: accurate sums of many rows

// Runs of rows.
struct Segments {
  const int64_t *start, *length;
  int64_t count;
};

// x [N, C] -> sums [B, C].
template <typename T>
inline void segment_sum(const T* x, const Segments& segments, int64_t channels, T* sums) {
  fill(sums, segments.count * channels, T(0));
  for_each(segments.count, [&](int64_t b) {
    const Buffer<T> part(channels);
    const int64_t start = segments.start[b], length = segments.length[b];
    for (int64_t done = 0; done < length; done += kSegmentPart) {
      fill(part.data(), channels, T(0));
      for (int64_t row = start + done; row < start + smaller(length, done + kSegmentPart); ++row)
        for (int64_t c = 0; c < channels; ++c) part.data()[c] += x[row * channels + c];
      for (int64_t c = 0; c < channels; ++c) sums[b * channels + c] += part.data()[c];
    }
  });
}

// The largest values [B, C] and their rows; 0 and -1 for an empty segment.
template <typename T>
inline void segment_max(const T* x, const Segments& segments, int64_t channels, T* largest, int32_t* origin) {
  fill(largest, segments.count * channels, T(0));
  fill(origin, segments.count * channels, -1);
  for_each(segments.count, [&](int64_t b) {
    const int64_t start = segments.start[b];
    for (int64_t row = start; row < start + segments.length[b]; ++row)
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = b * channels + c;
        const T candidate = x[row * channels + c];
        const bool better = takes(candidate, largest[at], row == start);
        largest[at] = better ? candidate : largest[at];
        origin[at] = better ? static_cast<int32_t>(row) : origin[at];
      }
  });
}

// y [B, C] -> spread [rows, C]: each row gets its segment's; rows of no segment 0.
template <typename T>
inline void segment_expand(const T* y, const Segments& segments, int64_t channels, int64_t rows, T* spread) {
  fill(spread, rows * channels, T(0));
  for_each(segments.count, [&](int64_t b) {
    const int64_t start = segments.start[b];
    for (int64_t row = start; row < start + segments.length[b]; ++row)
      copy(y + b * channels, channels, spread + row * channels);
  });
}

// x [N, C], index [P, E], weight [P, E] -> sums [P, C]; an index of -1 is absent.
template <typename T>
inline void interpolate(const T* x, const int32_t* index, const T* weight, int64_t points, int64_t corners,
                        int64_t channels, T* sums) {
  fill(sums, points * channels, T(0));
  for_each_part(points, kSegmentPart, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t e = p * corners; e < (p + 1) * corners; ++e) {
        if (index[e] < 0) continue;
        const T* row = x + index[e] * channels;
        for (int64_t c = 0; c < channels; ++c) sums[p * channels + c] += row[c] * weight[e];
      }
  });
}

}  // namespace halopipe
