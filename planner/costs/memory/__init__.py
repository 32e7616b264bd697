"""Memory: what the actions of a program hold, how high a stage rises while its layers run.

The peak of each rank.
"""

from __future__ import annotations

__all__: list[str] = []
