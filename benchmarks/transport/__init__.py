"""Messages, exchanges and sums over every transport, beside a copy in memory; what a computation costs after a wait."""

from __future__ import annotations

__all__: list[str] = []
