"""Which plan is the faster, with what probability; of plans that cannot be told apart the simplest is taken."""

from __future__ import annotations

from dataclasses import replace
from math import log
from statistics import NormalDist

import numpy as np
import pytest

from planner.check import check
from planner.costs.cost_model import PriceBook
from planner.costs.ties import OWN, Ties
from planner.costs.uncertainty import MODEL
from planner.ir.plan import Decision, Plan
from planner.ir.problem import Problem
from planner.ir.profile import ONE_DEVICE, PIPELINE, MeasuringProcess, Profile
from planner.solvers import solver
from planner.solvers.candidates.choose import FASTEST
from tests.planner.factories import chain_decision, chain_profile

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
    ties = Ties(PriceBook(profile))
    few, many = alone(profile, 0, (4,)), alone(profile, 0, (1, 1, 1, 1))  # 6 % longer, on a machine that varies by 20
    assert ties.confidence(few, many) == 1.0
    assert ties.confidence(alone(profile, 1, (4,)), many) == pytest.approx(0.6, abs=0.15)
    assert np.std(ties.judged(few).steps) / np.mean(ties.judged(few).steps) == pytest.approx(0.2, rel=0.3)


def test_what_the_model_leaves_out_is_alike_in_plans_of_a_kind() -> None:
    profile = chain_profile(4, 2)
    ties = Ties(PriceBook(profile))
    one = alone(profile, 0)
    even, uneven = (chain_decision(profile, (cut,), (2, 2)) for cut in (2, 1))
    steps_s = {cut: np.median(ties.judged(plan).steps) for cut, plan in ((2, even), (1, uneven))}
    one_s = np.median(ties.judged(one).steps)
    apart = (MODEL[PIPELINE] ** 2 - MODEL[ONE_DEVICE] ** 2) ** 0.5
    assert np.std(np.log(ties.judged(even).steps / one_s)) == pytest.approx(apart, rel=0.1)
    ratios = np.log(ties.judged(even).steps / ties.judged(uneven).steps)
    assert np.std(ratios) == pytest.approx((2 * OWN) ** 0.5 * apart, rel=0.1)
    slower = replace(profile, action_overhead_s={"kind-1": 1e-3})
    held = Ties(PriceBook(slower))
    ratio = log(np.median(held.judged(one).steps) / np.median(held.judged(even).steps))
    assert held.confidence(even, one) == pytest.approx(NormalDist().cdf(ratio / apart), abs=SURE)
    assert steps_s[2] < steps_s[1]


def test_the_simplest_of_plans_that_cannot_be_told_apart_is_taken() -> None:
    profile = chain_profile(4, 3)
    ties = Ties(PriceBook(profile))
    two, three = chain_decision(profile, (2,), (2, 2)), chain_decision(profile, (2, 3), (2, 2))
    one = alone(profile, 0)
    assert ties.judged(one).simplicity < ties.judged(two).simplicity < ties.judged(three).simplicity
    sure = ties.confidence(two, one)
    assert sure > 0.9  # a third faster
    assert ties.simplest(two, [three, one], sure - 0.01) == two
    assert ties.simplest(two, [three, one], sure + 0.001) == one
    assert ties.is_tie(one, two, sure + 0.001)
    assert not ties.is_tie(one, two, sure)


def solved(profile: Profile, confidence: float) -> Plan:
    return solver("best-first")(Problem(profile, 16, confidence=confidence), None)


def test_a_second_device_that_hardly_helps_is_left_out_and_the_proof_stays() -> None:
    fastest, taken = solved(SLIGHT, 0.0), solved(SLIGHT, 0.8)
    assert fastest.search.tie is None
    assert len({rank for stage in fastest.decision.stages for rank in stage.ranks}) == 2
    assert [stage.ranks for stage in taken.decision.stages] == [(0,)]
    tie = taken.search.tie
    assert tie is not None
    assert tie.step_s == fastest.prediction.step_s
    assert tie.given_up == pytest.approx(taken.prediction.step_s / fastest.prediction.step_s - 1)
    assert 0.5 < tie.confidence < 0.8
    assert (taken.search.status, taken.search.bound_s) == ("proven", pytest.approx(fastest.search.bound_s))
    assert taken.search.gap == pytest.approx(0.0)
    assert (taken.alternatives[0].name, taken.alternatives[0].step_s) == (FASTEST, tie.step_s)
    assert "faster, a tie" in taken.alternatives[0].why_not
    assert check(taken, SLIGHT) == ()
    assert solved(SLIGHT, tie.confidence).decision == fastest.decision


def test_a_device_that_helps_much_is_used() -> None:
    profile = chain_profile(6, 2, speeds=(1.0, 1.0))
    assert solved(profile, 0.8).decision == solved(profile, 0.0).decision


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"step_s": 1.0}, "search.tie.step_s"),
        ({"given_up": 0.5}, "search.tie.given_up"),
        ({"confidence": 0.9}, "search.tie.confidence"),
    ],
)
def test_a_tie_that_is_none_is_a_fault(changes: dict[str, float], fault: str) -> None:
    plan = solved(SLIGHT, 0.8)
    assert plan.search.tie is not None
    spoilt = replace(plan, search=replace(plan.search, tie=replace(plan.search.tie, **changes)))
    assert any(found.startswith(fault) for found in check(spoilt, None))
