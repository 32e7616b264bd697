// Radix sort of keys with the rows that they come from, over those bits alone that differ.
#pragma once

#include "arrays.h"

namespace halopipe {

struct Entry {
  uint64_t key;
  int64_t row;
};

// Ascending by key; entries of equal keys keep their order.  The result is in one of the two arrays, which is returned.
inline const Entry* sorted_entries(Entry* entries, Entry* other, int64_t count) {
  constexpr int kDigitBits = 11;
  constexpr int64_t kDigits = int64_t{1} << kDigitBits;
  uint64_t differing = 0;
  for (int64_t i = 0; i < count; ++i) differing |= entries[i].key ^ entries[0].key;
  for (int shift = 0; shift < 64 && differing >> shift != 0; shift += kDigitBits) {
    while ((differing >> shift & 1) == 0) ++shift;  // to the next bit that differs
    int64_t place[kDigits] = {};
    for (int64_t i = 0; i < count; ++i) ++place[entries[i].key >> shift & (kDigits - 1)];
    int64_t before = 0;
    for (int64_t& start : place) {
      const int64_t length = start;
      start = before;
      before += length;
    }
    for (int64_t i = 0; i < count; ++i) other[place[entries[i].key >> shift & (kDigits - 1)]++] = entries[i];
    Entry* const sorted = other;
    other = entries;
    entries = sorted;
  }
  return entries;
}

}  // namespace halopipe
