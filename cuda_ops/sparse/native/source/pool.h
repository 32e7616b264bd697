// Pooling over the neighbours that are there, offset after offset.
#pragma once

#include "calls.h"

namespace halopipe {

constexpr int64_t kPoolPart = 256;  // rows of one task

// Whether a candidate takes the place of the best so far: the first of equals stays, and the first NaN, which alone
// is not equal to itself.
template <typename T>
inline bool takes(T candidate, T best, bool none_yet) {
  return none_yet | (candidate > best) | ((candidate != candidate) & (best == best));
}

// [offsets, rows]: the row of another set that each row is joined to, or -1.
struct Map {
  const int32_t* at;
  int64_t volume, rows;

  // Calls f(row, other) for each row and each offset that joins it to another, rows over torch's threads.
  template <typename F>
  void for_each_neighbour(const F& f) const {
    for_each_part(rows, kPoolPart, [&](int64_t begin, int64_t end) {
      for (int64_t k = 0; k < volume; ++k)
        for (int64_t row = begin; row < end; ++row) {
          const int64_t other = at[k * rows + row];
          if (other >= 0) f(row, other);
        }
    });
  }
};

// x [N, C], neighbours [K, M] -> the largest values [M, C] and the rows that they come from; 0 and -1 where none is.
template <typename T>
inline void sparse_max_pool(const T* x, const Map& neighbours, int64_t channels, T* largest, int32_t* origin) {
  fill(largest, neighbours.rows * channels, T(0));
  fill(origin, neighbours.rows * channels, -1);
  neighbours.for_each_neighbour([&](int64_t row, int64_t other) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t at = row * channels + c;
      const T candidate = x[other * channels + c];
      const bool better = takes(candidate, largest[at], origin[at] < 0);
      largest[at] = better ? candidate : largest[at];
      origin[at] = better ? static_cast<int32_t>(other) : origin[at];
    }
  });
}

// dy [M, C], argmax [M, C], reverse [K, N] -> dx [N, C]: each input collects from the outputs that took it.
template <typename T>
inline void sparse_max_pool_backward(const T* dy, const int32_t* argmax, const Map& reverse, int64_t channels, T* dx) {
  fill(dx, reverse.rows * channels, T(0));
  reverse.for_each_neighbour([&](int64_t row, int64_t other) {
    for (int64_t c = 0; c < channels; ++c) {
      const int64_t at = other * channels + c;
      dx[row * channels + c] += argmax[at] == row ? dy[at] : T(0);
    }
  });
}

// x [N, C], neighbours [K, M] -> sums [M, C].
template <typename T>
inline void sparse_sum_pool(const T* x, const Map& neighbours, int64_t channels, T* sums) {
  fill(sums, neighbours.rows * channels, T(0));
  neighbours.for_each_neighbour([&](int64_t row, int64_t other) {
    for (int64_t c = 0; c < channels; ++c) sums[row * channels + c] += x[other * channels + c];
  });
}

}  // namespace halopipe
