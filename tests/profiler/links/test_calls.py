"""What is timed around exchanges is the runtime's own work, beside something that computes the same without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from planner.ir.cluster import AROUND, SITES
from profiler.links import calls
from runtime.optim.sharding import GradientBuckets

torch.set_num_threads(1)


def test_all_kinds_are_measured_by_growing_size_and_those_over_sites_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "_NUM_RUNS", 3)  # a median: of one run the machine alone may take longer than is sane
    for sites in (False, True):
        found = calls.exchange_calls("within-host", sites)
        assert [table.operation for table in found] == [each for each in AROUND if sites or each != SITES]
        for table in found:
            assert (table.num_ranks, table.link) == (1, "within-host")
            assert [size for size, _ in table.points] == sorted({size for size, _ in table.points})
            assert all(1e-6 <= seconds < 0.2 for _, seconds in table.points)


@pytest.mark.parametrize("edge", [2, 4])
def test_a_convolution_over_shared_sites_is_timed_beside_the_same_pairs_in_one_call(
    edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []

    def noted(call: Callable[[], Tensor], instead: Callable[[], Tensor], _: calls.Burst) -> float:
        pairs.append((call(), instead()))
        return 1.0

    monkeypatch.setattr(calls, "_call_s", noted)
    calls._sites_s(edge, calls.Burst())
    ((shared, alone),) = pairs
    assert shared.shape == (edge**3 // 2, 16)
    assert torch.allclose(shared, alone, rtol=1e-4, atol=1e-4)
    assert shared.grad_fn is not None


def test_gradients_are_the_same_with_and_without_the_sums_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GradientBuckets] = []
    found: list[list[Tensor]] = []

    def kept(*given: Any) -> GradientBuckets:
        made.append(GradientBuckets(*given))
        return made[-1]

    def once(longer_s: Callable[[], float]) -> float:
        longer_s()  # with the sums, then without
        found.append([parameter.grad for bucket in made[0].buckets for parameter in bucket])  # type: ignore[misc]
        return 1.0

    monkeypatch.setattr(calls, "GradientBuckets", kept)
    monkeypatch.setattr(calls, "_median_s", once)
    assert calls._gradient_sums_s(1 << 12, calls.Burst()) == 0.5  # of one of two
    assert [len(bucket) for bucket in made[0].buckets] == [12, 12]
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in found[0])
    assert not made[0]._hooks


class Counted:
    """A clock that says what has been done: each burst takes 100 s, a forward 1 s, a backward 2 s."""

    def __init__(self) -> None:
        self.now_s, self.order = 0.0, list[str]()

    def did(self, what: str, seconds: float) -> None:
        self.order.append(what)
        self.now_s += seconds

    def thread_time(self) -> float:
        return self.now_s

    def forward(self, x: Tensor) -> Tensor:
        self.did("forward", 1.0)
        y = x * 2
        y.register_hook(lambda _: self.did("backward", 2.0))
        return y


def test_forward_and_backward_each_come_behind_a_burst_that_is_not_in_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, x = Counted(), torch.ones(3, requires_grad=True)
    monkeypatch.setattr(calls, "time", clock)

    def burst() -> float:
        clock.did("burst", 100.0)
        return 100.0

    assert calls._passes_s(lambda: clock.forward(x), cast("calls.Burst", burst)) == 3.0
    assert clock.order == ["burst", "forward", "burst", "backward"]


def test_a_burst_goes_through_more_data_than_a_core_has_to_itself_and_does_as_much_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    burst = calls.Burst()
    burst.number = 2 * len(burst._inputs)
    seen: list[tuple[int, int]] = []

    def noted(x: Tensor, weight: Tensor, padding: int) -> Tensor:
        seen.append((x.data_ptr(), weight.data_ptr()))
        return x

    monkeypatch.setattr(calls, "conv2d", noted)
    burst()
    assert {seen.count(pair) for pair in seen} == {2}
    inputs, weights = burst._inputs, burst._weights
    assert sum(tensor.nbytes for tensor in (*inputs, *weights)) > 4 * 2**20
    burst()
    assert len(seen) == 2 * burst.number
