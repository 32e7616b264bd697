"""Stages as a plan wants them: every combination of recomputation, halves and weight versions is exact in float64."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action, Op, Pipeline, Schedule
from planner.schedules import schedule
from profiler.capture import Captured, capture
from profiler.source import LoadedModel, load_model
from runtime.build import Builder
from tests.runtime.plans import (
    Trained,
    assert_equal,
    batch_of,
    decide,
    model_of,
    run_ranks,
    train_by_plan,
    train_serially,
)
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


def net(*, input_shape: tuple[int, ...] = (4, 2, 4, 4)) -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def network() -> tuple[LoadedModel, Captured]:
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
    "replicas, once without rows": {"cuts": ["group"], "ranks": [(0, 1), (2,)], "shares": [(3, 1), (1,)]},
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
def transformer() -> tuple[LoadedModel, Captured]:
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
    ranks, shares = [(0, 1), (2,)], [(2, 1), (1,)]
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


def test_evaluation_is_that_of_the_module_and_leaves_no_trace() -> None:
    model, captured = network()
    for layout in LAYOUTS.values():
        decision = decide(captured.graph, micro_batches=MICRO_BATCHES, **layout)
        batch = batch_of(model, decision.global_batch, 0)
        engines, _ = run_ranks(model, decision, [batch])
        twin = train_state(engines)
        grads = [engine.gradients() for engine in engines]
        found = evaluate(engines, batch)
        model_twin = load_into(model, twin)
        expected = model_twin.loss(*batch).item()
        assert {round(loss, 12) for loss in found if loss is not None} == {round(expected, 12)}
        again = train_state(engines)
        assert all(torch.equal(again[name], tensor) for name, tensor in twin.items())
        assert [list(engine.gradients()) for engine in engines] == [list(each) for each in grads]
