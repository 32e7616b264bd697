"""What a host makes of coordinates ahead of a micro-batch, step by step: seconds, and the halos of shared sites."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cuda_ops.sparse.geometry import BuiltGeometry, KernelMap, Route, stride_of
from cuda_ops.sparse.preparation import Clouds, Preparation
from planner.ir.graph import Graph
from planner.ir.profile import PreparationCost, SiteHalo
from planner.sites.arrangement import arrange, cut
from planner.sites.balance import halo_sites
from planner.sites.blocks import Level
from planner.sites.prices import Pairs, network_work, prices
from profiler.model import CloudExample, graph_inputs
from profiler.timing import trimmed_mean

PARTS = (2, 3, 4, 8)
"""Numbers of ranks for which halos are counted; others follow from them."""
_NUM_RUNS = 5
_COLLATE = "collate"


def preparation_costs(example: CloudExample, raw: tuple[Tensor, ...], samples: int) -> tuple[PreparationCost, ...]:
    """Thread CPU seconds of each step, of the ``samples`` clouds in ``raw``: medians of a few runs.

    A site set comes after the one that it is made of, a map after its ends.
    """
    preparation = example.preparation
    words = preparation.size_of
    inputs = dict(zip(preparation.names, _names(preparation), strict=True))
    runs = [_timed(preparation, raw) for _ in range(_NUM_RUNS)]
    seconds = {name: trimmed_mean([run[name] for run in runs]) for name in runs[0]}
    found = [PreparationCost(_COLLATE, (inputs["lengths"],), (), seconds[_COLLATE], samples)]
    for route, word in words.items():
        if route:
            parent = words[route[:-1]] if route[:-1] else _COLLATE
            found.append(PreparationCost(word, (), (parent,), seconds[word], samples))

    def level(route: Route) -> str:
        return words[route] if route else _COLLATE

    for index, spec in enumerate(preparation.recipe.maps):
        made = inputs[f"neighbours_{index}"], inputs[f"reverse_{index}"]
        after = tuple(dict.fromkeys((level(spec.source), level(spec.target))))
        found.append(PreparationCost(f"map_{index}", made, after, seconds[f"map_{index}"], samples))
    for index, route in enumerate(preparation.recipe.segments):
        made = inputs[f"starts_{index}"], inputs[f"lengths_{index}"]
        found.append(PreparationCost(f"segments_{index}", made, (level(route),), seconds[f"segments_{index}"], samples))
    return tuple(found)


def site_halos(graph: Graph, example: CloudExample, raw: tuple[Tensor, ...], samples: int) -> tuple[SiteHalo, ...]:
    """Rows that each sparse layer exchanges, where equal ranks share the sites of the clouds in ``raw``."""
    preparation = example.preparation
    clouds, words = preparation.clouds(raw), preparation.size_of
    levels = {word: _level(clouds, route) for route, word in words.items()}
    maps = {name: _map(clouds, own) for name, own in zip(_names(preparation), preparation.names, strict=True)}
    known = {name: found for name, found in maps.items() if found is not None}
    pairs = {
        name: Pairs(words[source], words[target], _counts(found.reverse), _counts(found.neighbours))
        for name, (found, source, target) in known.items()
    }
    work = network_work(levels, pairs, prices(graph))
    halos = []
    for parts in PARTS:
        owned = cut(arrange(work, (1.0,) * parts), (1.0,) * parts)
        owners = {word: owned.owner(each.samples, each.coordinates, each.stride) for word, each in levels.items()}
        counted: dict[str, int] = {}
        for layer in graph.layers:
            name = next((value for value in layer.inputs[1:] if value in known), None)
            if name is None or "pairs" not in layer.attributes:
                continue
            if name not in counted:
                found, source, target = known[name]
                rows = halo_sites(owners[words[source]], owners[words[target]], found.neighbours.numpy(), parts)
                counted[name] = int(rows.sum(0).max(initial=0))
            halos.append(SiteHalo(layer.name, parts, samples, counted[name]))
    return tuple(halos)


def _names(preparation: Preparation) -> tuple[str, ...]:
    return graph_inputs(preparation.num_inputs, len(preparation.per_site))


def _timed(preparation: Preparation, raw: tuple[Tensor, ...]) -> dict[str, float]:
    seconds: dict[str, float] = {}

    def timed(name: str, make: Callable[[], object]) -> object:
        start_s = time.thread_time()
        found = make()
        seconds[name] = time.thread_time() - start_s
        return found

    made: list[Clouds] = []
    timed(_COLLATE, lambda: made.append(_collated(preparation, raw)))
    geometry: BuiltGeometry = made[0].geometry
    for route, word in preparation.size_of.items():
        if route:
            timed(word, lambda route=route: geometry.keys(route))
    for index, spec in enumerate(preparation.recipe.maps):
        timed(f"map_{index}", lambda spec=spec: geometry.map(spec))
    for index, route in enumerate(preparation.recipe.segments):
        timed(f"segments_{index}", lambda route=route: geometry.segments(route))
    return seconds


def _collated(preparation: Preparation, raw: tuple[Tensor, ...]) -> Clouds:
    clouds = preparation.clouds(raw)
    clouds.tensor("features")
    return clouds


def _map(clouds: Clouds, own: str) -> tuple[KernelMap, Route, Route] | None:
    """The map that a layer takes if it takes the prepared tensor ``own`` as neighbours, and its ends."""
    what, _, number = own.rpartition("_")
    if what not in ("neighbours", "reverse"):
        return None
    spec = clouds.preparation.recipe.maps[int(number)]
    found = clouds.map(spec)
    return (found, spec.source, spec.target) if what == "neighbours" else (found.inverse(), spec.target, spec.source)


def _level(clouds: Clouds, route: Route) -> Level:
    coordinates = clouds.geometry.coordinates(route).long()
    return Level(coordinates[:, 0].numpy(), coordinates[:, 1:].numpy(), stride_of(route))


def _counts(neighbours: Tensor) -> Any:
    return (neighbours >= 0).sum(0).numpy()
