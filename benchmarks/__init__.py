"""Performance claims, each a module: ``python -m benchmarks.NAME [--json] [--quick]``.

Every module prints a table of figures, each beside the peer or limit that was measured in the same run; ``--json``
prints only a list of rows ``{name, value, unit, goal, holds}``, and ``--quick`` ends within a minute.
"""

from __future__ import annotations

__all__: list[str] = []
