// Which input row each output reads through each offset: sorted merges, no hash.
//
// The offsets of one (x, y) form a column.  For one column the queries ascend with the outputs, so a single cursor walks
// through the inputs, and the offsets along z are found in the few keys behind it.
#pragma once

#include <type_traits>

#include "calls.h"
#include "keys.h"

namespace halopipe {

constexpr int64_t kMapPart = 1 << 14;  // outputs of one task
constexpr int64_t kColumns = 5;        // of one task; half of those of a 3 x 3 x 3 kernel and the middle one

// Along x, y and z.
struct MapShape {
  const int64_t *kernel, *stride, *dilation;
  int64_t volume() const { return kernel[0] * kernel[1] * kernel[2]; }
  int64_t columns() const { return kernel[0] * kernel[1]; }
  int64_t offset(int axis, int64_t i) const { return offset_of(i, kernel[axis], dilation[axis]); }
  // An odd kernel that moves nothing: offset K - 1 - k is the opposite of offset k.
  bool symmetric() const {
    return stride[0] == 1 && stride[1] == 1 && stride[2] == 1 && (kernel[0] & kernel[1] & kernel[2] & 1) == 1;
  }
};

struct Keys {
  const int64_t* at;
  int64_t count;
};

// Where the merge of one column stands.
struct Column {
  int64_t dx, dy;
  int64_t cursor;  // a row of the inputs whose key is not above what is asked for next; -1 before the first question
  int32_t* cells;  // of its offsets, one row of the map after another
};

// Rows of the inputs for one column's questions, all in range.  No branch depends on a hit: hits cannot be foretold.
struct Questions {
  const int64_t* keys;
  int64_t last, gap;

  // The first row from `near` on whose key is not below `wanted`, or the last row.
  template <int kSteps>
  int64_t walked(int64_t near, int64_t wanted) const {
    for (int step = 0; step < kSteps; ++step) near += (keys[near] < wanted) & (near < last);
    return near;
  }
  int64_t walked_on(int64_t near, int64_t wanted) const {
    near = walked<2>(near, wanted);  // mostly enough
    while (keys[near] < wanted && near < last) ++near;
    return near;
  }
  int64_t first(const Column& column, int64_t wanted) const {
    if (column.cursor < 0) return lower_bound(keys, last, wanted);
    return walked_on(column.cursor, wanted);
  }
  int64_t next(int64_t near, int64_t wanted) const {
    return gap == 1 ? walked<1>(near, wanted) : walked_on(near, wanted);
  }
};

// The columns [first, last) of a map, at most kColumns, side by side, since each waits for its keys.
struct Merge {
  const Keys &in, &out;
  const MapShape& shape;
  int32_t* to;

  Column column(int64_t c) const {
    return {shape.offset(0, c / shape.kernel[1]), shape.offset(1, c % shape.kernel[1]), -1,
            to + c * shape.kernel[2] * out.count};
  }

  // Asks for one output; (x, y, z) is it times the stride, moved by the column and the first offset along z.
  template <typename Depth>
  void ask(const Questions& questions, Depth depth, int64_t line, int64_t z, int64_t o, Column& column) const {
    int64_t near = column.cursor = questions.first(column, line + z);
    int32_t* cell = column.cells + o;
    for (int64_t k = 0; k < depth; ++k) {
      const int64_t wanted = line + z + k * questions.gap;
      if (k > 0) near = questions.next(near, wanted);
      cell[k * out.count] = questions.keys[near] == wanted ? static_cast<int32_t>(near) : -1;
    }
  }

  // The same where some of the questions leave the range.  They are never asked: their keys would be of the next field,
  // and the cursor would run ahead.
  void ask_some(const Questions& questions, int64_t line, bool line_there, int64_t z, int64_t o, Column& column) const {
    for (int64_t k = 0; k < shape.kernel[2]; ++k) {
      const int64_t at = z + k * questions.gap;
      int32_t& cell = column.cells[k * out.count + o];
      cell = -1;
      if (!line_there || at < 0 || at > kAxisMask) continue;
      const int64_t near = questions.first(column, line + at);
      if (questions.keys[near] == line + at) cell = static_cast<int32_t>(near);
    }
  }

  template <typename Depth>
  void run(Depth depth, int64_t first, int64_t last, int64_t begin, int64_t end) const {
    const Questions questions{in.at, in.count - 1, shape.dilation[2]};
    const int64_t extent = (depth - 1) * questions.gap, z_offset = shape.offset(2, 0) + kBias;
    Column columns[kColumns];
    for (int64_t c = first; c < last; ++c) columns[c - first] = column(c);
    for (int64_t o = begin; o < end; ++o) {
      const int64_t key = out.at[o], batch = key >> kBatchShift << kBatchShift;
      const int64_t x = coordinate(key, 0) * shape.stride[0] + kBias, y = coordinate(key, 1) * shape.stride[1] + kBias;
      const int64_t z = coordinate(key, 2) * shape.stride[2] + z_offset;
      const bool z_there = z >= 0 && z + extent <= kAxisMask;
      for (int64_t c = 0; c < last - first; ++c) {
        Column& at = columns[c];
        const int64_t line = batch + ((x + at.dx) << kShift[0]) + ((y + at.dy) << kShift[1]);
        const bool line_there = ((x + at.dx) | (y + at.dy) | kAxisMask) == kAxisMask;
        if (line_there && z_there) {
          ask(questions, depth, line, z, o, at);
        } else {
          ask_some(questions, line, line_there, z, o, at);
        }
      }
    }
  }
};

inline void merge(const Keys& in, const Keys& out, const MapShape& shape, int64_t columns, int32_t* to) {
  if (in.count == 0) {
    fill(to, columns * shape.kernel[2] * out.count, -1);
    return;
  }
  const int64_t parts = (out.count + kMapPart - 1) / kMapPart, groups = (columns + kColumns - 1) / kColumns;
  for_each(groups * parts, [&](int64_t task) {
    const int64_t first = task / parts * kColumns, begin = task % parts * kMapPart;
    const int64_t last = smaller(first + kColumns, columns), end = smaller(begin + kMapPart, out.count);
    if (shape.kernel[2] == 3) {
      Merge{in, out, shape, to}.run(std::integral_constant<int64_t, 3>(), first, last, begin, end);
    } else {
      Merge{in, out, shape, to}.run(shape.kernel[2], first, last, begin, end);
    }
  });
}

// to[i] = o for each from[o] = i >= 0; the rest is -1.
inline void reverse_row(const int32_t* from, int64_t outputs, int32_t* to, int64_t inputs) {
  fill(to, inputs, -1);
  int32_t nowhere = 0;
  for (int64_t o = 0; o < outputs; ++o) {
    // An address instead of a branch, which could not be foretold.
    const uintptr_t absent = from[o] < 0 ? ~uintptr_t{0} : 0, there = reinterpret_cast<uintptr_t>(to + from[o]);
    *reinterpret_cast<int32_t*>((there & ~absent) | (reinterpret_cast<uintptr_t>(&nowhere) & absent)) =
        static_cast<int32_t>(o);
  }
}

inline void reversed_map(const int32_t* from, int64_t volume, int64_t outputs, int32_t* to, int64_t inputs) {
  for_each(volume, [&](int64_t k) { reverse_row(from + k * outputs, outputs, to + k * inputs, inputs); });
}

// to [K, M] of the plain map.  Of a symmetric kernel between equal sets half of the columns is merged; the others are
// their mirror image: out reads in through k where in reads out through K - 1 - k.
inline void plain_map(const Keys& in, const Keys& out, const MapShape& shape, int32_t* to) {
  const int64_t volume = shape.volume(), columns = shape.columns(), count = out.count;
  const bool equal = in.count == count && (count == 0 || std::memcmp(in.at, out.at, count * sizeof(int64_t)) == 0);
  if (!equal || !shape.symmetric()) {
    merge(in, out, shape, columns, to);
    return;
  }
  merge(in, out, shape, columns / 2 + 1, to);
  for_each(columns / 2 * shape.kernel[2],
           [&](int64_t k) { reverse_row(to + k * count, count, to + (volume - 1 - k) * count, count); });
}

// A transposed map is the plain one of the swapped sets, read the other way.
inline void kernel_map(const Keys& in, const Keys& out, const MapShape& shape, bool transposed, int32_t* to) {
  if (!transposed) {
    plain_map(in, out, shape, to);
    return;
  }
  const Buffer<int32_t> plain(shape.volume() * in.count);
  plain_map(out, in, shape, plain.data());
  reversed_map(plain.data(), shape.volume(), in.count, to, out.count);
}

}  // namespace halopipe
