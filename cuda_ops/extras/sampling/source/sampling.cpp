// Neighbours without replacement, and the rows of what they name; the plain version is in ../draws.py, to the bit.
#include <cstdint>

#define HALOPIPE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15ULL;

inline uint64_t mixed(uint64_t z) {  // SplitMix64's finaliser (Steele, Lea and Flood 2014)
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

inline bool holds(const int64_t* begin, const int64_t* end, int64_t value) {
  for (; begin != end; ++begin)
    if (*begin == value) return true;
  return false;
}

}  // namespace

// Writes up to `fanout` (all where negative) neighbours of each of `count` nodes, then the node itself if asked for.
// `counts` [count] and `found` (as many as there may be) are written; how many were found is returned, -1 where the
// graph's arrays point outside of one another.  Nodes are in range.
HALOPIPE_API int64_t halopipe_sample(const int64_t* starts, const int32_t* neighbours, int64_t num_nodes,
                                     int64_t num_edges, const int64_t* nodes, int64_t count, int64_t fanout, int32_t with_self, uint64_t base, int64_t* counts,
                                     int64_t* found) {
  int64_t* next = found;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t node = nodes[i], first = starts[node], degree = starts[node + 1] - first;
    int64_t* const begin = next;
    if (first < 0 || degree < 0 || degree > num_edges - first) return -1;
    if (fanout < 0 || degree <= fanout) {
      for (int64_t j = 0; j < degree; ++j) *next++ = neighbours[first + j];
    } else {  // Floyd's algorithm (Bentley and Floyd 1987); places first, looked up behind
      const uint64_t key = mixed(base + static_cast<uint64_t>(node));
      for (int64_t j = 0; j < fanout; ++j) {
        const uint64_t bound = static_cast<uint64_t>(degree - fanout + j + 1);
        const int64_t drawn = static_cast<int64_t>(((mixed(key + kStep * static_cast<uint64_t>(j)) >> 32) * bound) >> 32);
        *next = holds(begin, next, drawn) ? static_cast<int64_t>(bound) - 1 : drawn;
        ++next;
      }
      for (int64_t* place = begin; place != next; ++place) *place = neighbours[first + *place];
    }
    for (const int64_t* place = begin; place != next; ++place)
      if (static_cast<uint64_t>(*place) >= static_cast<uint64_t>(num_nodes)) return -1;
    if (with_self) *next++ = node;
    counts[i] = next - begin;
  }
  return next - found;
}

// Rows of `found` [count] among `nodes`: those of `targets` first, then each new one as it first comes.
// `table` [all nodes] is -1 throughout, before and after; how many nodes there are is returned.
HALOPIPE_API int64_t halopipe_relabel(const int64_t* targets, int64_t num_targets, const int64_t* found, int64_t count,
                                      int32_t* table, int64_t* nodes, int64_t* target_rows, int64_t* rows) {
  int64_t size = 0;
  for (int64_t i = 0; i < num_targets; ++i) {
    int32_t& row = table[targets[i]];
    if (row < 0) row = static_cast<int32_t>(size), nodes[size++] = targets[i];
    target_rows[i] = row;
  }
  for (int64_t i = 0; i < count; ++i) {
    int32_t& row = table[found[i]];
    if (row < 0) row = static_cast<int32_t>(size), nodes[size++] = found[i];
    rows[i] = row;
  }
  for (int64_t i = 0; i < size; ++i) table[nodes[i]] = -1;
  return size;
}

// Rows of `width` bytes of `from` into `to`.
HALOPIPE_API void halopipe_gather(const char* from, const int64_t* nodes, int64_t count, int64_t width, char* to) {
  for (int64_t i = 0; i < count; ++i) __builtin_memcpy(to + i * width, from + nodes[i] * width, width);
}
