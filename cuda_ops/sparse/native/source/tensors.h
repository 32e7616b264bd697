// Tensors of torch's stable ABI as plain arrays: checked pointers, new tensors, loops over torch's threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <type_traits>
#include <vector>

namespace halopipe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
constexpr ScalarType scalar_type_of() {
  if constexpr (std::is_same_v<T, float>) return ScalarType::Float;
  if constexpr (std::is_same_v<T, double>) return ScalarType::Double;
  if constexpr (std::is_same_v<T, int32_t>) return ScalarType::Int;
  if constexpr (std::is_same_v<T, int64_t>) return ScalarType::Long;
}

// The elements of a contiguous tensor.
template <typename T>
inline const T* elements(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.scalar_type() == scalar_type_of<T>(), "a tensor has another dtype than its operator expects");
  STD_TORCH_CHECK(tensor.is_contiguous(), "a tensor should be contiguous");
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
inline T* writable(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
inline Tensor uninitialized(std::initializer_list<int64_t> sizes) {
  return torch::stable::empty(sizes, scalar_type_of<T>());
}

template <typename T>
inline Tensor filled(std::initializer_list<int64_t> sizes, T value) {
  Tensor tensor = uninitialized<T>(sizes);
  std::fill_n(writable<T>(tensor), tensor.numel(), value);
  return tensor;
}

template <typename T>
inline Tensor copied(const std::vector<T>& values) {
  Tensor tensor = uninitialized<T>({static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(writable<T>(tensor), values.data(), values.size() * sizeof(T));
  return tensor;
}

// Calls f(T()) with the type of a tensor's elements.
template <typename F>
inline auto with_floats(const Tensor& tensor, const F& f) {
  if (tensor.scalar_type() == ScalarType::Double) return f(double());
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float, "only float32 and float64 are computed here");
  return f(float());
}

// Calls f(i) for each i below `count`, over torch's threads.
template <typename F>
inline void for_each(int64_t count, const F& f) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Calls f(begin, end) for parts of [0, count) of a length that no number of threads changes.
template <typename F>
inline void for_each_part(int64_t count, int64_t length, const F& f) {
  for_each((count + length - 1) / length, [&](int64_t part) {
    const int64_t begin = part * length;
    f(begin, std::min(begin + length, count));
  });
}

}  // namespace halopipe
