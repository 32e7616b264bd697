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
inline const T* filled_up(const T* dy, int64_t rows, int64_t outputs, int64_t columns, Buffer<T>& copy) {
  if (columns == outputs) return dy;
  for_each_part(rows, kConvBlock, [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      T* to = copy.data() + o * columns;
      std::fill(std::copy(dy + o * outputs, dy + (o + 1) * outputs, to), to + columns, T(0));
    }
  });
  return copy.data();
}

template <typename T>
inline Tensor sparse_conv_weight_of(const Tensor& x, const Tensor& dy, const Tensor& neighbours) {
  const int64_t volume = neighbours.size(0), rows = neighbours.size(1), inputs = x.size(1), outputs = dy.size(1);
  const int64_t columns = rounded_up<T>(outputs);
  const int32_t* map = elements<int32_t>(neighbours);
  Buffer<T> copy(columns == outputs ? 0 : rows * columns), sums(volume * inputs * columns);
  std::fill(sums.data(), sums.data() + volume * inputs * columns, T(0));
  const T* gradients = filled_up(elements<T>(dy), rows, outputs, columns, copy);
  const OuterProducts<T> products{elements<T>(x), gradients, sums.data(), inputs, columns};

  const int64_t row_bytes = (inputs + columns) * static_cast<int64_t>(sizeof(T));
  const int64_t range = std::max<int64_t>(1, kRangeBytes / row_bytes / kConvBlock) * kConvBlock;
  const int64_t groups = volume < kFewOffsets ? (inputs + kChannelGroup - 1) / kChannelGroup : 1;
  torch::stable::parallel_for(0, volume * groups, 1, [&](int64_t first, int64_t last) {
    Pairs pairs;
    for (int64_t start = 0; start < rows; start += range)
      for (int64_t task = first; task < last; ++task) {
        const int64_t k = task / groups, c = task % groups * kChannelGroup;
        for (int64_t o = start; o < std::min(rows, start + range); o += kConvBlock) {
          pairs.collect(map + k * rows + o, std::min(kConvBlock, rows - o));
          products.add(pairs, o, k, c, groups == 1 ? inputs : std::min(inputs, c + kChannelGroup));
        }
      }
  });

  Tensor weight = uninitialized<T>({volume, inputs, outputs});
  T* to = writable<T>(weight);
  for (int64_t row = 0; row < volume * inputs; ++row)
    std::memcpy(to + row * outputs, sums.data() + row * columns, outputs * sizeof(T));
  return weight;
}

// x [N, C], dy [M, D], neighbours [K, M] -> [K, C, D].
inline Tensor sparse_conv_weight(const Tensor& x, const Tensor& dy, const Tensor& neighbours) {
  STD_TORCH_CHECK(dy.scalar_type() == x.scalar_type(), "features and gradient should have one dtype");
  return with_floats(x, [&](auto zero) { return sparse_conv_weight_of<decltype(zero)>(x, dy, neighbours); });
}

}  // namespace halopipe
