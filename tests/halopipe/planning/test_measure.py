"""What is measured for a plan: by a profile, where a plan lacks it, and at another size; here with made up figures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halopipe.planning import measure, measure_missing, solve
from halopipe.planning.measure_missing import MOST_ROUNDS, plan_and_measure, with_measurements
from halopipe.planning.options import ProfileOptions
from halopipe.planning.problem import make_problem
from halopipe.planning.resized import parse_sizes, resized
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
from planner.ir.codec import dump, fingerprint
from planner.ir.errors import MissingDeviceError, UsageError
from planner.ir.profile import Measurement, ModelSource, Profile
from planner.solvers import solver
from profiler import load_model
from profiler.measure.devices import BACKENDS, described
from runtime.stage.shapes import graph_of_sizes
from tests.captures import capture
from tests.planner.networks import Network, plain, priced, residual


class Model:
    def make(self) -> None:
        """A method cannot be found by name."""


def test_a_factory_is_named_by_where_it_lives() -> None:
    assert measure.source_of(json.dumps, (8, 3), {"width": [1, 2]}, "float64") == ModelSource(
        "json:dumps", {"width": "[1,2]"}, (8, 3), "float64"
    )
    found = measure.source_of("a.b:c", (), {}, "float32", "bfloat16", elementwise=["lib::op"])
    assert (found.factory, found.autocast, found.elementwise) == ("a.b:c", "bfloat16", ("lib::op",))


def source() -> ModelSource:
    return measure.source_of("a.b:c", (), {}, "float32")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("ask", "text"),
    [
        *(
            (lambda model=model: measure.source_of(model, (), {}, "float32"), "model|top level")
            for model in (Model(), Model().make, Model.make, lambda: None, 3)
        ),
        (lambda: measure.source_of("a.b:c", (), {"activation": source}, "float32"), "cannot be written as JSON"),
        *((lambda given=given: measure.num_workers(given), "is not known") for given in (0, -1, True, "host:8")),
        (
            lambda: measure.measure(source(), ProfileOptions(device="cpu", allow=("space",)), quiet=True),
            r"no family of dims 'space'[\s\S]*spatial",
        ),
        (lambda: measure_missing.require_possible("cluster.yaml"), "--cluster describes others"),
        (lambda: measure_missing.require_possible(None, 3), "--pareto"),
        (lambda: parse_sizes("height"), "names no size"),
        (lambda: parse_sizes("height=0"), "names no size"),
        (lambda: parse_sizes("height=x"), "names no size"),
    ],
)
def test_what_cannot_be_measured_is_refused(ask: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ask()


def test_a_cluster_is_a_number_of_workers_or_auto_and_sizes_are_read() -> None:
    assert (measure.num_workers("auto"), measure.num_workers(4)) == (0, 4)
    assert parse_sizes("height=8192,width=4096") == {"height": 8192, "width": 4096}


@pytest.mark.parametrize(("allow", "num_ranks", "asked"), [(["sample"], 0, None), ([], 4, None), (["spatial"], 0, 2)])
def test_parts_are_asked_for_where_more_than_samples_may_be_cut(
    allow: list[str], num_ranks: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    measured = priced(*plain())
    monkeypatch.setattr("profiler.session.profile", lambda source, **options: seen.update(options) or measured)
    asked_for = ProfileOptions(workers=2, device="cpu", allow=allow, num_ranks=num_ranks)
    measure.measure(source(), asked_for, quiet=True)
    assert (seen["shapes"].keywords if seen["shapes"] else None) == (
        {"allow": ("spatial",), "num_ranks": asked} if asked else None
    )


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
    problem = make_problem(old, global_batch=8, micro_batch=[1, 8], allow=["sample"])
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
    again = replace(one, forward_s=9.0)
    fresh = replace(one, samples=5)
    part = replace(one, part=(8, 4, 16))
    found = with_measurements(given, KIND, (again, fresh), (part,))
    assert found.measurements[KIND] == (*given.measurements[KIND], fresh)
    assert found.parts[KIND] == (part,)
    assert with_measurements(found, KIND, (), (replace(part, forward_s=3.0),)).parts[KIND][0].forward_s == 3.0


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


def test_the_command_that_waits_for_measuring_processes_does_not_load_torch() -> None:
    program = (
        "import sys, halopipe.planning.measure, profiler.session as session; "
        "from profiler.measure.devices import chosen, described; "
        "described(chosen('cpu', 2)[0], 'n0', 2); "
        "there = session.versions()['torch']; "
        "assert 'torch' not in sys.modules, 'torch was loaded'; "
        "import torch; "
        "assert there == torch.__version__, there"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_optimizer_is_refused_also_where_nobody_has_loaded_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(measure, "require_arguments", lambda _: pytest.fail("it was asked in this process"))
    asked_for = ProfileOptions(workers=2, device="cpu", optimizer="SGD:lr=-1")
    with pytest.raises(UsageError, match=r"cannot train with these numbers[\s\S]*lr=-1"):
        measure.measure(source(), asked_for, quiet=True)


def profiled(height: int) -> Profile:
    made = Network(1, 2, height)
    return priced(made, made.relu(made.conv(made.image, 4)), sizes=(1,))


def test_a_layer_costs_as_many_times_as_much_as_it_does_of_the_work_and_what_was_measured_is_a_part_of_it() -> None:
    small = profiled(32)
    large = profiled(64)
    found = resized(small, large.graph)
    for kind, measured in small.measurements.items():
        for before, after in zip(measured, found.measurements[kind], strict=True):
            assert after.forward_s == pytest.approx(4 * before.forward_s)
            assert after.saved_bytes == 4 * before.saved_bytes
    assert found.graph == large.graph
    (parts,) = found.parts.values()
    assert {(one.layer, one.part) for one in parts if one.layer != "loss"} == {
        ("conv0", (4, 32, 32)),
        ("pointwise1", (4, 32, 32)),
    }
    made = Network(1, 2, 64)
    with pytest.raises(UsageError, match="other layers"):
        resized(profiled(32), made.graph(made.conv(made.image, 4)))


@pytest.mark.exhaustive("two captures of a network whose sizes vary")
def test_the_graph_of_other_sizes_is_that_of_a_capture_there() -> None:
    small, large = (
        capture(load_model(ModelSource("profiler.models.unet2d:unet2d", {"width": "2"}, (1, 1, extent, extent))))
        for extent in (16, 32)
    )
    found = graph_of_sizes(small, {"height": 32, "width": 32})
    assert fingerprint(found) == fingerprint(large.graph)
