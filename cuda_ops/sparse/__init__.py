"""Sparse 3-D networks on packed, sorted coordinates: operators in plain torch, C++ and Triton behind one call.

keys, quantize           coordinates: packing, voxelising, batches
operators                everything that computes, as functions and as torch.ops.halopipe
geometry, recipe         site sets and maps of a network, found once
nn, adapters             layers as in torchsparse, and tensors and weights of other libraries
reference, native, gpu   the implementations; dispatch chooses
"""

from __future__ import annotations

from cuda_ops.sparse.errors import SparseImplementationError, SparseInputError

__all__ = ["SparseImplementationError", "SparseInputError"]
