"""The planners of other papers, one folder a paper.

Its cost model, its search, its file format, and its plan as one of ours.
"""

from __future__ import annotations

__all__: list[str] = []
