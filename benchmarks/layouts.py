"""How long the best layouts of a stage take to find, and what the best uniform one and shortest paths are worse by.

    python -m benchmarks.layouts [--quick] [--json]

ResNet-50 (images of 224 x 224) as captured, on up to 64 devices of a datasheet: 15.7 TFLOP/s, 900 GB/s, eight a host.
Every layer may take any grid of all devices over samples, height and width (and channels); a layer's time is its
roofline (``planner.costs.layers.roofline``).  *Search* is the exact minimum over all layers once prices are known,
*prices* the time to find these, CPU seconds both.  Shortest paths are Dryden et al.'s heuristic (2019).  A uniform
layout cuts all layers by the same grid, as far as they have its dims.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.report import Row, at_least, at_most, run
from planner.costs.cost_model import CostModel
from planner.costs.layers.roofline import work_of
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.graph import Graph
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance
from planner.solvers.layouts.factor_graph import LabelledGraph
from planner.solvers.layouts.solve import minimise
from planner.solvers.layouts.stage import Question, labelled_graph, options_of

FLOP_PER_S = 15.7e12
BYTES_PER_S = 9e11
CALL_S = 5e-6
DEVICES_A_HOST = 8
MOST_LAYOUTS = 20
SEARCH_LIMIT_S = 1.0
SPACE = ("sample", "spatial")
EVERYTHING = ("sample", "spatial", "channel")


@dataclass(frozen=True, slots=True)
class Case:
    """A group of devices and the layouts that layers may take; ``most``: so many of each layer at most (0: all)."""

    num_devices: int
    samples: int
    allow: tuple[str, ...]
    most: int = 0

    def __str__(self) -> str:
        layouts = f"{self.most} layouts" if self.most else "all layouts"
        return f"ResNet-50, {self.num_devices} devices, {self.samples} samples, {'+'.join(self.allow)}, {layouts}"


FULL = (
    Case(64, 64, SPACE, MOST_LAYOUTS),
    Case(64, 64, SPACE),
    Case(64, 64, EVERYTHING, MOST_LAYOUTS),
    Case(16, 16, EVERYTHING),
    Case(16, 4, EVERYTHING),
    Case(4, 1, EVERYTHING),
)
QUICK = (Case(16, 16, SPACE), Case(4, 1, EVERYTHING))


def graph_of(source: ModelSource) -> Graph:
    """The network as the profiler captures it."""
    from profiler import load_model
    from profiler.capture.graph import capture

    return capture(load_model(source)).graph


def at_samples(graph: Graph, samples: int) -> Graph:
    """The same network for another number of samples."""
    inputs = {name: spec.at(samples, graph.samples) for name, spec in graph.inputs.items()}
    layers = (
        replace(layer, outputs=tuple(spec.at(samples, graph.samples) for spec in layer.outputs))
        for layer in graph.layers
    )
    return replace(graph, samples=samples, inputs=inputs, layers=tuple(layers))


def profile_of(source: ModelSource, graph: Graph, num_devices: int) -> Profile:
    """The network on devices of a datasheet; nothing is measured."""
    devices = tuple(
        DeviceSpec(f"n{k // DEVICES_A_HOST}/gpu{k % DEVICES_A_HOST}", "V100", f"n{k // DEVICES_A_HOST}", 32 * 10**9)
        for k in range(num_devices)
    )
    links = {WITHIN_HOST: Link(3e-6, 1.2e11), ACROSS_HOSTS: Link(5e-6, 2.5e10)}
    found = []
    samples = 1
    while samples <= 2 * graph.samples:
        found += [_measurement(graph, index, samples) for index in range(len(graph.layers))]
        samples *= 2
    costs = {}
    for layer in graph.layers:
        if layer.parameters:
            seconds = 3 * graph.parameter_bytes(frozenset({layer.name})) / BYTES_PER_S
            costs[layer.name] = ParameterCost(seconds, seconds)
    return Profile(
        source,
        Optimizer("SGD", {"lr": 0.1}, 0.0),
        graph,
        Cluster(devices, links),
        {"V100": tuple(found)},
        {"V100": costs},
        Provenance({"halopipe": "0", "torch": "0", "python": "0"}),
    )


def _measurement(graph: Graph, index: int, samples: int) -> Measurement:
    layer = graph.layers[index]
    work = work_of(graph, graph.values(), layer, samples)
    once = max(work.flops / FLOP_PER_S, work.num_bytes / BYTES_PER_S) + CALL_S
    kept = sum(spec.at(samples, graph.samples).num_bytes for spec in layer.outputs)
    return Measurement(layer.name, samples, once, 2 * once, once, once, kept, 0, 0, evidence=DATASHEET)


def uniform(prices: LayoutPrices, graph: LabelledGraph, options: Sequence[tuple[ShardingSpec, ...]]) -> float:
    """The least cost of one grid for all layers, as far as they have its dims; infinity if none is an option."""
    best = float("inf")
    for grid in {option.grid for each in options for option in each}:
        wanted = {dim: parts for dim, parts in grid if not dim.startswith("replica")}
        picked = []
        for index, each in enumerate(options):
            own = {dim: parts for dim, parts in wanted.items() if dim in prices.sized(index).divisible}
            grids = [{dim: parts for dim, parts in option.grid if not dim.startswith("replica")} for option in each]
            picked += [grids.index(own)] if own in grids else []
        if len(picked) == len(options):
            best = min(best, graph.cost(picked))
    return best


def measure_case(case: Case, profile: Profile) -> Iterator[Row]:
    """The figures of one case."""
    start = time.process_time()
    prices = LayoutPrices(CostModel(profile), tuple(range(case.num_devices)), case.samples, case.allow)
    question = Question(tuple(range(len(prices.layers))))
    options = tuple(each[: case.most] if case.most else each for each in options_of(prices, question))
    graph = labelled_graph(prices, question, options)
    priced = time.process_time()
    answer = minimise(graph)
    found = time.process_time()
    yield at_most(f"{case}: search, CPU", found - priced, "s", SEARCH_LIMIT_S)
    yield Row(f"{case}: prices, CPU", priced - start, "s")
    yield Row(f"{case}: layouts a layer, most", max(map(len, options)), "")
    yield Row(f"{case}: step", 1e3 * answer.cost, f"ms ({answer.status})")
    from planner.extras.baselines.dryden import by_shortest_paths  # late: tests of the core take networks from here

    yield at_least(f"{case}: shortest paths / ours", graph.cost(by_shortest_paths(graph)) / answer.cost, "ratio", 1.0)
    least = uniform(prices, graph, options)
    if least < float("inf"):
        yield at_least(f"{case}: best uniform layout / ours", least / answer.cost, "ratio", 1.0)


def measure(quick: bool) -> list[Row]:
    """All cases, of a network that is captured once."""
    rows: list[Row] = []
    source = ModelSource("profiler.models.resnet:resnet50", {}, (2, 3, 224, 224))
    graph = graph_of(source)
    for case in QUICK if quick else FULL:
        sys.stderr.write(f"{case}\n")
        rows += measure_case(case, profile_of(source, at_samples(graph, case.samples), case.num_devices))
    return rows


main = partial(run, "The best layouts of a stage, beside uniform ones and shortest paths", measure)

if __name__ == "__main__":
    raise SystemExit(main())
