"""Every way to spoil a plan is found by the independent checker, and named with its numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner import faults_of
from planner.costs.predict import predict
from planner.ir.cluster import DATASHEET
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Decision, Measured, Placement, Plan, RankPrediction, Stage
from planner.ir.problem import ALWAYS, LATENCY, NEVER, Problem, Request
from planner.ir.profile import Optimizer, Profile
from planner.solvers import solver
from tests.oracles.plans import check as check_plainly
from tests.planner.factories import chain_decision, plan_of
from tests.planner.solvers.instances import random_problem


@functools.cache
def profile() -> Profile:
    return chain_profile(
        6, 2, forward_s=(1e-3, 2e-3, 1e-3, 3e-3, 1e-3, 1e-3), parameter_bytes=2**20, bandwidth_bytes_per_s=1e8
    )


@functools.cache
def pipeline() -> Plan:
    return solver("best-first")(Problem(profile(), 8))


@functools.cache
def replicas() -> Plan:
    return solver("data-parallel")(Problem(profile(), 8))


def decided(plan: Plan, **changes: object) -> Plan:
    return replace(plan, decision=replace(plan.decision, **changes))


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


def test_a_good_plan_has_no_fault() -> None:
    assert check_plainly(pipeline(), profile()) == ()
    assert check_plainly(replicas(), profile()) == ()
    assert check_plainly(pipeline(), None) == ()


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
    "rank 0 is in stage 0 and in stage 1": lambda: decided(
        pipeline(), stages=(pipeline().decision.stages[0], Stage((0,), ("n0/cpu0",)))
    ),
    "in the cluster it is n0/cpu1": lambda: decided(
        pipeline(), stages=(pipeline().decision.stages[0], Stage((1,), ("n0/cpu9",)))
    ),
    "rank 5; the program has 2": lambda: decided(
        pipeline(), stages=(pipeline().decision.stages[0], Stage((5,), ("n0/cpu5",)))
    ),
    "3 parts for the 2 ranks of its stage": lambda: decided(
        replicas(), layers={name: Placement(0, {"sample": (0, 2, 4, 8)}) for name in replicas().decision.layers}
    ),
    "the predicted step is": lambda: decided(
        replicas(), layers=moved(replicas().decision, "l1", Placement(0, {"sample": (0, 1, 8)}))
    ),
    "leaves rank 1 none": lambda: decided(
        replicas(), layers={name: Placement(0, {"sample": (0, 8, 8)}) for name in replicas().decision.layers}
    ),
    "micro_batches[1]: 0 is less than 1": lambda: decided(pipeline(), micro_batches=(8, 0)),
    "is not the global batch of 9": lambda: decided(pipeline(), micro_batches=(2, *(1,) * 7)),
    "the program is not legal": lambda: decided(
        pipeline(), program=(pipeline().decision.program[0][:-1], pipeline().decision.program[1])
    ),
    "0F0 on rank 1; stage 0 is on ranks [0]": lambda: decided(
        pipeline(), program=(pipeline().decision.program[0], ("0F0", *pipeline().decision.program[1]))
    ),
    "'7F0' names stage 7, there are 2": lambda: decided(
        pipeline(), program=(pipeline().decision.program[0], ("7F0", *pipeline().decision.program[1]))
    ),
    "'1F99' names microbatch 99, there are 8": lambda: decided(
        pipeline(), program=(pipeline().decision.program[0], ("1F99", *pipeline().decision.program[1]))
    ),
    "'0X0' is no action": lambda: decided(pipeline(), program=(("0X0",), pipeline().decision.program[1])),
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


def test_a_stream_with_an_action_that_is_none_is_a_fault_and_no_exception() -> None:
    plan = solver("best-first")(Problem(profile(), 4, objective=LATENCY))
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


def test_the_checker_and_the_oracle_agree() -> None:
    """Plans of every shape, also on half-duplex links and of sizes nobody measured."""
    num_checked = 0
    for seed in range(300, 330):
        problem = random_problem(seed)
        try:
            plan = solver("best-first")(problem)
        except InfeasibleError:
            continue
        assert check_plainly(plan, problem.profile) == (), seed
        num_checked += 1
    assert num_checked > 15


def test_layers_that_a_datasheet_prices_are_checked_too() -> None:
    """A layer measured at one size alone, of which no family is known."""
    whole = chain_profile(3, 1)
    devices = tuple(
        replace(device, peak_flop_per_s={"float32": 1e12}, memory_bytes_per_s=1e11) for device in whole.cluster.devices
    )
    few = {kind: tuple(m for m in found if m.samples == 1) for kind, found in whole.measurements.items()}
    sheet = replace(whole, cluster=replace(whole.cluster, devices=devices), measurements=few)
    decision = chain_decision(sheet, micro_batches=(2,), schedule="gpipe")
    prediction, _ = predict(sheet, decision)
    assert prediction.evidence == DATASHEET
    plan = replace(plan_of(sheet, decision), prediction=prediction)
    assert check_plainly(replace(plan, search=replace(plan.search, bound_s=0.0, gap=0.0)), sheet) == ()
