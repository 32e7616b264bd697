"""A convolution over cut space: which terms it is a sum of, and three ways to compute it."""

from __future__ import annotations

__all__: list[str] = []
