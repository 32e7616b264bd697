"""What ranks prepare of the next step while this one runs, and how much of it is left when their rows end.

    rank 0   F0 F1 F2 ......... B0 B1 B2 UPDATE           row, with a wait
    thread            [ maps ]                 [ maps ]   of the next step
                      ^ drains while the rank waits ^ what is left delays the end of the step

A plan that prepares the next step (of graphs every plan) has the inputs of this one when it begins, so its ``PREP``
actions take nothing.  Instead each rank has seconds of work beside its row.  On the rank's own core it is done
while the rank waits for messages and for the members of a sum; what is left is done after the row's last action, since
the next step waits for it.  On a core of the host that no rank has it goes on throughout; ranks that share such a core
wait for all that they give it.  In either case the rank's own thread loses some time (``Preparations.turns_s``), as
both take turns with the interpreter, caches and memory.  In steady state every step pays so much as this one does,
whether what is left counts at its end or at its beginning: all ranks begin a step together.

Ignored: waits inside actions (statistics, halos).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.costs.layers.cost_table import layers_of
from planner.costs.simulator.program import RECEIVE_STEP, REDUCE_STEP, CompiledProgram
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.input_pipeline import spare_cores
from planner.costs.timeline import Trace
from planner.ir.schedule import Op

T = TypeVar("T", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class NextStep:
    """What is prepared of the next step beside one rank's row.

    Attributes:
        seconds: of work, with that of other ranks on the same spare core.
        has_core: whether there is such a core.
        turns_s: what the rank's own thread loses to it.
    """

    seconds: float
    has_core: bool
    turns_s: float = 0.0

    def left_s(self, waited_s: T, end_s: T) -> T:
        """What the step is longer by, whose row ends at ``end_s``, in which the rank waited so long; elementwise."""
        left: T = np.maximum(0.0, self.seconds - (end_s if self.has_core else waited_s))
        return left + self.turns_s


def next_steps(compiled: CompiledProgram, costs: StageCosts) -> tuple[NextStep, ...]:
    """By rank; empty where the plan prepares each step in itself."""
    if not costs.is_prepared or not compiled.num_prepared:
        return ()
    cores = spare_cores(costs.cost_model.cluster, len(compiled.grid))
    cost_model = costs.cost_model
    steps = list[NextStep]()
    for rank, row in enumerate(compiled.grid):
        has_core = cores[rank] is not None
        own_s = 0.0
        turns_s = 0.0
        for action in row:
            if action.op is Op.PREPARE:
                made_s = costs.prepare_s(rank, action)
                layers = costs.stages[action.stage]
                own_s += made_s
                turns_s += cost_model.preparations.turns_s(
                    cost_model.kind(rank), layers_of(layers.runs), made_s, has_core
                )
        steps.append(NextStep(own_s, has_core, turns_s))
    on_core = {core: sum(each.seconds for each, at in zip(steps, cores, strict=True) if at == core) for core in cores}
    return tuple(
        replace(each, seconds=on_core[core]) if each.has_core else each for each, core in zip(steps, cores, strict=True)
    )


def with_next_step(compiled: CompiledProgram, trace: Trace, next_step: Sequence[NextStep]) -> Trace:
    """The trace, with what is left of ``next_step`` after its rows."""
    if not next_step:
        return trace
    left_s = [
        float(each.left_s(_waited_s(compiled, trace, rank), trace.stops[rank][-1])) if trace.stops[rank] else 0.0
        for rank, each in enumerate(next_step)
    ]
    return replace(trace, left_s=left_s)


def _waited_s(compiled: CompiledProgram, trace: Trace, rank: int) -> float:
    total_s = 0.0
    for (code, _, numbers), start_s in zip(compiled.rows[rank], trace.starts[rank], strict=True):
        if code == RECEIVE_STEP:
            total_s += max(0.0, max(trace.arrived[number] for number in numbers) - start_s) if numbers else 0.0
        elif code == REDUCE_STEP:
            total_s += max(0.0, trace.released[numbers[0]] - start_s)
    return total_s
