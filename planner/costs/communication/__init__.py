"""What messages cost: links, collectives, resharding between layers, and halos."""

from __future__ import annotations

__all__: list[str] = []
