// What a call from Python may look like, and loops over torch's threads.
//
// Every function that Python calls takes pointers to contiguous arrays and int64 numbers and returns an int64: what it
// has to say, or kFailed.  No header of torch is read and no library of torch linked; its loop over threads, a part of
// its stable C interface, is handed over once.
#pragma once

#include <cstdint>

#include "arrays.h"

#define HALOPIPE_CALL extern "C" __attribute__((visibility("default"))) int64_t

namespace halopipe {

constexpr int64_t kDone = 0, kFailed = -1;

// torch_parallel_for of torch's stable C interface; 0 where all went well.
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, void (*)(int64_t, int64_t, void*), void*);
extern ParallelFor parallel_for;

struct ThreadFailed {};

// Calls f(begin, end) for ranges that cover [0, count), over torch's threads.
template <typename F>
inline void for_ranges(int64_t count, const F& f) {
  if (count <= 0) return;
  const auto run = [](int64_t begin, int64_t end, void* body) { (*static_cast<const F*>(body))(begin, end); };
  if (parallel_for(0, count, 1, run, const_cast<F*>(&f)) != 0) throw ThreadFailed{};
}

// Calls f(i) for each i below `count`, over torch's threads.
template <typename F>
inline void for_each(int64_t count, const F& f) {
  for_ranges(count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) f(i);
  });
}

// Calls f(begin, end) for parts of [0, count) of a length that no number of threads changes.
template <typename F>
inline void for_each_part(int64_t count, int64_t length, const F& f) {
  for_each((count + length - 1) / length, [&](int64_t part) {
    const int64_t begin = part * length;
    f(begin, smaller(begin + length, count));
  });
}

// Calls f and says that it is done; the only thing that can fail is to find memory.
template <typename F>
inline int64_t done(const F& f) noexcept {
  try {
    f();
    return kDone;
  } catch (...) {
    return kFailed;
  }
}

// Calls f(T()) with double or float.
template <typename F>
inline int64_t done_with_floats(int64_t is_double, const F& f) noexcept {
  return done([&] { is_double ? f(double()) : f(float()); });
}

}  // namespace halopipe
