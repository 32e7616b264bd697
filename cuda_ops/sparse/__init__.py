"""Sparse 3-D networks on packed, sorted coordinates: operators in plain torch, C++ and Triton by one call.

keys, quantize           coordinates: packing, voxelising, batches
operators                everything that computes, as functions and as torch.ops.halopipe
geometry, recipe         site sets and maps of a network, found once
nn                       layers as in torchsparse
reference, native, gpu   the implementations; dispatch chooses

Besides:

    adapters        The names under which users import what converts tensors and weights of other libraries
    checks          What every operator asks of its tensors before one of its implementations runs
    errors          What goes wrong in the hands of a user of sparse tensors
    gradients       The operators' gradients, in terms of the operators: so they can be differentiated again, exported
                    and compiled
    local           The inspector: what one rank does of a kernel map, and which rows travel for it, for any ownership
                    whatsoever
    preparation     From a batch of clouds as users have it to what a prepared network is given
    registrations   How torch knows the sparse operators: their signatures, shapes without memory, autocast and counted
                    operations
"""

from __future__ import annotations

from cuda_ops.sparse.errors import SparseImplementationError, SparseInputError

__all__ = ["SparseImplementationError", "SparseInputError"]
