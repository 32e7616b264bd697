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

_HERE = "cuda_ops.extras.adapters"
HOOKS = {
    "sparse kernels": {"spconv": f"{_HERE}.backends:load"},
    "cuda_ops.sparse.adapters.spconv": {"*": f"{_HERE}.spconv"},
    "cuda_ops.sparse.adapters.torchsparse": {"*": f"{_HERE}.torchsparse"},
}
