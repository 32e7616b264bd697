"""Random small networks, and PipeDream's states, costs and plans in the plainest form: what peers are held against."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import ceil, inf

from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode
from planner.extras.baselines.pipedream.planner import PipeDreamOptions

Layers = frozenset[int]


def random_graph(seed: int, largest: int = 6, sources: int = 1) -> LayerGraph:
    """At most ``largest`` layers with random costs; the first ``sources`` of them need nothing."""
    draw = random.Random(seed)
    count = draw.randint(sources, largest)
    nodes = tuple(
        LayerNode(
            f"n{k}", "layer", draw.uniform(0, 1), draw.uniform(0, 2), draw.uniform(0, 5), draw.choice([0, 1, 4, 9])
        )
        for k in range(count)
    )
    edges = []
    for k in range(sources, count):
        edges += [(src, k) for src in sorted(draw.sample(range(k), draw.randint(1, min(k, 3))))]
    return LayerGraph("random", nodes, tuple(edges))


def ancestors(graph: LayerGraph, layer: int) -> Layers:
    """Layers that ``layer`` needs."""
    near = [src for src, dst in graph.edges if dst == layer]
    return frozenset(near).union(*(ancestors(graph, src) for src in near))


def whole(graph: LayerGraph) -> Layers:
    """All layers."""
    return frozenset(range(len(graph.nodes)))


def closed_sets(graph: LayerGraph) -> list[Layers]:
    """Every set of layers that holds what it needs, but the empty one."""
    sets = (frozenset(s) for r in range(1, len(graph.nodes) + 1) for s in combinations(range(len(graph.nodes)), r))
    return [found for found in sets if all(ancestors(graph, layer) <= found for layer in found)]


def walked_sets(graph: LayerGraph) -> list[Layers]:
    """Those that the public code walks through: from the first source, by antichains."""
    first = next(k for k in range(len(graph.nodes)) if not ancestors(graph, k))
    found = set()
    queue = [frozenset([first])]
    while queue:
        antichain = queue.pop()
        if antichain in found:
            continue
        found.add(antichain)
        wide = augmented(graph, antichain)
        for old in wide:
            for new in (dst for src, dst in graph.edges if src == old):
                if new in antichain or any(new in ancestors(graph, other) for other in wide):
                    continue
                grown = (wide - {old}) | {new}
                queue.append(frozenset(k for k in grown if not any(k in ancestors(graph, other) for other in grown)))
    return [with_needs(graph, antichain) for antichain in found]


def with_needs(graph: LayerGraph, layers: Layers) -> Layers:
    """Layers and all that they need."""
    return layers.union(*(ancestors(graph, layer) for layer in layers))


def augmented(graph: LayerGraph, antichain: Layers) -> Layers:
    """The antichain, and the layers before one of its layers that feed one not before it."""
    extra = {
        src
        for layer in antichain
        for src, dst in graph.edges
        if src in ancestors(graph, layer) and dst != layer and dst not in ancestors(graph, layer)
    }
    return antichain | extra


def output_bytes(graph: LayerGraph, done: Layers) -> float:
    """What crosses behind ``done``."""
    last = frozenset(k for k in done if not any(k in ancestors(graph, other) for other in done))
    return sum(graph.nodes[k].activation_bytes for k in augmented(graph, last))


def chains(sets: Sequence[Layers], first: Layers, last: Layers) -> Iterator[tuple[Layers, ...]]:
    """Every way from ``first`` to ``last`` over growing sets, both included."""
    if first == last:
        yield (last,)
        return
    for middle in sets:
        if first < middle <= last:
            yield from ((first, *rest) for rest in chains(sets, middle, last))


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to give ``total`` machines to ``parts`` stages, one at least."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        yield from ((first, *rest) for rest in splits(total - first, parts - 1))


def best_by_exhaustion(
    graph: LayerGraph,
    sets: Sequence[Layers],
    machines: Sequence[int],
    bandwidths: Sequence[float],
    options: PipeDreamOptions,
    first: Layers = frozenset(),
    last: Layers | None = None,
) -> float:
    """PipeDream's objective over all plans from ``first`` to ``last`` on the levels given."""
    last = whole(graph) if last is None else last
    count = machines[-1]
    bandwidth = bandwidths[-1]
    below = machines[-2] if len(machines) > 1 else 1
    best = inf
    for chain in chains(sets, first, last):
        spans = list(pairwise(chain))
        if len(machines) == 1:
            times = [sum(graph.nodes[k].forward_s + graph.nodes[k].backward_s for k in b - a) for a, b in spans]
        else:
            times = [best_by_exhaustion(graph, sets, machines[:-1], bandwidths[:-1], options, a, b) for a, b in spans]
        for replicas in splits(count, len(spans)) if len(spans) <= count else ():
            if options.straight and max(replicas) > 1:
                continue
            value = _slowest(graph, spans, times, replicas, bandwidth, below, options)
            best = min(best, value)
    return best


def _slowest(
    graph: LayerGraph,
    spans: Sequence[tuple[Layers, Layers]],
    times: Sequence[float],
    replicas: Sequence[int],
    bandwidth: float,
    below: int,
    options: PipeDreamOptions,
) -> float:
    value = 0.0
    for stage, ((a, b), seconds, m) in enumerate(zip(spans, times, replicas, strict=True)):
        parameters = sum(graph.nodes[k].parameter_bytes for k in b - a)
        stash = parameters + sum(graph.nodes[k].activation_bytes for k in b - a)
        if ceil(sum(replicas[stage + 1 :]) / m) * stash > options.memory_bytes:
            return inf
        reduction = 4 * (m - 1) * parameters / (bandwidth * m) / (below if stage == 0 else 1)
        value = max(value, (seconds + reduction) / m)
        if stage and options.communication:
            leaves = b != whole(graph)
            crossing = max(output_bytes(graph, a), output_bytes(graph, b) if leaves else 0.0)
            value = max(value, 2 * crossing / (bandwidth * m))
    return value
