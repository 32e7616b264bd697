// Memory of a task, on the boundaries of cache lines.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace halopipe {

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), kAlignment))) {}
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Release {
    void operator()(T* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<T, Release> data_;
};

}  // namespace halopipe
