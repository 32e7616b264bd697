"""How true predictions are: plans on hosts with rate-limited links, predicted first, then run."""

from __future__ import annotations

__all__: list[str] = []
