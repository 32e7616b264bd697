"""Sums of gradients, clipping, several batches, divided optimisers and shared parameters, as on one device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.ir.errors import UsageError
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.program import Program
from planner.ir.schedule import Action, StageGraph
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.numerics.finite import OnNan
from runtime.optim.gradient_buckets import GradientBuckets, in_buckets
from runtime.optim.gradient_sync import GradientSync, check_finishing
from runtime.optim.of_stage import Updates
from runtime.optim.ties import TiedParameters, groups_of_ties, ties_of
from runtime.stage.local_stage import AccumulationStep
from runtime.transport import InProcessTransport
from tests.captures import capture
from tests.runtime.plans import Trained, assert_equal, batch_of, decide, folded, run_ranks, sgd, split_backward
from tests.runtime.ranks import on_ranks
from tests.runtime.training import alone, by_plan, cosine, sharded, tied_model

MICRO_BATCHES = (3, 2)
PLANS = {
    "two ranks": {"cuts": [0.5]},
    "three ranks, the one between has no part": {"cuts": [0.3, 0.6]},
    "replicas of both": {"cuts": [0.5], "ranks": [(0, 1), (2, 3)], "shares": [(3, 1), (1, 1)]},
    "three replicas": {"cuts": [], "ranks": [(0, 1, 2)], "shares": [(1, 2, 1)]},
    "replicas of the first, the second of which has no rows": {
        "cuts": [0.5],
        "ranks": [(0, 1), (2,)],
        "shares": [(7, 1), (1,)],
    },
    "first and last stage on one rank": {"cuts": [0.3, 0.6], "ranks": [(0,), (1,), (0,)], "schedule": folded},
    "first and last stage on two ranks": {
        "cuts": [0.3, 0.6],
        "ranks": [(0, 1), (2,), (0, 1)],
        "shares": [(1, 1), (1,), (1, 1)],
        "schedule": folded,
    },
    "backward split": {"cuts": [0.5], "ranks": [(0,), (1, 2)], "shares": [(1,), (1, 1)], "schedule": split_backward},
}
CLIPPED = {"clip_norm": 0.5}
ALL_KEPT = {"clip_norm": 1000.0}
DIVIDED = ("three replicas", "replicas of both", "first and last stage on two ranks")


@cache
def network() -> tuple[LoadedModel, CapturedModule]:
    model = tied_model()
    return model, capture(model)


@cache
def expected(clip_norm: float = 0.0, accumulate: int = 1) -> tuple[Trained, list[float]]:
    steps = {"steps": 6} if accumulate > 1 else {}
    model = network()[0]
    return alone(model, MICRO_BATCHES, scheduler=cosine, clip_norm=clip_norm, accumulate=accumulate, **steps)


@pytest.mark.cases(12)
@pytest.mark.parametrize(
    ("plan", "options", "zero"),
    [
        *((plan, options, 0) for plan in PLANS for options in ({}, CLIPPED)),
        ("two ranks", ALL_KEPT, 0),
        *((plan, options, zero) for plan in DIVIDED for options in ({}, CLIPPED) for zero in (1, 2, 3)),
        *(("three replicas", {**CLIPPED, "accumulate": 3}, zero) for zero in (0, 1, 2, 3)),
        ("two ranks", {**CLIPPED, "accumulate": 3}, 0),
    ],
)
def test_tied_parameters_are_trained_as_on_one_device(plan: str, options: dict[str, float], zero: int) -> None:
    model, captured = network()
    decision = decide(captured.graph, micro_batches=MICRO_BATCHES, **PLANS[plan])
    count = int(options.get("accumulate", 1))
    steps = {"steps": 6} if count > 1 else {}
    found, norms = by_plan(model, sharded(decision, zero) if zero else decision, scheduler=cosine, **steps, **options)
    there, expected_norms = expected(**options)
    assert [norm is None for norm in norms[:count]] == [True] * (count - 1) + [not options]
    if options:
        assert min(expected_norms) > 0.5
        assert norms[count - 1 :: count] == pytest.approx(expected_norms, rel=1e-12)
    losses = [sum(found.losses[first : first + count]) / count for first in range(0, len(found.losses), count)]
    gradients = ({}, {}) if zero else (found.gradients, there.gradients)
    assert_equal(Trained(losses, gradients[0], found.state), Trained(there.losses, gradients[1], there.state))


def test_nothing_is_summed_before_the_last_of_several_batches() -> None:
    class Counting(InProcessTransport):
        num_sums = 0

        def start_sum(self, *arguments: object, **named: object) -> object:
            Counting.num_sums += 1
            return super().start_sum(*arguments, **named)

    model, captured = network()
    decision = decide(captured.graph, micro_batches=MICRO_BATCHES, **PLANS["three replicas"])
    batches = [batch_of(model, 5, step) for step in range(2)]
    run_ranks(model, decision, batches, accumulate=3, transport=Counting, optimizer=sgd)
    assert Counting.num_sums == 0


@pytest.mark.parametrize(("gradient", "left"), [(math.inf, 0.0), (math.nan, math.nan)])
def test_of_a_norm_that_is_not_finite_all_ranks_know(gradient: float, left: float) -> None:
    """Of two replicas on ranks 0 and 1, and another stage on rank 2, whose gradients have been summed."""

    def finish(end: InProcessTransport, on_nan: OnNan) -> tuple[float | None, list[float]]:
        parameters = {name: nn.Parameter(torch.zeros(2, dtype=torch.float64)) for name in "abc"}
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, gradient if end.rank == 2 else 1.0)
        stage = SimpleNamespace(
            parameters=parameters,
            ranks=(0, 1) if end.rank < 2 else (2,),
            updates=Updates(frozenset(), GradientBuckets([], lambda flat: None), None, frozenset()),
            accumulation=AccumulationStep(),
            is_finite=lambda *, gradients=True: True,
        )
        context = SimpleNamespace(ties=(), rank=end.rank, transport=end, clip_norm=1.0, on_nan=on_nan, accumulate=1)
        gradient_sync = GradientSync(context, {0: stage})
        gradient_sync.begin()
        norm = gradient_sync.run()
        return norm, [value for parameter in parameters.values() for value in parameter.grad.tolist()]

    found = on_ranks(3, partial(finish, on_nan=OnNan.IGNORE))
    assert [str(norm) for norm, _ in found] == [str(gradient)] * 3
    assert found[0][1] == pytest.approx([left] * 6, nan_ok=True)  # as torch leaves them
    for rank, (norm, gradients) in enumerate(on_ranks(3, partial(finish, on_nan=OnNan.STOP))):
        assert str(norm) == str(gradient)
        assert gradients == pytest.approx([gradient if rank == 2 else 1.0] * 6, nan_ok=True)  # nobody uses them


def program(*rows: str) -> Program:
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return Program(actions, StageGraph(2, 2, ()), ((0,), (1,)), {})


def test_updates_may_end_a_row() -> None:
    check_finishing(program("0F0 0F1 0B0 0B1 0UPDATE", "1F0 1B0 1F1 1B1 1UPDATE"))
    check_finishing(program("0F0 1F0 1B0 0B0 0UPDATE 1UPDATE", "1F1"))


@pytest.mark.parametrize(
    ("row", "culprit"),
    [("0F0 0B0 0UPDATE 0F1 0B1 0UPDATE", "0F1"), ("0F0 0B0 0UPDATE0", "0UPDATE0"), ("0B0 0UPDATE 1B0 1UPDATE", "1B0")],
)
def test_what_follows_the_first_update_is_named(row: str, culprit: str) -> None:
    with pytest.raises(UsageError, match=f"rank 1 comes to {culprit} with or after") as caught:
        check_finishing(program("1F0 1B0 1UPDATE", row))
    assert culprit in caught.value.details[1]


def test_a_rank_with_two_of_its_stages_keeps_one_copy_and_one_state() -> None:
    model, captured = network()
    decision = decide(captured.graph, micro_batches=MICRO_BATCHES, **PLANS["first and last stage on one rank"])
    engines, _ = run_ranks(model, decision, [])
    first = engines[0]._local_stages[0]
    last = engines[0]._local_stages[2]
    assert first.parameters["token.weight"] is last.parameters["token.weight"]
    assert "token.weight" in first.optimizer.tensors
    assert "token.weight" not in last.optimizer.tensors


def graph(**used: tuple[str, ...]) -> Graph:
    spec = TensorSpec(("feature",), (1,), "float32")
    layers = tuple(Layer(name, "opaque", (), (spec,), parameters) for name, parameters in used.items())
    names = dict.fromkeys(name for parameters in used.values() for name in parameters)
    return Graph(1, {}, layers, dict.fromkeys(names, spec), layers[-1].name)


def test_ties_are_named_by_stages_and_ranks() -> None:
    found = ties_of(
        graph(a=("x", "y"), b=("z", "x"), c=("y", "w"), d=("z",)),
        {"a": 0, "b": 1, "c": 2, "d": 1},
        [(4, 1), (2,), (1, 0)],
    )
    assert found == (TiedParameters(("x",), (0, 1), ((1, 4), (2,))), TiedParameters(("y",), (0, 2), ((1, 4), (0, 1))))
    assert [tie.ranks for tie in found] == [(1, 2, 4), (0, 1, 4)]
    assert [found[1].owner(rank) for rank in (0, 1, 4)] == [2, 0, 0]
    assert groups_of_ties(found) == ((1, 2, 4), (0, 1, 4))


def test_ties_of_one_rank_need_no_group() -> None:
    ties = ties_of(graph(a=("x",), b=("x",)), {"a": 0, "b": 1}, [(3,), (3,)])
    assert groups_of_ties(ties) == ()
    assert ties[0].ranks == (3,)


class Sums:
    """Stands in for a transport: a started sum doubles what it is given and adds one, when it is waited for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.waited = 0

    def start(self, flat: torch.Tensor) -> Sums._Pending:
        self.sizes.append(flat.numel())
        return Sums._Pending(self, flat)

    class _Pending:
        def __init__(self, sums: Sums, flat: torch.Tensor) -> None:
            self.sums = sums
            self.flat = flat

        def wait(self) -> None:
            self.flat.mul_(2).add_(1)
            self.sums.waited += 1


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    for number, parameter in enumerate(found):
        parameter.grad = torch.full_like(parameter, number + 1)
    return found


def three_layers() -> tuple[nn.Sequential, Callable[[], torch.Tensor]]:
    """Three layers with (12, 4), (20, 5) and (10, 2) elements of weight and bias, and a loss."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    x = torch.randn(2, 3)
    return module, lambda: module(x).square().sum()


def test_buckets_begin_with_the_last_parameter_and_keep_the_dtype_and_the_bound() -> None:
    small = parameters(2, 2, 8, 1)
    double = parameters(3, dtype=torch.float64)
    buckets = in_buckets([*small, *double], bucket_bytes=16)
    assert [[parameter.numel() for parameter in bucket] for bucket in buckets] == [[3], [1], [8], [2, 2]]


def test_a_gradient_of_odd_strides_is_summed() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.arange(6.0).view(2, 3).t()
    GradientBuckets([parameter], Sums().start).reduce()
    assert parameter.grad.tolist() == [[1, 7], [3, 9], [5, 11]]


def test_a_gradient_alone_in_its_bucket_is_not_copied_and_others_are_views_of_it() -> None:
    found = parameters(40, 3, 2)
    alone = found[0].grad
    GradientBuckets(found, Sums().start, bucket_bytes=32).reduce()
    assert found[0].grad.data_ptr() == alone.data_ptr()
    assert found[1].grad.untyped_storage().data_ptr() == found[2].grad.untyped_storage().data_ptr()


def test_sums_start_within_the_last_backward_in_the_order_of_the_buckets() -> None:
    module, loss = three_layers()
    sums = Sums()
    buckets = GradientBuckets(module.parameters(), sums.start, bucket_bytes=100)
    loss().backward()
    assert sums.sizes == []  # not armed: more is to come
    buckets.arm()
    loss().backward()
    assert (sums.sizes, sums.waited) == ([17, 24, 12], 0)
    expected = [2 * 2 * gradient + 1 for gradient in torch.autograd.grad(loss(), tuple(module.parameters()))]
    buckets.reduce()
    assert sums.sizes == [17, 24, 12]
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for end in (buckets.reduce, buckets.reset):  # after which nothing is left behind
        buckets.arm()
        loss().backward()
        end()
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    sums.sizes.clear()
    loss().backward()
    assert sums.sizes == []


def test_a_bucket_waits_for_all_earlier_ones() -> None:
    found = parameters(10, 20, 30)
    sums = Sums()
    buckets = GradientBuckets(found, sums.start, bucket_bytes=1)
    buckets.arm()
    buckets.note(found[0])
    assert sums.sizes == []
    buckets.note(found[2])
    assert sums.sizes == [30]
    buckets.note(found[1])
    assert sums.sizes == [30, 20, 10]


def test_a_gradient_that_comes_after_its_sum_has_started_is_refused() -> None:
    module, loss = three_layers()
    buckets = GradientBuckets(module.parameters(), Sums().start, bucket_bytes=100)
    buckets.arm()
    loss().backward()
    with pytest.raises(RuntimeError, match="after its sum had been started"):
        loss().backward()


def test_parts_of_another_group_have_buckets_of_their_own_which_come_when_they_are_complete() -> None:
    found = parameters(10, 20, 30, 40, 50)
    ours = Sums()
    theirs = Sums()
    order: list[str] = []

    def start(sums: Sums, name: str) -> Callable[[torch.Tensor], Sums._Pending]:
        def begin(flat: torch.Tensor) -> Sums._Pending:
            order.append(f"{name} {flat.numel()}")
            return sums.start(flat)

        return begin

    others = dict.fromkeys((found[1], found[3]), start(theirs, "theirs"))
    buckets = GradientBuckets(found, start(ours, "ours"), others={**others, found[4]: None})
    assert [[p.numel() for p in bucket] for bucket in buckets.buckets] == [[40, 20], [30, 10]]
    buckets.arm()
    for parameter in reversed(found):
        buckets.note(parameter)
    assert order == ["theirs 60", "ours 40"]
    buckets.reduce()
    assert (ours.waited, theirs.waited) == (1, 1)
    assert found[4].grad.unique().tolist() == [5]  # this rank is the only one that has it
    assert found[1].grad.unique().tolist() == [5]  # 2 * 2 + 1
