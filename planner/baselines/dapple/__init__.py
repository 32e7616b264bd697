"""DAPPLE (Fan et al., PPoPP 2021): the shortest latency of a synchronous pipeline of replicated stages."""

from __future__ import annotations

__all__: list[str] = []
