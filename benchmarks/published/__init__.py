"""Training runs that others published, predicted from tables of kernels: ``python -m benchmarks.published``."""

from __future__ import annotations

__all__: list[str] = []
