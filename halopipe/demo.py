"""The demonstration: profile a network, plan, explain, compare, train on real digits, predicted beside measured."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halopipe.extra import FaceExtra
from halopipe.planning import measure, plan_files, search_progress, solve
from halopipe.planning import problem as problems
from halopipe.planning.compare import Comparison, tie_text
from halopipe.planning.options import DEFAULT_SOLVER, ProfileOptions
from halopipe.reports import explain, measured, run
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.terminal import tables, units
from halopipe.terminal.console import command, emit
from halopipe.terminal.output_files import claimed
from planner.ir.chrome_trace import chrome_trace
from planner.ir.codec import dump
from planner.ir.errors import MissingFileError
from planner.ir.extras import extras
from planner.ir.files import write_text
from planner.ir.plan import Plan, Prediction
from planner.ir.profile import Profile

_NUM_WORKERS = 2
NUM_STEPS = 60
_RIVAL_STEPS = 20
_COMPARED_STEPS = 2  # later ones differ by rounding that training itself magnifies
_DATA = "halopipe.data:digits"


@dataclass(frozen=True, slots=True)
class DemoNetwork:
    """What the demonstration trains.

    Attributes:
        input_shape: of a micro-batch at most.
    """

    factory: str
    input_shape: tuple[int, ...]
    arguments: Mapping[str, Any]
    optimizer: str
    global_batch: int = 32


VGG16 = DemoNetwork(
    "profiler.models.vgg:vgg16",
    (8, 3, 64, 64),
    {"num_classes": 10, "width": 32, "hidden": 2048},
    "AdamW:lr=0.0001",
    global_batch=16,
)
"""Half as wide as the paper's.

Most weights are in the last layers and most operations in the first, so replicas sum and update every weight twice, and
stages that are balanced without their updates are not: which plan is best is worth asking.
"""
SMALL = DemoNetwork(
    "profiler.models.resnet:resnet18",
    (8, 3, 32, 32),
    {"num_classes": 10, "width": 16},
    "AdamW:lr=0.001",
)


def travel(folder: Path, network: DemoNetwork) -> None:
    """The journey; every file it makes stays in ``folder``.

    Raises:
        HalopipeError: a step of it failed; the text says which and why.
    """
    start_s = time.monotonic()
    _make(folder)
    with claimed(folder / name for name in ("profile.json", "plan.json", "timeline.json", "trace.json")):
        profile = _profile(folder, network)
        plan = _plan(folder, profile, network)
        _heading("3. Explain", "Why this plan?", "halopipe explain plan.json")
        emit(explain.explain(plan, profile))
        rivals = _compare(plan, profile)
        _check(plan)
        result = _run(folder, plan, profile)
        if result is not None:
            _run_rival(plan, profile, result, rivals)
    _heading("Done", f"in {units.seconds(time.monotonic() - start_s)}; the files are in {folder}")
    emit(
        f"  {folder}/step.svg shows the predicted and the measured step; for every message, open\n"
        f"  {folder}/trace.json at https://ui.perfetto.dev\n"
        f"  {command('explain', folder / 'plan.json', '--why-not', 'schedule=gpipe')}\n"
        "  halopipe profile path/to/your_model.py:factory --input 8,3,64,64"
    )


def _profile(folder: Path, network: DemoNetwork) -> Profile:
    source = measure.source_of(network.factory, network.input_shape, network.arguments, "float32")
    _heading(
        "1. Profile",
        f"What does every layer of {explain.model_text(source)} cost on {_NUM_WORKERS} CPU cores? "
        "Forward, backward and memory are measured, and so is the link between the cores.",
        f"halopipe profile {source.factory} --input {','.join(map(str, source.input_shape))} "
        f"{' '.join(f'--arg {key}={value}' for key, value in source.arguments.items())} "
        f"--optimizer {network.optimizer} --quick",
    )
    asked = ProfileOptions(
        workers=_NUM_WORKERS, device="cpu", optimizer=network.optimizer, quick=True
    )  # the full profile measures for longer than all the rest
    profile = measure.measure(source, asked)
    dump(profile, folder / "profile.json")
    emit(measured.summary(profile))
    return profile


def _plan(folder: Path, profile: Profile, network: DemoNetwork) -> Plan:
    _heading(
        "2. Plan",
        "Which layers on which core, in which order? The search knows a lower bound, so it can prove its answer.",
        f"halopipe plan profile.json --global-batch {network.global_batch}",
    )
    problem = problems.make_problem(profile, global_batch=network.global_batch)
    plan = search_progress.solve(problem, DEFAULT_SOLVER)
    dump(plan, folder / "plan.json")
    emit(explain.headline(plan, profile=profile))
    return plan


def _compare(plan: Plan, profile: Profile) -> Mapping[str, Plan]:
    _heading(
        "4. Compare",
        "How would the published strategies do?",
        "halopipe compare plan.json --baselines",
    )
    solved = solve.solve_baselines(problems.problem_of(plan, profile))
    plans = {"plan.json": plan, **solved.plans}
    emit(Comparison(plans, profile, solved).render())
    return solved.plans


def _check(plan: Plan) -> None:
    _heading(
        "5. Check",
        "Does the plan compute what one device computes? The first steps are done both ways in float64, where rounding "
        "cannot hide a mistake; losses, gradients, parameters and buffers must agree.",
        f"halopipe run plan.json --steps {_COMPARED_STEPS} --data {_DATA} --check-numerics --dtype float64",
    )
    options = RunOptions(steps=_COMPARED_STEPS, warmup=0, data=_DATA, check_numerics=True, dtype="float64")
    result = run.train(plan, options)
    if result is not None:
        emit(f"numerics: {result.numerics}")


def _run(folder: Path, plan: Plan, profile: Profile) -> RunResult | None:
    """What was measured; None if the ranks belong to somebody else's job."""
    _heading(
        "6. Run",
        f"{NUM_STEPS} steps on handwritten digits by the plan, one process a core. What was predicted stands beside "
        "what was measured.",
        f"halopipe run plan.json --steps {NUM_STEPS} --data {_DATA} --update --details --trace trace.json",
    )
    result = run.train(plan, RunOptions(steps=NUM_STEPS, data=_DATA, check_first_step=False))
    if result is None:
        return None
    prediction, predicted = run.predicted_step(plan, profile)
    file = result.timeline_file(plan, predicted)
    dump(file, folder / "timeline.json")
    dump(replace(plan, measured=result.measured(plan.prediction)), folder / "plan.json")
    write_text(folder / "trace.json", chrome_trace((file.predicted, file.measured), plan_files.device_names(plan)))
    for extra in extras(FaceExtra):
        extra.draw_run(folder, (file.predicted, file.measured), plan_files.device_names(plan))
    emit(run.RunReport(plan, result, prediction, predicted, has_details=True).render())
    return result


def _run_rival(plan: Plan, profile: Profile, ours: RunResult, rivals: Mapping[str, Plan]) -> None:
    """Runs the best published strategy that is another plan, so that the gain is measured as well."""
    others = {name: rival for name, rival in rivals.items() if rival.decision != plan.decision}
    if not others:
        emit("Every published strategy that fits found the same plan: there is no rival to run.")
        return
    name = min(others, key=lambda rival: others[rival].prediction.step_s)
    rival = others[name]
    _heading(
        "7. Run the best rival",
        f"{_RIVAL_STEPS} steps by the plan of {name}, the fastest of the published strategies, so that the gain is "
        "measured and not only predicted.",
        f"halopipe plan profile.json --solver {name} --global-batch {plan.decision.global_batch} -o rival.json && "
        f"halopipe run rival.json --steps {_RIVAL_STEPS} --data {_DATA}",
    )
    result = run.train(rival, RunOptions(steps=_RIVAL_STEPS, data=_DATA, check_first_step=False))
    if result is not None:
        for title, each in (("plan.json", ours), (name, result)):
            emit(f"{title}, measured:\n{tables.gantt(each.timeline, plan_files.device_names(plan))}\n")
        our_s = ours.measured(plan.prediction).step_s
        rival_s = result.measured(rival.prediction).step_s
        sure = next(iter(Comparison({"plan.json": plan, name: rival}, profile=profile).ties.values()), None)
        emit(gain("plan.json", (plan.prediction, our_s), name, (rival.prediction, rival_s), sure))
        if plan.search.tie is not None:
            emit(f"plan.json {tie_text(plan, plan.search.tie)}.")


def gain(
    ours: str,
    our_step: tuple[Prediction, float],
    name: str,
    rival_step: tuple[Prediction, float],
    sure: float | None = None,
) -> str:
    """Two plans side by side, and by how much the first is faster.

    Args:
        ours, name: what the plans are called.
        our_step, rival_step: of each plan, what was predicted, and the step that was measured in seconds.
        sure: with what probability the faster at the mean is the faster, where that makes the two a tie
            (``planner.costs.ties``); None: it does not.
    """
    predicted, measured_s = our_step
    rival, rival_s = rival_step
    rows = [
        (each, units.seconds_within(expected.step_s, expected.p10_s, expected.p90_s), units.seconds(step_s))
        for each, (expected, step_s) in ((ours, our_step), (name, rival_step))
    ]
    table = tables.table(("plan", "predicted step", "measured step"), rows)
    verdict = f"{rival.step_s / predicted.step_s:.2f} times as fast as {name}"
    if sure is not None:
        verdict = f"a tie ({verdict} at the mean; which is the faster is {units.percent(sure)} sure)"
    return f"{table}\npredicted {verdict}; measured {rival_s / measured_s:.2f} times as fast"


def _heading(title: str, text: str, command: str = "") -> None:
    width = min(96, shutil.get_terminal_size((96, 24)).columns)
    lines = ["", f"== {title} ".ljust(width, "="), *textwrap.wrap(text, width)]
    emit("\n".join([*lines, *([f"$ {command}"] if command else []), ""]))


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MissingFileError(
            f"cannot make the folder {folder}", [error.strerror or str(error)], ["-o another folder"]
        ) from None
