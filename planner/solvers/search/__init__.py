"""The exact search: bounds over suffixes, a queue of prefixes, and what it starts from (see ``solvers.suffix_dp``)."""

from __future__ import annotations

__all__: list[str] = []
