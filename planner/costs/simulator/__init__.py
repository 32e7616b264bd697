"""A step, simulated.

A program as integers, its prices, its events, what shares a network card, and where the time went.
"""

from __future__ import annotations

__all__: list[str] = []
