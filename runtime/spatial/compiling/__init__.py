"""Divided stages under torch.compile: collectives that the compiler sees.

Modules:

    collective   What a divided stage moves, as functional collectives: torch.compile sees them in its graph
    compiled     Stages that torch.compile makes faster, divided ones included
"""

from __future__ import annotations

__all__: list[str] = []
