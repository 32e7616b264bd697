from __future__ import annotations

import random
from dataclasses import replace
from math import exp, log
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs import uncertainty
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.costs.simulator.events import run
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.simulator.replay import replayed
from planner.costs.stages.action_costs import StageCosts
from planner.costs.timeline import Trace
from planner.costs.uncertainty import MODEL, Deciles, deciles
from planner.ir.plan import Decision
from planner.ir.profile import (
    ONE_DEVICE,
    PIPELINE,
    STEP_RANGE,
    Correction,
    CostClass,
    Measurement,
    MeasuringProcess,
    Profile,
)
from planner.layers.boundary import Boundaries
from planner.schedules import names
from tests.planner.factories import chain_decision, slot_prices
from tests.planner.shared_hosts import random_plan

NUM_MICROBATCHES = 16


def simulated(profile: Profile, decision: Decision) -> tuple[CompiledProgram, StageCosts, SlotPrices, Trace]:
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    cost_model = CostModel(profile)
    costs = StageCosts(
        cost_model, Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, decision)), decision.micro_batches
    )
    compiled = compile_program(program, decision.micro_batches, costs.tied_ranks)
    prices = slot_prices(program, compiled, costs)
    return compiled, costs, prices, run(compiled, prices)


@pytest.mark.cases(30)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", names())
def test_a_replay_without_noise_is_the_trace(schedule: str, seed: int) -> None:
    compiled, _, prices, trace = simulated(*random_plan(random.Random(seed), schedule))
    assert replayed(compiled, prices, trace, {}, 3) == pytest.approx(np.full(3, trace.step_s), rel=1e-9)


def test_a_replay_with_one_action_longer_is_a_simulation_with_it_longer() -> None:
    profile, decision = one_rank()
    compiled, _, prices, trace = simulated(profile, decision)
    longer = replayed(compiled, prices, trace, {(0, 0): np.array([1.0, 3.0])}, 2)
    assert longer == pytest.approx([trace.step_s, trace.step_s + 2 * (trace.stops[0][0] - trace.starts[0][0])])


@pytest.fixture(autouse=True)
def exact_model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of what the profile says; what the model leaves out has tests of its own."""
    if "seen" not in request.fixturenames:
        monkeypatch.setattr(uncertainty, "MODEL", dict.fromkeys(MODEL, 0.0))


def one_rank(*processes: tuple[float, ...], **changes: object) -> tuple[Profile, Decision]:
    """One layer, 1 + 2 ms a micro-batch; runs as long as these factors say, by process."""
    profile = chain_profile(1, 1, loss_s=0.0)
    factors = [factor for process in processes for factor in process]

    def noisy(found: Measurement) -> Measurement:
        seconds = found.forward_s + found.backward_s
        return replace(found, raw_s=tuple(seconds * factor for factor in factors), **changes)

    measurements = {kind: tuple(map(noisy, found)) for kind, found in profile.measurements.items()}
    provenance = replace(profile.provenance, processes=tuple(MeasuringProcess(0.0, 0.0, 0.0, False) for _ in processes))
    profile = replace(profile, measurements=measurements, provenance=provenance)
    return profile, chain_decision(profile, (), (1,) * NUM_MICROBATCHES)


def found(profile: Profile, decision: Decision) -> Deciles:
    compiled, costs, prices, trace = simulated(profile, decision)
    return deciles(compiled, costs, prices, trace, 2000)


def width(case: tuple[Profile, Decision]) -> float:
    """Of the interval, over its middle."""
    seen = found(*case)
    return (seen.p90_s - seen.p10_s) / seen.p50_s


def normal(seed: int, count: int, spread: float) -> tuple[float, ...]:
    return tuple(1 + spread * np.random.default_rng(seed).standard_normal(count))


def test_what_is_independent_averages_out_and_what_is_common_does_not() -> None:
    of_a_sum = (NUM_MICROBATCHES * (1**2 + 2**2)) ** 0.5 / (NUM_MICROBATCHES * (1 + 2))
    assert width(one_rank(normal(0, 200, 0.03))) == pytest.approx(2 * 1.28 * 0.03 * of_a_sum, rel=0.15)
    levels = (1 + 0.03 * NormalDist().inv_cdf((number + 0.5) / 20) for number in range(20))
    processes = [(level,) * 10 for level in levels]
    assert width(one_rank(*processes)) == pytest.approx(2 * 1.28 * 0.03, rel=0.15)
    assert width(one_rank(spread=0.03 * 1.349)) == pytest.approx(2 * 1.28 * 0.03, rel=0.1)


def test_passes_that_drift_are_common_in_part() -> None:
    steps = np.random.default_rng(2).standard_normal(400)
    walk = [0.0]
    for step in steps:
        walk.append(0.9 * walk[-1] + step)
    drifting = np.array(walk[1:]) * 0.03 / np.std(walk)
    shuffled = np.random.default_rng(3).permutation(drifting)
    assert width(one_rank(tuple(1 + drifting))) > 2.5 * width(one_rank(tuple(1 + shuffled)))


def test_sizes_nobody_measured_widen_the_step_by_what_their_costs_are_uncertain() -> None:
    profile = chain_profile(2, 1, sizes=(1, 2, 4, 8), forward_s=(1e-3, 2e-3))
    exact, between = (predict(profile, chain_decision(profile, (), (size,) * 2))[0] for size in (4, 3))
    assert exact.p10_s == exact.p90_s == exact.step_s
    table = CostModel(profile).tables.at("kind-1", 3)
    low, high = (float((each[0] + 2 * each[1]) / 3) for each in (table.low, table.high))
    assert low < 1 < high
    assert between.p10_s == pytest.approx(between.step_s * low, rel=0.03)
    assert between.p90_s == pytest.approx(between.step_s * high, rel=0.03)


def test_overhead_and_messages_are_not_noisy() -> None:
    profile, decision = one_rank(spread=0.05)
    slow = replace(profile, action_overhead_s={"kind-1": 1e-2})
    narrow, wide = (found(each, decision) for each in (slow, profile))
    assert narrow.p90_s - narrow.p10_s == pytest.approx(wide.p90_s - wide.p10_s, rel=1e-3)


@pytest.mark.parametrize("seen", [0.0, 0.05, 0.3])
def test_what_runs_of_a_kind_of_plan_were_out_by_widens_its_range_and_not_that_of_others(seen: float) -> None:
    profile, decision = one_rank(spread=1e-6)
    other = Correction(CostClass(STEP_RANGE, PIPELINE), 2.0, 1)
    own = Correction(CostClass(STEP_RANGE, ONE_DEVICE), exp(seen), 3)
    corrections = (other, own) if seen else (other,)
    given = found(profile.corrected_by(corrections), decision)
    tenth = NormalDist().inv_cdf(0.9) * (seen or MODEL[ONE_DEVICE])
    assert log(given.p90_s / given.p10_s) == pytest.approx(2 * tenth, rel=0.15)
