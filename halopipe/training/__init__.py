"""One rank's training: opened, looped, evaluated, checkpointed, compared with one device."""

from __future__ import annotations

__all__: list[str] = []
