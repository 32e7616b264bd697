"""What a host makes ahead of a micro-batch of clouds: site sets, maps and ranks' shares of them.

Layers are measured on the first samples of an example.  Clouds differ, so these are to be as nearly average as they can
be (:func:`evenly_ordered`).

Shares are made as ranks make them (:mod:`runtime.sparse`): the order of the sites, the places where ranks cut it, and
the first rank's part of each map.  Halos are counted in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
from torch import Tensor

from cuda_ops.sparse.geometry import BuiltGeometry, SiteRoute
from cuda_ops.sparse.preparation import Clouds, Preparation
from planner.ir.graph import Graph
from planner.ir.layout import Layout
from planner.ir.profile import PreparationCost, SiteHalo
from planner.ir.program import Program
from planner.ir.schedule import Edge
from planner.layers.boundary import Boundaries
from planner.sites.arrangement import halo_sites
from planner.sites.prices import prices
from profiler.measure.contention import trimmed_mean
from profiler.source.model import PreparedExample
from runtime.pipeline.microbatches import Batch
from runtime.pipeline.routing import Routing
from runtime.sparse.batch import ArrangedClouds, PreparedBatch, PreparedInputs
from runtime.sparse.share import SiteShare

T = TypeVar("T")
PARTS = (2, 3, 4, 8)
"""Numbers of ranks for which halos are counted; others follow from them."""
_NUM_RUNS = 5
_COLLATE = "collate"


def evenly_ordered(example: PreparedExample) -> PreparedExample:
    """The same clouds in an order whose first ones have, for any number of them, about as many sites as are average.

    One after another the cloud comes next with which the numbers of sites so far, at all levels, are nearest to the
    mean of all (least squares of relative differences).  Other examples stay as they are.
    """
    if not isinstance(example.preparation, Preparation):
        return example
    clouds = example.preparation.clouds((*example.inputs, *example.targets))
    counts = np.array(
        [np.bincount(clouds.level(route)[0], minlength=clouds.num_samples) for route in example.preparation.size_of]
    )
    relative = counts / np.maximum(counts.mean(1, keepdims=True), 1.0)  # [levels, samples]
    order = list[int]()
    left = list(range(clouds.num_samples))
    while left:
        sums = relative[:, order].sum(1, keepdims=True) + relative[:, left]
        order.append(left.pop(int(np.square(sums - len(order) - 1).sum(0).argmin())))
    inputs, targets = (tuple(each[order] for each in tensors) for tensors in (example.inputs, example.targets))
    return PreparedExample(example.preparation, inputs, targets)


def preparation_costs(
    graph: Graph, example: PreparedExample, raw: tuple[Tensor, ...], samples: int
) -> tuple[PreparationCost, ...]:
    """Thread CPU seconds of each step, of the ``samples`` clouds in ``raw``: medians of a few runs.

    A site set comes after the one that it is made of, a map after its ends.  What sharing sites costs on top is
    measured for two ranks: the order of the sites, and what a rank does with each map.
    """
    preparation = cast("Preparation", example.preparation)
    prepared = PreparedInputs.of(graph, preparation, {})
    level_names = preparation.size_of
    inputs = {own: name for name, own in prepared.names.items()}
    runs = [_timed(graph, preparation, raw) for _ in range(_NUM_RUNS)]
    seconds = {name: trimmed_mean([run[name] for run in runs]) for name in runs[0]}
    shares = [_timed_shares(prepared, raw) for _ in range(_NUM_RUNS)]
    shared = {name: trimmed_mean([run[name] for run in shares]) for name in shares[0]}
    costs = [PreparationCost(_COLLATE, (inputs["lengths"],), (), seconds[_COLLATE], samples, shared[_COLLATE])]
    for route, word in level_names.items():
        if route:
            parent = level_names[route[:-1]] if route[:-1] else _COLLATE
            costs.append(PreparationCost(word, (), (parent,), seconds[word], samples))

    def level(route: SiteRoute) -> str:
        return level_names[route] if route else _COLLATE

    for index, spec in enumerate(preparation.recipe.maps):
        made = inputs[f"neighbours_{index}"], inputs[f"reverse_{index}"]
        after = tuple(dict.fromkeys((level(spec.source), level(spec.target))))
        name = f"map_{index}"
        costs.append(PreparationCost(name, made, after, seconds[name], samples, shared.get(name, 0.0)))
    for index, route in enumerate(preparation.recipe.segments):
        made = inputs[f"starts_{index}"], inputs[f"lengths_{index}"]
        costs.append(PreparationCost(f"segments_{index}", made, (level(route),), seconds[f"segments_{index}"], samples))
    return tuple(costs)


def site_halos(graph: Graph, example: PreparedExample, raw: tuple[Tensor, ...], samples: int) -> tuple[SiteHalo, ...]:
    """Rows that each sparse layer exchanges, where equal ranks share the sites of the clouds in ``raw``."""
    preparation = cast("Preparation", example.preparation)
    prepared = PreparedInputs.of(graph, preparation, {})
    clouds = preparation.clouds(raw)
    recipe = preparation.recipe
    halos = []
    for parts in PARTS:
        speeds = (1.0,) * parts
        arranged = ArrangedClouds(clouds, prepared.names, prices(graph), speeds)
        places = arranged.places(speeds)
        counted = dict[str, int]()
        for layer in graph.layers:
            passages = ((name, recipe.passage(clouds, prepared.names.get(name, ""))) for name in layer.inputs[1:])
            name, passage = next((pair for pair in passages if pair[1] is not None), ("", None))
            if passage is None or "pairs" not in layer.attributes:
                continue
            if name not in counted:
                ends = [arranged.owned(route, places, 0).owners.numpy() for route in (passage.source, passage.target)]
                rows = halo_sites(ends[0], ends[1], passage.kernel_map.neighbours.numpy(), parts)
                counted[name] = int(rows.sum(0).max(initial=0))
            halos.append(SiteHalo(layer.name, parts, samples, counted[name]))
    return tuple(halos)


def _timed(graph: Graph, preparation: Preparation, raw: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of each step; with ``collate``, what binds a plan to so many sites."""
    laps = _Laps()
    clouds = laps.timed(_COLLATE, lambda: preparation.clouds(raw))
    laps.timed(_COLLATE, lambda: clouds.tensor("features"))
    geometry: BuiltGeometry = clouds.geometry
    for route, word in preparation.size_of.items():
        if route:
            laps.timed(word, partial(geometry.keys, route))
    planned = _in_halves(graph)
    laps.timed(_COLLATE, partial(_bind, planned, planned.edges(), clouds))
    for index, spec in enumerate(preparation.recipe.maps):
        laps.timed(f"map_{index}", partial(geometry.map, spec))
    for index, route in enumerate(preparation.recipe.segments):
        laps.timed(f"segments_{index}", partial(geometry.segments, route))
    return laps.seconds


def _in_halves(graph: Graph) -> Boundaries:
    """Those of a pipeline of two ranks."""
    half = len(graph.layers) // 2
    stage_of = {layer.name: int(index >= half) for index, layer in enumerate(graph.layers)}
    return Boundaries.of(graph, stage_of, (Layout(), Layout()), ((0,), (1,)))


def _bind(planned: Boundaries, edges: tuple[Edge, ...], clouds: Clouds) -> Routing:
    """What rank 0 sends and receives of a micro-batch, as every step works it out for its own clouds."""
    boundaries = planned.at_sites(clouds.sizes, planned.layouts)
    sizes = (clouds.num_samples,)
    program = Program((), planned.stages(edges, sizes), planned.ranks, boundaries.routes(edges, sizes))
    return Routing((boundaries,), program, sizes, 0)


def _timed_shares(prepared: PreparedInputs, raw: tuple[Tensor, ...]) -> dict[str, float]:
    """Seconds of arranging the clouds (under ``collate``), and of each map's part on the first of two ranks.

    All maps are there.  Of one that no layer reads as neighbours, ranks make no part.
    """
    clouds = prepared.of_clouds.clouds(raw)
    price = prices(prepared.graph)
    samples = len(raw[0])
    for spec in prepared.of_clouds.recipe.maps:
        clouds.map(spec)
    speeds = (1.0, 1.0)
    laps = _Laps()
    batch = PreparedBatch(cast("Batch", SimpleNamespace(rows=(samples,))), prepared, price, speeds)

    def share() -> SiteShare:
        arranged = ArrangedClouds(clouds, prepared.names, price, speeds)
        return SiteShare(batch, 0, arranged, arranged.places(speeds), 0, (samples - samples // 2, samples // 2))

    made = laps.timed(_COLLATE, share)
    for name in batch.neighbours:
        _, _, index = prepared.names[name].rpartition("_")  # a layer that goes back through a map reads its reverse
        laps.timed(f"map_{index}", partial(made.map, name))
    return laps.seconds


@dataclass(frozen=True, slots=True)
class _Laps:
    """Processor seconds of this thread, added up by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, make: Callable[[], T]) -> T:
        """What ``make`` makes."""
        start_s = time.thread_time()
        made = make()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start_s
        return made
