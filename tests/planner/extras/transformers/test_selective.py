"""Layers of a stage whose activations alone are computed again: attention's cores under every way, and any others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from planner.check.structure import require_possible
from planner.extras.transformers.shape import ParallelDegrees
from planner.ir.errors import CorruptFileError
from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.layers.recomputed import cores_among
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.rank import check_layers
from runtime.stage import recomputed as rooms
from tests.planner.extras.transformers.test_transformer_ways import BATCH, decision_of
from tests.runtime.engines import Network, trained
from tests.runtime.plans import assert_equal, decide, split_backward, train_serially

GPT = {"vocabulary": 33, "width": 16, "layers": 4, "heads": 4, "context": 8}
NETWORKS: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, object]]] = {
    "gpt": ("profiler.models.gpt:gpt", (BATCH, 8), {**GPT, "fused": "false"}),
    "gpt, dropout": ("profiler.models.gpt:gpt", (BATCH, 8), {**GPT, "fused": "false", "dropout": 0.2}),
    "gpt, fused": ("profiler.models.gpt:gpt", (BATCH, 8), {**GPT, "dropout": 0.2}),
    "llama": (
        "profiler.models.llama:llama",
        (BATCH, 7),
        {"vocabulary": 33, "width": 16, "hidden": 24, "layers": 4, "heads": 4, "kv_heads": 2, "context": 9},
    ),
    "stranger": ("tests.runtime.strangers:transformer", (BATCH, 8), {"layers": 4}),
    "stranger, dropout": ("tests.runtime.strangers:transformer", (BATCH, 8), {"layers": 4, "dropout": 0.2}),
}
WAYS = {
    "tensor": ParallelDegrees(tensor=2),
    "sequence": ParallelDegrees(tensor=2, sequence_parallel=True, micro_batch=2),
    "sequence of four": ParallelDegrees(tensor=4, sequence_parallel=True),
    "stages": ParallelDegrees(tensor=2, pipeline=2, sequence_parallel=True),
    "gpipe": ParallelDegrees(pipeline=2, schedule="gpipe"),
    "interleaved": ParallelDegrees(pipeline=2, interleave=2),
    "interleaved, tensor": ParallelDegrees(tensor=2, pipeline=2, interleave=2, sequence_parallel=True),
    "replicas": ParallelDegrees(data=2, pipeline=2),
}


@cache
def network(name: str) -> Network:
    factory, shape, arguments = NETWORKS[name]
    torch.manual_seed(1)
    model = load_model(ModelSource(factory, {key: str(value) for key, value in arguments.items()}, shape, "float64"))
    return model, capture(model)


def selective(graph: Graph, decision: Decision) -> Decision:
    """The same with attention's cores computed again on every stage."""
    spans = [cores_among(graph, decision.layers_of(number)) for number in range(len(decision.stages))]
    assert any(spans)
    stages = tuple(replace(each, recomputed=own) for each, own in zip(decision.stages, spans, strict=True))
    return replace(decision, stages=stages)


def assert_trains_as_one_device(of: Network, decision: Decision) -> None:
    """Where layers draw, one device is a plan of one rank that keeps everything; else it is the user's own module."""
    require_possible(decision, of[1].graph)
    alone = trained(of, decide(of[1].graph, [], decision.micro_batches), 2)
    assert_equal(trained(of, decision, 2), alone)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_way_trains_as_one_device(name: str, ways: str) -> None:
    graph = network(name)[1].graph
    assert_trains_as_one_device(network(name), selective(graph, decision_of(graph, WAYS[ways])))


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zb-h1", "1f1b-2bp", split_backward, "pipedream", "pipedream-2bw"]
)
@pytest.mark.parametrize("name", ["gpt, dropout", "stranger"])
def test_a_schedule_trains_as_without(name: str, schedule: object) -> None:
    """Backwards in halves leave weight gradients where they would; several versions of weights are those of forward."""
    graph = network(name)[1].graph
    plain = decide(graph, [0.5], (1, 1, 2), schedule=schedule)
    assert_equal(trained(network(name), selective(graph, plain), 2), trained(network(name), plain, 2))


@pytest.mark.parametrize("name", ["gpt", "llama", "stranger"])
def test_a_step_is_that_of_the_users_own_module(name: str) -> None:
    graph = network(name)[1].graph
    decision = selective(graph, decide(graph, [0.5], (2, 2)))
    assert_equal(trained(network(name), decision, 2), train_serially(network(name)[0], (2, 2), 2))


@cache
def convolutional() -> Network:
    torch.manual_seed(1)
    arguments = {"width": "4", "num_classes": "3", "depths": "[1, 1]"}
    model = load_model(ModelSource("profiler.models.resnet:resnet18", arguments, (4, 3, 16, 16), "float64"))
    return model, capture(model)


def in_two(decision: Decision, names: Sequence[str]) -> Decision:
    """All layers but the first of a decision of one stage, as two spans."""
    half = len(names) // 2
    (stage,) = decision.stages
    return replace(decision, stages=(replace(stage, recomputed=(tuple(names[1:half]), tuple(names[half:]))),))


@pytest.mark.parametrize(("ranks", "schedule"), [(1, split_backward), (2, "1f1b"), (1, "1f1b")])
def test_any_layers_may_be_computed_again_and_running_statistics_are_updated_once(ranks: int, schedule: object) -> None:
    """Convolutions, norms whose ranks exchange statistics (again in the backward), residual paths, and the loss."""
    graph = convolutional()[1].graph
    plain = decide(graph, [], (2, 2), [tuple(range(ranks))], [(1,) * ranks], schedule)
    found = trained(convolutional(), in_two(plain, [layer.name for layer in graph.layers]), 2)
    assert_equal(found, train_serially(convolutional()[0], (2, 2), 2))
    counts = {name: value for name, value in found.state.items() if name.endswith("num_batches_tracked")}
    assert counts
    assert {value.item() for value in counts.values()} == {4}


def test_under_autocast_the_second_run_is_the_first() -> None:
    """On one rank: ranks as threads share torch's cache of cast weights, and no two of their runs are equal."""
    factory, shape, arguments = NETWORKS["gpt, dropout"]
    given = {key: str(value) for key, value in arguments.items()}
    model = load_model(ModelSource(factory, given, shape, "float32", autocast="bfloat16"))
    of = model, capture(model)
    plain = decide(of[1].graph, [], (2, 2))
    found, expected = (trained(of, each, 1) for each in (selective(of[1].graph, plain), plain))
    assert found.losses == expected.losses
    assert all(torch.equal(found.gradients[name], each) for name, each in expected.gradients.items())


def test_a_core_draws_other_numbers_where_the_second_run_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above rest on: with several micro-batches under way the last one told is another."""
    graph = network("gpt, dropout")[1].graph
    plain = decide(graph, [], (2, 2), schedule="gpipe")
    monkeypatch.setattr(rooms.SpanRecompute, "at", lambda self, microbatch_shard: None)
    found = trained(network("gpt, dropout"), selective(graph, plain), 1)
    with pytest.raises(AssertionError):
        assert_equal(found, trained(network("gpt, dropout"), plain, 1))


def test_spans_that_make_no_sense_are_refused_before_the_first_step() -> None:
    graph = network("gpt")[1].graph
    plain = decide(graph, [0.5], (2, 2))
    wrong = replace(plain, stages=(replace(plain.stages[0], recomputed=(("head",),)), plain.stages[1]))
    for refuse in (lambda: require_possible(wrong, graph), lambda: check_layers(wrong, graph)):
        with pytest.raises(CorruptFileError, match="computed again") as caught:
            refuse()
        assert "layer head is not on stage 0" in caught.value.details[0]
