"""Plans, profiles and timelines in the forms of other tools: tables (pandas), Chrome traces (Perfetto), launchers.

Import from the module that defines a name: ``from planner.export.tables import plans``.
"""

from __future__ import annotations

__all__: list[str] = []
