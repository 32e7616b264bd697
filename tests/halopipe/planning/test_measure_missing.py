"""Planning, measuring what is missing, and planning again: with figures that a test makes up, and with a tiny model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from halopipe.planning import measure_missing, solve
from halopipe.planning.measure_missing import MOST_ROUNDS, plan_and_measure, with_measurements
from halopipe.planning.problem import make_problem
from planner.costs.stages.coverage import Unmeasured
from planner.ir.cluster import (
    AROUND,
    GRADIENT_SUMS,
    NORMALISATION,
    PARTIAL_SUMS,
    PIECES,
    WITHIN_HOST,
    Collective,
)
from planner.ir.codec import dump
from planner.ir.errors import MissingDeviceError, UsageError
from planner.ir.profile import Measurement, Profile
from planner.solvers import solver
from profiler.measure.devices import BACKENDS, described
from tests.planner.networks import plain, priced, residual

KIND = "kind-1"


@dataclass(frozen=True)
class Found:
    whole: tuple[Measurement, ...]
    parts: tuple[Measurement, ...] = ()
    is_contended: bool = False
    action_overhead_s: float | None = None
    calls: tuple[Collective, ...] = ()


def profile() -> Profile:
    return priced(*plain(samples=8), speeds=(1.0, 1.0), sizes=(1, 8))


def slower(given: Profile, kind: str, wanted: Unmeasured) -> Found:
    """Every layer takes ten times as long as at 8 samples."""
    whole = [m for m in given.measurements[kind] if m.samples == 8]
    return Found(
        tuple(
            replace(m, samples=size, forward_s=10 * m.forward_s, backward_s=10 * m.backward_s)
            for m in whole
            for size in wanted.sizes
        )
    )


def test_what_turns_out_to_be_slow_is_planned_otherwise() -> None:
    said: list[str] = []
    problem = make_problem(profile(), global_batch=8, micro_batch=[2, 8])
    first = solve.solve(problem)
    assert max(first.decision.micro_batches) == 2 or first.prediction.evidence != "measured"
    found = plan_and_measure(problem, solve.solve, slower, said.append)
    assert found.rounds == tuple(said)
    assert "measured layers at" in said[0]
    assert "predicted" in said[0]
    assert found.plan.prediction.evidence == "measured"
    sizes = {m.samples for m in found.profile.measurements[KIND]}
    assert sizes > {1, 8}
    assert plan_and_measure(replace(problem, profile=found.profile), solve.solve, slower).rounds == ()


def test_what_cannot_be_measured_is_tried_once() -> None:
    asked: list[Unmeasured] = []

    def nothing(given: Profile, kind: str, wanted: Unmeasured) -> Found:
        asked.append(wanted)
        return Found(())

    problem = make_problem(profile(), global_batch=4, micro_batch=[2])
    found = plan_and_measure(problem, solve.solve, nothing)
    assert len(asked) == len(set(asked)) <= MOST_ROUNDS
    assert found.profile.measurements == problem.profile.measurements


def test_what_actions_take_longer_after_waits_is_measured_once() -> None:
    def waits(given: Profile, kind: str, wanted: Unmeasured) -> Found:
        return replace(slower(given, kind, wanted), action_overhead_s=1e-3 if wanted.waits else None)

    sums = [Collective(GRADIENT_SUMS, 1, WITHIN_HOST, ((1024, 1e-6),))]  # a rival's
    old = measure_missing.with_calls(replace(profile(), action_overhead_s={}), sums)
    problem = make_problem(old, global_batch=8, micro_batch=[1, 8])
    found = plan_and_measure(problem, solver("even-split"), waits)
    assert len(found.plan.decision.stages) == 2
    assert "actions after waits on kind-1" in found.rounds[0]
    assert measure_missing.stored(old, found.profile).action_overhead_s == {KIND: 1e-3}
    assert plan_and_measure(replace(problem, profile=found.profile), solver("even-split"), waits).rounds == ()


def test_calls_around_exchanges_are_measured_once_and_kept() -> None:
    old = Collective(PIECES, 1, WITHIN_HOST, ((1024, 1e-3),))
    calls = tuple(Collective(what, 1, WITHIN_HOST, ((1024, 1e-2),)) for what in AROUND)
    given = priced(*residual(samples=4), speeds=(1.0, 1.0), sizes=(1, 2, 4))
    given = measure_missing.with_calls(given, [old])  # of an older profile, measured anew
    problem = make_problem(given, global_batch=4, micro_batch=[4])
    found = plan_and_measure(problem, solver("data-parallel"), lambda *_: Found((), calls=calls))
    assert "calls around exchanges (normalisation, gradient sums) on kind-1" in found.rounds[0]
    assert len(found.rounds) == 1
    kept = measure_missing.stored(given, found.profile).cluster.collectives
    assert tuple(each for each in kept if each.operation in AROUND) == calls
    assert found.plan.prediction.step_s > solver("data-parallel")(problem).prediction.step_s


@pytest.mark.exhaustive("a process that loads torch")
def test_calls_around_exchanges_are_measured_on_this_machine() -> None:
    here = described(BACKENDS["cpu"], "n0", 1)[0].kind
    wanted = Unmeasured(exchanges=(PIECES,))
    found = measure_missing.measure_here(quiet=True)(profile(), here, wanted)
    assert [table.operation for table in found.calls] == [NORMALISATION, PIECES, PARTIAL_SUMS, GRADIENT_SUMS]
    assert {table.num_ranks for table in found.calls} == {1}
    assert found.whole == ()


def test_measurements_are_added_and_those_that_were_there_stay() -> None:
    given = profile()
    one = given.measurements[KIND][0]
    again, fresh = replace(one, forward_s=9.0), replace(one, samples=5)
    part = replace(one, part=(8, 4, 16))
    found = with_measurements(given, KIND, (again, fresh), (part,))
    assert found.measurements[KIND] == (*given.measurements[KIND], fresh)
    assert found.parts[KIND] == (part,)
    assert with_measurements(found, KIND, (), (replace(part, forward_s=3.0),)).parts[KIND][0].forward_s == 3.0


def test_machines_that_are_described_and_fronts_are_refused() -> None:
    with pytest.raises(UsageError, match="--cluster describes others"):
        measure_missing.require_possible("cluster.yaml")
    with pytest.raises(UsageError, match="--pareto"):
        measure_missing.require_possible(None, 3)


def test_another_machines_devices_are_refused() -> None:
    problem = make_problem(profile(), global_batch=6, micro_batch=[3])
    with pytest.raises(MissingDeviceError, match="kind-1 cannot be measured on this machine"):
        plan_and_measure(problem, solve.solve, measure_missing.measure_here(quiet=True))


def test_planning_alone_does_not_load_torch(tmp_path: Path) -> None:
    dump(profile(), tmp_path / "profile.json")
    program = (
        "import sys, halopipe as hp; "
        "plan = hp.plan('profile.json', global_batch=8); "
        "assert plan.decision.micro_batches, plan; "
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
