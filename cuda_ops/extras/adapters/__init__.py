"""Tensors, weights and kernels of torchsparse and spconv, imported only when they are used.

Users import the module of the library: ``from cuda_ops.sparse.adapters.spconv import from_spconv``.

Modules:

    backends      The kernels of spconv as an implementation of our operators: functions of their names
    spconv        Tensors and weights of spconv 2
    torchsparse   Tensors and weights of torchsparse 2.1
    weights       State dicts of other libraries: which of their entries is which of ours, and in what order its numbers
                  lie
"""

from __future__ import annotations

from typing import ClassVar

from cuda_ops.extra import OperatorsExtra


class Adapters(OperatorsExtra):
    """Tensors, weights and kernels of other libraries."""

    sparse_kernels: ClassVar = {"spconv": "cuda_ops.extras.adapters.backends:load"}
    public: ClassVar = {
        "cuda_ops.sparse.adapters.spconv": {"*": "cuda_ops.extras.adapters.spconv"},
        "cuda_ops.sparse.adapters.torchsparse": {"*": "cuda_ops.extras.adapters.torchsparse"},
    }


EXTRA = Adapters()
