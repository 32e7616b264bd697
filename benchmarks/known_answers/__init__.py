"""Published optimisers' answers, found again under each one's own objective."""

from __future__ import annotations

__all__: list[str] = []
