"""`torchsparse.backbones`: networks that return every level."""

from __future__ import annotations

from halopipe.sparse.backbones import modules
from profiler.models.sparse_backbones import SparseResNet, SparseResNet21D, SparseResUNet, SparseResUNet42

__all__ = ["SparseResNet", "SparseResNet21D", "SparseResUNet", "SparseResUNet42", "modules"]
