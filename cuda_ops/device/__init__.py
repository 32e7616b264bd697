"""A process as one device: its cores, allocator and seeds, its GPUs, and libraries compiled at first use."""

from __future__ import annotations

__all__: list[str] = []
