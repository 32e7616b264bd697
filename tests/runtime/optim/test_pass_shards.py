"""Gradients and parameters that ranks have in slices while passes run (ZeRO-2, ZeRO-3) train as one device does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import CorruptFileError, UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.layers.recomputed import cores_among
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.engine import Engine
from runtime.optim.pass_shards import PassShards
from runtime.optim.sharding import ShardedParameters
from runtime.optim.ties import groups_of
from runtime.transport import InProcessTransport
from tests.runtime.plans import (
    Trained,
    assert_equal,
    batch_of,
    decide,
    engine_of,
    model_of,
    run_ranks,
    sgd,
    split_backward,
    train_by_plan,
    train_serially,
)
from tests.runtime.ranks import on_ranks
from tests.runtime.training import adamw, sharded

SMALL_BUCKET = 700
"""Bytes: every network here has several buckets, most of them of several parameters."""


class Mixed(nn.Module):
    """Statistics over samples, a skip, a layer used twice, a frozen one, and a parameter that is used bare."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.twice = nn.Conv2d(6, 6, 3, padding=1)
        self.frozen = nn.Conv2d(6, 6, 1)
        self.wide = nn.Linear(6, 24)
        self.last = nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.full((24,), 1.5))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x)).relu()
        y = y + self.twice(self.frozen(self.twice(y).relu()))
        return self.last(functional.silu(self.wide(y.mean((2, 3)))) * self.scale)


def mixed(*, input_shape: tuple[int, ...] = (8, 3, 5, 5)) -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    torch.manual_seed(0)
    return Mixed(), (torch.randn(input_shape), torch.arange(input_shape[0]) % 5), nn.CrossEntropyLoss()


class Pieces(nn.Module):
    """One parameter in pieces, of which distant layers use one each, as attention's projections do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(18, 6) * 0.4)
        self.between = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.weight.split([6, 6, 6])
        y = self.between(functional.linear(x, first).tanh())
        return self.last(functional.linear(functional.linear(y, second).tanh(), third))


def pieces(*, input_shape: tuple[int, ...] = (8, 6)) -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    torch.manual_seed(0)
    return Pieces(), (torch.randn(input_shape), torch.arange(input_shape[0]) % 3), nn.CrossEntropyLoss()


NETWORKS: dict[str, Callable[[], LoadedModel]] = {
    "gpt": lambda: model_of("gpt:gpt", (8, 6), vocabulary=17, width=8, layers=2, heads=2, context=8),
    "llama": lambda: model_of("llama:llama", (8, 6), vocabulary=17, width=8, hidden=12, layers=2, heads=4, kv_heads=2),
    "mixed": lambda: load_model(ModelSource(f"{__name__}:mixed", {}, (8, 3, 5, 5), "float64")),
    "pieces": lambda: load_model(ModelSource(f"{__name__}:pieces", {}, (8, 6), "float64")),
}
PLANS: dict[str, dict[str, object]] = {
    "two replicas": {"cuts": [], "ranks": [(0, 1)], "shares": [(1, 1)]},
    "four replicas of unequal share": {"cuts": [], "ranks": [(0, 1, 2, 3)], "shares": [(3, 2, 2, 1)]},
    "a replica without rows": {"cuts": [], "ranks": [(0, 1)], "shares": [(8, 0)]},
    "stages of replicas": {"cuts": [0.5], "ranks": [(0, 1), (2, 3)], "shares": [(1, 1), (3, 1)]},
    "stages of replicas, all forwards first": {
        "cuts": [0.4],
        "ranks": [(0, 1), (2, 3)],
        "shares": [(1, 1), (1, 1)],
        "schedule": "gpipe",
    },
}
MICRO_BATCHES = (3, 3, 2)
STEPS = 3


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(ShardedParameters.__init__, "__defaults__", (SMALL_BUCKET,))


@cache
def network(name: str) -> tuple[LoadedModel, CapturedModule]:
    model = NETWORKS[name]()
    return model, capture(model)


@cache
def serial(name: str) -> Trained:
    return train_serially(network(name)[0], MICRO_BATCHES, STEPS)


def decision_of(name: str, plan: str, zero: int) -> Decision:
    return sharded(decide(network(name)[1].graph, micro_batches=MICRO_BATCHES, **PLANS[plan]), zero)


def expected(name: str) -> Trained:
    """Frozen parameters have no gradient."""
    found = serial(name)
    return replace(found, gradients={key: each for key, each in found.gradients.items() if each is not None})


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NETWORKS)
def test_slices_train_as_one_device(name: str, plan: str, zero: int) -> None:
    found = train_by_plan(network(name)[0], decision_of(name, plan, zero), STEPS)
    assert_equal(found, expected(name))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("which", ["all", "cores", "all layers in halves"])
def test_what_is_computed_again_gathers_again_or_finds_its_parameters(which: str, zero: int) -> None:
    graph = network("gpt")[1].graph
    decision = decision_of("gpt", "stages of replicas", zero)
    own = [[name for name, each in decision.layers.items() if each.stage == stage] for stage in (0, 1)]
    own[1].pop()  # the loss is not computed again
    changes = {
        "all": [{"recompute": True}] * 2,
        "cores": [{"recomputed": cores_among(graph, names)} for names in own],
        "all layers in halves": [
            {"recomputed": (tuple(names[: len(names) // 2]), tuple(names[len(names) // 2 :]))} for names in own
        ],
    }[which]
    assert all(all(change.values()) for change in changes)
    stages = tuple(replace(stage, **change) for stage, change in zip(decision.stages, changes, strict=True))
    again = replace(decision, stages=stages)
    if zero == 3 and which == "all layers in halves":
        with pytest.raises(CorruptFileError, match="such spans may have 0"):
            train_by_plan(network("gpt")[0], again, STEPS)
    else:
        assert_equal(train_by_plan(network("gpt")[0], again, STEPS), expected("gpt"))


def on_all(name: str, decision: Decision, does: Callable[[Engine], object]) -> list[object]:
    copies = [copy.deepcopy(network(name)) for _ in range(decision.num_ranks)]

    def work(end: InProcessTransport) -> object:
        model, captured = copies[end.rank]
        return does(engine_of(decision, model, captured, end, optimizer=sgd))

    return on_ranks(decision.num_ranks, work, groups_of(decision, network(name)[1].graph))


def test_between_passes_a_rank_has_its_slices_and_nobody_can_read_another_value() -> None:
    model = network("gpt")[0]
    decision = decision_of("gpt", "two replicas", 3)
    kept: list[int] = []

    def does(engine: Engine) -> None:
        engine.step(*batch_of(model, 8, 0))
        local_stage = engine._local_stages[0]
        assert all(torch.isnan(each).all() for each in local_stage.parameters.values())
        assert all(each.grad is None for each in local_stage.parameters.values())
        kept.append(sum(each.numel() for each in engine.held_tensors() if each.is_floating_point()))

    on_all("gpt", decision, does)
    whole = sum(each.numel() for each in model.module.parameters())
    buffers = sum(each.numel() for each in model.module.buffers() if each.is_floating_point())
    assert sum(kept) == pytest.approx(2 * whole + 2 * buffers, rel=0.01)  # parameters and momentum, once in all


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_has_whole_gradients_of_few_buckets_at_a_time(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    scatter = PassShards._scatter

    def watched(shards: PassShards, number: int) -> None:
        having = [p for each in shards._shards for p in each.bucket if p.grad is not None]
        there = sum(each.flat.untyped_storage().nbytes() > 0 for each in shards._shards)
        seen.append((sum(p.grad.nbytes for p in having), there))
        scatter(shards, number)

    monkeypatch.setattr(PassShards, "_scatter", watched)
    train_by_plan(network("gpt")[0], decision_of("gpt", "two replicas", zero), 1)
    whole = sum(p.nbytes for p in network("gpt")[0].module.parameters())
    assert max(size for size, _ in seen) < whole / 4
    if zero == 3:
        assert max(there for _, there in seen) <= 3


@pytest.mark.parametrize("zero", [2, 3])
def test_evaluation_reads_whole_parameters_and_changes_nothing(zero: int) -> None:
    model = network("mixed")[0]
    decision = decision_of("mixed", "stages of replicas", zero)
    batch = batch_of(model, 8, 5)

    def does(engine: Engine) -> float | None:
        engine.step(*batch_of(model, 8, 0))
        first = engine.evaluate(*batch).loss
        second = engine.evaluate(*batch).loss
        assert first == second
        engine.step(*batch_of(model, 8, 1))
        return first

    twin = copy.deepcopy(model)
    other = decide(network("mixed")[1].graph, [], MICRO_BATCHES)
    found = {each for each in on_all("mixed", decision, does) if each is not None}
    alone = {each for each in on_all("mixed", other, does) if each is not None}
    assert twin.module.training
    assert found.pop() == pytest.approx(alone.pop(), rel=1e-12)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_given_state_replaces_slices(zero: int) -> None:
    model = network("gpt")[0]
    decision = decision_of("gpt", "two replicas", zero)
    given = {
        name: each + 0.25 if each.is_floating_point() else each for name, each in model.module.state_dict().items()
    }

    def does(engine: Engine) -> dict[str, Tensor]:
        engine.unshard()
        engine.load_state_dict(given)
        return engine.state_dict()

    for found in on_all("gpt", decision, does):
        assert all(torch.equal(found[name], given[name]) for name in given)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_module_made_whole_is_divided_again_by_the_next_step(zero: int) -> None:
    model = network("gpt")[0]
    decision = decision_of("gpt", "two replicas", zero)

    def does(engine: Engine) -> float | None:
        for step in range(STEPS):
            loss = engine.step(*batch_of(model, 8, step)).loss
            engine.unshard()
            assert not any(torch.isnan(each).any() for each in engine._local_stages[0].parameters.values())
        return loss

    assert on_all("gpt", decision, does)[0] == pytest.approx(serial("gpt").losses[-1], rel=1e-12)


REFUSED = {
    "a split backward": ({"schedule": split_backward}, {}, "split backward"),
    "versions of weights": (
        {"cuts": [0.5], "ranks": [(0, 1), (2,)], "shares": [(1, 1), (1,)], "schedule": "pipedream"},
        {},
        "versions",
    ),
}


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("case", REFUSED)
def test_what_nothing_runs_is_refused_before_the_first_step(case: str, zero: int) -> None:
    changed, options, why = REFUSED[case]
    named = {**PLANS["two replicas"], **changed}
    decision = sharded(decide(network("gpt")[1].graph, micro_batches=MICRO_BATCHES, **named), zero)
    with pytest.raises(UnsupportedModelError, match="cannot divide its") as caught:
        run_ranks(network("gpt")[0], decision, [], **options)
    assert why in " ".join(caught.value.details)
    assert any("--zero 1" in each for each in caught.value.remedies)


def test_an_optimiser_is_made_of_whole_parameters() -> None:
    seen: list[set[tuple[int, ...]]] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        assert not any(torch.isnan(each).any() for each in parameters)
        seen.append({tuple(each.shape) for each in parameters})
        return adamw(parameters)

    run_ranks(network("gpt")[0], decision_of("gpt", "two replicas", 3), [], optimizer=make)
    assert seen == [{tuple(each.shape) for each in network("gpt")[0].module.parameters()}] * 2
