"""A transformer's ways, executed: tensor and sequence parallelism, heads, shared keys, vocabulary, chunks, replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.check.structure import require_possible
from planner.extras.transformers.placement import groups_of, placements, schedule_of
from planner.extras.transformers.shape import ParallelDegrees, Recompute
from planner.ir.box import volume
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Stage
from planner.ir.profile import ModelSource
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.layers.division import Division
from planner.passes import lower, validate
from planner.schedules import schedule
from profiler.capture.graph import capture
from profiler.models.example import Example
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, save
from runtime.engine import Engine
from tests.runtime.engines import Network, network_of, on_engines, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, train_serially
from tests.runtime.training import sharded

BATCH = 4
NETWORKS: Mapping[str, tuple[str, tuple[int, ...], Mapping[str, object]]] = {
    "gpt": ("gpt:gpt", (BATCH, 8), {"vocabulary": 33, "width": 16, "layers": 4, "heads": 4, "context": 8}),
    "shared keys": (
        "llama:llama",
        (BATCH, 7),
        {"vocabulary": 33, "width": 16, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "context": 9},
    ),
    "tied": (
        "llama:llama",
        (BATCH, 7),
        {"vocabulary": 33, "width": 16, "hidden": 24, "layers": 2, "heads": 2, "kv_heads": 2, "tied": "true"},
    ),
}
WAYS = {
    "tensor": ParallelDegrees(tensor=2),
    "tensor of four": ParallelDegrees(tensor=4),
    "sequence": ParallelDegrees(tensor=2, sequence_parallel=True, micro_batch=2),
    "sequence of four": ParallelDegrees(tensor=4, sequence_parallel=True),
    "sequence and replicas": ParallelDegrees(tensor=2, data=2, sequence_parallel=True),
    "stages": ParallelDegrees(tensor=2, pipeline=2, sequence_parallel=True),
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
    *(("shared keys", ways) for ways in ("tensor", "sequence", "stages", "replicas of degrees")),
    ("tied", "sequence"),
    ("tied", "tensor"),
    ("tied", "stages"),
    ("tied", "all"),
    ("tied", "ZeRO-3"),
    ("tied", "ZeRO-3 with stages"),
    ("shared keys", "ZeRO-3 with stages"),
]


@cache
def network(name: str) -> Network:
    return network_of(*NETWORKS[name])


@cache
def serial(name: str, micro_batches: tuple[int, ...]) -> Trained:
    return train_serially(network(name)[0], micro_batches, 2)


def decision_of(graph: Graph, ways: ParallelDegrees) -> Decision:
    groups, again = groups_of(ways), ways.recompute is Recompute.FULL
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


@pytest.mark.parametrize(("name", "ways"), CASES)
def test_a_way_trains_as_one_device(name: str, ways: str) -> None:
    decision = decision_of(network(name)[1].graph, WAYS[ways])
    require_possible(decision, network(name)[1].graph)
    assert_equal(trained(network(name), decision, 2), serial(name, decision.micro_batches))


def test_under_autocast_gradients_of_micro_batches_are_summed_in_float32() -> None:
    factory, shape, arguments = NETWORKS["shared keys"]
    given = {name: str(value) for name, value in arguments.items()}
    model = load_model(ModelSource(f"profiler.models.{factory}", given, shape, "float32", autocast="bfloat16"))
    of = model, capture(model)
    decision = decision_of(of[1].graph, WAYS["sequence and replicas"])
    found, expected = trained(of, decision, 1), train_serially(model, decision.micro_batches, 1)
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
    decision = decision_of(graph, WAYS["sequence"])
    division = Division.of(graph, decision, 0, 2)
    for layer in division.layers.values():
        for name, boxes in zip(layer.layer.parameters, layer.weights, strict=True):
            whole = volume_of(graph.parameters[name].shape)
            assert whole <= 16 or all(volume(box) < 0.6 * whole for box in boxes), name
    (logits,) = (name for name in division.layers if name == "head")
    assert all(len(box[-1]) in (16, 17) for box in division.owned(logits))
    assert not division.moves("loss", 0)


class Transposed(nn.Module):
    """A linear map with its weight as [input, output]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight).relu()


def transposed(*, input_shape: tuple[int, ...]) -> Example:
    blocks = nn.ModuleDict({"blocks": nn.Sequential(Transposed(), Transposed())})
    blocks.forward = blocks["blocks"].forward
    return blocks, (torch.randn(input_shape), torch.randn(input_shape)), nn.functional.mse_loss


def volume_of(shape: tuple[int, ...]) -> int:
    found = 1
    for extent in shape:
        found *= extent
    return found


@pytest.mark.parametrize(
    ("ways", "why"),
    [
        (ParallelDegrees(tensor=2, data=2, zero=1), "beside tensor 2"),
        (ParallelDegrees(tensor=2, data=2, zero=3), "beside tensor 2"),
    ],
)
def test_what_no_plan_says_is_refused_by_name(ways: ParallelDegrees, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        placements(network("gpt")[1].graph, ways)
    assert why in caught.value.details[0]


def test_a_tied_table_in_parts_that_differ_on_two_stages_is_refused_by_name() -> None:
    decision = decision_of(network("tied")[1].graph, ParallelDegrees(tensor=2, pipeline=2, sequence_parallel=True))
    whole = replace(decision.layers["head"], cuts={"replica": (0, 1, 2)})
    changed = replace(decision, layers={**decision.layers, "head": whole})
    with pytest.raises(UnsupportedModelError, match=r"tokens\.weight"):
        trained(network("tied"), changed, 1)


@pytest.mark.parametrize("back", [False, True])
def test_a_tied_table_in_parts_is_clipped_saved_and_read_by_another_plan(back: bool, tmp_path: Path) -> None:
    of = network("tied")
    in_parts = decision_of(of[1].graph, ParallelDegrees(tensor=2, pipeline=2, sequence_parallel=True))
    plans = [in_parts, decide(of[1].graph, [], in_parts.micro_batches)]
    first, second = reversed(plans) if back else plans
    batches = [batch_of(of[0], BATCH, step) for step in range(3)]

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


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def test_a_product_that_cannot_be_cut_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model = load_model(ModelSource(f"{__name__}:transposed", {}, (4, 6), "float64"))
    with pytest.raises(UsageError, match=r"blocks\.0 \(aten\.addmm\.default\) cannot be divided over 2 tensor"):
        placements(capture(model).graph, ParallelDegrees(tensor=2))
