// Memory of a task, and the few algorithms on plain arrays that are needed: the standard's headers take longer to
// compile than all the kernels.
#pragma once

#include <cstdint>
#include <cstring>
#include <new>

namespace halopipe {

// Uninitialized memory on the boundary of a cache line.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), kAlignment))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { ::operator delete(data_, kAlignment); }
  T* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  T* data_;
};

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
inline void fill(T* to, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) to[i] = value;
}

template <typename T>
inline void copy(const T* from, int64_t count, T* to) {
  if (count > 0) std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
}

// The first place in ascending values that is not below `wanted`.
inline int64_t lower_bound(const int64_t* values, int64_t count, int64_t wanted) {
  const int64_t* at = values;
  while (count > 0) {
    const int64_t half = count / 2;
    if (at[half] < wanted) {
      at += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return at - values;
}

}  // namespace halopipe
