"""What messages and sums between ranks cost, on this host and between hosts."""

from __future__ import annotations

__all__: list[str] = []
