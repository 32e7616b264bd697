"""A plan whose ranks have unlike shares of a micro-batch, from the search to the run."""

from __future__ import annotations

from dataclasses import replace

from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.constraints import parse_rule
from planner.ir.problem import Problem
from planner.ir.profile import Measurement
from planner.solvers import solver
from tests.halopipe.plans import RESNET, plan_of, profiled

TIMES = "forward_s", "backward_s", "backward_input_s", "backward_weight_s"


def test_shares_of_one_and_three_are_planned_and_run_as_on_one_device() -> None:
    _, profile = profiled(plan_of(RESNET, [0.5]), 2)
    ((kind, measured),) = profile.measurements.items()

    def slower(one: Measurement) -> Measurement:
        return replace(one, **{name: 3 * getattr(one, name) for name in TIMES})

    devices = profile.cluster.devices
    unlike = replace(
        profile,
        cluster=replace(profile.cluster, devices=(replace(devices[0], kind="slow"), devices[1])),
        measurements={**profile.measurements, "slow": tuple(map(slower, measured))},
        parameters={**profile.parameters, "slow": profile.parameters[kind]},
        action_overhead_s={**profile.action_overhead_s, "slow": profile.action_overhead_s.get(kind, 0.0)},
    )
    rules = (parse_rule("*=replicas:2"),)
    plan = solver("best-first")(Problem(unlike, 8, (), (4,), max_stages=1, fix=rules))
    assert {placed.cuts["sample"] for placed in plan.decision.layers.values()} == {(0, 1, 4)}
    result = run_plan(plan, RunOptions(steps=2, warmup=1, transport="gloo", check_numerics=True, dtype="float64"))
    assert result is not None
    assert result.transport == "gloo"
    assert result.numerics is not None
    assert max(compared.error for compared in result.numerics.worst.values()) < 1e-10
