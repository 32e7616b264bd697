"""Random networks on random stages of unequal rank groups, lowered by any schedule."""

from __future__ import annotations

import random

from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout, cut_points
from planner.ir.program import Program
from planner.ir.schedule import Pipeline, StageGraph, StageTimes
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import positions, schedule, traits

SAMPLES = 4


def random_graph(rng: random.Random, num_layers: int) -> Graph:
    """Layers of several kinds; each reads one or two earlier ones, and all are read in the end."""
    layers: list[Layer] = []
    unread: set[str] = set()
    for index in range(num_layers):
        earlier = [layer.name for layer in layers]
        reads = tuple(dict.fromkeys([earlier[-1], rng.choice(earlier)])) if earlier else ("x",)
        unread -= set(reads)
        unread.add(f"l{index}")
        kind = "pointwise" if len(reads) > 1 else rng.choice(("pointwise", "linear", "reshape"))
        layers.append(_layer(f"l{index}", kind, reads))
    joined = (f"l{num_layers - 1}", *sorted(unread - {f"l{num_layers - 1}"}))
    loss = Layer("loss", "loss", (*joined, "y"), (TensorSpec((), (), "float32"),))
    inputs = {"x": _spec(), "y": TensorSpec(("sample",), (SAMPLES,), "int64")}
    return Graph(SAMPLES, inputs, (*layers, loss), {}, "loss")


def _layer(name: str, kind: str, reads: tuple[str, ...]) -> Layer:
    return Layer(name, kind, reads, (_spec(),))


def _spec() -> TensorSpec:
    return TensorSpec(("sample", "feature"), (SAMPLES, 6), "float32")


SHARES = ((1,), (1,), (1, 1), (2, 1), (1, 0), (3, 1, 2))


def random_boundaries(rng: random.Random, spatial: bool = False, positions: tuple[int, ...] = ()) -> Boundaries:
    """Stages of 1 to 3 ranks with unequal, sometimes empty shares; ``spatial`` also cuts the features of some.

    Args:
        positions: by stage; stages of one position are on the same ranks, whose shares may differ.
    """
    graph = random_graph(rng, len(positions) + rng.randint(0, 3) if positions else rng.randint(2, 7))
    num_stages = len(positions) or rng.randint(1, min(4, len(graph.layers)))
    cuts = [0, *sorted(rng.sample(range(1, len(graph.layers)), num_stages - 1)), len(graph.layers)]
    stage_of = {graph.layers[i].name: s for s in range(num_stages) for i in range(cuts[s], cuts[s + 1])}
    layouts: list[Layout] = []
    ranks: list[tuple[int, ...]] = []
    group_of: dict[int, tuple[int, ...]] = {}
    for stage in range(num_stages):
        position = positions[stage] if positions else stage
        known = group_of.get(position, ())
        shares = rng.choice([each for each in SHARES if not known or len(each) == len(known)])
        dim = "feature" if spatial and rng.random() < 0.5 else "sample"
        layouts.append(Layout({dim: cut_points(shares)} if len(shares) > 1 else {}))
        first = sum(map(len, group_of.values()))
        ranks.append(group_of.setdefault(position, tuple(range(first, first + len(shares)))))
    return Boundaries.of(graph, stage_of, layouts, ranks)


def random_positions(rng: random.Random, schedule_name: str) -> tuple[int, ...]:
    """Where the stages lie that the schedule can order; empty if each has its own position."""
    per_position = traits(schedule_name).stages_per_position
    if per_position == 1:
        return ()
    count = rng.randint(1, 3)
    per_position = per_position or rng.randint(1, 3)
    found = positions(schedule_name, count, per_position)
    uneven = rng.randint(0, count - 1) if traits(schedule_name).stages_per_position == 0 and per_position > 1 else 0
    return found[: len(found) - uneven]


def random_pipeline(rng: random.Random, schedule_name: str, stages: StageGraph, positions: tuple[int, ...]) -> Pipeline:
    """The stages, with windows and times where the schedule heeds them."""
    windows = ()
    times = ()
    transfer = 0.0
    if traits(schedule_name).windowed and rng.random() < 0.7:
        windows = tuple(rng.randint(1, stages.num_microbatches + 1) for _ in range(stages.num_stages))
    if traits(schedule_name).timed and rng.random() < 0.7:
        times = tuple(
            StageTimes(*(rng.choice((0.0, 1.0, 2.0, 5.0)) for _ in range(3))) for _ in range(stages.num_stages)
        )
        transfer = rng.choice((0.0, 0.5, 7.0))
    return Pipeline(stages, positions, windows, times, transfer)


def random_program(rng: random.Random, schedule_name: str) -> Program:
    """A legal program."""
    positions = random_positions(rng, schedule_name)
    boundaries = random_boundaries(rng, positions=positions)
    micro_batches = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 6)))
    edges = boundaries.edges()
    stages = StageGraph(len(boundaries.ranks), len(micro_batches), edges, boundaries.prepares())
    routes = boundaries.routes(edges, micro_batches)
    num_ranks = len({rank for group in boundaries.ranks for rank in group})
    order = schedule(schedule_name)(random_pipeline(rng, schedule_name, stages, positions))
    return lower(order, stages, boundaries.ranks, routes, num_ranks)
