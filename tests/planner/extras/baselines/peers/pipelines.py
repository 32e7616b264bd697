"""Random small instances of Piper's format, and their best plans by trying all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from math import ceil, inf

from planner.extras.baselines.piper.format import Machine, PiperInstance, PiperNode, PiperOption
from planner.extras.baselines.piper.stages import PiperStage, choose_options, value_of


def random_instance(seed: int, largest: int = 5, degrees: tuple[int, ...] = (1,), alike: bool = True) -> PiperInstance:
    """At most ``largest`` layers with one or two options of each degree (three if they need not be alike).

    Args:
        alike: whether options of a degree differ in time and memory alone.
    """
    draw = random.Random(seed)
    count = draw.randint(1, largest)
    edges = tuple(
        (a, b, draw.choice([0.0, draw.uniform(0, 4)])) for b in range(count) for a in range(b) if draw.random() < 0.5
    )
    scale = draw.choice([0.0, 0.3, 2.0])
    nodes = []
    for number in range(count):
        options = {}
        for degree in degrees:
            if degree == degrees[0] or draw.random() < 0.8:
                options[degree] = _options(draw, number, edges, degree, scale, alike)
        nodes.append(PiperNode(number, f"n{number}", options))
    memory = draw.choice([inf, draw.uniform(4, 30), draw.uniform(2, 60)])
    return PiperInstance(
        "random", draw.randint(1, 5), memory, draw.uniform(2, 9), draw.choice([2, 4, 6, 12]), tuple(nodes), edges
    )


def _options(
    draw: random.Random, number: int, edges: tuple[tuple[int, int, float], ...], degree: int, scale: float, alike: bool
) -> tuple[PiperOption, ...]:
    def synced() -> tuple[float, dict[int, float], dict[int, float]]:
        reads = {src: scale * draw.random() for src, dst, _ in edges if dst == number}
        readers = {dst: scale * draw.random() for src, dst, _ in edges if src == number}
        return scale * draw.uniform(0, 3), reads, readers

    time = draw.uniform(0.5, 4) / degree
    held = draw.uniform(0, 4) / degree
    always = draw.uniform(0, 3)
    same = synced()
    quick = PiperOption("vanilla", time, same[0], held, always, same[1], same[2])
    if draw.random() < 0.2:
        return (quick,)
    other = same if alike else synced()
    found = [quick]
    for name in ("activation recomp",) if alike else ("activation recomp", "sharded")[: draw.randint(1, 2)]:
        less = draw.uniform(0, 0.9)
        more = draw.uniform(0, 1.2)
        slower = draw.uniform(1, 2)
        found.append(PiperOption(name, slower * time, other[0], less * held, more * always, *other[1:]))
    return tuple(found)


def best_plan(instance: PiperInstance, machine: Machine) -> tuple[float, float]:
    """The smallest time by the rule of thumb for options, and by any choice of options; infinite if nothing fits."""
    by_rule = inf
    by_any = inf
    for split in _splits(len(instance.nodes)):
        sets = [tuple(k for k, s in enumerate(split) if s == stage) for stage in range(max(split) + 1)]
        if any(split[src] > split[dst] for src, dst, _ in instance.edges):
            continue
        choices = sorted({t for node in instance.nodes for t in node.options})
        replicas = [d for d in range(1, machine.devices + 1) if instance.micro_batches % d == 0]
        for shape in product(product(replicas, choices), repeat=len(sets)):
            if sum(d * t for d, t in shape) > machine.devices:
                continue
            if all(t in instance.nodes[k].options for nodes, (_, t) in zip(sets, shape, strict=True) for k in nodes):
                by_rule = min(by_rule, _by_rule(instance, machine, sets, list(shape)))
                by_any = min(by_any, _by_any(instance, machine, sets, list(shape)))
    return by_rule, by_any


def best_equal_plan(instance: PiperInstance, machine: Machine, order: Sequence[int]) -> float:
    """The smallest time of equally many layers a stage, in ``order``, one way for all; infinite if nothing fits."""
    best = inf
    for num_stages in range(1, len(order) + 1):
        each, more = divmod(len(order), num_stages)
        sizes = [each + (stage >= num_stages - more) for stage in range(num_stages)]
        ends = list(accumulate(sizes))
        sets = [tuple(sorted(order[end - size : end])) for end, size in zip(ends, sizes, strict=True)]
        for d, t, last in product(range(1, 6), range(1, 5), (False, True)):
            if all(t in node.options for node in instance.nodes):
                picked = [tuple(last * (len(instance.nodes[k].options[t]) - 1) for k in nodes) for nodes in sets]
                stages = [PiperStage(nodes, d, t, own) for nodes, own in zip(sets, picked, strict=True)]
                best = min(best, value_of(instance, machine, stages))
    return best


def _splits(count: int) -> Iterator[tuple[int, ...]]:
    """Each way to give ``count`` layers a stage, all stages from 0 on used."""
    for split in product(range(count), repeat=count):
        if set(split) == set(range(max(split) + 1)):
            yield split


def _by_rule(
    instance: PiperInstance, machine: Machine, sets: list[tuple[int, ...]], shape: list[tuple[int, int]]
) -> float:
    """Where the rule does better for more in flight than there are, that counts, as in the public code."""
    slowest = 0.0
    most = min(instance.micro_batches, machine.devices)
    if sum(d for d, _ in shape) > most:
        return inf
    for number, (nodes, (d, t)) in enumerate(zip(sets, shape, strict=True)):
        least = ceil(sum(each for each, _ in shape[number:]) / d)
        found = [choose_options(instance, machine, nodes, t, d, y) for y in range(least, most + 1)]
        slowest = max(slowest, min((each[1] for each in found if each), default=inf))
    return slowest


def _by_any(
    instance: PiperInstance, machine: Machine, sets: list[tuple[int, ...]], shape: list[tuple[int, int]]
) -> float:
    per_stage = [
        list(product(*(range(len(instance.nodes[k].options[t])) for k in nodes)))
        for nodes, (_, t) in zip(sets, shape, strict=True)
    ]
    return min(
        value_of(instance, machine, [PiperStage(n, d, t, o) for n, (d, t), o in zip(sets, shape, options, strict=True)])
        for options in product(*per_stage)
    )
