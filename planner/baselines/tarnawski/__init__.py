"""Tarnawski et al. (NeurIPS 2020): contiguous sets of operators on accelerators, the smallest largest load."""

from __future__ import annotations

__all__: list[str] = []
