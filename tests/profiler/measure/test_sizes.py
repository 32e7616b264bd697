"""Which sizes are measured, in one process; progress over recorded profiles."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from planner.costs.layers.interpolation import layer_cost
from planner.ir.codec import fingerprint
from planner.ir.errors import StaleFileError, UsageError
from planner.ir.profile import Measurement, ModelSource, Optimizer
from profiler.measure.job import MeasuringJob
from profiler.measure.partial_results import (
    CapturedGraph,
    ChosenMeasurements,
    FinishedMeasurements,
    ModelCosts,
    SizeCosts,
)
from profiler.measure.progress import Overall, ProfileProgress, ProgressCounter
from profiler.measure.sizes import (
    KeyChange,
    Limits,
    key_changes,
    likely_sizes,
    middle,
    next_size,
    not_bracketed,
    reading_error,
)
from profiler.measure.timing import QUICK, TimingEffort, shared
from profiler.measure.worker import given_sizes, measure_model

Cost = Callable[[int], float]
Network = Mapping[str, Cost]
"""Seconds of forward + backward by layer and samples; a number below 0: the model does not run."""

LIMITS = Limits()
SMOOTH: Network = {"conv": lambda n: 0.02 * n + 0.001, "norm": lambda n: 0.004 * n, "head": lambda n: 0.001 + 1e-5 * n}


def cliff(at: int, factor: float = 0.5) -> Cost:
    """Twice as fast from more than ``at`` samples on."""
    return lambda n: 0.02 * n * (factor if n > at else 1.0)


def measured_at(network: Network, samples: int, keys: Mapping[str, str], spread: float) -> list[Measurement]:
    seconds = {name: cost(samples) for name, cost in network.items()}
    if min(seconds.values()) < 0:
        return []
    return [
        Measurement(name, samples, value_s / 3, 2 * value_s / 3, value_s / 3, value_s / 3, 0, 0, 10, spread, keys[name])
        for name, value_s in seconds.items()
    ]


def sampled(
    network: Network,
    batch: int,
    breaks: Mapping[str, int] | None = None,
    limits: Limits = LIMITS,
    spread: float = 0.0,
) -> dict[int, list[Measurement]]:
    """What is measured, in that order; ``breaks``: by layer, the last size on its first back end."""

    def keys_at(samples: int) -> dict[str, str]:
        return {name: str(name in (breaks or {}) and samples > (breaks or {})[name]) for name in network}

    changes = key_changes(keys_at, batch)
    found: dict[int, list[Measurement]] = {}
    while (size := next_size(batch, found, changes, limits, layer_cost)) is not None:
        assert size not in found
        found[size] = measured_at(network, size, keys_at(size), spread)
    return found


def worst_error(network: Network, found: Mapping[int, list[Measurement]], batch: int) -> float:
    """Of a whole step, over all sizes."""
    errors = []
    for samples in range(min(size for size in found if found[size]), batch + 1):
        lines = {name: [one for size in sorted(found) for one in found[size] if one.layer == name] for name in network}
        read_s = sum(sum(layer_cost(lines[name], samples).values[:2]) for name in network)
        errors.append(abs(read_s / sum(cost(samples) for cost in network.values()) - 1))
    return max(errors)


@pytest.mark.parametrize("batch", [16, 64, 96, 256])
def test_smooth_costs_need_fewer_sizes_than_the_batch_has_divisors_and_are_read_within_3_percent(batch: int) -> None:
    found = sampled(SMOOTH, batch)
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    assert len(found) < len(divisors)
    assert set(found) <= set(divisors)
    assert worst_error(SMOOTH, found, batch) < 0.03


def test_costs_in_proportion_need_the_ends_and_the_middle() -> None:
    assert list(sampled({"conv": lambda n: 0.02 * n}, 64)) == [1, 64, 8]


def test_more_is_measured_where_a_fixed_part_bends_the_line() -> None:
    found = sampled({"conv": lambda n: 0.02 + 0.02 * n}, 64)
    assert list(found)[:3] == [1, 64, 8]
    assert 3 < len(found) < 7
    assert worst_error({"conv": lambda n: 0.02 + 0.02 * n}, found, 64) < 0.03


@pytest.mark.parametrize("at", [5, 23, 40, 63])
def test_a_cliff_that_no_back_end_tells_of_is_bracketed_by_halves(at: int) -> None:
    found = sampled({"conv": cliff(at), "norm": lambda n: 0.004 * n}, 64, limits=Limits(most_sizes=20))
    assert {at, at + 1} <= set(found)
    assert worst_error({"conv": cliff(at), "norm": lambda n: 0.004 * n}, found, 64) < 0.03
    assert len(found) <= 20


@pytest.mark.parametrize("at", [1, 15, 23, 63])
def test_a_change_of_back_end_is_bracketed_without_search(at: int) -> None:
    network = {"conv": cliff(at), "norm": lambda n: 0.004 * n}
    found = sampled(network, 64, {"conv": at})
    assert {1, at, at + 1, 64} <= set(found)
    assert len(found) <= 6
    assert worst_error(network, found, 64) < 0.03


def test_a_small_layer_is_not_worth_a_size() -> None:
    small = {**SMOOTH, "tiny": cliff(23, 3.0)}
    factor = 0.0004 / 0.02
    small["tiny"] = lambda n: factor * cliff(23, 3.0)(n)
    assert len(sampled(small, 64)) == len(sampled(SMOOTH, 64))


def test_what_differs_by_chance_is_not_looked_into() -> None:
    noise = {1: 1.0, 8: 1.06, 64: 1.0}
    network = {"conv": lambda n: 0.02 * n * noise.get(n, 1.0)}
    assert set(sampled(network, 64, spread=0.15)) == set(noise)
    assert set(noise) < set(sampled(network, 64, spread=0.01))


def test_a_model_that_fails_at_few_samples_starts_where_it_runs() -> None:
    network = {"norm": lambda n: 0.01 * n if n > 2 else -1.0}
    found = sampled(network, 32)
    assert list(found)[:4] == [1, 2, 4, 32]
    assert [size for size in found if not found[size]] == [1, 2]
    assert sampled({"norm": lambda n: -1.0}, 4) == {1: [], 2: [], 4: []}
    assert list(sampled({"norm": lambda n: -1.0 if n == 6 else 1.0 * n}, 6)) == [1, 6, 3, 2]


def test_a_batch_of_one_has_one_size() -> None:
    assert list(sampled(SMOOTH, 1)) == [1]
    assert likely_sizes(1, {}, (), Limits(), layer_cost) == (1,)


def test_the_sizes_that_are_likely_are_the_ends_the_changes_and_a_middle_each() -> None:
    changes = (KeyChange(40, ("layer",)),)
    assert likely_sizes(64, {}, changes, LIMITS, layer_cost) == (1, 64, 40, 41, 8)
    assert likely_sizes(64, {64: ()}, changes, Limits(most_sizes=3), layer_cost)[0] == 1


def test_the_number_of_sizes_is_limited_and_the_larger_change_goes_first() -> None:
    network = {"small": cliff(9, 0.9), "large": lambda n: 10 * cliff(40)(n), "mid": lambda n: 3 * cliff(20)(n)}
    breaks = {"small": 9, "large": 40, "mid": 20}
    found = sampled(network, 64, breaks, Limits(most_sizes=6))
    assert set(found) == {1, 64, 40, 41, 20, 21}
    changes = tuple(KeyChange(at, (name,)) for name, at in breaks.items())
    assert [change.samples for change in not_bracketed(found, changes)] == [9]
    assert not_bracketed(sampled(network, 64, breaks, Limits(most_s=1e9)), changes) == ()


def test_where_passes_take_long_the_ends_are_measured_and_what_there_is_time_for() -> None:
    slow = {"conv": lambda n: 20.0 + 20.0 * n}
    assert set(sampled(slow, 64, {"conv": 30})) == {1, 64}
    assert set(sampled(slow, 64, limits=Limits(most_s=30 * 1600.0))) == {1, 64, 8, 2}
    assert len(sampled(slow, 64, limits=Limits(most_s=1e9))) > 4


def test_a_size_already_measured_is_not_asked_for_again() -> None:
    whole = sampled(SMOOTH, 64)
    some = dict(list(whole.items())[:2])
    assert next_size(64, some, (), Limits(), layer_cost) == list(whole)[2]
    assert next_size(64, dict(reversed(whole.items())), (), Limits(), layer_cost) is None


@pytest.mark.parametrize(
    ("low", "high", "batch", "expected"),
    [(1, 64, 64, 8), (1, 8, 8, 2), (1, 4, 4, 2), (2, 4, 4, 3), (1, 7, 7, 3), (4, 5, 64, None), (1, 97, 97, 10)],
)
def test_the_middle_is_a_divisor_near_the_geometric_mean(low: int, high: int, batch: int, expected: int | None) -> None:
    assert middle(low, high, batch) == expected


def test_changes_of_back_end_are_found_by_asking_also_beyond_what_is_asked_one_by_one() -> None:
    asked: list[int] = []

    def keys_at(samples: int) -> dict[str, str]:
        asked.append(samples)
        return {"a": str(samples > 1), "b": str(samples > 777), "c": "x" if samples <= 15 else "y"}

    assert key_changes(keys_at, 1024) == (KeyChange(1, ("a",)), KeyChange(15, ("c",)), KeyChange(777, ("b",)))
    assert len(asked) == len(set(asked)) < 300
    assert key_changes(keys_at, 1) == ()


def test_what_cannot_be_read_is_in_error_without_end() -> None:
    (one,) = measured_at({"a": lambda n: 1.0}, 4, {"a": "x"}, 0.0)
    assert reading_error([one], {"a": [replace(one, samples=1, key="y")]}, Limits(), layer_cost) == float("inf")
    assert reading_error([one], {}, Limits(), layer_cost) == float("inf")


SOURCE = ModelSource("tests.profiler.measure.test_sizes:convolutions", {}, (8, 2, 12, 12))
JOB = MeasuringJob(SOURCE, Optimizer(), (), quick=True, read=layer_cost)


def convolutions() -> nn.Module:
    """The back end changes from one sample to two."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))


def measured(job: MeasuringJob) -> tuple[ModelCosts, list[object]]:
    reports: list[object] = []
    return measure_model(reports.append, job), reports


@pytest.fixture(scope="module")
def first() -> tuple[ModelCosts, list[object]]:
    return measured(JOB)


def test_it_reports_the_graph_then_every_size_as_it_is_finished(first: tuple[ModelCosts, list[object]]) -> None:
    costs, reports = first
    graphs = [report for report in reports if isinstance(report, CapturedGraph)]
    sizes = [report for report in reports if isinstance(report, SizeCosts)]
    assert len(graphs) == 1
    assert tuple(sizes) == costs.done.sizes
    assert [size.samples for size in sizes][:2] == [1, 8]
    assert len({one.key for one in sizes[0].measurements} | {one.key for one in sizes[1].measurements}) > 2
    assert {1, 2, 8} <= set(costs.chosen.sizes)  # both sides of the change, and the ends
    for size in sizes:
        assert {len(one.raw_s) for one in size.measurements} == {QUICK.min_runs}
        assert size.step_s == pytest.approx(sum(one.forward_s + one.backward_s for one in size.measurements))
    progress = [report for report in reports if isinstance(report, ProfileProgress)]
    assert all(at.done <= at.total for at in progress)
    assert progress[-1].eta_s < 0.5 * progress[-1].total


def test_what_is_chosen_or_given_is_measured_and_no_more() -> None:
    costs, _ = measured(replace(JOB, chosen=ChosenMeasurements((2, 3), ())))
    assert [size.samples for size in costs.done.sizes] == [2, 3]
    assert [size.samples for size in measured(replace(JOB, sizes=(5, 5, 1)))[0].done.sizes] == [1, 5]


def test_what_is_done_is_not_measured_again(first: tuple[ModelCosts, list[object]]) -> None:
    costs, reports = first
    (graph,) = [report.graph for report in reports if isinstance(report, CapturedGraph)]
    done = FinishedMeasurements(costs.done.sizes[:2])
    again, seen = measured(replace(JOB, chosen=costs.chosen, done=done, graph=fingerprint(graph)))
    assert again.chosen == costs.chosen
    assert not {1, 8} & {report.samples for report in seen if isinstance(report, ProfileProgress) and report.samples}
    assert not {1, 8} & {report.samples for report in seen if isinstance(report, SizeCosts)}
    assert again.done.sizes[:2] == done.sizes


def test_another_graph_is_refused() -> None:
    with pytest.raises(StaleFileError, match=r"the model changed while it was profiled[\s\S]*before: sha256:0"):
        measured(replace(JOB, graph="sha256:0"))


def test_sizes_are_given_by_the_user_another_process_or_the_model() -> None:
    assert given_sizes(JOB, 8, True) == ()
    assert given_sizes(replace(JOB, read=None), 12, True) == (1, 2, 3, 4, 6, 12)
    assert given_sizes(replace(JOB, sizes=(4, 2)), 8, True) == (2, 4)
    assert given_sizes(replace(JOB, sizes=(4, 2), chosen=ChosenMeasurements((3,), ())), 8, True) == (3,)
    assert given_sizes(JOB, 8, False) == (8,)
    with pytest.raises(UsageError, match="with 8 samples only"):
        given_sizes(replace(JOB, sizes=(4,)), 8, False)


def test_processes_share_about_as_many_passes_as_one_makes() -> None:
    def passes(effort: TimingEffort) -> int:
        return effort.num_warm_ups + effort.min_runs + effort.split_runs + 1

    alone = TimingEffort()
    assert shared(alone, 1) == alone
    three = shared(alone, 3)
    assert (three.num_warm_ups, three.min_runs, three.max_runs, three.split_runs) == (1, 5, 10, 3)
    assert passes(alone) < 3 * passes(three) <= 1.5 * passes(alone)
    assert shared(alone, 20).min_runs == 4


RECORDS = Path(__file__).resolve().parents[2] / "data" / "profiling"


def never_falls(seen: Sequence[ProfileProgress]) -> bool:
    """But for rounding."""
    return all(b.done / b.total >= a.done / a.total - 1e-12 for a, b in pairwise(at for at in seen if at.total))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replayed(record: dict[str, Any]) -> list[tuple[float, ProfileProgress]]:
    """What a profile would have shown, and when."""
    clock = Clock()
    seen = list[tuple[float, ProfileProgress]]()
    overall = Overall(1, lambda at: seen.append((clock.now_s, at)), record["links"], record["link_s"], clock)
    overall.show(ProfileProgress("capture", 0.0, 0.0, 0.0, 0.0, None))
    counter: ProgressCounter | None = None
    for at_s, what, *arguments in record["events"]:
        clock.now_s = at_s
        if what in ("ended", "link"):
            getattr(overall, what)(*arguments)
            continue
        if counter is None:
            overall.captured()
            counter = ProgressCounter(overall.show, record["passes"], record["passes"], record["parts"], clock)
        getattr(counter, what)(*arguments)
    return seen


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_left_is_known_within_a_factor_of_two(path: Path) -> None:
    record = json.loads(path.read_text("utf-8"))
    seen = replayed(record)
    end_s = record["events"][-1][0]
    assert never_falls([at for _, at in seen])
    assert seen[-1][1].done == seen[-1][1].total
    captured_s = record["events"][0][0]
    guessed = [(at_s, at.eta_s) for at_s, at in seen if at_s > captured_s and at.eta_s is not None]
    assert guessed[0][0] < 10.0 + captured_s
    for at_s, eta_s in guessed:
        left_s = end_s - at_s
        if at_s >= 10.0 and left_s > 0.1 * end_s:
            assert 0.5 <= eta_s / left_s <= 2.0, (at_s, eta_s, left_s)


def test_sizes_that_nobody_expected_lower_no_share() -> None:
    clock = Clock()
    seen = list[ProfileProgress]()
    overall = Overall(2, seen.append, now=clock)
    for process in range(2):
        counter = ProgressCounter(overall.show, 3, 2, has_parts=True, now=clock)
        counter.expect((1, 4))
        for samples in (1, 2, 4):
            counter.start_size(samples)
            for _ in range(4):  # one more than planned
                clock.now_s += 0.1 * samples
                counter.passed(samples, "layer", 1.0, 0.0)
            counter.end_size(samples)
            counter.expect((4,) if samples == 2 else (), [0.5])
        counter.end_size(3)  # it did not run
        counter.start_parts([0.1, 0.1], 4)
        for _ in range(3):  # one more than planned
            clock.now_s += 1.0
            counter.passed_part("layer", 1.0, 0.0)
            counter.end_round(2)
        overall.ended()
        assert seen[-1].eta_s == pytest.approx(5.8 * (1 - process), abs=0.1)
    assert never_falls(seen)
    assert seen[-1].done == pytest.approx(seen[-1].total, rel=0.02)


def test_a_process_that_is_not_run_counts_for_nothing() -> None:
    clock = Clock()
    seen = list[ProfileProgress]()
    overall = Overall(3, seen.append, now=clock)
    overall.ended(measured=False)
    overall.show(ProfileProgress("capture", 0.0, 0.0, 0.0, 0.0, None))
    assert (seen[-1].done, seen[-1].total, seen[-1].eta_s) == (0.0, 0.0, None)
    clock.now_s = 10.0
    overall.show(ProfileProgress("layer", 1.0, 0.0, 5.0, 10.0, 5.0, 1))
    assert seen[-1].eta_s == 5.0 + 15.0
