"""What a launcher tells its workers, and what they answer."""

from __future__ import annotations

__all__: list[str] = []
