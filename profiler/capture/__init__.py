"""A module and its loss as one clean graph of layers, checked against the module itself."""

from __future__ import annotations

__all__: list[str] = []
