// Operators that make site sets and maps.
#include "maps.h"

#include "sites.h"

namespace halopipe {
ParallelFor parallel_for = nullptr;
}  // namespace halopipe

// Once, before any other call.
HALOPIPE_CALL use_threads(halopipe::ParallelFor parallel_for) {
  halopipe::parallel_for = parallel_for;
  return halopipe::kDone;
}

// 1 if the coordinates are sites, each once, else 0.
HALOPIPE_CALL sorted_sites(const int32_t* coordinates, int64_t count, int64_t* keys, int64_t* order) {
  bool fine = false;
  const int64_t result = halopipe::done([&] { fine = halopipe::sorted_sites(coordinates, count, keys, order); });
  return result == halopipe::kFailed ? result : fine;
}

// How many sites there are in `to`, which has room for `kernel` times as many as there are keys.
HALOPIPE_CALL moved_sites(const int64_t* keys, int64_t count, int64_t axis, int64_t kernel, int64_t stride,
                          int64_t dilation, int64_t generated, int64_t* to) {
  int64_t found = 0;
  const auto move = [&](const auto& how) {
    return halopipe::done(
        [&] { found = halopipe::moved_sites(keys, count, static_cast<int>(axis), kernel, dilation, how, to); });
  };
  const int64_t result = generated ? move(halopipe::Generated{stride}) : move(halopipe::Strided{stride});
  return result == halopipe::kFailed ? result : found;
}

// `shape`: kernel, stride and dilation, three numbers each.
HALOPIPE_CALL kernel_map(const int64_t* in_keys, int64_t inputs, const int64_t* out_keys, int64_t outputs,
                         const int64_t* shape, int64_t transposed, int32_t* neighbours) {
  return halopipe::done([&] {
    halopipe::kernel_map({in_keys, inputs}, {out_keys, outputs}, {shape, shape + 3, shape + 6}, transposed, neighbours);
  });
}

HALOPIPE_CALL reversed_map(const int32_t* neighbours, int64_t volume, int64_t outputs, int32_t* reverse, int64_t inputs) {
  return halopipe::done([&] { halopipe::reversed_map(neighbours, volume, outputs, reverse, inputs); });
}
