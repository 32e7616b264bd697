"""Tensors, weights and kernels of torchsparse and spconv, imported only when they are used.

Import the module of the library: ``from cuda_ops.sparse.adapters.spconv import from_spconv``. Nothing is imported here,
so that ``dispatch``, below the layers, can take ``backends``.
"""

from __future__ import annotations

__all__: list[str] = []
