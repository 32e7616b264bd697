"""Schedules and local losses: gains under the simulator beside closed forms, and jobs beside one device.

On equal stages with free messages; *closed forms* follow from bubbles, those of Chimera as published:

- Chimera (Li and Hoefler, SC 2021, section 3): D stages, D micro-batches, a backward as long as a forward: bubbles of
  (D - 2) / (2 D + D - 2) of a step where 1F1B has (D - 1) / (2 D - 1).  The gain is 1F1B's step over Chimera's.
- Hanayo (Liu et al., SC 2023): W waves on p positions, p micro-batches, a backward of twice a forward: (2 p - 2) /
  (3 p W + 2 p - 2), as we count them, over 1F1B's (p - 1) / (2 p - 1).
- PipeDream-2BW (Narayanan et al., ICML 2021): m micro-batches on p stages with a flush, over the same without one:
  (m + p - 1) / m.
- PPLL: four stages with losses of their own under 1F1B, over the same with gradients.  What it learns is another matter
  (it is another optimisation): a network of four blocks is trained both ways by jobs of four stages on the digits, as
  they are and as pictures of three channels and 32 x 32 places, and asked about digits that it has not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.report import Row
from benchmarks.runs import simulated_s
from benchmarks.seeds.jobs import folder_of, halopipe, largest_error
from planner.ir.box import Interval
from planner.ir.program import Message, Part
from planner.ir.schedule import Action, Edge, Op, Pipeline, StageGraph, StageTimes
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


BLOCKS = """
from itertools import pairwise

import torch
from torch import nn, randint, randn
from torch.utils.data import TensorDataset

from halopipe.data import digits

TRAINED = 1400


def model(input_shape=(64, 1, 8, 8)):
    channels, layers = (input_shape[1], 16, 24, 32, 48), []
    for before, after in pairwise(channels):
        stride = 1 if after == 16 else 2
        layers += [nn.Conv2d(before, after, 3, stride=stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))
    return network, (randn(input_shape), randint(10, input_shape[:1])), nn.CrossEntropyLoss()


def shuffled(input_shape):
    return next(digits(1797, input_shape, 0))


def train(global_batch, input_shape, seed):
    images, labels = (each[:TRAINED] for each in shuffled(input_shape))
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(TRAINED, (global_batch,), generator=generator)
        yield images[rows], labels[rows]


def unseen(global_batch, input_shape, seed):
    return TensorDataset(*(each[TRAINED:] for each in shuffled(input_shape)))
"""

PICTURES = {"digits": "64,1,8,8", "digits of 3 x 32 x 32": "64,3,32,32"}
LEARNING = {
    "back-propagation": ((), (), "output"),
    "local losses": (
        ("--local-loss", "4"),
        tuple(word for block in (1, 2, 3) for word in ("--fix", f"blocks.{block}.0=stage:{block}")),
        "3",
    ),
}
"""By way to learn, options of ``profile`` and of ``plan``, and the output that is the answer."""


def rows(quick: bool) -> Iterator[Row]:
    """All rows; quick ones are of one job and leave out what is learnt."""
    yield from predicted()
    yield from executed(["Chimera"] if quick else EXECUTED)
    if not quick:
        yield from learnt()


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
    p = 4
    m = 8
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
    """A step of equal stages in a row, by the simulator; updates and messages take no time."""
    count = num_positions * per_position
    edges = tuple(Edge(s, s + 1, ("x",), gradient) for s in range(count - 1))
    stages = StageGraph(count, num_microbatches, edges)
    where = positions(name, num_positions, per_position)
    return graph_step_s(name, stages, where, (forward,) * count, (backward,) * count)


def graph_step_s(
    name: str, stages: StageGraph, where: Sequence[int], forward: Sequence[float], backward: Sequence[float]
) -> float:
    """As :func:`step_s`, of any stages.

    Args:
        where: the position of each stage.
        forward, backward: of each stage, of a micro-batch.
    """
    routes = {
        (edge.src, edge.dst, m): (Message(where[edge.src], where[edge.dst], _PART, _PART if edge.gradient else ()),)
        for edge in stages.edges
        for m in range(stages.num_microbatches)
    }
    times = tuple(StageTimes(f, b / 2, b / 2) for f, b in zip(forward, backward, strict=True))
    ranks = tuple((position,) for position in where)
    num_positions = 1 + max(where)
    order = schedule(name)(Pipeline(stages, tuple(where), times=times))
    program = lower(order, stages, ranks, routes, num_positions)
    lasts = {Op.FORWARD: forward, Op.BACKWARD: backward}

    def action_s(action: Action) -> float:
        return lasts[action.op][action.stage] if action.op in lasts else 0.0

    return simulated_s(program, (1,) * stages.num_microbatches, action_s)


def executed(systems: Iterable[str]) -> Iterator[Row]:
    """Jobs of two workers beside one device."""
    for name in systems:
        yield largest_error(name, MODEL, *EXECUTED[name])


def learnt() -> Iterator[Row]:
    """Right answers about digits that were not seen in training, by losses of blocks and by back-propagation."""
    for pictures, shape in PICTURES.items():
        for name, (profile, plan, answer) in LEARNING.items():
            with folder_of(BLOCKS) as folder:
                measured = ("--input", shape, "--quick", "--workers", "4", "--sizes", "16,64")
                halopipe(folder, "profile", "model.py:model", *measured, *profile)
                asked = ("--global-batch", "64", "--micro-batch", "16", "--schedule", "1f1b", "--fix", "*=replicas:1")
                halopipe(folder, "plan", "profile.json", *asked, *plan)
                data = {"data": "model.py:train", "eval-data": "model.py:unseen", "eval-outputs": f"{answer},targets"}
                options = {**data, "steps": "400", "optimizer": "Adam:lr=0.003"}
                words = [word for option, value in options.items() for word in (f"--{option}", value)]
                told = json.loads(halopipe(folder, "run", "plan.json", *words, "--json"))
            yield Row(f"PPLL, {pictures}, {name}: right answers", 100 * told["evaluations"][-1]["accuracy"], "%")
