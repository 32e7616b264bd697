"""Jobs of several processes: started, watched, their activity told, their failures explained."""

from __future__ import annotations

__all__: list[str] = []
