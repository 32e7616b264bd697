"""Passes over action lists: list in, list out.

``lower`` makes a schedule into a program with every message, reduction and update explicit; ``validate`` proves that a
program is complete, in order, on the right weights and free of deadlock.  What a list keeps in memory is read off it by
``in_flight`` and ``versions_kept``; how old its weights are, by ``staleness``.  When an action may start, and when it
ends, is in ``events``.

Modules:

    ending       Whether a program ends: it is run without clocks, every rank as far as it gets
    events       When an action may start, and when it ends: the rules that everybody shares who takes a program step by
                 step
    lowering     From the order of compute to a program with every message, reduction and update explicit
    validation   Whether a program does everything once, in order, on the right weights, and ends
    versions     Which weights each micro-batch runs on, and their staleness; how many micro-batches are in flight
"""

from __future__ import annotations

from planner.passes.lowering import lower
from planner.passes.validation import validate
from planner.passes.versions import in_flight, staleness, versions_kept

__all__ = ["in_flight", "lower", "staleness", "validate", "versions_kept"]
