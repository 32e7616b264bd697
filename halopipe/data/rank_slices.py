"""Which rows of which inputs each rank reads in a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from planner.ir.box import Interval
from planner.ir.graph import SAMPLE, Graph, TensorSpec, producer
from planner.ir.plan import Decision
from planner.layers.boundary import Boundaries
from planner.layers.division import Division, divides
from runtime.captured import judged_values, judging_layer


@dataclass(frozen=True, slots=True)
class Need:
    """Samples ``start`` to ``start + count`` of a micro-batch's input ``name``."""

    name: str
    microbatch: int
    start: int
    count: int


def needs(
    decision: Decision,
    graph: Graph,
    rank: int,
    rows: tuple[int, ...],
    counted: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    watched: tuple[tuple[str, ...], tuple[str, ...]] | None = None,
) -> tuple[Need, ...]:
    """What ``rank`` asks a batch for, in a fixed order.

    A stage that makes what evaluations compare needs the targets too.

    Args:
        rows: samples of each micro-batch.
        counted: by stage, further inputs of which its ranks read their samples.
        watched: what evaluations may be asked for, and the inputs that it is compared with; None: what the loss reads.
    """
    return tuple(dict.fromkeys(_needs(decision, graph, rank, rows, counted, watched)))


def whole_needs(names: Iterable[str], rows: tuple[int, ...]) -> tuple[Need, ...]:
    """What every rank asks for where the graph's inputs are first made of whole micro-batches: all of them."""
    return tuple(Need(name, m, 0, samples) for m, samples in enumerate(rows) if samples for name in names)


def portion(decision: Decision, stage: int, rank: int, samples: int) -> tuple[int, int]:
    """First sample, and number of samples, of ``rank`` in a micro-batch of ``samples``; of a stage cut by samples."""
    counts = decision.layout_of(stage).samples(samples)
    position = decision.stages[stage].ranks.index(rank)
    return sum(counts[:position]), counts[position]


def samples_in(interval: Interval, extent: int, samples: int) -> tuple[int, int]:
    """First sample, and number of samples, that rows of a sample dim of ``extent`` belong to."""
    each = max(1, extent // samples)
    start = interval.start // each
    return start, -(-interval.stop // each) - start


def _needs(
    decision: Decision,
    graph: Graph,
    rank: int,
    rows: tuple[int, ...],
    counted: Mapping[int, tuple[str, ...]],
    watched: tuple[tuple[str, ...], tuple[str, ...]] | None,
) -> Iterator[Need]:
    layers = graph.by_name()
    judged, targets = watched or (
        judged_values(graph),
        tuple(value for value in judging_layer(graph).inputs if value in graph.inputs),
    )
    for stage, ranks in enumerate(each.ranks for each in decision.stages):
        if rank not in ranks:
            continue
        own = set(decision.layers_of(stage))
        names = [value for name in decision.layers_of(stage) for value in layers[name].inputs if value in graph.inputs]
        compared = [value for value in judged if producer(value) in own]
        if divides(decision, stage, graph):
            yield from _of_divided(decision, graph, stage, rank, rows, names, compared, targets)
            if ranks.index(rank) == 0:  # which counts for all
                yield from whole_needs(counted.get(stage, ()), rows)
            continue
        for m, samples in enumerate(rows):
            if samples:
                start, count = portion(decision, stage, rank, samples)
                read = dict.fromkeys([*names, *counted.get(stage, ()), *(targets if compared else ())])
                yield from (Need(name, m, start, count) for name in read)


def _of_divided(
    decision: Decision,
    graph: Graph,
    stage: int,
    rank: int,
    rows: tuple[int, ...],
    names: list[str],
    compared: list[str],
    targets: tuple[str, ...],
) -> Iterator[Need]:
    """Of a stage whose layers are divided along any dims: the samples that the rank's parts reach into."""
    boundaries = Boundaries.of_decision(graph, decision)
    values = graph.values()
    position = decision.stages[stage].ranks.index(rank)
    for m, samples in enumerate(rows):
        if not samples:
            continue
        for name in dict.fromkeys(names):
            box = boundaries.needed(name, stage, samples)[rank]
            yield Need(name, m, *_samples_of(graph.inputs[name].at(samples, graph.samples), box, samples))
        division = Division.of(graph, decision, stage, samples)
        for value in compared:
            box = division.held(value)[position]
            start, count = _samples_of(values[value].at(samples, graph.samples), box, samples)
            yield from (Need(name, m, start, count) for name in targets)


def _samples_of(spec: TensorSpec, box: tuple[Interval, ...], samples: int) -> tuple[int, int]:
    if SAMPLE not in spec.dims:
        return 0, samples
    dim = spec.dims.index(SAMPLE)
    return samples_in(box[dim], spec.shape[dim], samples)
