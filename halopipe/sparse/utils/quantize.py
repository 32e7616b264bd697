"""`torchsparse.utils.quantize`."""

from __future__ import annotations

from cuda_ops.sparse.quantize import sparse_quantize

__all__ = ["sparse_quantize"]
