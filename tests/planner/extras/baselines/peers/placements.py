"""Random small instances of dnn-partitioning's format, and their best placements by trying all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import inf

from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode

Edges = Sequence[tuple[int, int]]


def random_instance(seed: int, largest: int = 6, training: bool = False) -> TarnawskiInstance:
    """At most ``largest`` forward nodes: some take no time, share colours, or need a CPU; memory may bind."""
    draw = random.Random(seed)
    count = draw.randint(2, largest)
    scale = draw.choice([0.1, 1.0, 5.0])  # of transfers
    nodes = [_node(draw, number, scale) for number in range(count)]
    edges = [(a, b) for b in range(count) for a in range(b) if draw.random() < draw.choice([0.3, 0.6])]
    if training:
        for node in tuple(nodes):
            lone = draw.random() < 0.15  # a backward node without its forward node
            colour = 100 + node.number if lone else node.colour
            number = count + node.number
            nodes.append(replace(_node(draw, number, scale), colour=colour, backward=True, on_accelerator=True))
        edges += [(count + b, count + a) for a, b in edges]
        edges += [(k, count + k) for k in range(count) if draw.random() < 0.8]
    memory = draw.choice([1e9, 0.6, 0.35]) * sum(node.size_bytes for node in nodes)
    sends = {a for a, _ in edges}
    sent = tuple(node if k in sends else replace(node, transfer_ms=0.0) for k, node in enumerate(nodes))
    return TarnawskiInstance("random", draw.randint(0, 3), draw.randint(0, 1), memory, sent, tuple(edges))


def _node(draw: random.Random, number: int, scale: float) -> TarnawskiNode:
    idle = draw.random() < 0.35
    return TarnawskiNode(
        number=number,
        name=f"n{number}",
        accelerator_ms=0.0 if idle else draw.choice([0.5, draw.uniform(0, 3)]),
        cpu_ms=0.0 if idle else draw.uniform(0, 9),
        transfer_ms=scale * draw.choice([0.0, 0.5, draw.random()]),
        size_bytes=draw.choice([0.0, 1.0, 4.0]),
        on_accelerator=draw.random() < 0.93,
        backward=False,
        colour=draw.choice([number, number, number % 3]),
    )


def best_load(instance: TarnawskiInstance, contiguous: bool = True) -> float:
    """The smallest largest load over every assignment of colours to devices; infinite if there is none."""
    kinds = ["accelerator"] * instance.accelerators + ["cpu"] * instance.cpus
    colours = sorted({node.colour for node in instance.nodes if node.colour is not None})
    best = inf
    for devices in product(range(len(kinds)), repeat=len(colours)):
        of = dict(zip(colours, devices, strict=True))
        placed = [of[node.colour] for node in instance.nodes if node.colour is not None]
        if not contiguous or in_order(instance, placed):
            best = min(best, max(_loads(instance, placed, kinds)))
    return best


def in_order(instance: TarnawskiInstance, placed: Sequence[int]) -> bool:
    """Whether the devices can be put in an order that all forward edges, and mirrored backward ones, follow."""
    forward = {node.colour for node in instance.nodes if not node.backward}
    after: dict[int, set[int]] = {device: set() for device in placed}
    for a, b in instance.edges:
        src = instance.nodes[a]
        dst = instance.nodes[b]
        if not dst.backward:
            after[placed[a]].add(placed[b])
        elif src.backward and not {src.colour, dst.colour} <= forward:
            after[placed[b]].add(placed[a])
    left = set(after)
    while left:
        free = {device for device in left if not any(device in after[other] for other in left - {device})}
        if not free:
            return False
        left -= free
    return True


def _loads(instance: TarnawskiInstance, placed: Sequence[int], kinds: Sequence[str]) -> Iterator[float]:
    for device, kind in enumerate(kinds):
        here = [node for node, at in zip(instance.nodes, placed, strict=True) if at == device]
        if kind == "cpu":
            yield sum(node.cpu_ms for node in here)
            continue
        too_much = sum(node.size_bytes for node in here) > instance.memory_bytes * (1 + 1e-12)
        if too_much or not all(node.on_accelerator for node in here):
            yield inf
            continue
        crossing = {a for a, b in instance.edges if (placed[a] == device) != (placed[b] == device)}
        yield sum(node.accelerator_ms for node in here) + sum(instance.nodes[a].transfer_ms for a in crossing)
