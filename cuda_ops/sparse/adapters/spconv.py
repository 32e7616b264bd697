"""Tensors and weights of spconv 2, for users; they are an extra's (``cuda_ops.extras.adapters``)."""

from __future__ import annotations

from planner.ir.extras import public

__getattr__, __dir__ = public(__name__)
