"""Which rows of which inputs each rank reads in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.ir.graph import Graph, producer
from planner.ir.plan import Decision


@dataclass(frozen=True, slots=True)
class Need:
    """Samples ``start`` to ``start + count`` of a micro-batch's input ``name``."""

    name: str
    microbatch: int
    start: int
    count: int


def needs(decision: Decision, graph: Graph, rank: int, rows: tuple[int, ...]) -> tuple[Need, ...]:
    """What ``rank`` asks a batch for, in a fixed order.

    A stage that makes what the loss reads needs the targets too: it compares them in evaluations.

    Args:
        rows: samples of each micro-batch.
    """
    return tuple(dict.fromkeys(_needs(decision, graph, rank, rows)))


def portion(decision: Decision, stage: int, rank: int, samples: int) -> tuple[int, int]:
    """First sample, and number of samples, of ``rank`` in a micro-batch of ``samples``."""
    counts = decision.layout_of(stage).samples(samples)
    position = sorted(decision.stages[stage].ranks).index(rank)
    return sum(counts[:position]), counts[position]


def _needs(decision: Decision, graph: Graph, rank: int, rows: tuple[int, ...]) -> Iterator[Need]:
    layers = graph.by_name()
    loss = layers[producer(graph.loss)]
    judged = {producer(value) for value in loss.inputs if value not in graph.inputs}
    for stage, ranks in enumerate(each.ranks for each in decision.stages):
        if rank not in ranks:
            continue
        own = decision.layers_of(stage)
        read = [layers[name] for name in own] + ([loss] if judged & set(own) else [])
        names = dict.fromkeys(value for layer in read for value in layer.inputs if value in graph.inputs)
        for m, samples in enumerate(rows):
            if samples:
                start, count = portion(decision, stage, rank, samples)
                yield from (Need(name, m, start, count) for name in names)
