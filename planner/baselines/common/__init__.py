"""What the papers' planners share.

Networks and clusters as they see them, ideals, chains, readers of files, and plans.
"""

from __future__ import annotations

__all__: list[str] = []
