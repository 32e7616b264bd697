"""Passes over action lists: list in, list out.

    schedule -> program     every message, reduction and update explicit                 ``lowering.lower``
    actions as integers     rules looked up once for all micro-batches                   ``numbering``
    complete, in order      everything once, after what it needs, on the right weights  ``validation.validate``
    it ends                 run without clocks: no circle of waits                       ``ending.stuck``
    v(m), staleness         the version of weights of micro-batch m, updates it lacks    ``versions.staleness``
    in flight               F minus B or W so far, at most                               ``versions.in_flight``
    start of an action      max over what it waits for; its end, as long after as it lasts    ``events``

The order is that of a row; times belong to :mod:`planner.costs.simulator`, which reads ``events`` too.
"""

from __future__ import annotations

from planner.passes.lowering import lower
from planner.passes.validation import validate
from planner.passes.versions import in_flight, staleness, versions_kept

__all__ = ["in_flight", "lower", "staleness", "validate", "versions_kept"]
