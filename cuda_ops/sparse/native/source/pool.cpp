// Operators that pool: neighbours, segments, corners.
#include "pool.h"

#include "segments.h"

HALOPIPE_CALL sparse_max_pool(int64_t is_double, const void* x, const int32_t* neighbours, int64_t volume, int64_t rows,
                              int64_t channels, void* largest, int32_t* origin) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::sparse_max_pool(static_cast<const T*>(x), {neighbours, volume, rows}, channels, static_cast<T*>(largest),
                              origin);
  });
}

HALOPIPE_CALL sparse_max_pool_backward(int64_t is_double, const void* dy, const int32_t* argmax, const int32_t* reverse,
                                       int64_t volume, int64_t rows, int64_t channels, void* dx) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::sparse_max_pool_backward(static_cast<const T*>(dy), argmax, {reverse, volume, rows}, channels,
                                       static_cast<T*>(dx));
  });
}

HALOPIPE_CALL sparse_sum_pool(int64_t is_double, const void* x, const int32_t* neighbours, int64_t volume, int64_t rows,
                              int64_t channels, void* sums) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::sparse_sum_pool(static_cast<const T*>(x), {neighbours, volume, rows}, channels, static_cast<T*>(sums));
  });
}

HALOPIPE_CALL segment_sum(int64_t is_double, const void* x, const int64_t* starts, const int64_t* lengths, int64_t count,
                          int64_t channels, void* sums) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::segment_sum(static_cast<const T*>(x), {starts, lengths, count}, channels, static_cast<T*>(sums));
  });
}

HALOPIPE_CALL segment_max(int64_t is_double, const void* x, const int64_t* starts, const int64_t* lengths, int64_t count,
                          int64_t channels, void* largest, int32_t* origin) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::segment_max(static_cast<const T*>(x), {starts, lengths, count}, channels, static_cast<T*>(largest), origin);
  });
}

HALOPIPE_CALL segment_expand(int64_t is_double, const void* y, const int64_t* starts, const int64_t* lengths,
                             int64_t count, int64_t channels, int64_t rows, void* spread) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::segment_expand(static_cast<const T*>(y), {starts, lengths, count}, channels, rows, static_cast<T*>(spread));
  });
}

HALOPIPE_CALL interpolate(int64_t is_double, const void* x, const int32_t* index, const void* weight, int64_t points,
                          int64_t corners, int64_t channels, void* sums) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::interpolate(static_cast<const T*>(x), index, static_cast<const T*>(weight), points, corners, channels,
                          static_cast<T*>(sums));
  });
}
