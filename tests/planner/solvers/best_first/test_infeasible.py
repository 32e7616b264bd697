"""Where nothing fits, the error names what really lacks: memory only where more of it helps, else the rules."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.chains import chain_profile
from planner.ir.constraints import parse_rule
from planner.ir.errors import InfeasibleError
from planner.ir.problem import Problem
from planner.solvers.best_first.solver import solve

CLASH = "no plan keeps to the side constraints"
RULES = (
    "l1=stage:1",
    "l2=stage:2",
    "l0=replicas:2",
    "l1=replicas:1",
    "l0=device:n0/cpu0",
    "l[01]=together",
    "*=sample:2",
)


def problem(fix: tuple[str, ...], forbid: tuple[str, ...] = (), memory_bytes: int = 2**30) -> Problem:
    profile = chain_profile(3, 2, parameter_bytes=4000, memory_bytes=memory_bytes)
    fixed, forbidden = (tuple(map(parse_rule, rules)) for rules in (fix, forbid))
    return Problem(profile, 4, ("1f1b",), (1, 2), fix=fixed, forbid=forbidden)


def refused(asked: Problem) -> InfeasibleError | None:
    try:
        solve(asked)
    except InfeasibleError as error:
        return error
    return None


def test_a_stage_for_which_there_is_no_device_is_no_matter_of_memory() -> None:
    error = refused(problem(("l0=stage:0", "l2=stage:2", "l1=replicas:1")))
    assert error is not None
    assert error.title == CLASH
    assert error.details[0] == "--fix l2=stage:2"
    assert error.details[1].startswith("no plan meets this with 2 devices")
    assert error.remedies == ("leave out --fix l2=stage:2",)


def test_rules_that_clash_are_named_and_no_others() -> None:
    error = refused(problem(("l1=stage:1", "l2=replicas:2", "l0=device:n0/*")))
    assert error is not None
    assert error.details[:2] == ("--fix l1=stage:1", "--fix l2=replicas:2")
    assert error.remedies == ("leave out --fix l1=stage:1", "leave out --fix l2=replicas:2")


def test_memory_is_named_where_the_least_plan_of_all_breaks_a_rule() -> None:
    error = refused(problem(("l2=stage:1",), ("l0=device:n0/cpu1",), memory_bytes=5000))
    assert error is not None
    assert error.title == "no plan fits"


@pytest.mark.parametrize("seed", range(24))
def test_memory_is_named_only_where_more_of_it_helps(seed: int) -> None:
    draw = Random(seed)
    fix, forbid = draw.sample(RULES, draw.randint(1, 3)), draw.sample(RULES, draw.randint(0, 1))
    error = refused(problem(tuple(fix), tuple(forbid), draw.choice([20_000, 2**30])))
    if error is None or error.title not in (CLASH, "no plan fits"):
        return
    more = refused(problem(tuple(fix), tuple(forbid), 2**45))
    assert (error.title == CLASH) == (more is not None)
    if error.title == CLASH:
        named = [detail.removeprefix("--fix ") for detail in error.details if detail.startswith("--fix ")]
        barred = [detail.removeprefix("--forbid ") for detail in error.details if detail.startswith("--forbid ")]
        assert refused(problem(tuple(named), tuple(barred), 2**45)) is not None
