"""Every way to spoil a plan is found by the independent checker, and named with its numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner import faults_of
from planner.costs.predict import predict
from planner.ir.plan import Decision, Measured, Placement, Plan, RankPrediction, Stage
from planner.ir.problem import ALWAYS, LATENCY, NEVER, Problem, Request
from planner.ir.profile import Optimizer, Profile
from planner.solvers import solver
from tests.oracles.plans import check as check_plainly
from tests.planner.factories import chain_decision, plan_of


@functools.cache
def profile() -> Profile:
    return chain_profile(
        6, 2, forward_s=(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3), parameter_bytes=2**20, bandwidth_bytes_per_s=1e8
    )


@functools.cache
def pipeline() -> Plan:
    return solver("best-first")(Problem(profile(), 8, confidence=0.0))


@functools.cache
def replicas() -> Plan:
    return solver("data-parallel")(Problem(profile(), 8, confidence=0.0))


def decided(plan: Plan, **changes: object) -> Plan:
    return replace(plan, decision=replace(plan.decision, **changes))


def programmed(first: tuple[str, ...] = (), second: tuple[str, ...] = (), cut: int = 0) -> Plan:
    """The pipeline with other actions before those of its two ranks, the last ``cut`` of the first left out."""
    one, two = pipeline().decision.program
    return decided(pipeline(), program=((*first, *one[: len(one) - cut]), (*second, *two)))


def divided(*points: int, layers: tuple[str, ...] = ()) -> Plan:
    """The replicas with samples cut at other points, of some layers or of all."""
    decision = replicas().decision
    cut = {name: Placement(0, {"sample": points}) for name in layers or decision.layers}
    return decided(replicas(), layers={**decision.layers, **cut})


def staged(*second: object) -> Plan:
    return decided(pipeline(), stages=(pipeline().decision.stages[0], Stage(*second)))


def moved(decision: Decision, name: str, placement: Placement | None) -> dict[str, Placement]:
    layers = {layer: old for layer, old in decision.layers.items() if layer != name}
    return {**layers, name: placement} if placement is not None else layers


def predicted(plan: Plan, **changes: object) -> Plan:
    return replace(plan, prediction=replace(plan.prediction, **changes))


def with_rank(plan: Plan, **changes: object) -> Plan:
    ranks: tuple[RankPrediction, ...] = plan.prediction.ranks
    return predicted(plan, ranks=(replace(ranks[0], **changes), *ranks[1:]))


def searched(plan: Plan, **changes: object) -> Plan:
    return replace(plan, search=replace(plan.search, **changes))


SPOILS: dict[str, Callable[[], Plan]] = {
    "the model is another one": lambda: replace(
        pipeline(), inputs=replace(pipeline().inputs, model_fingerprint="sha256:0")
    ),
    "the cluster is another one": lambda: replace(
        pipeline(), inputs=replace(pipeline().inputs, cluster_fingerprint="sha256:0")
    ),
    "another model source": lambda: replace(
        pipeline(), inputs=replace(pipeline().inputs, model=replace(profile().model, dtype="float64"))
    ),
    "layer l2 is in no stage": lambda: decided(pipeline(), layers=moved(pipeline().decision, "l2", None)),
    "layer l9 is not in the model": lambda: decided(pipeline(), layers=moved(pipeline().decision, "l9", Placement(0))),
    "l0.stage: 7 is none of 2 stages": lambda: decided(
        pipeline(), layers=moved(pipeline().decision, "l0", Placement(7))
    ),
    "which stage 1 makes": lambda: decided(pipeline(), layers=moved(pipeline().decision, "l0", Placement(1))),
    "rank 0 is in stage 0 and in stage 1": lambda: staged((0,), ("n0/cpu0",)),
    "in the cluster it is n0/cpu1": lambda: staged((1,), ("n0/cpu9",)),
    "rank 5; the program has 2": lambda: staged((5,), ("n0/cpu5",)),
    "3 parts for the 2 ranks of its stage": lambda: divided(0, 2, 4, 8),
    "the predicted step is": lambda: divided(0, 1, 8, layers=("l1",)),
    "leaves rank 1 none": lambda: divided(0, 8, 8),
    "micro_batches[1]: 0 is less than 1": lambda: decided(pipeline(), micro_batches=(8, 0)),
    "is not the global batch of 9": lambda: decided(pipeline(), micro_batches=(2, *(1,) * 7)),
    "the program is not legal": lambda: programmed(cut=1),
    "0F0 on rank 1; stage 0 is on ranks [0]": lambda: programmed(second=("0F0",)),
    "'7F0' names stage 7, there are 2": lambda: programmed(second=("7F0",)),
    "'1F99' names microbatch 99, there are 8": lambda: programmed(second=("1F99",)),
    "'0X0' is no action": lambda: programmed(("0X0",)),
    "recomputed": lambda: predicted(
        pipeline(),
        step_s=pipeline().prediction.step_s * (1 + 1e-6),
        samples_per_s=pipeline().prediction.samples_per_s / (1 + 1e-6),
    ),
    "is predicted to hold 1 bytes": lambda: with_rank(pipeline(), peak_bytes=1),
    "more than its limit of 1000": lambda: with_rank(pipeline(), memory_limit_bytes=1000),
    "its device": lambda: with_rank(pipeline(), memory_limit_bytes=2**40),
    "1 ranks are predicted": lambda: predicted(pipeline(), ranks=pipeline().prediction.ranks[:1]),
    "is above the step": lambda: searched(pipeline(), bound_s=1.0),
    "is not step over bound - 1": lambda: searched(pipeline(), gap=0.5),
    "called proven with a bound": lambda: searched(pipeline(), bound_s=pipeline().prediction.step_s / 2, gap=1.0),
    "above the 0.0 that was asked for": lambda: searched(
        pipeline(), status="within gap", bound_s=pipeline().prediction.step_s / 2, gap=1.0, bounds_s={}
    ),
    "'mpi', the links were measured with ''": lambda: predicted(pipeline(), transport="mpi"),
    "0.5 of a step measured over mpi, predicted over gloo": lambda: replace(
        predicted(pipeline(), transport="gloo"), measured=Measured(1.0, 0.0, 1, (), (), (), 0.5, transport="mpi")
    ),
    "status 'lucky' is none of": lambda: searched(pipeline(), status="lucky"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("words", SPOILS)
def test_a_spoilt_plan_is_found_out(words: str) -> None:
    faults = faults_of(SPOILS[words](), profile())
    assert any(words in fault for fault in faults), faults
    known = ("inputs.", "decision.", "prediction.", "search.", "alternatives[", "measured.")
    assert all(fault.startswith(known) for fault in faults), "each begins with its path in the file"


def test_a_stream_with_an_action_that_is_none_is_a_fault_and_no_exception() -> None:
    plan = solver("best-first")(Problem(profile(), 4, objective=LATENCY, confidence=0.0))
    assert plan.prediction.sustained_per_s > 0
    spoilt = decided(plan, program=(("0X0",), *plan.decision.program[1:]))
    assert any("'0X0' is no action" in fault for fault in faults_of(spoilt, None))


@pytest.mark.parametrize("ranks", [((0,), (1,), (2,)), ((0, 1), (2,), (3, 4))])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_of_two_stages_are_summed_over_both(ranks: tuple[tuple[int, ...], ...], zero: int) -> None:
    apart = chain_profile(6, 5, parameter_bytes=2**20, update_s=1e-3, bandwidth_bytes_per_s=1e8)
    adam = replace(apart, optimizer=Optimizer("Adam", {}, 2.0))
    layers = tuple(replace(x, parameters=("l0.weight",)) if x.name == "l5" else x for x in adam.graph.layers)
    tied = replace(adam, graph=replace(adam.graph, layers=layers))
    decision = chain_decision(tied, cuts=(2, 4), micro_batches=(4, 4), ranks=ranks, schedule="gpipe")
    divided = tuple(
        replace(stage, sharded=True, zero=zero) if zero and len(stage.ranks) > 1 else stage for stage in decision.stages
    )
    decision = replace(decision, stages=divided)
    alone, together = (predict(each, decision)[0] for each in (adam, tied))
    assert together.step_s > alone.step_s or zero > 1  # of what is tied nothing is gathered or scattered in passes
    plan = plan_of(tied, decision)
    asked = replace(plan.inputs, request=Request(shard=ALWAYS if zero else NEVER, zero=max(1, zero)))
    plan = replace(plan, inputs=asked, prediction=together, search=replace(plan.search, bound_s=0.0, gap=0.0))
    assert check_plainly(plan, tied) == ()
