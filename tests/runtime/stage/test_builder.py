"""Stages as a plan wants them: every combination of recomputation, halves and weight versions is exact in float64."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action, Op, Pipeline, Schedule
from planner.schedules import schedule
from profiler.models.example import Example
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.engine import Engine, EvaluationResult
from runtime.optim.ties import groups_of
from runtime.rank import RankContext
from runtime.stage.builder import StageBuilder
from runtime.stage.modes import MicrobatchShard
from runtime.transport import Hub, InProcessTransport, Pending
from tests.captures import capture
from tests.runtime.plans import (
    Trained,
    assert_equal,
    batch_of,
    decide,
    engine_of,
    model_of,
    sgd,
    train_by_plan,
    train_serially,
)
from tests.runtime.ranks import on_ranks
from tests.runtime.versioned import train_on_versions

MICRO_BATCHES = (2, 1, 3, 2)


class Net(nn.Module):
    """Layers that can be halved (convolution, linear) and that cannot (normalisations), one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.batch = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.group = nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.last = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.conv(x)).relu()
        y = self.group(self.again(y)) + self.again(y * self.scale)
        return self.last(y.view(y.shape[0], -1))


def net(*, input_shape: tuple[int, ...] = (4, 2, 4, 4)) -> Example:
    torch.manual_seed(0)
    x = torch.randn(input_shape)
    target = torch.arange(input_shape[0]) % 3
    return Net(), (x, target), functional.cross_entropy


@cache
def network() -> tuple[LoadedModel, CapturedModule]:
    model = load_model(ModelSource(f"{__name__}:net", {}, (4, 2, 4, 4), "float64"))
    return model, capture(model)


@cache
def serial() -> Trained:
    return train_serially(network()[0], MICRO_BATCHES, steps=2)


def halved(name: str) -> Callable[[Pipeline], Schedule]:
    """The schedule ``name`` with halves in place of backwards; those for the weights come as late as updates allow."""

    def order(pipeline: Pipeline) -> Schedule:
        rows = []
        for row in schedule(name)(pipeline).rows:
            found: list[Action] = []
            late: list[Action] = []
            for action in row:
                if action.op is Op.BACKWARD:
                    found.append(replace(action, op=Op.BACKWARD_INPUT))
                    late.append(replace(action, op=Op.BACKWARD_WEIGHT))
                elif action.op is Op.UPDATE:
                    found += [*late, action]
                    late = []
                else:
                    found.append(action)
            rows.append((*found, *late))
        return Schedule(tuple(rows))

    return order


def recomputing(decision: Decision) -> Decision:
    return replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))


LAYOUTS = {
    "chain": {"cuts": ["group"], "ranks": [(0,), (1,)]},
    "replicas, once without rows": {"cuts": ["group"], "ranks": [(0, 1), (2, 3)], "shares": [(3, 1), (3, 1)]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["1f1b", halved("1f1b"), "zb-h1"], ids=["whole", "halves, late", "zb-h1"])
def test_recomputation_and_halves_are_exact(layout: str, recompute: bool, order: object) -> None:
    model, captured = network()
    decision = decide(captured.graph, micro_batches=MICRO_BATCHES, schedule=order, **LAYOUTS[layout])
    decision = recomputing(decision) if recompute else decision
    assert_equal(train_by_plan(model, decision, steps=2), serial(), 1e-12)


@cache
def transformer() -> tuple[LoadedModel, CapturedModule]:
    model = model_of("gpt:gpt", (4, 6), vocabulary=17, width=8, layers=2, heads=2)
    return model, capture(model)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "order",
    ["pipedream", "pipedream-2bw", halved("pipedream"), halved("pipedream-2bw")],
    ids=["pipedream", "2bw", "pipedream, halves", "2bw, halves"],
)
def test_weight_versions_are_exact(order: object, recompute: bool) -> None:
    model, captured = transformer()
    decision = decide(captured.graph, [0.3, 0.6], (2, 1, 2, 2, 1), schedule=order)
    decision = recomputing(decision) if recompute else decision
    expected = train_on_versions(model, captured.graph, decision)
    assert_equal(train_by_plan(model, decision, steps=2), expected, 1e-12)


def test_weight_versions_on_replicas_are_exact() -> None:
    model, captured = transformer()
    ranks = [(0, 1), (2,)]
    shares = [(2, 1), (1,)]
    decision = decide(captured.graph, [0.5], (3, 2, 3), ranks, shares, schedule="pipedream")
    expected = train_on_versions(model, captured.graph, decision)
    assert_equal(train_by_plan(model, decision, steps=2), expected, 1e-12)


def test_the_comparison_notices_another_version() -> None:
    model, captured = transformer()
    decision = decide(captured.graph, [0.5], (2, 1, 2), schedule="pipedream")
    other = decide(captured.graph, [0.5], (2, 1, 2), schedule="pipedream-2bw")
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal(
            train_by_plan(model, decision, steps=1), train_on_versions(model, captured.graph, other, steps=1), 1e-12
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_is_that_of_the_module_and_leaves_no_trace(layout: str) -> None:
    model, captured = network()
    decision = recomputing(decide(captured.graph, micro_batches=MICRO_BATCHES, **LAYOUTS[layout]))
    batch, other = (batch_of(model, decision.global_batch, step) for step in range(2))
    twins = [copy.deepcopy((model, captured)) for _ in range(decision.num_ranks)]

    def run(end: InProcessTransport) -> tuple[EvaluationResult, Snapshot, Snapshot]:
        engine = engine_of(decision, *twins[end.rank], end)
        engine.step(*batch)
        before = snapshot(engine)
        return engine.evaluate(*other), before, snapshot(engine)

    found = on_ranks(decision.num_ranks, run, groups_of(decision, captured.graph))
    whole = copy.deepcopy(model)
    for _, before, after in found:
        whole.module.load_state_dict(before[0], strict=False)
        for here, there in zip(before, after, strict=True):
            assert list(here) == list(there)
            assert all(torch.equal(here[name], tensor) for name, tensor in there.items())
    whole.module.eval()
    losses = {each.loss for each, _, _ in found if each.loss is not None}
    assert list(losses) == pytest.approx([whole.loss(*other).item()], rel=1e-12)
    ends = [each.outputs for each, _, _ in found if each.loss is not None]
    joined = torch.cat([outputs[m]["last"][1] for m in range(len(MICRO_BATCHES)) for outputs in ends])
    torch.testing.assert_close(joined, whole.module(*other[0]), rtol=1e-12, atol=1e-12)


Snapshot = tuple[dict[str, Tensor], dict[str, Tensor]]


def snapshot(engine: Engine) -> Snapshot:
    """Copies of parameters and buffers, and of gradients."""
    state = engine.state_dict()
    gradients = engine.gradients()
    return {name: each.clone() for name, each in state.items()}, {n: each.clone() for n, each in gradients.items()}


def builder(decision: Decision, captured: CapturedModule, rank: int = 0) -> StageBuilder:
    hub = Hub(decision.num_ranks, groups_of(decision, captured.graph))
    end = InProcessTransport(hub, rank)
    return StageBuilder(RankContext(decision, sgd, deadline_s=5.0, model=captured, transport=end))


def test_a_rank_keeps_alive_nothing_of_other_stages() -> None:
    model, captured = copy.deepcopy(network())
    alive = weakref.ref(model.module.last.weight), weakref.ref(captured.graph_module)
    decision = decide(captured.graph, ["group"], MICRO_BATCHES, [(0, 1), (2,)], [(3, 1), (1,)])
    local_stages = builder(decision, captured).local_stages()
    del model, captured
    gc.collect()
    assert list(local_stages) == [0]
    assert alive[0]() is None
    assert alive[1]() is None


class Noisy(nn.Module):
    """Draws on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + torch.randn_like(x))


def noisy(*, input_shape: tuple[int, ...] = (4, 4)) -> nn.Module:
    return Noisy()


def test_what_cannot_be_evaluated_can_be_trained_and_says_so_when_it_is_evaluated() -> None:
    captured = capture(load_model(ModelSource(f"{__name__}:noisy", {}, (4, 4), "float64")))
    decision = decide(captured.graph, ["last"], (2, 2))
    alive = weakref.ref(captured.graph_module)
    (local_stage,) = builder(decision, captured).local_stages().values()
    del captured
    gc.collect()
    assert alive() is None
    values = {"inputs": torch.ones(2, 4, dtype=torch.float64)}
    microbatch_shard = MicrobatchShard(0, 2, 0, 2)
    local_stage.passes.forward(microbatch_shard, values, 1.0)
    with pytest.raises(UnsupportedModelError, match="randn_like"):
        local_stage.passes.evaluate(microbatch_shard, values)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_versions_of_divided_weights_are_those_of_whole_ones(name: str) -> None:
    model, captured = transformer()
    whole = decide(captured.graph, [0.5], (3, 2), [(0, 1), (2,)], [(2, 1), (1,)], schedule=name)
    divided = replace(whole, stages=tuple(replace(stage, sharded=True) for stage in whole.stages))
    assert_equal(train_by_plan(model, divided, 2), train_by_plan(model, whole, 2), 1e-12)


def test_only_the_program_says_what_a_stage_keeps() -> None:
    """Forward passes alone hold nothing, whatever else is asked for."""
    _, captured = network()
    decision = recomputing(decide(captured.graph, ["group"], MICRO_BATCHES, schedule="forward"))
    (local_stage,) = builder(decision, captured).local_stages().values()
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    outputs = local_stage.passes.forward(MicrobatchShard(0, 2, 0, 2), {"inputs": x}, 1.0)
    assert not any(output.requires_grad for output in outputs.values())
    assert local_stage.passes.num_in_flight == 0


class Noting(InProcessTransport):
    """Notes what ranks exchange, by the key that it goes under, and what they sum at once."""

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self.exchanged: list[tuple[int | None, int]] = []
        self.sums: list[int] = []

    def start_exchange(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        key: int | None = None,
    ) -> Pending:
        self.exchanged.append((key, sum(tensor.numel() for tensor in sent.values())))
        return super().start_exchange(sent, received, key)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self.sums.append(tensor.numel())
        super().all_reduce(tensor, ranks)


def test_ranks_that_share_samples_tell_each_other_rows_of_each_norm_under_its_own_key() -> None:
    """As ranks that divide layers do, and as profiles measure it: a sum of a table is dearer."""
    model = model_of("resnet:resnet18", (4, 3, 16, 16), width=4, depths=(1, 1))
    captured = capture(model)
    channels = [layer.outputs[0].shape[1] for layer in captured.graph.layers if layer.kind == "batch_norm"]
    decision = decide(captured.graph, (), (4, 4), ((0, 1),), ((2, 2),))

    def run(transport: Noting) -> tuple[list[tuple[int | None, int]], list[int]]:
        engine_of(decision, *copy.deepcopy((model, captured)), transport).step(*batch_of(model, 8, 0))
        return transport.exchanged, transport.sums

    groups = groups_of(decision, captured.graph)
    for exchanged, summed in on_ranks(2, run, groups, rendezvous=True, transport=Noting):
        numbers = Counter(number for _, number in exchanged)
        assert numbers == Counter(2 * [1 + 2 * each for each in channels] + 2 * [2 * each for each in channels])
        keys = Counter(key for key, _ in exchanged)
        assert len(keys - Counter([None])) == 2 * len(channels)
        assert set(keys.values()) == {2}, "once for each micro-batch"
        assert max(summed, default=0) < 1 + 2 * min(channels), "a table was summed"
