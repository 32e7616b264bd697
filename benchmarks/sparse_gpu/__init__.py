"""Triton kernels of the sparse operators, beside what the GPU itself allows and beside spconv where it is there."""

from __future__ import annotations

__all__: list[str] = []
