"""Cases that runtimes get wrong or refuse, beside one device in float64: losses, gradients, parameters, buffers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from planner.ir.profile import ModelSource
from planner.ir.schedule import Op
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.pipeline.microbatches import MicroBatches
from runtime.stage.shapes import step_inputs
from runtime.transport import InProcessTransport, MessageKey
from tests.captures import capture
from tests.profiler.varying_models import MODELS
from tests.runtime.cases import (
    PLANS,
    TURNED,
    TURNED_BACK,
    WIDTH,
    decision_of,
    dropping,
    expected,
    in_order,
    network,
    order_of,
    recomputing,
    trained_alone,
)
from tests.runtime.engines import Network, Tensors, evaluated, on_engines, trained, trained_on
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, folded, sgd, split_backward
from tests.runtime.training import adamw, alone, by_plan, cosine, sharded, tied_model

each_plan = pytest.mark.parametrize("plan", PLANS)
each_network = pytest.mark.parametrize("name", ["normalised", "mixed"])


@each_plan
@each_network
def test_training_is_that_of_one_device(name: str, plan: str) -> None:
    decision = decision_of(name, **PLANS[plan])
    assert_equal(trained(network(name), decision), expected(name, PLANS[plan]["micro_batches"], order_of(plan)))


@each_plan
@each_network
def test_recomputed_training_is_that_of_one_device(name: str, plan: str) -> None:
    """Running statistics are updated once, what in-place operators write is restored."""
    decision = recomputing(decision_of(name, **PLANS[plan]))
    assert_equal(trained(network(name), decision), expected(name, PLANS[plan]["micro_batches"], order_of(plan)))


@each_plan
def test_ten_rows_go_in_and_ten_come_out_in_their_order(plan: str) -> None:
    given = network("normalised")
    inputs, targets = batch_of(given[0], 10, 3)
    loss, rows = evaluated(given, decision_of("normalised", **PLANS[plan]), inputs, targets)
    twin = copy.deepcopy(given[0].module).eval()
    torch.testing.assert_close(rows, twin(*inputs), rtol=1e-12, atol=1e-14)
    assert loss == pytest.approx(functional.cross_entropy(rows, *targets).item(), rel=1e-12)


def test_integers_and_tuples_cross_edges() -> None:
    decision = decision_of("mixed", **PLANS["a skip over several stages"])
    graph = network("mixed")[1].graph
    values = graph.values()
    crossing = {value for edge in Boundaries.of_decision(graph, decision).edges() for value in edge.values}
    assert {values[value].dtype for value in crossing} == {"float64", "int64"}
    assert any(":" in value for value in crossing)


def test_the_last_stage_may_compute_in_another_order_than_it_receives() -> None:
    decision = decision_of("mixed", cuts=[0.5], micro_batches=(4, 3, 3), schedule="gpipe")
    receives = [f"1RECV_F{m}<0" for m in range(3)]
    computes = [*(f"1F{m}" for m in TURNED), *(f"1B{m}" for m in TURNED_BACK)]
    sends = [f"1SEND_B{m}>0" for m in (0, 1, 2)]
    decision = replace(decision, program=(decision.program[0], (*receives, *computes, *sends, "1UPDATE")))
    program = Boundaries.of_decision(network("mixed")[1].graph, decision).program(decision)
    assert program.rows[0] == decide(network("mixed")[1].graph, [0.5], (4, 3, 3), schedule="gpipe").rows()[0]
    assert [a.microbatch for a in program.rows[0] if a.op is Op.RECV_BACKWARD] == [0, 1, 2]
    validate(program)
    assert_equal(trained(network("mixed"), decision), expected("mixed", (4, 3, 3)))


TIED = {
    "on two stages": {"cuts": [0.5]},
    "on two stages, one replicated": {"cuts": [0.5], "ranks": [(0, 1), (2,)], "shares": [(2, 1), (1,)]},
    "on two stages that are no neighbours": {"cuts": [0.3, 0.6]},
    "on two stages of one rank": {"cuts": [0.3, 0.6], "ranks": [(0,), (1,), (0,)], "schedule": folded},
}


@cache
def tied() -> Network:
    model = tied_model()
    return model, capture(model)


@pytest.mark.parametrize("plan", TIED)
def test_tied_parameters_with_clipping_schedules_and_accumulation(plan: str) -> None:
    options = {"scheduler": cosine, "clip_norm": 0.5, "accumulate": 2, "steps": 4}
    whole, norms = alone(tied()[0], (4, 3, 3), **options)
    decision = decide(tied()[1].graph, micro_batches=(4, 3, 3), **TIED[plan])
    found, given = by_plan(tied()[0], decision, **options)
    assert [given[1], given[3]] == pytest.approx(norms, rel=1e-10)
    assert_equal(replace(found, losses=[]), replace(whole, losses=[]))


@pytest.mark.parametrize("plan", ["replicas of unequal share", "one feeds two, they feed one"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_divided_optimiser_with_clipping(plan: str, recompute: bool) -> None:
    given = network("normalised")
    options = {"clip_norm": 0.05, "steps": 3, "optimizer": adamw}
    whole, norms = alone(given[0], PLANS[plan]["micro_batches"], **options)
    decision = sharded(decision_of("normalised", **PLANS[plan]))
    found, norms_found = by_plan(given[0], recomputing(decision) if recompute else decision, **options)
    assert norms_found == pytest.approx(norms, rel=1e-10)
    assert_equal(replace(found, gradients={}), replace(whole, gradients={}))


@pytest.mark.parametrize("plan", [plan for plan in PLANS if order_of(plan) == (0, 1, 2)])
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_that_of_one_device(plan: str, recompute: bool) -> None:
    given = network("dropping")
    micro_batches = PLANS[plan]["micro_batches"]
    decision = decision_of("dropping", **PLANS[plan])
    batches = [batch_of(given[0], sum(micro_batches), step) for step in range(2)]
    whole = trained_alone(given, batches, [micro_batches] * 2, dropping, seed=3)
    assert_equal(trained(given, recomputing(decision) if recompute else decision, seed=3), whole)
    other = trained_alone(given, batches, [micro_batches] * 2, dropping, seed=4)
    assert abs(other.losses[0] - whole.losses[0]) > 1e-6


@each_plan
def test_smaller_last_batches_and_evaluation_in_between(plan: str) -> None:
    """Ten rows, then seven and four: these fill the first micro-batches; evaluation leaves no trace."""
    given = network("normalised")
    planned = PLANS[plan]["micro_batches"]
    rows = [planned, *SMALLER[planned]]
    batches = [batch_of(given[0], sum(each), step) for step, each in enumerate(rows)]

    def work(engine: Engine) -> list[float | None]:
        losses = []
        for batch in batches:
            engine.evaluate(*batch)
            losses.append(engine.step(*batch).loss)
        return losses

    order = order_of(plan)
    turned_batches = [in_order(batch, each, order) for batch, each in zip(batches, rows, strict=True)]
    turned_rows = [tuple(each[m] for m in order if m < len(each)) for each in rows]
    assert_equal(
        trained_on(given, decision_of("normalised", **PLANS[plan]), work),
        trained_alone(given, turned_batches, turned_rows),
    )


SMALLER = {
    (4, 3, 3): [(4, 3), (4,)],
    (2, 5, 3): [(2, 5), (2, 2)],
    (4, 6): [(4, 3), (4,)],
}


@cache
def varying(name: str) -> Network:
    model = MODELS[name].load()
    double = replace(
        model,
        module=model.module.double(),
        inputs=tuple(each.double() if each.is_floating_point() else each for each in model.inputs),
    )
    return double, capture(double)


@pytest.mark.parametrize("name", ["pointnet", "gpt", "convnet"])
@pytest.mark.parametrize(
    "plan",
    [
        {"cuts": [0.5]},
        {"cuts": [0.5], "ranks": [(0, 1), (2,)], "shares": [(2, 1), (1,)]},
        {"cuts": [0.3, 0.6], "ranks": [(0,), (1,), (0,)], "schedule": folded},
        {"cuts": [0.3, 0.6], "ranks": [(0,), (1, 2), (3,)], "shares": [(1,), (1, 2), (1,)], "schedule": split_backward},
    ],
    ids=["two ranks", "2 to 1 feed one", "two stages on one rank", "one feeds two, they feed one"],
)
def test_micro_batches_of_other_sample_and_point_counts(name: str, plan: dict[str, object]) -> None:
    given = varying(name)
    decision = decide(given[1].graph, micro_batches=(3, 3, 3), **plan)
    sizes = [each for each in MODELS[name].sizes if min(each.values()) > 1][:3]
    steps = [_micro_batches(name, [*zip((3, 5, 4), sizes, strict=False)]), _micro_batches(name, [(2, sizes[1])])]
    model = given[1]
    inputs = step_inputs(model)
    batches = [MicroBatches(inputs, [(*x, *y) for x, y in each], len(decision.micro_batches)) for each in steps]
    found = trained_on(given, decision, lambda engine: [engine.step_on(each).loss for each in batches])
    assert_equal(found, _trained_each(given, steps))


def _micro_batches(name: str, counts: Sequence[tuple[int, dict[str, int]]]) -> list[tuple[Tensors, Tensors]]:
    torch.manual_seed(len(counts))
    found = [MODELS[name].batch(*each) for each in counts]
    return [
        (tuple(each.double() if each.is_floating_point() else each for each in inputs), targets)
        for inputs, targets in found
    ]


def _trained_each(given: Network, steps: Sequence[Sequence[tuple[Tensors, Tensors]]]) -> Trained:
    model = copy.deepcopy(given[0])
    optimizer = sgd(model.module.parameters())
    losses = []
    for micro_batches in steps:
        optimizer.zero_grad(set_to_none=True)
        total = sum(targets[0].numel() for _, targets in micro_batches)  # terms that the cross-entropy is a mean over
        losses.append(0.0)
        for inputs, targets in micro_batches:
            loss = model.loss(inputs, targets) * (targets[0].numel() / total)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    return Trained(losses, gradients, model.module.state_dict())


class Watched(InProcessTransport):
    """Counts what it received before and is still in memory, at each receive."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.received: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[int] = []

    def receive(self, key: MessageKey, source: int) -> tuple[Tensor, ...]:
        self.alive.append(sum(each() is not None for each in self.received))
        tensors = tuple(tensor.clone() for tensor in super().receive(key, source))  # not the sender's
        self.received += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        return tensors


@pytest.mark.parametrize("recompute", [False, True])
def test_what_was_received_is_freed_after_its_use(recompute: bool) -> None:
    """1F1B on three stages with a skip: the ends wait for two messages a micro-batch, the middle is one ahead."""
    given = network("normalised")
    decision = decision_of("normalised", cuts=["norm1", "norm2"], micro_batches=(2, 2, 2, 2))
    decision = recomputing(decision) if recompute else decision
    ends = on_engines(given, decision, _stepped, transport=Watched)
    assert [max(end.alive) for end in ends] == [1, 2, 1]
    assert all(end.num_buffers() == (0, 0) for end in ends)
    assert all(each() is None for end in ends for each in end.received)


def _stepped(engine: Engine) -> Watched:
    engine.step(*batch_of(network("normalised")[0], 8, 0))
    engine.forget_step()
    return engine._transport


@cache
def lower_precision() -> Network:
    source = ModelSource("tests.runtime.cases:made", {"name": '"mixed"'}, (4, WIDTH), "float32", autocast="bfloat16")
    model = load_model(source)
    return model, capture(model)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "plan",
    [{"cuts": [0.5]}, {"cuts": [0.3, 0.6]}, {"cuts": [0.3, 0.6], "ranks": [(0,), (1,), (0,)], "schedule": folded}],
    ids=["two ranks", "three ranks", "two stages on one rank"],
)
def test_autocast_gives_the_bits_of_one_device(plan: dict[str, object], recompute: bool) -> None:
    given = lower_precision()
    decision = decide(given[1].graph, micro_batches=(4, 3, 3), **plan)
    batches = [batch_of(given[0], 10, step) for step in range(2)]
    whole = trained_alone(given, batches, [(4, 3, 3)] * 2)
    found = trained(given, recomputing(decision) if recompute else decision)
    assert found.losses == pytest.approx(whole.losses, rel=1e-7)  # added up in another order
    for kind in ("gradients", "state"):
        here = getattr(found, kind)
        there = getattr(whole, kind)
        assert sorted(here) == sorted(there)
        assert [name for name, tensor in there.items() if not torch.equal(here[name], tensor)] == []


def test_the_comparison_with_one_device_can_fail() -> None:
    found = trained(network("normalised"), decision_of("normalised", cuts=[0.5], micro_batches=(4, 3, 3)))
    with pytest.raises(AssertionError, match="relative error"):
        assert_equal(found, expected("normalised", (4, 6)))
