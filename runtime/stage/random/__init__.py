"""Random numbers that depend on the seed, the step, the micro-batch and the node, whoever draws them."""

from __future__ import annotations

__all__: list[str] = []
