"""Readers of published file formats into frozen records: no cost model, base units, faults named with their line.

One module a format, each with ``read(path)`` and, for text at hand, ``parse(text, source)``; import from the module:
``from planner.formats import pipedream``.  A file that breaks its format raises
:class:`planner.ir.errors.FormatError`, one that is not there :class:`planner.ir.errors.MissingFileError`.
"""

from __future__ import annotations

__all__: list[str] = []
