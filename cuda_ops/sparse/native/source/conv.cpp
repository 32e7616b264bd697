// Operators that convolve.
#include "conv.h"

#include "conv_weight.h"

STABLE_TORCH_LIBRARY_FRAGMENT(halopipe_native, m) {
  m.def("sparse_conv(Tensor x, Tensor weight, Tensor neighbours) -> Tensor");
  m.def("sparse_conv_weight(Tensor x, Tensor dy, Tensor neighbours) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(halopipe_native, CPU, m) {
  m.impl("sparse_conv", TORCH_BOX(&halopipe::sparse_conv));
  m.impl("sparse_conv_weight", TORCH_BOX(&halopipe::sparse_conv_weight));
}
