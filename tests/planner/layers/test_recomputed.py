"""Spans of layers that are computed again: attention's cores, and the order in which spans run."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.plan import Decision, Placement, Stage
from planner.layers.recomputed import (
    attention_cores,
    cores_among,
    cores_by_index,
    layers_in_order,
    running_order,
    span_faults,
)

TOKENS = ("sample", "time", "feature")


def layer(name: str, kind: str, inputs: str, op: str = "", parameters: tuple[str, ...] = ()) -> Layer:
    spec = TensorSpec(TOKENS, (2, 4, 4), "float32")
    return Layer(name, kind, tuple(inputs.split()), (spec,), parameters, {"op": f"aten.{op}.default"} if op else {})


def graph_of(*layers: Layer) -> Graph:
    spec = TensorSpec(TOKENS, (2, 4, 4), "float32")
    names = {name for each in layers for name in each.parameters}
    weights = {name: TensorSpec(("dim0", "dim1"), (4, 4), "float32") for name in sorted(names)}
    return Graph(2, {"x": spec}, layers, weights, layers[-1].name)


ATTENTION = graph_of(
    layer("q", "linear", "x", "linear", ("q.weight",)),
    layer("k", "linear", "x", "linear", ("k.weight",)),
    layer("scores", "opaque", "q k", "matmul"),
    layer("mask", "pointwise", "x", "lt"),
    layer("masked", "pointwise", "scores mask", "masked_fill"),
    layer("v", "linear", "x", "linear", ("v.weight",)),  # made late, between the layers of the core
    layer("softmax", "softmax", "masked", "softmax"),
    layer("drop", "pointwise", "softmax", "dropout"),
    layer("mixed", "opaque", "drop v", "matmul"),
    layer("out", "linear", "mixed", "linear", ("out.weight",)),
    layer("next", "softmax", "out", "softmax"),  # of no scores
)
CORE = ("scores", "masked", "softmax", "drop", "mixed")


BIASED = [*ATTENTION.layers[:3], layer("bias", "linear", "scores", "linear", ("bias.weight",)), *ATTENTION.layers[3:]]
BIASED[5] = layer("masked", "pointwise", "scores bias", "add")
SEEN = layer("seen", "pointwise", "softmax", "mul")
TALKING = layer("masked", "linear", "scores", "linear", ("talking.weight",))
QUERY = layer("q", "linear", "x", "linear", ("q.weight",))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("graph", "cores"),
    [
        (ATTENTION, (CORE,)),
        (graph_of(QUERY, layer("fused", "attention", "q q q")), (("fused",),)),
        (graph_of(QUERY, layer("gate", "softmax", "q", "softmax")), ()),  # without both products
        (replace(ATTENTION, layers=(*ATTENTION.layers[:4], TALKING, *ATTENTION.layers[5:])), ()),  # a weight between
        (replace(ATTENTION, layers=(*ATTENTION.layers, SEEN)), (CORE,)),  # what scores are returned for stays outside
        (replace(ATTENTION, layers=tuple(BIASED)), ()),  # it could not run as one
    ],
)
def test_the_core_lies_between_the_product_of_scores_and_the_weighted_sum(graph: Graph, cores: object) -> None:
    assert attention_cores(graph) == cores
    assert tuple(tuple(graph.layers[index].name for index in core) for core in cores_by_index(graph)) == cores


def test_a_stage_has_of_a_core_what_it_has_of_its_layers() -> None:
    assert cores_among(ATTENTION, {"softmax", "drop", "mixed", "out"}) == (("softmax", "drop", "mixed"),)
    assert cores_among(ATTENTION, {"out"}) == ()


def test_a_span_runs_as_one_behind_what_it_reads_and_before_its_readers() -> None:
    names = [[each.name for each in unit] for unit in layers_in_order(ATTENTION, ATTENTION.by_name(), (CORE,))]
    assert names == [["q"], ["k"], ["mask"], ["v"], [*CORE], ["out"], ["next"]]


@pytest.mark.parametrize("seed", range(8))
def test_the_running_order_keeps_spans_together_and_all_that_is_read_before(seed: int) -> None:
    """Against its definition, on random graphs; what cannot be in order is refused, by exhaustion of cycles."""
    draw = random.Random(seed)
    count = 9
    reads = {item: [other for other in range(item) if draw.random() < 0.25] for item in range(count)}
    start = draw.randrange(count - 3)
    span = [item for item in range(start, start + 4) if draw.random() < 0.67]
    behind = set(span)
    for item in range(count):
        behind |= {item} if behind.intersection(reads[item]) else set()
    before = set(span)
    for item in reversed(range(count)):
        before |= set(reads[item]) if item in before else set()
    if (behind & before) - set(span):
        with pytest.raises(ValueError, match="outside"):
            running_order(range(count), reads, [span])
        return
    units = running_order(range(count), reads, [span])
    flat = [item for unit in units for item in unit]
    assert sorted(flat) == [*range(count)]
    assert not span or tuple(span) in units
    assert all(flat.index(other) < flat.index(item) for item in range(count) for other in reads[item])
    rest = [item for item in flat if item not in span and item not in behind]
    assert all(a < b for a, b in pairwise(rest)), "what does not wait keeps its order"


def decision(*spans: tuple[str, ...], recompute: bool = False) -> Decision:
    stages = (Stage((0,), ("a",), recompute, recomputed=spans), Stage((1,), ("b",)))
    layers = {each.name: Placement(int(each.name in ("out", "next"))) for each in ATTENTION.layers}
    return Decision("1f1b", (2,), stages, layers, ((), ()))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("found", "why"),
    [
        (decision(("scores", "out")), "layer out is not on stage 0"),
        (decision(()), "a span has 0 layers"),
        (decision(("scores",), ("scores", "masked")), "layer scores is in the spans twice"),
        (decision(("scores", "scores")), "layer scores is in the spans twice"),
        (decision(("q", "scores", "softmax")), "both reads it and is read by it"),
        (decision(("q", "masked"), ("scores", "softmax")), "both"),
        (decision(("scores",), recompute=True), "computes all its layers again"),
    ],
)
def test_spans_that_make_no_sense_are_named(found: Decision, why: str) -> None:
    faults = list(span_faults(found, 0, ATTENTION))
    assert faults
    assert why in faults[0], faults
    assert faults[0].startswith("decision.stages[0].recomputed: ")


def test_spans_that_do_are_not() -> None:
    assert not list(span_faults(decision(CORE, ("q",)), 0, ATTENTION))
    assert not list(span_faults(decision(CORE), 1, ATTENTION))
