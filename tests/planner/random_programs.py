"""Random networks on random stages of unequal rank groups, lowered by any schedule."""

from __future__ import annotations

import random

from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout, cut_points
from planner.ir.program import Program
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import schedule

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


def random_boundaries(rng: random.Random, spatial: bool = False) -> Boundaries:
    """Stages of 1 to 3 ranks with unequal, sometimes empty shares; ``spatial`` also cuts the features of some."""
    graph = random_graph(rng, rng.randint(2, 7))
    num_stages = rng.randint(1, min(4, len(graph.layers)))
    cuts = [0, *sorted(rng.sample(range(1, len(graph.layers)), num_stages - 1)), len(graph.layers)]
    stage_of = {graph.layers[i].name: s for s in range(num_stages) for i in range(cuts[s], cuts[s + 1])}
    layouts, ranks = [], []
    for _ in range(num_stages):
        shares = rng.choice(((1,), (1,), (1, 1), (2, 1), (1, 0), (3, 1, 2)))
        dim = "feature" if spatial and rng.random() < 0.5 else "sample"
        layouts.append(Layout({dim: cut_points(shares)} if len(shares) > 1 else {}))
        first = sum(map(len, ranks))
        ranks.append(tuple(range(first, first + len(shares))))
    return Boundaries.of(graph, stage_of, layouts, ranks)


def random_program(rng: random.Random, schedule_name: str) -> Program:
    """A legal program."""
    boundaries = random_boundaries(rng)
    micro_batches = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
    edges = boundaries.edges()
    stages = StageGraph(len(boundaries.ranks), len(micro_batches), edges)
    routes = boundaries.routes(edges, micro_batches)
    num_ranks = sum(map(len, boundaries.ranks))
    return lower(schedule(schedule_name)(Pipeline(stages)), stages, boundaries.ranks, routes, num_ranks)
