"""Spans of layers that are computed again when the backward comes to them, and which of them are attention's core.

    q, k, v -> [ scores -> scaled, masked -> softmax -> dropout -> weighted sum ] -> projection
               what the layers of a span save is dropped after the forward;      the inputs of the span are kept

The core of attention is what lies between two products of activations with a softmax between them, or one layer of
attention where that is a single operator.  It has no weights, takes little computing, and saves most of what a block
does where scores are written to memory: of s b h (34 + 5 a s / h) bytes the term with s^2 (Korthikanti et al. 2022,
"Reducing activation recomputation in large transformer models", section 5).

A span runs as one: what lies between its layers in the graph's order and does not read it runs before, what does,
after.  So no layer outside may both read it and be read by it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from planner.ir.errors import operator_of
from planner.ir.graph import Graph, Layer, producer, topological_order
from planner.ir.plan import Decision

Spans = tuple[tuple[str, ...], ...]
"""Names of the layers of each span, in the graph's order."""

_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
_BETWEEN = frozenset({"pointwise", "reshape", "softmax"})
"""Kinds of layers that may lie between the scores' product and the softmax, or that and the weighted sum."""

T = TypeVar("T", bound=Hashable)


def running_order(items: Sequence[T], reads: Mapping[T, Iterable[T]], spans: Iterable[Sequence[T]]) -> (
    list[tuple[T, ...]]
):  # fmt: skip
    """The order in which ``items`` run: spans as one, the others alone, in their own order as far as that can be.

    Args:
        items: in an order in which each comes after what it reads.
        reads: by item, others that must come before it; what is not among ``items`` is there already.

    Raises:
        ValueError: an item outside a span both reads it and is read by it.
    """
    span_of: dict[T, object] = {item: number for number, span in enumerate(spans) for item in span}
    members: dict[object, list[T]] = {}
    for item in items:
        members.setdefault(span_of.get(item, (item,)), []).append(item)
    units = list(members.values())
    place = {item: at for at, item in enumerate(items)}
    unit = {item: number for number, own in enumerate(units) for item in own}
    reading = ((unit[other], unit[item]) for item in items for other in reads.get(item, ()) if other in unit)
    order = topological_order(
        len(units), {(a, b) for a, b in reading if a != b}, lambda number: place[units[number][-1]]
    )
    if len(order) < len(units):
        raise ValueError("an item outside a span reads it and is read by it")
    return [tuple(units[number]) for number in order]


def layers_in_order(graph: Graph, names: Collection[str], spans: Spans) -> list[tuple[Layer, ...]]:
    """The layers of a stage in the order in which they run: spans as one, the others alone.

    Raises:
        ValueError: a layer outside a span both reads it and is read by it.
    """
    own = {layer.name: layer for layer in graph.layers if layer.name in names}
    reads = {name: [producer(value) for value in layer.inputs] for name, layer in own.items()}
    return [tuple(own[name] for name in unit) for unit in running_order(list(own), reads, spans)]


def attention_cores(graph: Graph) -> Spans:
    """The core of every attention, in the graph's order; none where the graph has none that can be told."""
    layers = graph.by_name()
    readers = _readers(graph)
    cores: list[tuple[str, ...]] = []
    in_cores: set[str] = set()
    for layer in graph.layers:
        core = {layer.name} if layer.kind == "attention" else set[str]()
        if layer.kind == "softmax":
            core = _between_products(layer, layers, readers)
        names = tuple(name for name in layers if name in core)
        if names and in_cores.isdisjoint(names) and _is_closed(graph, names):
            in_cores.update(names)
            cores.append(names)
    return tuple(cores)


def cores_by_index(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The same by index of the layers in the graph."""
    index = {layer.name: number for number, layer in enumerate(graph.layers)}
    return tuple(tuple(index[name] for name in core) for core in attention_cores(graph))


def cores_among(graph: Graph, names: Collection[str]) -> Spans:
    """Of every attention's core, what is among ``names``, such as those of a stage."""
    own = (tuple(name for name in core if name in names) for core in attention_cores(graph))
    return tuple(core for core in own if core)


def span_faults(decision: Decision, number: int, graph: Graph | None = None) -> Iterator[str]:
    """What is wrong with the spans of a stage; without the graph, what can be seen without it."""
    stage = decision.stages[number]
    names = list(decision.layers_of(number))
    path = f"decision.stages[{number}].recomputed"
    if not stage.recomputed:
        return
    if stage.recompute:
        yield f"{path}: stage {number} computes all its layers again, and {len(stage.recomputed)} spans besides"
    in_spans: set[str] = set()
    for span in stage.recomputed:
        strange = [name for name in span if name not in names]
        if strange or not span:
            yield f"{path}: layer {strange[0]} is not on stage {number}" if strange else f"{path}: a span has 0 layers"
            return
        twice = [name for place, name in enumerate(span) if name in in_spans or name in span[:place]]
        if twice:
            yield f"{path}: layer {twice[0]} is in the spans twice"
            return
        in_spans.update(span)
    if graph is None:
        return
    needy = next((layer for layer in graph.layers if layer.name in in_spans and layer.parameters), None)
    if stage.level == 3 and needy is not None:
        few = f"{len(needy.parameters)} parameters of layer {needy.name}, which runs again"
        yield f"{path}: stage {number} divides its parameters (ZeRO-3), among them {few}; such spans may have 0"
    for span in stage.recomputed:
        try:
            layers_in_order(graph, names, (span,))
        except ValueError:
            yield f"{path}: a layer outside the span {span[0]} ... {span[-1]} both reads it and is read by it"
            return
    try:
        layers_in_order(graph, names, stage.recomputed)
    except ValueError:
        yield f"{path}: two of the {len(stage.recomputed)} spans both read one another"


def _is_closed(graph: Graph, span: tuple[str, ...]) -> bool:
    try:
        layers_in_order(graph, graph.by_name(), (span,))
    except ValueError:
        return False
    return True


def _between_products(softmax: Layer, layers: Mapping[str, Layer], readers: Mapping[str, Sequence[str]]) -> set[str]:
    """From the product of scores before ``softmax`` to the weighted sum after it; empty if there are no such two."""
    makers = {name: [m for m in map(producer, layer.inputs) if m in layers] for name, layer in layers.items()}
    before, after = (_reached(softmax.name, layers, way) for way in (makers, readers))
    from_scores: set[str] = set()
    for name in (each for each in layers if each in before | after):
        if (name in before and _is_product(layers[name])) or from_scores.intersection(makers[name]):
            from_scores.add(name)
    core: set[str] = set()
    for name in (each for each in reversed(list(layers)) if each in from_scores):
        if (name in after and _is_product(layers[name])) or core.intersection(readers.get(name, ())):
            core.add(name)
    return core if softmax.name in core else set()


def _reached(start: str, layers: Mapping[str, Layer], way: Mapping[str, Sequence[str]]) -> set[str]:
    """What ``way`` leads to from a softmax, up to the nearest products; layers with weights are the end of it."""
    reached = {start}
    open_ends = [start]
    while open_ends:
        for name in way.get(open_ends.pop(), ()):
            layer = layers[name]
            if name in reached or layer.parameters or not (layer.kind in _BETWEEN or _is_product(layer)):
                continue
            reached.add(name)
            if not _is_product(layer):
                open_ends.append(name)
    return reached


def _is_product(layer: Layer) -> bool:
    """Whether it multiplies activations with one another."""
    parts = operator_of(layer).split(".")
    return not layer.parameters and len(layer.inputs) > 1 and len(parts) > 1 and parts[1] in _PRODUCTS


def _readers(graph: Graph) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in dict.fromkeys(map(producer, layer.inputs)):
            readers.setdefault(name, []).append(layer.name)
    return readers
