"""What messages cost: links, collectives, resharding between layers, halos, and the least that stages hand over."""

from __future__ import annotations

__all__: list[str] = []
