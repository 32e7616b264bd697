// Operators that convolve.
#include "conv.h"

#include "conv_weight.h"

HALOPIPE_CALL sparse_conv(int64_t is_double, const void* x, const void* weight, int64_t volume, int64_t inputs,
                          int64_t outputs, int64_t step_k, int64_t step_c, int64_t step_d, const int32_t* neighbours,
                          int64_t rows, void* y) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    const halopipe::Weight<T> strided{static_cast<const T*>(weight), volume, inputs, outputs, step_k, step_c, step_d};
    halopipe::sparse_conv(static_cast<const T*>(x), strided, neighbours, rows, static_cast<T*>(y));
  });
}

HALOPIPE_CALL sparse_conv_weight(int64_t is_double, const void* x, const void* dy, const int32_t* neighbours,
                                 int64_t volume, int64_t rows, int64_t inputs, int64_t outputs, void* gradient) {
  return halopipe::done_with_floats(is_double, [&](auto zero) {
    using T = decltype(zero);
    halopipe::sparse_conv_weight(static_cast<const T*>(x), static_cast<const T*>(dy), neighbours, volume, rows, inputs,
                                 outputs, static_cast<T*>(gradient));
  });
}
