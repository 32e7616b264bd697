// Operators that make site sets and maps.
#include "maps.h"

#include "sites.h"

STABLE_TORCH_LIBRARY_FRAGMENT(halopipe_native, m) {
  m.def("sorted_sites(Tensor coordinates) -> (Tensor, Tensor, bool)");
  m.def("strided_sites(Tensor keys, int[] kernel, int[] stride, int[] dilation) -> Tensor");
  m.def("generated_sites(Tensor keys, int[] kernel, int[] stride, int[] dilation) -> Tensor");
  m.def(
      "kernel_map(Tensor in_keys, Tensor out_keys, int[] kernel, int[] stride, int[] dilation, bool transposed)"
      " -> Tensor");
  m.def("reversed_map(Tensor neighbours, int num_inputs) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(halopipe_native, CPU, m) {
  m.impl("sorted_sites", TORCH_BOX(&halopipe::sorted_sites));
  m.impl("strided_sites", TORCH_BOX(&halopipe::strided_sites));
  m.impl("generated_sites", TORCH_BOX(&halopipe::generated_sites));
  m.impl("kernel_map", TORCH_BOX(&halopipe::kernel_map));
  m.impl("reversed_map", TORCH_BOX(&halopipe::reversed_map));
}
