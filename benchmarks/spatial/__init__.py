"""Networks whose rows are divided between two ranks, beside half of the network with nobody to talk to."""

from __future__ import annotations

__all__: list[str] = []
