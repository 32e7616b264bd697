"""Piper (Tarnawski, Narayanan and Phanishayee, NeurIPS 2021).

Pipeline, data and tensor parallelism with recomputation.
"""

from __future__ import annotations

__all__: list[str] = []
