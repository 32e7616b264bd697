"""A transformer's ways, executed: tensor and sequence parallelism, keys, vocabulary, chunks, replicas, and spans.

A span is what a stage computes again of its activations alone: attention's cores under every way, and any layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.check.structure import require_possible
from planner.extras.transformers.placement import groups_of, placements, schedule_of
from planner.extras.transformers.shape import ParallelDegrees, Recompute
from planner.ir.box import volume
from planner.ir.errors import CorruptFileError, UnsupportedModelError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Stage
from planner.ir.profile import ModelSource
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.layers.division import Division
from planner.layers.recomputed import cores_among
from planner.passes import lower, validate
from planner.schedules import schedule
from profiler.capture.graph import capture
from profiler.models.example import Example
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, save
from runtime.engine import Engine
from runtime.rank import check_layers
from runtime.stage import recomputed as rooms
from tests.runtime.engines import Network, on_engines, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, split_backward, train_serially
from tests.runtime.training import sharded

BATCH = 4
GPT = {"vocabulary": 33, "width": 16, "layers": 4, "heads": 4, "context": 8}
LLAMA = {"vocabulary": 33, "width": 16, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "context": 9}
GPTS = "profiler.models.gpt:gpt"
LLAMAS = "profiler.models.llama:llama"
STRANGERS = "tests.runtime.strangers:transformer"
NETWORKS: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, object]]] = {
    "gpt": (GPTS, (BATCH, 8), GPT),
    "gpt, parted": (GPTS, (BATCH, 8), {**GPT, "fused": "false"}),
    "gpt, parted, dropout": (GPTS, (BATCH, 8), {**GPT, "fused": "false", "dropout": 0.2}),
    "gpt, dropout": (GPTS, (BATCH, 8), {**GPT, "dropout": 0.2}),
    "shared keys": (LLAMAS, (BATCH, 7), LLAMA),
    "shared keys, four": (LLAMAS, (BATCH, 7), {**LLAMA, "layers": 4}),
    "tied": (LLAMAS, (BATCH, 7), {**LLAMA, "heads": 2, "tied": "true"}),
    "stranger": (STRANGERS, (BATCH, 8), {"layers": 4}),
    "stranger, dropout": (STRANGERS, (BATCH, 8), {"layers": 4, "dropout": 0.2}),
    "convolutions": (
        "profiler.models.resnet:resnet18",
        (4, 3, 16, 16),
        {"width": 4, "num_classes": 3, "depths": [1, 1]},
    ),
}
SPANNED = ("gpt, parted", "gpt, parted, dropout", "gpt, dropout", "shared keys, four", "stranger", "stranger, dropout")
WAYS = {
    "tensor": ParallelDegrees(tensor=2),
    "tensor of four": ParallelDegrees(tensor=4),
    "sequence": ParallelDegrees(tensor=2, sequence_parallel=True, micro_batch=2),
    "sequence of four": ParallelDegrees(tensor=4, sequence_parallel=True),
    "sequence and replicas": ParallelDegrees(tensor=2, data=2, sequence_parallel=True),
    "stages": ParallelDegrees(tensor=2, pipeline=2, sequence_parallel=True),
    "gpipe": ParallelDegrees(pipeline=2, schedule="gpipe"),
    "replicas": ParallelDegrees(data=2, pipeline=2),
    "interleaved": ParallelDegrees(tensor=2, pipeline=2, interleave=2, sequence_parallel=True),
    "interleaved alone": ParallelDegrees(pipeline=2, interleave=2),
    "all": ParallelDegrees(tensor=2, pipeline=2, data=2, sequence_parallel=True, recompute=Recompute.FULL),
    "degrees of stages": ParallelDegrees(tensor=2, pipeline=2, tensors=(2, 1), blocks=(1, 3)),
    "degrees and replicas": ParallelDegrees(
        tensor=4, pipeline=3, tensors=(1, 4, 2), blocks=(1, 2, 1), sequence_parallel=True, recompute=Recompute.FULL
    ),
    "replicas of degrees": ParallelDegrees(tensor=2, pipeline=2, data=2, tensors=(1, 2), micro_batch=2),
    "ZeRO-1": ParallelDegrees(data=2, pipeline=2, zero=1, recompute=Recompute.FULL),
    "ZeRO-2": ParallelDegrees(data=4, zero=2),
    "ZeRO-2 with stages": ParallelDegrees(data=2, pipeline=2, zero=2, recompute=Recompute.FULL),
    "ZeRO-3": ParallelDegrees(data=2, zero=3, micro_batch=2),
    "ZeRO-3 with stages": ParallelDegrees(data=2, pipeline=2, zero=3, recompute=Recompute.FULL),
    "ZeRO-3, interleaved": ParallelDegrees(data=2, pipeline=2, interleave=2, zero=3),
}
CASES = [
    *(("gpt", ways) for ways in WAYS),
    *(("shared keys", ways) for ways in ("tensor", "sequence", "stages", "replicas of degrees", "ZeRO-3 with stages")),
    *(("tied", ways) for ways in ("sequence", "tensor", "stages", "all", "ZeRO-3", "ZeRO-3 with stages")),
]
SPANNED_WAYS = (
    *("tensor", "sequence", "sequence of four", "stages", "gpipe", "interleaved", "interleaved alone", "replicas"),
)


def loaded(name: str, dtype: str = "float64", **more: str) -> Network:
    factory, shape, arguments = NETWORKS[name]
    torch.manual_seed(1)
    texts = {key: str(value) for key, value in arguments.items()}
    model = load_model(ModelSource(factory, texts, shape, dtype, **more))
    return model, capture(model)


@cache
def network(name: str) -> Network:
    return loaded(name)


@cache
def serial(name: str, micro_batches: tuple[int, ...]) -> Trained:
    return train_serially(network(name)[0], micro_batches, 2)


def decision_of(graph: Graph, ways: ParallelDegrees) -> Decision:
    groups = groups_of(ways)
    again = ways.recompute is Recompute.FULL
    stages = tuple(Stage(ranks, tuple(f"n0/cpu{rank}" for rank in ranks), again) for ranks in groups)
    batches = (ways.micro_batch * ways.data,) * ways.micro_batches(BATCH)
    made = Decision(schedule_of(ways), batches, stages, placements(graph, ways), ())
    boundaries = Boundaries.of_decision(graph, made)
    edges = boundaries.edges()
    positions = tuple(chunk % ways.pipeline for chunk in range(len(groups))) if ways.interleave > 1 else ()
    dag = StageGraph(len(groups), len(batches), edges, boundaries.prepares())
    order = schedule(made.schedule)(Pipeline(dag, positions))
    program = lower(order, dag, groups, boundaries.routes(edges, batches), ways.devices)
    validate(program)
    found = replace(made, program=tuple(tuple(map(str, row)) for row in program.rows))
    return sharded(found, ways.zero) if ways.zero else found


def selective(graph: Graph, decision: Decision) -> Decision:
    """The same with attention's cores computed again on every stage."""
    spans = [cores_among(graph, decision.layers_of(number)) for number in range(len(decision.stages))]
    assert any(spans)
    stages = tuple(replace(each, recomputed=own) for each, own in zip(decision.stages, spans, strict=True))
    return replace(decision, stages=stages)


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_a_way_trains_as_one_device(name: str, ways: str) -> None:
    decision = decision_of(network(name)[1].graph, WAYS[ways])
    require_possible(decision, network(name)[1].graph)
    assert_equal(trained(network(name), decision, 2), serial(name, decision.micro_batches))


@pytest.mark.parametrize("ways", SPANNED_WAYS)
@pytest.mark.parametrize("name", SPANNED)
def test_a_way_with_spans_trains_as_one_device(name: str, ways: str) -> None:
    """Where layers draw, one device is a plan of one rank that keeps everything; else it is the user's own module."""
    graph = network(name)[1].graph
    decision = selective(graph, decision_of(graph, WAYS[ways]))
    require_possible(decision, graph)
    alone = trained(network(name), decide(graph, [], decision.micro_batches), 2)
    assert_equal(trained(network(name), decision, 2), alone)
    if "dropout" not in name:
        assert_equal(alone, serial(name, decision.micro_batches))


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "zb-h1", "1f1b-2bp", split_backward, "pipedream", "pipedream-2bw"]
)
@pytest.mark.parametrize("name", ["gpt, parted, dropout", "stranger"])
def test_a_schedule_with_spans_trains_as_without(name: str, schedule: object) -> None:
    """Backwards in halves leave weight gradients where they would; several versions of weights are those of forward."""
    graph = network(name)[1].graph
    plain = decide(graph, [0.5], (1, 1, 2), schedule=schedule)
    assert_equal(trained(network(name), selective(graph, plain), 2), trained(network(name), plain, 2))


@pytest.mark.parametrize(("ranks", "schedule"), [(1, split_backward), (2, "1f1b"), (1, "1f1b")])
def test_any_layers_may_be_computed_again_and_running_statistics_are_updated_once(ranks: int, schedule: object) -> None:
    """Convolutions, norms whose ranks exchange statistics (again in the backward), residual paths, and the loss."""
    of = network("convolutions")
    plain = decide(of[1].graph, [], (2, 2), [tuple(range(ranks))], [(1,) * ranks], schedule)
    names = tuple(layer.name for layer in of[1].graph.layers)
    half = len(names) // 2  # all layers but the first, as two spans
    stage = replace(plain.stages[0], recomputed=(names[1:half], names[half:]))
    found = trained(of, replace(plain, stages=(stage,)), 2)
    assert_equal(found, train_serially(of[0], (2, 2), 2))
    counts = {value.item() for name, value in found.state.items() if name.endswith("num_batches_tracked")}
    assert counts == {4}


def test_under_autocast_the_second_run_of_a_span_is_the_first() -> None:
    """On one rank: ranks as threads share torch's cache of cast weights, and no two of their runs are equal."""
    of = loaded("gpt, parted, dropout", "float32", autocast="bfloat16")
    plain = decide(of[1].graph, [], (2, 2))
    found, expected = (trained(of, each, 1) for each in (selective(of[1].graph, plain), plain))
    assert found.losses == expected.losses
    assert all(torch.equal(found.gradients[name], each) for name, each in expected.gradients.items())


def test_a_span_draws_other_numbers_where_the_second_run_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above rest on: with several micro-batches under way the last one told is another."""
    of = network("gpt, parted, dropout")
    plain = decide(of[1].graph, [], (2, 2), schedule="gpipe")
    monkeypatch.setattr(rooms.SpanRecompute, "at", lambda self, microbatch_shard: None)
    found = trained(of, selective(of[1].graph, plain), 1)
    with pytest.raises(AssertionError):
        assert_equal(found, trained(of, plain, 1))


def test_spans_that_make_no_sense_are_refused_before_the_first_step() -> None:
    graph = network("gpt")[1].graph
    plain = decide(graph, [0.5], (2, 2))
    wrong = replace(plain, stages=(replace(plain.stages[0], recomputed=(("head",),)), plain.stages[1]))
    for refuse in (require_possible, check_layers):
        with pytest.raises(CorruptFileError, match="computed again") as caught:
            refuse(wrong, graph)
        assert "layer head is not on stage 0" in caught.value.details[0]


def test_under_autocast_gradients_of_micro_batches_are_summed_in_float32() -> None:
    of = loaded("shared keys", "float32", autocast="bfloat16")
    decision = decision_of(of[1].graph, WAYS["sequence and replicas"])
    found = trained(of, decision, 1)
    expected = train_serially(of[0], decision.micro_batches, 1)
    assert {gradient.dtype for gradient in found.gradients.values()} == {torch.float32}
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    for name, gradient in expected.gradients.items():
        assert float((found.gradients[name] - gradient).norm()) < 0.02 * float(gradient.norm()), name


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [2, 4])
def test_a_block_sends_two_all_reduces_worth_forward_in_their_two_halves(sequence_parallel: bool, tensor: int) -> None:
    """Korthikanti et al. 2022, section 4.2.2: sequence parallelism moves no byte more than tensor parallelism."""
    graph = network("gpt")[1].graph
    decision = decision_of(graph, ParallelDegrees(tensor=tensor, sequence_parallel=sequence_parallel))
    division = Division.of(graph, decision, 0, 1)
    sent: dict[str, int] = {}
    for name, layer in division.layers.items():
        moves = [move for index in range(len(layer.inputs)) for move in division.moves(name, index)]
        scattered = 0 if layer.contraction is None else int(layer.contraction.scattered.sum())
        sent[name] = sum(volume(move.box) for move in moves) + scattered
    half = (tensor - 1) * 8 * 16  # of all ranks: what one half of an all-reduce of (time, width) moves
    of_block = {name: sent[name] for name in sent if name.startswith("blocks.1.") and sent[name]}
    assert sum(of_block.values()) == 4 * half, of_block
    assert of_block["blocks.1.attention.out"] == of_block["blocks.1.contract"] == half


def test_no_rank_has_the_whole_of_a_large_weight_or_of_the_logits() -> None:
    graph = network("tied")[1].graph
    division = Division.of(graph, decision_of(graph, WAYS["sequence"]), 0, 2)
    for layer in division.layers.values():
        for name, boxes in zip(layer.layer.parameters, layer.weights, strict=True):
            whole = prod(graph.parameters[name].shape)
            assert whole <= 16 or all(volume(box) < 0.6 * whole for box in boxes), name
    assert all(len(box[-1]) in (16, 17) for box in division.owned("head"))
    assert not division.moves("loss", 0)


class Transposed(nn.Module):
    """A linear map with its weight as [input, output]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight).relu()


def transposed(*, input_shape: tuple[int, ...]) -> Example:
    blocks = nn.ModuleDict({"blocks": nn.Sequential(Transposed(), Transposed())})
    blocks.forward = blocks["blocks"].forward
    return blocks, (torch.randn(input_shape), torch.randn(input_shape)), nn.functional.mse_loss


def test_what_no_plan_says_is_refused_by_name() -> None:
    for zero in (1, 3):
        with pytest.raises(UsageError) as caught:
            placements(network("gpt")[1].graph, ParallelDegrees(tensor=2, data=2, zero=zero))
        assert "beside tensor 2" in caught.value.details[0]
    graph = capture(load_model(ModelSource(f"{__name__}:transposed", {}, (4, 6), "float64"))).graph
    with pytest.raises(UsageError, match=r"blocks\.0 \(aten\.addmm\.default\) cannot be divided over 2 tensor"):
        placements(graph, ParallelDegrees(tensor=2))
    decision = decision_of(network("tied")[1].graph, WAYS["stages"])
    whole = replace(decision.layers["head"], cuts={"replica": (0, 1, 2)})  # a tied table in parts that differ
    with pytest.raises(UnsupportedModelError, match=r"tokens\.weight"):
        trained(network("tied"), replace(decision, layers={**decision.layers, "head": whole}), 1)


@pytest.mark.parametrize("back", [False, True])
def test_a_tied_table_in_parts_is_clipped_saved_and_read_by_another_plan(back: bool, tmp_path: Path) -> None:
    of = network("tied")
    in_parts = decision_of(of[1].graph, WAYS["stages"])
    plans = [in_parts, decide(of[1].graph, [], in_parts.micro_batches)]
    first, second = reversed(plans) if back else plans
    batches = [batch_of(of[0], BATCH, step) for step in range(3)]

    def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    def begin(engine: Engine) -> None:
        engine.step(*batches[0])
        end = engine._transport
        save(tmp_path, 1, engine.state(), end.rank, end.world_size, lambda: end.barrier(), {})

    def go_on(engine: Engine) -> list[float | None]:
        engine.load_state(Checkpoint.open(tmp_path))
        return [engine.step(*batch).loss for batch in batches[1:]]

    given = {"optimizer": adam, "clip_norm": 0.05}
    on_engines(of, first, begin, **given)
    found = trained_on(of, second, go_on, **given)
    alone = trained(of, plans[1], 3, **given)
    assert_equal(found, Trained(alone.losses[1:], alone.gradients, alone.state))
