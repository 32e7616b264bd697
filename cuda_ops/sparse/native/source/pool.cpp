// Operators that pool: neighbours, segments, corners.
#include "pool.h"

#include "segments.h"

STABLE_TORCH_LIBRARY_FRAGMENT(halopipe_native, m) {
  m.def("sparse_max_pool(Tensor x, Tensor neighbours) -> (Tensor, Tensor)");
  m.def("sparse_max_pool_backward(Tensor dy, Tensor argmax, Tensor reverse) -> Tensor");
  m.def("sparse_sum_pool(Tensor x, Tensor neighbours) -> Tensor");
  m.def("segment_sum(Tensor x, Tensor starts, Tensor lengths) -> Tensor");
  m.def("segment_max(Tensor x, Tensor starts, Tensor lengths) -> (Tensor, Tensor)");
  m.def("segment_expand(Tensor y, Tensor starts, Tensor lengths, int num_rows) -> Tensor");
  m.def("interpolate(Tensor x, Tensor index, Tensor weight) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(halopipe_native, CPU, m) {
  m.impl("sparse_max_pool", TORCH_BOX(&halopipe::sparse_max_pool));
  m.impl("sparse_max_pool_backward", TORCH_BOX(&halopipe::sparse_max_pool_backward));
  m.impl("sparse_sum_pool", TORCH_BOX(&halopipe::sparse_sum_pool));
  m.impl("segment_sum", TORCH_BOX(&halopipe::segment_sum));
  m.impl("segment_max", TORCH_BOX(&halopipe::segment_max));
  m.impl("segment_expand", TORCH_BOX(&halopipe::segment_expand));
  m.impl("interpolate", TORCH_BOX(&halopipe::interpolate));
}
