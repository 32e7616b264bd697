"""Schedules as programs with one rank a position and one message an edge, and the simulator run on given times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from planner.costs.simulator.events import execute
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.timeline import Trace
from planner.ir.box import Interval
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import ADDS_GRADIENTS, COMPUTE, MESSAGE, Action, Edge, Op, Pipeline, Schedule, StageGraph
from planner.passes import lower
from planner.schedules import positions, schedule

Seconds = Callable[[Action], float]
_PART = (Part("x", (Interval(0, 1),), 4),)


def chain(name: str, num_positions: int, num_microbatches: int, per_position: int = 1) -> Pipeline:
    """A chain of stages, where the schedule ``name`` wants them."""
    stages = StageGraph.chain(num_positions * per_position, num_microbatches)
    return Pipeline(stages, positions(name, num_positions, per_position) if per_position > 1 else ())


def dag(num_stages: int, num_microbatches: int, *edges: tuple[int, int]) -> StageGraph:
    return StageGraph(num_stages, num_microbatches, tuple(Edge(src, dst, ("x",)) for src, dst in edges))


def lowered(pipeline: Pipeline, order: Schedule | str) -> Program:
    """The program, position ``i`` on rank ``i``."""
    stages = pipeline.stages
    ranks = tuple((pipeline.position(s),) for s in range(stages.num_stages))
    routes = {
        (edge.src, edge.dst, m): (
            Message(ranks[edge.src][0], ranks[edge.dst][0], _PART, _PART if edge.gradient else ()),
        )
        for edge in stages.edges
        for m in range(stages.num_microbatches)
    }
    found = schedule(order)(pipeline) if isinstance(order, str) else order
    return lower(found, stages, ranks, routes, pipeline.num_positions)


@dataclass(frozen=True)
class Ran:
    """What the simulator says."""

    step: float
    busy: tuple[float, ...]
    ends: dict[Action, float]


@dataclass(frozen=True)
class Simulated:
    """A program compiled once, on a network where a message neither waits for another nor depends on its size."""

    compiled: CompiledProgram

    @classmethod
    def of(cls, program: Program) -> Simulated:
        compiled = compile_program(program, (1,) * program.stages.num_microbatches)
        own_wires = tuple((slot, wire) for wire, (slot, _) in enumerate(compiled.messages))
        return cls(replace(compiled, messages=own_wires, channels=tuple((0, 0) for _ in own_wires)))

    def run(self, seconds: Seconds, transfer: float) -> Ran:
        compiled = self.compiled
        prices = [0.0 if a.action.op in MESSAGE else seconds(a.action) for a in compiled.actions]
        wires = range(len(compiled.messages))
        found = execute(compiled, SlotPrices(prices, [transfer] * len(compiled.transfers), wires))
        return Ran(found.step_s, tuple(self._busy(found)), self._ends(found))

    def _busy(self, trace: Trace) -> list[float]:
        return [
            sum(
                stop - start
                for action, start, stop in zip(row, trace.starts[rank], trace.stops[rank], strict=True)
                if action.op in COMPUTE
            )
            for rank, row in enumerate(self.compiled.grid)
        ]

    def _ends(self, trace: Trace) -> dict[Action, float]:
        rows = zip(self.compiled.grid, trace.stops, strict=True)
        return {action: stop for row, stops in rows for action, stop in zip(row, stops, strict=True)}


def uniform(forward: float, backward_input: float, backward_weight: float) -> Seconds:
    """Equal stages."""
    lasts = {
        Op.FORWARD: forward,
        Op.BACKWARD_INPUT: backward_input,
        Op.BACKWARD_WEIGHT: backward_weight,
        Op.BACKWARD: backward_input + backward_weight,
    }
    return lambda action: lasts.get(action.op, 0.0)


def peaks(rows: Iterable[Iterable[Action]], kept: Sequence[float]) -> tuple[float, ...]:
    """The most that each row keeps at once, all its stages together.

    Args:
        kept: by stage, what one micro-batch takes between its forward and its backward, in any unit.
    """
    found = []
    for row in map(tuple, rows):
        trained = {action.stage for action in row if action.op in ADDS_GRADIENTS}
        held = most = 0.0
        for action in row:
            if action.op is Op.FORWARD and action.stage in trained:
                held += kept[action.stage]
                most = max(most, held)
            elif action.op in ADDS_GRADIENTS:
                held -= kept[action.stage]
        found.append(most)
    return tuple(found)
