"""The exact search.

A queue of prefixes, bounds on their suffixes, what it starts from, and what to say where nothing fits.
"""

from __future__ import annotations

__all__: list[str] = []
