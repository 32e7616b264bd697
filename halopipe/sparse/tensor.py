"""`torchsparse.tensor`."""

from __future__ import annotations

from cuda_ops.sparse.nn.points import PointTensor
from cuda_ops.sparse.nn.tensor import SparseTensor

__all__ = ["PointTensor", "SparseTensor"]
