"""Small networks of linear maps and convolutions, and plans that divide their channels over the ranks of one stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

import torch
from torch import Tensor, nn

from planner.ir.layout import cut_points
from planner.ir.plan import Decision, Placement
from planner.ir.profile import ModelSource
from planner.ir.schedule import Pipeline, Schedule, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower, validate
from planner.schedules import schedule as schedule_named
from profiler.capture.graph import capture
from profiler.models.example import Example
from profiler.source.source import load_model
from tests.runtime.engines import Network
from tests.runtime.plans import decide

SAMPLES = 5
Cut = tuple[Mapping[str, Sequence[int]], int]
"""Shares by dim, ``replica`` for copies, and ways."""


def mlp(*, input_shape: tuple[int, ...] = (SAMPLES, 6)) -> Example:
    """Three linear maps, the last without bias."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4, bias=False))
    return module, (torch.randn(input_shape), torch.randn(input_shape[0], 4)), _squares


def convolutions(*, input_shape: tuple[int, ...] = (SAMPLES, 3, 6, 5)) -> Example:
    """Convolutions, one of them by groups and one of each channel alone, normalised."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # of one before a normalisation, Adam would magnify the rounding
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False),
        nn.Conv2d(12, 4, 1),
    )
    return module, (torch.randn(input_shape), torch.randn(input_shape[0], 4, 6, 5)), _squares


def _squares(found: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(found, target)


@cache
def network(name: str) -> Network:
    """A captured network in float64."""
    shape = {"mlp": (SAMPLES, 6), "convolutions": (SAMPLES, 3, 6, 5)}[name]
    model = load_model(ModelSource(f"{__name__}:{name}", {}, shape, "float64"))
    return model, capture(model)


def divided(of: Network, micro_batches: tuple[int, ...], cuts: Mapping[str, Cut], otherwise: Cut) -> Decision:
    """All layers on one stage, those that are named as ``cuts`` says."""
    graph = of[1].graph
    num_ranks = prod(map(len, otherwise[0].values()))
    whole = decide(graph, [], micro_batches, [tuple(range(num_ranks))], [(1,) * num_ranks])
    return replace(whole, layers={name: _placed(*cuts.get(name, otherwise)) for name in whole.layers})


def _placed(shares: Mapping[str, Sequence[int]], ways: int, stage: int = 0) -> Placement:
    return Placement(stage, {dim: cut_points(tuple(each)) for dim, each in shares.items()}, ways)


def piped(
    of: Network,
    micro_batches: tuple[int, ...],
    begins: str,
    otherwise: tuple[Cut, Cut],
    cuts: Mapping[str, Cut],
    schedule: str | Callable[[Pipeline], Schedule] = "1f1b",
) -> Decision:
    """Two stages on ranks of their own, the second one beginning with layer ``begins``; lowered for these cuts."""
    graph = of[1].graph
    counts = [prod(map(len, shares.values())) for shares, _ in otherwise]
    ranks = [tuple(range(counts[0])), tuple(range(counts[0], sum(counts)))]
    plain = decide(graph, [begins], micro_batches, ranks, schedule=schedule)
    layers = {
        name: _placed(*cuts.get(name, otherwise[placed.stage]), stage=placed.stage)
        for name, placed in plain.layers.items()
    }
    decision = replace(plain, layers=layers)
    boundaries = Boundaries.of_decision(graph, decision)
    edges = boundaries.edges()
    stages = StageGraph(2, len(micro_batches), edges)
    order = schedule_named(schedule) if isinstance(schedule, str) else schedule
    routes = boundaries.routes(edges, micro_batches)
    program = lower(order(Pipeline(stages)), stages, tuple(ranks), routes, sum(counts))
    validate(program)
    return replace(decision, program=tuple(tuple(map(str, row)) for row in program.rows))
