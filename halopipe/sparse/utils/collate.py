"""`torchsparse.utils.collate`."""

from __future__ import annotations

from cuda_ops.sparse.quantize import sparse_collate, sparse_collate_fn

__all__ = ["sparse_collate", "sparse_collate_fn"]
