"""`torchsparse.operators`."""

from __future__ import annotations

from cuda_ops.sparse.nn.bev import generative_add
from cuda_ops.sparse.nn.tensor import cat

__all__ = ["cat", "generative_add"]
