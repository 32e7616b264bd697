"""Schedules and local losses: gains under the simulator beside closed forms, and jobs beside one device.

On equal stages with free messages; *closed forms* follow from bubbles, those of Chimera as published:

- Chimera (Li and Hoefler, SC 2021, section 3): D stages, D micro-batches, a backward as long as a forward: bubbles of
  (D - 2) / (2 D + D - 2) of a step where 1F1B has (D - 1) / (2 D - 1).  The gain is 1F1B's step over Chimera's.
- Hanayo (Liu et al., SC 2023): W waves on p positions, p micro-batches, a backward of twice a forward: (2 p - 2) /
  (3 p W + 2 p - 2), as we count them, over 1F1B's (p - 1) / (2 p - 1).
- PipeDream-2BW (Narayanan et al., ICML 2021): m micro-batches on p stages with a flush, over the same without one:
  (m + p - 1) / m.
- PPLL: four stages with losses of their own under 1F1B, over the same with gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Row
from benchmarks.seeds.jobs import largest_error
from planner.costs.simulator.events import execute
from planner.costs.simulator.program import compile_program
from planner.ir.box import Interval
from planner.ir.program import Message, Part
from planner.ir.schedule import MESSAGE, Edge, Op, Pipeline, StageGraph
from planner.passes import lower
from planner.schedules import positions, schedule

_PART = (Part("x", (Interval(0, 1),), 4),)

MODEL = """
from torch import nn, randint, randn


def model():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()]
    network = nn.Sequential(*layers, nn.Linear(288, 32), nn.Tanh(), nn.Linear(32, 10))
    return network, (randn(16, 1, 8, 8), randint(10, (16,))), nn.CrossEntropyLoss()
"""

EXECUTED = {
    "Chimera": ([], ["--schedule", "chimera"]),
    "Hanayo": ([], ["--schedule", "hanayo"]),
    "PPLL": (["--local-loss", "2"], ["--schedule", "1f1b", "--fix", "*=replicas:1", "--fix", "blocks.1.0=stage:1"]),
}
"""By system, options of ``profile`` and of ``plan``."""


def rows(quick: bool) -> Iterator[Row]:
    """All rows."""
    yield from predicted()
    yield from executed()


def predicted() -> Iterator[Row]:
    """What is arithmetic."""
    for depth in (4, 8, 16):
        gain = step_s("1f1b", depth, depth) / step_s("chimera", depth // 2, depth // 2, 2)
        yield from _gains(
            f"Chimera, {depth} stages", gain, (depth - 2) / (3 * depth - 2), (depth - 1) / (2 * depth - 1)
        )
    for p, waves in ((4, 1), (4, 2), (8, 4)):
        part = 1 / (2 * waves)
        gain = step_s("1f1b", p, p, backward=2.0) / step_s("hanayo", p, p, 2 * waves, part, 2 * part)
        bubble = (2 * p - 2) / (3 * p * waves + 2 * p - 2)
        yield from _gains(f"Hanayo, {p} positions, {waves} waves", gain, bubble, (p - 1) / (2 * p - 1))
    p, m = 4, 8
    endless = step_s("pipedream-2bw", p, 3 * m) - step_s("pipedream-2bw", p, 2 * m)
    yield from _gains("PipeDream-2BW, no flush", step_s("pipedream-2bw", p, m) / endless, 0.0, (p - 1) / (m + p - 1))
    apart = step_s("1f1b", p, m, backward=2.0, gradient=False)
    lost = (p - 1) / (3 * m + p - 1)
    yield from _gains("PPLL, 4 stages", step_s("1f1b", p, m, backward=2.0) / apart, lost, (p - 1) / (m + p - 1))


def _gains(name: str, gain: float, bubble: float, before: float) -> Iterator[Row]:
    """Predicted, and that of a step with ``bubble`` where it had ``before``; they are one number."""
    closed = (1 - bubble) / (1 - before)
    yield Row(f"{name}: predicted gain", gain, "x", f"{closed:.6g}", abs(gain - closed) <= 1e-9 * closed)
    yield Row(f"{name}: closed form", closed, "x")


def step_s(
    name: str,
    num_positions: int,
    num_microbatches: int,
    per_position: int = 1,
    forward: float = 1.0,
    backward: float = 1.0,
    *,
    gradient: bool = True,
) -> float:
    """A step of equal stages, by the simulator; updates and messages take no time."""
    count = num_positions * per_position
    edges = tuple(Edge(s, s + 1, ("x",), gradient) for s in range(count - 1))
    stages = StageGraph(count, num_microbatches, edges)
    where = positions(name, num_positions, per_position)
    routes = {
        (edge.src, edge.dst, m): (Message(where[edge.src], where[edge.dst], _PART, _PART if gradient else ()),)
        for edge in edges
        for m in range(num_microbatches)
    }
    ranks = tuple((position,) for position in where)
    program = lower(schedule(name)(Pipeline(stages, where)), stages, ranks, routes, num_positions)
    compiled = compile_program(program, (1,) * num_microbatches)
    lasts = {Op.FORWARD: forward, Op.BACKWARD: backward}
    prices = [0.0 if a.action.op in MESSAGE else lasts.get(a.action.op, 0.0) for a in compiled.actions]
    wires = [slot for slot, _ in compiled.messages]
    found = execute(compiled, prices, [0.0] * len(compiled.transfers), range(len(wires)))
    return found.step_s


def executed() -> Iterator[Row]:
    """Jobs of two workers beside one device."""
    for name, (profile, plan) in EXECUTED.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model.py").write_text(MODEL, encoding="utf-8")
            yield largest_error(name, Path(folder), profile, plan)
