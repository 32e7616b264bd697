"""The names under which users import what converts tensors and weights; an extra has it (``cuda_ops.extras.adapters``).

Modules:

    spconv        Tensors and weights of spconv 2
    torchsparse   Tensors and weights of torchsparse 2.1
"""

from __future__ import annotations

__all__: list[str] = []
