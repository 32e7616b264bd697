// Vectors as wide as the machine's registers, through the compilers' vector extensions.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace halopipe {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int64_t kVectorBytes = 16, kRegisters = 32;
#else
constexpr int64_t kVectorBytes = 16, kRegisters = 16;
#endif

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VectorOf<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
};
template <typename T>
using Vector = typename VectorOf<T>::Type;

template <typename T>
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(T));

// From any address, aligned or not.
template <typename T>
inline Vector<T> load(const T* from) {
  Vector<T> vector;
  std::memcpy(&vector, from, kVectorBytes);
  return vector;
}

template <typename T>
inline void store(T* to, const Vector<T>& vector) {
  std::memcpy(to, &vector, kVectorBytes);
}

template <typename T>
constexpr int64_t rounded_up(int64_t columns) {
  return (columns + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// Calls f(first column, width) for panels of 2 or 1 vectors that cover `columns`, a multiple of the lanes; the width, in
// vectors, is a std::integral_constant, so that f's registers are counted when it is compiled.
template <typename T, typename F>
inline void for_each_panel(int64_t columns, const F& f) {
  int64_t column = 0;
  const auto cover = [&](auto width) {
    for (; columns - column >= width() * kLanes<T>; column += width() * kLanes<T>) f(column, width);
  };
  cover(std::integral_constant<int64_t, 2>{});
  cover(std::integral_constant<int64_t, 1>{});
}

}  // namespace halopipe
