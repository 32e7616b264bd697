"""What a plan, a layer or a run looks like to a person."""

from __future__ import annotations

__all__: list[str] = []
