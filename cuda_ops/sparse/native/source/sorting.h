// Radix sort of keys with the rows that they come from, over those bits alone that differ.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace halopipe {

struct Entry {
  uint64_t key;
  int64_t row;
};

// Ascending by key; entries of equal keys keep their order.
inline void sort_entries(std::vector<Entry>& entries) {
  constexpr int kDigitBits = 11;
  constexpr uint64_t kDigitMask = (uint64_t{1} << kDigitBits) - 1;
  uint64_t differing = 0;
  for (const Entry& entry : entries) differing |= entry.key ^ entries.front().key;
  std::vector<Entry> other(entries.size());
  for (int shift = 0; shift < 64 && differing >> shift != 0; shift += kDigitBits) {
    while ((differing >> shift & 1) == 0) ++shift;  // to the next bit that differs
    std::array<size_t, kDigitMask + 1> place{};
    for (const Entry& entry : entries) ++place[entry.key >> shift & kDigitMask];
    size_t before = 0;
    for (size_t& start : place) {
      const size_t length = start;
      start = before;
      before += length;
    }
    for (const Entry& entry : entries) other[place[entry.key >> shift & kDigitMask]++] = entry;
    entries.swap(other);
  }
}

}  // namespace halopipe
