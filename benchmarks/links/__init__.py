"""What the profile says of links, beside what fresh processes measure on them."""

from __future__ import annotations

__all__: list[str] = []
