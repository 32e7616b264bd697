"""Which plan is the faster, with what probability; more ranks are used only where that is sure."""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.pricing import Pricing
from planner.costs.ties import DRAWS, ERRORS, OWN, Judged, Ties
from planner.ir.codec import fingerprint
from planner.ir.plan import Decision, Plan
from planner.ir.problem import Problem
from planner.ir.profile import ONE_DEVICE, PIPELINE, MeasuringProcess, Profile
from planner.solvers import solver
from planner.solvers.candidates.choose import FASTEST
from tests.oracles.plans import check
from tests.planner.factories import chain_decision

SURE = 0.03
"""How near shares of the draws come to a probability."""


SLIGHT = chain_profile(18, 2, speeds=(1.0, 0.1), parameter_bytes=2**22)
"""The second device can do an eighteenth of the work meanwhile."""


def noisy(profile: Profile, processes: int = 40, spread: float = 0.2) -> Profile:
    """Measured by processes that differ by ``spread``."""
    levels = np.repeat(1 + spread * np.random.default_rng(0).standard_normal(processes), 5)
    return replace(
        profile,
        measurements={
            kind: tuple(replace(m, raw_s=tuple((m.forward_s + m.backward_s) * levels)) for m in found)
            for kind, found in profile.measurements.items()
        },
        provenance=replace(profile.provenance, processes=(MeasuringProcess(0.0, 0.0, 0.0, False),) * processes),
    )


def alone(profile: Profile, rank: int, micro_batches: tuple[int, ...] = (2, 2)) -> Decision:
    return chain_decision(profile, (), micro_batches, ranks=((rank,),))


def test_errors_that_plans_share_leave_no_doubt_and_others_do() -> None:
    profile = noisy(chain_profile(3, 2, accumulate_s=2.4e-4))
    ties = Ties(Pricing.of(profile))
    few = alone(profile, 0, (4,))
    many = alone(profile, 0, (1, 1, 1, 1))  # 6 % longer, on a machine that varies by 20
    assert ties.confidence(few, many) == 1.0
    assert ties.confidence(alone(profile, 1, (4,)), many) == pytest.approx(0.6, abs=0.15)
    assert np.std(ties.judged(few).steps) / np.mean(ties.judged(few).steps) == pytest.approx(0.2, rel=0.3)


def test_what_the_model_leaves_out_is_alike_in_plans_of_a_kind() -> None:
    profile = chain_profile(4, 2)
    ties = Ties(Pricing.of(profile))
    one = alone(profile, 0)
    even, uneven = (chain_decision(profile, (cut,), (2, 2)) for cut in (2, 1))
    steps_s = {cut: np.median(ties.judged(plan).steps) for cut, plan in ((2, even), (1, uneven))}
    one_s = np.median(ties.judged(one).steps)
    apart = (ERRORS[PIPELINE] ** 2 - ERRORS[ONE_DEVICE] ** 2) ** 0.5
    assert np.std(np.log(ties.judged(even).steps / one_s)) == pytest.approx(apart, rel=0.1)
    ratios = np.log(ties.judged(even).steps / ties.judged(uneven).steps)
    assert np.std(ratios) == pytest.approx((2 * OWN) ** 0.5 * apart, rel=0.1)
    slower = replace(profile, action_overhead_s={"kind-1": 1e-3})
    held = Ties(Pricing.of(slower))
    ratio = log(np.median(held.judged(one).steps) / np.median(held.judged(even).steps))
    assert held.confidence(even, one) == pytest.approx(NormalDist().cdf(ratio / apart), abs=SURE)
    assert steps_s[2] < steps_s[1]


def test_of_plans_that_cannot_be_told_apart_one_on_the_fewest_ranks_is_taken() -> None:
    profile = chain_profile(4, 3)
    ties = Ties(Pricing.of(profile))
    two = chain_decision(profile, (2,), (2, 2))
    three = chain_decision(profile, (2, 3), (2, 2))
    one = alone(profile, 0)
    assert [ties.judged(plan).num_ranks for plan in (one, two, three)] == [1, 2, 3]
    sure = ties.confidence(two, one)
    assert sure > 0.9  # a third faster
    assert ties.taken(two, [three, one], sure - 0.01) == two
    assert ties.taken(two, [three, one], sure + 0.001) == one
    assert ties.is_tie(one, two, sure + 0.001)
    assert not ties.is_tie(one, two, sure)


def judged(sample_s: float, num_ranks: int, num_exchanges: int, sureness: float = 0.0) -> Judged:
    """A plan that takes 1 s in all draws, but in a share of them ``sureness`` longer than anything."""
    steps = np.where(np.arange(DRAWS) < sureness * DRAWS, 10.0, 1.0 - sureness / 10)
    return Judged(steps, sample_s, num_ranks, num_exchanges)


class Figures(Ties):
    """Plans that are judged by the figures given for them."""

    def __init__(self, figures: dict[str, Judged]) -> None:
        self._figures = figures

    def judged(self, decision: Decision, candidate: Candidate | None = None) -> Judged:
        return self._figures[fingerprint(decision)]


def taken(plans: dict[str, Judged], best: str, confidence: float = 0.8) -> str:
    """By the rule, of plans that are told by their figures alone."""
    profile = chain_profile(2, 1)
    made = {name: alone(profile, 0, (number,)) for number, name in enumerate(plans, 1)}
    ties = Figures(
        {
            fingerprint(plan): replace(plans[name], steps=plans[name].steps * plan.global_batch)
            for name, plan in made.items()
        }
    )
    rest = [plan for name, plan in made.items() if name != best]
    chosen = ties.taken(made[best], rest, confidence)
    assert ties.taken(made[best], rest[::-1], confidence) == chosen, "whatever the order that they were found in"
    return next(name for name, plan in made.items() if plan == chosen)


FAST = judged(1.0, 2, 40)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ({"cuts less": judged(1.065, 2, 6)}, "fast"),  # data parallelism beside a pipeline, on as many ranks
        ({"cuts less": judged(1.009, 2, 6)}, "cuts less"),
        ({"cuts less": judged(1.009, 2, 6), "least": judged(1.008, 2, 5)}, "least"),
        ({"cuts less": judged(1.009, 2, 6, 0.9)}, "fast"),  # a little slower, and surely
        ({"leaner": judged(1.2, 1, 0, 0.7)}, "leaner"),
        ({"leaner": judged(1.2, 1, 0, 0.9)}, "fast"),
        ({"leaner": judged(1.2, 1, 0), "lean": judged(1.1, 1, 9)}, "lean"),
        ({"leaner": judged(1.105, 1, 0), "lean": judged(1.1, 1, 9)}, "leaner"),
        ({"leaner": judged(1.105, 1, 0, 0.7), "lean": judged(1.1, 1, 9)}, "leaner"),
        ({"more": judged(1.001, 3, 0)}, "fast"),
        ({}, "fast"),
    ],
)
def test_more_ranks_need_confidence_and_of_as_many_the_fastest_at_the_mean_is_taken(
    others: dict[str, Judged], expected: str
) -> None:
    assert taken({"fast": FAST, **others}, "fast") == expected


def test_what_is_taken_ties_with_the_fastest_though_ties_are_no_equivalence() -> None:
    """Fast and lean tie, lean and leanest too; fast is surely faster than leanest, which is not taken."""
    plans = {"fast": FAST, "lean": judged(1.1, 2, 1), "leanest": judged(1.2, 1, 0, 0.9)}
    plans["fast"] = replace(FAST, num_ranks=3)
    assert taken(plans, "fast") == "lean"


def solved(profile: Profile, confidence: float) -> Plan:
    return solver("best-first")(Problem(profile, 16, confidence=confidence), None)


def test_a_second_device_that_hardly_helps_is_left_out_and_the_proof_stays() -> None:
    fastest = solved(SLIGHT, 0.0)
    taken = solved(SLIGHT, 0.8)
    assert fastest.search.tie is None
    assert len({rank for stage in fastest.decision.stages for rank in stage.ranks}) == 2
    assert [stage.ranks for stage in taken.decision.stages] == [(0,)]
    tie = taken.search.tie
    assert tie is not None
    assert (tie.step_s, tie.num_ranks) == (fastest.prediction.step_s, 2)
    assert tie.given_up == pytest.approx(taken.prediction.step_s / fastest.prediction.step_s - 1)
    assert 0.5 < tie.confidence < 0.8
    assert (taken.search.status, taken.search.bound_s) == ("proven", pytest.approx(fastest.search.bound_s))
    assert taken.search.gap == pytest.approx(0.0)
    assert (taken.alternatives[0].name, taken.alternatives[0].step_s) == (FASTEST, tie.step_s)
    assert "faster, a tie" in taken.alternatives[0].why_not
    assert check(taken, SLIGHT) == ()
    assert solved(SLIGHT, tie.confidence).decision == fastest.decision


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"step_s": 1.0}, "search.tie.step_s"),
        ({"given_up": 0.5}, "search.tie.given_up"),
        ({"confidence": 0.9}, "search.tie.confidence"),
        ({"num_ranks": 1}, "search.tie.num_ranks"),
    ],
)
def test_a_tie_that_is_none_is_a_fault(changes: dict[str, float], fault: str) -> None:
    plan = solved(SLIGHT, 0.8)
    assert plan.search.tie is not None
    spoilt = replace(plan, search=replace(plan.search, tie=replace(plan.search.tie, **changes)))
    assert any(found.startswith(fault) for found in check(spoilt, None))
