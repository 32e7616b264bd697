// The weight's gradient: for each offset the sum of the outer products of the rows that it joins.
//
// A range of outputs stays in the cache while the offsets pass.  Tiles of a gradient stay in registers while the pairs of
// a block pass; blocks are summed apart and then added in ascending order, which keeps float32 sums over many pairs
// accurate and the same whatever the number of threads.
#pragma once

#include "conv.h"

namespace halopipe {

constexpr int64_t kTileRows = kRegisters == 32 ? 12 : 6;  // input channels of a tile
constexpr int64_t kRangeBytes = 256 * 1024;               // of the rows of a range
constexpr int64_t kFewOffsets = 8;                        // of fewer the input channels are divided among threads too
constexpr int64_t kChannelGroup = 2 * kTileRows;

// What the gradient is made of, and its sums [K, C, columns].
template <typename T>
struct OuterProducts {
  const T* x;
  const T* dy;
  T* sums;
  int64_t inputs, columns;

  // Adds to kRows channels from c on of one panel of an offset's sums [C, columns].
  template <int64_t kRows, int64_t kVectors>
  void add_tile(const Pairs& pairs, int64_t first_output, int64_t c, int64_t column, T* gradient) const {
    const T* const rows = x + c;
    const T* const gradients = dy + first_output * columns + column;
    Vector<T> sum[kRows][kVectors] = {};
    for (int64_t p = 0; p < pairs.count; ++p) {
      const T* row = rows + pairs.input[p] * inputs;
      const T* from = gradients + pairs.output[p] * columns;
      Vector<T> g[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) g[v] = load(from + v * kLanes<T>);
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t v = 0; v < kVectors; ++v) sum[r][v] += g[v] * row[r];
    }
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t v = 0; v < kVectors; ++v) {
        T* to = gradient + (c + r) * columns + column + v * kLanes<T>;
        store(to, load(to) + sum[r][v]);
      }
  }

  // Adds the pairs of one block to the channels [begin, end) of offset k.
  void add(const Pairs& pairs, int64_t first_output, int64_t k, int64_t begin, int64_t end) const {
    T* gradient = sums + k * inputs * columns;
    for_each_panel<T>(columns, [&](int64_t column, auto width) {
      constexpr int64_t kVectors = decltype(width)::value;
      int64_t c = begin;
      for (; c + kTileRows <= end; c += kTileRows) add_tile<kTileRows, kVectors>(pairs, first_output, c, column, gradient);
      for (; c + 4 <= end; c += 4) add_tile<4, kVectors>(pairs, first_output, c, column, gradient);
      for (; c < end; ++c) add_tile<1, kVectors>(pairs, first_output, c, column, gradient);
    });
  }
};

// dy [M, D] itself, or a copy whose rows are filled up to whole vectors.
template <typename T>
inline const T* filled_up(const T* dy, int64_t rows, int64_t outputs, int64_t columns, T* filled) {
  if (columns == outputs) return dy;
  for_each_part(rows, kConvBlock, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      copy(dy + o * outputs, outputs, filled + o * columns);
      fill(filled + o * columns + outputs, columns - outputs, T(0));
    }
  });
  return filled;
}

// x [N, C], dy [M, D], map [K, M] -> gradient [K, C, D].
template <typename T>
inline void sparse_conv_weight(const T* x, const T* dy, const int32_t* map, int64_t volume, int64_t rows,
                               int64_t inputs, int64_t outputs, T* gradient) {
  const int64_t columns = rounded_up<T>(outputs);
  const Buffer<T> filled(columns == outputs ? 0 : rows * columns), sums(volume * inputs * columns);
  fill(sums.data(), volume * inputs * columns, T(0));
  const T* gradients = filled_up(dy, rows, outputs, columns, filled.data());
  const OuterProducts<T> products{x, gradients, sums.data(), inputs, columns};

  const int64_t row_bytes = (inputs + columns) * static_cast<int64_t>(sizeof(T));
  const int64_t blocks = kRangeBytes / row_bytes / kConvBlock, range = (blocks > 1 ? blocks : 1) * kConvBlock;
  const int64_t groups = volume < kFewOffsets ? (inputs + kChannelGroup - 1) / kChannelGroup : 1;
  for_ranges(volume * groups, [&](int64_t first, int64_t last) {
    Pairs pairs;
    for (int64_t start = 0; start < rows; start += range)
      for (int64_t task = first; task < last; ++task) {
        const int64_t k = task / groups, c = task % groups * kChannelGroup;
        for (int64_t o = start; o < smaller(rows, start + range); o += kConvBlock) {
          pairs.collect(map + k * rows + o, smaller(kConvBlock, rows - o));
          products.add(pairs, o, k, c, groups == 1 ? inputs : smaller(inputs, c + kChannelGroup));
        }
      }
  });
  for (int64_t row = 0; row < volume * inputs; ++row) copy(sums.data() + row * columns, outputs, gradient + row * outputs);
}

}  // namespace halopipe
