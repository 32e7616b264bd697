// Sparse convolution: for each output and offset a row is gathered, multiplied and added where it lies.
//
// Output-stationary: a block of outputs stays in the nearest cache while all offsets pass.  The rows that an offset reads
// are gathered a few at a time, so that their sums stay in registers; each output adds its offsets in ascending order,
// and within one the input channels, whatever the number of threads.
#pragma once

#include "calls.h"
#include "vectors.h"

namespace halopipe {

constexpr int64_t kConvBlock = 512;                      // outputs of one task
constexpr int64_t kConvRows = kRegisters == 32 ? 8 : 6;  // gathered at a time; each has sums of two vectors

// The weight [K, C, D] of any strides.
template <typename T>
struct Weight {
  const T* at;
  int64_t volume, inputs, outputs, step_k, step_c, step_d;
};

// The weight as, for each offset and panel, C rows of the panel's columns, zeros behind the last.
template <typename T>
inline void in_panels(const Weight<T>& weight, int64_t columns, T* packed) {
  for_each(weight.volume, [&](int64_t k) {
    T* to = packed + k * weight.inputs * columns;
    for_each_panel<T>(columns, [&](int64_t column, auto width) {
      constexpr int64_t kWidth = decltype(width)::value * kLanes<T>;
      const int64_t there = smaller(kWidth, weight.outputs - column);
      for (int64_t c = 0; c < weight.inputs; ++c, to += kWidth) {
        const T* row = weight.at + k * weight.step_k + c * weight.step_c + column * weight.step_d;
        for (int64_t d = 0; d < kWidth; ++d) to[d] = d < there ? row[d * weight.step_d] : T(0);
      }
    });
  });
}

// sums[r] += rows[r] . panel, for rows of `inputs` channels.
template <typename T, int64_t kVectors>
inline void multiply_rows(const T* const* rows, int64_t inputs, const T* panel, T* const* sums) {
  Vector<T> sum[kConvRows][kVectors];
  for (int64_t r = 0; r < kConvRows; ++r)
    for (int64_t v = 0; v < kVectors; ++v) sum[r][v] = load(sums[r] + v * kLanes<T>);
  for (int64_t c = 0; c < inputs; ++c, panel += kVectors * kLanes<T>) {
    Vector<T> w[kVectors];
    for (int64_t v = 0; v < kVectors; ++v) w[v] = load(panel + v * kLanes<T>);
    for (int64_t r = 0; r < kConvRows; ++r)
      for (int64_t v = 0; v < kVectors; ++v) sum[r][v] += w[v] * rows[r][c];
  }
  for (int64_t r = 0; r < kConvRows; ++r)
    for (int64_t v = 0; v < kVectors; ++v) store(sums[r] + v * kLanes<T>, sum[r][v]);
}

// The outputs of one block that read something through one offset, and what they read.
struct Pairs {
  int32_t input[kConvBlock];
  int32_t output[kConvBlock];
  int64_t count = 0;

  void collect(const int32_t* neighbours, int64_t length) {
    count = 0;
    for (int64_t o = 0; o < length; ++o) {
      input[count] = neighbours[o];
      output[count] = static_cast<int32_t>(o);
      count += neighbours[o] >= 0;
    }
  }
};

// sums [kConvBlock + 1, columns] += the pairs' products; the last row takes what fills up the last group.
template <typename T>
inline void multiply_pairs(const Pairs& pairs, const T* x, int64_t inputs, const T* packed, int64_t columns, T* sums) {
  for_each_panel<T>(columns, [&](int64_t column, auto width) {
    const T* rows[kConvRows];
    T* to[kConvRows];
    for (int64_t first = 0; first < pairs.count; first += kConvRows) {
      for (int64_t r = 0; r < kConvRows; ++r) {
        const bool there = first + r < pairs.count;
        rows[r] = x + pairs.input[there ? first + r : first] * inputs;
        to[r] = sums + (there ? pairs.output[first + r] : kConvBlock) * columns + column;
      }
      multiply_rows<T, decltype(width)::value>(rows, inputs, packed + column * inputs, to);
    }
  });
}

// x [N, C], weight [K, C, D], map [K, M] -> y [M, D].
template <typename T>
inline void sparse_conv(const T* x, const Weight<T>& weight, const int32_t* map, int64_t rows, T* y) {
  const int64_t inputs = weight.inputs, outputs = weight.outputs, columns = rounded_up<T>(outputs);
  if (rows * outputs == 0) return;
  const Buffer<T> packed(weight.volume * inputs * columns);
  in_panels(weight, columns, packed.data());
  const auto convolve = [&](int64_t begin, int64_t end, Pairs& pairs, T* sums) {
    fill(sums, kConvBlock * columns, T(0));
    for (int64_t k = 0; k < weight.volume; ++k) {
      pairs.collect(map + k * rows + begin, end - begin);
      multiply_pairs(pairs, x, inputs, packed.data() + k * inputs * columns, columns, sums);
    }
    for (int64_t o = begin; o < end; ++o) copy(sums + (o - begin) * columns, outputs, y + o * outputs);
  };
  for_ranges((rows + kConvBlock - 1) / kConvBlock, [&](int64_t first, int64_t last) {
    Pairs pairs;
    const Buffer<T> sums((kConvBlock + 1) * columns);
    for (int64_t block = first; block < last; ++block) {
      convolve(block * kConvBlock, smaller(rows, (block + 1) * kConvBlock), pairs, sums.data());
    }
  });
}

}  // namespace halopipe
