// Pooling over the neighbours that are there, offset after offset.
#pragma once

#include <algorithm>
#include <cmath>

#include "tensors.h"

namespace halopipe {

constexpr int64_t kPoolPart = 256;  // rows of one task

// Whether a candidate takes the place of the best so far: the first of equals stays, and the first NaN.
template <typename T>
inline bool takes(T candidate, T best, bool none_yet) {
  return none_yet | (candidate > best) | (std::isnan(candidate) & !std::isnan(best));
}

// Calls f(row, other) for each row and each offset that joins it to another, rows over torch's threads.
template <typename F>
inline void for_each_neighbour(const Tensor& map, const F& f) {
  const int64_t volume = map.size(0), rows = map.size(1);
  const int32_t* at = elements<int32_t>(map);
  for_each_part(rows, kPoolPart, [&](int64_t begin, int64_t end) {
    for (int64_t k = 0; k < volume; ++k)
      for (int64_t row = begin; row < end; ++row) {
        const int64_t other = at[k * rows + row];
        if (other >= 0) f(row, other);
      }
  });
}

// x [N, C], neighbours [K, M] -> the largest values [M, C] and the rows that they come from; 0 and -1 where none is.
inline std::tuple<Tensor, Tensor> sparse_max_pool(const Tensor& x, const Tensor& neighbours) {
  return with_floats(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = neighbours.size(1), channels = x.size(1);
    Tensor largest = filled<T>({rows, channels}, 0), origin = filled<int32_t>({rows, channels}, -1);
    const T* from = elements<T>(x);
    T* to = writable<T>(largest);
    int32_t* origins = writable<int32_t>(origin);
    for_each_neighbour(neighbours, [&](int64_t row, int64_t other) {
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = row * channels + c;
        const T candidate = from[other * channels + c];
        const bool better = takes(candidate, to[at], origins[at] < 0);
        to[at] = better ? candidate : to[at];
        origins[at] = better ? static_cast<int32_t>(other) : origins[at];
      }
    });
    return std::make_tuple(largest, origin);
  });
}

// dy [M, C], argmax [M, C], reverse [K, N] -> [N, C]: each input collects from the outputs that took it.
inline Tensor sparse_max_pool_backward(const Tensor& dy, const Tensor& argmax, const Tensor& reverse) {
  return with_floats(dy, [&](auto zero) {
    using T = decltype(zero);
    const int64_t channels = dy.size(1);
    Tensor dx = filled<T>({reverse.size(1), channels}, 0);
    const T* from = elements<T>(dy);
    const int32_t* origins = elements<int32_t>(argmax);
    T* to = writable<T>(dx);
    for_each_neighbour(reverse, [&](int64_t row, int64_t other) {
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t at = other * channels + c;
        to[row * channels + c] += origins[at] == row ? from[at] : T(0);
      }
    });
    return dx;
  });
}

// x [N, C], neighbours [K, M] -> sums [M, C].
inline Tensor sparse_sum_pool(const Tensor& x, const Tensor& neighbours) {
  return with_floats(x, [&](auto zero) {
    using T = decltype(zero);
    const int64_t channels = x.size(1);
    Tensor sums = filled<T>({neighbours.size(1), channels}, 0);
    const T* from = elements<T>(x);
    T* to = writable<T>(sums);
    for_each_neighbour(neighbours, [&](int64_t row, int64_t other) {
      for (int64_t c = 0; c < channels; ++c) to[row * channels + c] += from[other * channels + c];
    });
    return sums;
  });
}

}  // namespace halopipe
