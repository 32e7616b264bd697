"""Equal to one device: the step that a plan must equal, and how far it is from it."""

from __future__ import annotations

__all__: list[str] = []
