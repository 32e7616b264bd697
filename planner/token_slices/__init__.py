"""Token slices (TeraPipe): micro-batches whose sequences are cut along time, into parts that follow one another.

Read ``axes`` (where tokens lie in each value, and what cannot be cut), ``prices`` (what a slice costs a stage),
``search`` (plans with slices, after the best plan without).  The rest of the planner knows an axis with an order alone:

    parts of a micro-batch      ``planner.ir.plan.Size``: of what the passes are, of how many tokens behind how many
    their order                 ``StageGraph.slices`` in ``planner.ir.schedule``; schedules by ``schedules.can_slice``
    what crosses boundaries     ``Boundaries.axes``: the box of a part
    what a part costs           ``CostModel.beside(SlicePrices)``
    what cannot be beside it    the table of ``planner.solvers.requests``; one rank a stage (``require_one_rank``)
"""

from __future__ import annotations

__all__: list[str] = []
