"""A step, simulated.

A program as integers (``program``), its prices (``prices``), its events: where everything lasts as long as it does
alone (``events``) and where messages share network cards (``contention``), both ``rows`` of
:mod:`planner.passes.events`; ranks that do the same (``symmetry``), inputs of the next step, where the time went.
"""

from __future__ import annotations

__all__: list[str] = []
