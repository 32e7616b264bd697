"""What a slice costs, lengths of slices and cuts of stages beside exhaustive search, and plans beside the checker."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest

from planner import faults_of
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import running
from planner.extras.token_slices.prices import SAVED, SlicePrices
from planner.extras.token_slices.search import SliceTimes, balanced, best_slices
from planner.ir import codec
from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import AxisPart, Plan
from planner.ir.problem import SAMPLE_DIMS, TIME_DIMS, Problem
from planner.solvers import solver
from tests.planner.causal import TOKENS, WIDTH, attention_s, graph, profile


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (4, 8), (8, 16), (12, 14), (6, 10)])
@pytest.mark.parametrize("samples", [1, 2])
def test_attention_behind_other_tokens_costs_what_fits_the_measurements(start: int, stop: int, samples: int) -> None:
    made = profile()
    (kind,) = made.measurements
    table = CostModel(made).beside(SlicePrices).table(kind, AxisPart(samples, start, stop))
    at = [layer.name for layer in made.graph.layers].index("a0")
    own = attention_s(samples, stop - start, 0)
    rise = attention_s(samples, stop - start, start) - own
    alone = CostModel(made).beside(SlicePrices).table(kind, AxisPart(samples, 0, stop - start)).costs[0, at]
    assert table.costs[0, at] - alone == pytest.approx(rise, rel=1e-6, abs=1e-12)
    if stop - start in (2, 4, 8):
        assert alone == pytest.approx(own)


def test_without_such_measurements_a_slice_takes_as_long_as_it_reads_pairs() -> None:
    made = profile(behind=False)
    (kind,) = made.measurements
    prices = CostModel(made).beside(SlicePrices)
    at = [layer.name for layer in made.graph.layers].index("a0")
    first, later = (prices.table(kind, AxisPart(1, start, start + 4)).costs[0, at] for start in (0, 8))
    assert later == pytest.approx(first * (1 + 2 * 8 / 4))


def test_layers_without_attention_add_up_to_the_whole_over_any_slices() -> None:
    made = profile()
    (kind,) = made.measurements
    cost_model = CostModel(made)
    plain = [at for at, layer in enumerate(made.graph.layers) if layer.kind != "attention"]
    parts = [
        cost_model.beside(SlicePrices).table(kind, AxisPart(2, *ends)).costs[:, plain]
        for ends in ((0, 5), (5, 9), (9, 16))
    ]
    whole = np.diff(cost_model.tables.at(kind, 2).forward_s)[plain]
    assert np.sum(parts, axis=0)[0] == pytest.approx(whole)


def test_what_a_slice_reads_of_others_is_kept_and_counted_in_bytes() -> None:
    made = profile()
    (kind,) = made.measurements
    prices = CostModel(made).beside(SlicePrices)
    at = [layer.name for layer in made.graph.layers].index("a0")
    received = [prices.table(kind, AxisPart(2, a, b)).received[at] for a, b in ((0, 8), (8, 16), (0, TOKENS))]
    keys_and_values = 2 * 2 * WIDTH * 4  # of both samples, a token
    assert received == [8 * keys_and_values, 16 * keys_and_values, 0]
    assert prices.table(kind, AxisPart(2, 8, 16)).costs[SAVED + 1, at] == 8 * keys_and_values


def random_times(seed: int, count: int = 7) -> SliceTimes:
    numbers = np.random.default_rng(seed)
    points = tuple(range(count + 1))
    seconds = np.full((count + 1, count + 1), np.inf)
    a, b, c = numbers.uniform(0, 1, 3)
    for start, stop in combinations(points, 2):
        seconds[start, stop] = a + b * (stop - start) + c * start * (stop - start) + numbers.uniform(0, 0.3)
    return SliceTimes(points, seconds)


def formula(times: SliceTimes, ends: tuple[int, ...], stages: int, batches: int) -> float:
    each = [times.seconds[a, b] for a, b in pairwise(ends)]
    return batches * sum(each) + (stages - 1) * max(each)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 1), (8, 1), (8, 3)])
def test_no_lengths_of_slices_are_better_by_the_formula(seed: int, stages: int, batches: int) -> None:
    times = random_times(seed)
    last = len(times.points) - 1
    every = [(0, *cuts, last) for count in range(last) for cuts in combinations(range(1, last), count)]
    least = min(formula(times, ends, stages, batches) for ends in every)
    slices, found = best_slices(times, stages, batches)
    assert found == pytest.approx(least)
    assert sum(slices) == last
    assert formula(times, tuple(int(x) for x in running(np.array(slices, dtype=float))), stages, batches) == found


@pytest.mark.parametrize("seed", range(12))
def test_no_cut_into_stages_has_a_faster_slowest_stage(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    sums = [running(numbers.uniform(0, 1, 9)) for _ in range(3)]
    positions = (0, 1, 3, 4, 6, 8, 9)
    hops = numbers.uniform(0, 0.5, 7)
    hops[[0, -1]] = 0.0

    def slowest(bounds: tuple[int, ...]) -> float:
        at = [positions.index(each) for each in bounds]
        ends = zip(pairwise(at), sums, strict=True)
        return max(own[positions[b]] - own[positions[a]] + hops[a] + hops[b] for (a, b), own in ends)

    every = [(0, *cuts, 9) for cuts in combinations(positions[1:-1], 2)]
    assert slowest(balanced(sums, positions, hops)) == pytest.approx(min(map(slowest, every)))


def planned(batch: int = 1, **asked: object) -> Plan:
    return solver("best-first")(
        Problem(profile(), batch, allow=(SAMPLE_DIMS, TIME_DIMS), **{"confidence": 0.0, **asked}), None
    )


def test_one_sequence_on_two_devices_is_faster_in_slices_and_the_plan_is_good() -> None:
    whole = solver("best-first")(Problem(profile(), 1, confidence=0.0), None)
    plan = planned()
    assert len(plan.decision.stages) == 2
    assert plan.decision.num_parts > 1
    assert sum(plan.decision.token_slices) == TOKENS
    assert plan.prediction.step_s < 0.8 * whole.prediction.step_s
    assert faults_of(plan, profile()) == ()
    assert faults_of(plan, None) == ()
    assert [other.name for other in plan.alternatives] == ["no token slices"]
    assert plan.search.status == "heuristic"


def test_unequal_lengths_pay_where_attention_grows_with_what_is_before() -> None:
    points = tuple(range(TOKENS + 1))
    seconds = np.full((TOKENS + 1, TOKENS + 1), np.inf)
    for start, stop in combinations(points, 2):
        seconds[start, stop] = 2e-4 + attention_s(1, stop - start, start)
    times = SliceTimes(points, seconds)
    slices, found = best_slices(times, 8, 1)
    assert list(slices) == sorted(slices, reverse=True)
    assert slices[0] > 2 * slices[-1]
    equal = [tuple(range(0, TOKENS + 1, length)) for length in (1, 2, 4, 8, 16)]
    assert found < 0.97 * min(formula(times, ends, 8, 1) for ends in equal)


def test_slices_that_are_asked_for_are_taken() -> None:
    plan = planned(2, token_slices=(9, 7), schedules=("1f1b",), micro_batch_sizes=(1,))
    assert plan.decision.token_slices == (9, 7)
    assert plan.decision.micro_batches == (1, 1)
    assert faults_of(plan, profile()) == ()


def test_slices_on_one_device_need_no_link() -> None:
    alone = profile(1)
    alone = replace(alone, cluster=replace(alone.cluster, links={}))
    plan = solver("best-first")(Problem(alone, 2, allow=("sample", "time"), token_slices=(8, 8), confidence=0.0), None)
    assert plan.decision.token_slices == (8, 8)


def test_nothing_is_sliced_where_that_is_slower_or_not_allowed() -> None:
    slow = profile(latency_s=1.0)
    allowed = solver("best-first")(Problem(slow, 1, allow=(SAMPLE_DIMS, TIME_DIMS), confidence=0.0), None)
    plain = solver("best-first")(Problem(slow, 1, confidence=0.0), None)
    assert allowed.decision == plain.decision
    assert "token slices" in [each.what for each in allowed.search.rejected]
    assert "token_slices" not in codec.dumps(plain)


def test_a_network_that_cannot_be_sliced_is_refused_where_time_may_be_cut() -> None:
    two_ways = replace(profile(), graph=graph(causal=False))
    with pytest.raises(UnsupportedModelError, match="a0 cannot be run in token slices"):
        solver("best-first")(Problem(two_ways, 1, allow=(TIME_DIMS,), confidence=0.0), None)


@pytest.mark.parametrize(
    ("slices", "fault"),
    [((4, 4), "do not make up a sequence"), ((8, 8, 0), "0 is less than 1"), ((8, 4, 4), "program")],
)
def test_the_checker_finds_other_slices_than_the_program_has(slices: tuple[int, ...], fault: str) -> None:
    plan = planned(token_slices=(8, 8))
    edited = replace(plan, decision=replace(plan.decision, token_slices=slices))
    assert any(fault in each for each in faults_of(edited, profile()))


def test_the_checker_prices_other_lengths_otherwise() -> None:
    plan = planned(token_slices=(8, 8))
    edited = replace(plan, decision=replace(plan.decision, token_slices=(10, 6)))
    assert any(each.startswith("prediction.step_s") for each in faults_of(edited, profile()))
