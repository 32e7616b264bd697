"""Whether halopipe is right, or says before the first step what it cannot keep."""

from __future__ import annotations

__all__: list[str] = []
