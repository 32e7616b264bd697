"""What the papers' planners share.

Networks (graphs and chains) and clusters as they see them, ideals, readers of files, answers and their candidates.
"""

from __future__ import annotations

__all__: list[str] = []
