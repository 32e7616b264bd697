from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning import problem as problems
from halopipe.planning import solve
from planner.ir.errors import InfeasibleError, RankCountError, UnknownNameError, UsageError
from planner.ir.graph import SHARED_STATE
from planner.ir.problem import AUTO, NEVER, Problem, Rule
from tests.planner.factories import chain_decision, plan_of

PROFILE = chain_profile(4, memory_bytes=2**30)
PLAN = plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,)))


def test_the_defaults_are_the_batch_of_the_example_and_the_schedules_that_run() -> None:
    problem = problems.make_problem(PROFILE)
    assert problem.global_batch == PROFILE.graph.samples
    assert problem.schedules == ()  # the solver chooses among those that the runtime executes as they are priced
    assert problem.ranks == (0, 1)
    assert (problem.objective, problem.allow, problem.recompute) == ("throughput", ("sample",), "never")


def test_a_memory_limit_is_the_devices_own_where_that_is_less() -> None:
    uneven = chain_profile(4, memory_bytes=(2**30, 2**28))
    problem = problems.make_problem(uneven, memory_bytes=300_000_001)
    assert [problem.memory_limit_bytes(rank) for rank in (0, 1)] == [300_000_001, int(2**28 * 0.92)]


def test_more_memory_than_any_device_has_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="more than the devices have"):
        problems.make_problem(PROFILE, memory_bytes=2**31)


def test_what_is_asked_for_goes_into_the_problem() -> None:
    problem = problems.make_problem(
        PROFILE,
        objective="memory",
        allow=["channel", "sample"],
        recompute="auto",
        fix=["l*=replicas:2", Rule("l1", "recompute", "yes")],
        forbid=["loss=device:n0/cpu0"],
    )
    assert (problem.objective, problem.allow, problem.recompute) == ("memory", ("sample", "channel"), "auto")
    assert problem.fix == (Rule("l*", "replicas", "2"), Rule("l1", "recompute", "yes"))
    assert problem.forbid == (Rule("loss", "device", "n0/cpu0"),)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"schedules": ["gpipe", "1b1f"]}, "no schedule '1b1f'"),
        ({"objective": "speed"}, "no objective 'speed'"),
        ({"allow": ["space"]}, "no family of dims 'space'"),
        ({"recompute": "sometimes"}, "no way to recompute 'sometimes'"),
        ({"fix": ["enc.*=replicas:2"]}, "matches no layer"),
        ({"forbid": ["l1=device:n7/cpu0"]}, "matches no device"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(asked: dict[str, object], text: str) -> None:
    with pytest.raises(UnknownNameError, match=text) as caught:
        problems.make_problem(PROFILE, **asked)  # type: ignore[arg-type]
    assert caught.value.remedies or caught.value.details


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(RankCountError, match="3 ranks are asked for, the profile has 2"):
        problems.make_problem(PROFILE, num_ranks=3)
    with pytest.raises(UsageError, match="micro-batch 16 is larger than the global batch 8"):
        problems.make_problem(PROFILE, micro_batch=[16])
    with pytest.raises(UsageError, match="is not a rule"):
        problems.make_problem(PROFILE, fix=["l1"])
    with pytest.raises(UsageError, match="--zero is 3, --shard never"):
        problems.make_problem(PROFILE, zero=3)


def test_what_was_asked_is_read_back_from_the_plan() -> None:
    asked = problems.make_problem(PROFILE, memory_bytes=2**29, max_stages=2, fix=["l1=stage:0"], gap=0.1)
    plan = solve.solve(asked)
    assert problems.problem_of(plan, PROFILE) == asked
    assert {rank.memory_limit_bytes for rank in plan.prediction.ranks} == {2**29}


def test_the_freedom_that_a_plan_uses_is_granted() -> None:
    plain = problems.problem_of(PLAN, PROFILE)
    assert (plain.recompute, plain.allow) == (NEVER, ("sample",))
    decision = PLAN.decision
    again = replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))
    sliced = replace(decision, stages=tuple(replace(stage, sharded=True, zero=2) for stage in decision.stages))
    divides = problems.problem_of(replace(PLAN, decision=sliced), PROFILE)
    assert (divides.shard, divides.zero) == (AUTO, 2)
    layers = {name: replace(placement, cuts={"height": (0, 1, 2)}) for name, placement in decision.layers.items()}
    free: Problem = problems.problem_of(replace(PLAN, decision=replace(again, layers=layers)), PROFILE)
    assert (free.recompute, free.allow) == (AUTO, ("sample", "spatial", "channel"))
    odd = next(name for name in problems.schedule_names() if name not in problems.default_schedules())
    assert odd in problems.problem_of(replace(PLAN, decision=replace(decision, schedule=odd)), PROFILE).schedules


def test_layers_that_share_a_buffer_which_is_written_stay_in_one_stage() -> None:
    first, second, *others = PROFILE.graph.layers
    sharing = [replace(each, attributes={**each.attributes, SHARED_STATE: "seen"}) for each in (first, second)]
    profile = replace(PROFILE, graph=replace(PROFILE.graph, layers=(*sharing, *others)))
    cut = [f"{first.name}=stage:0", f"{second.name}=stage:1"]
    assert solve.solve(problems.make_problem(PROFILE, fix=cut)).decision.layers[second.name].stage == 1
    with pytest.raises((InfeasibleError, UsageError), match="contradict each other"):
        solve.solve(problems.make_problem(profile, fix=cut))
    plan = solve.solve(problems.make_problem(profile, fix=[f"{others[-1].name}=stage:1"]))
    stages = {plan.decision.layers[each.name].stage for each in sharing}
    assert len(stages) == 1
    assert (
        problems.problem_of(plan, profile).fix == problems.make_problem(profile, fix=[f"{others[-1].name}=stage:1"]).fix
    )
