"""``halopipe plan``: searches for the best plan.

Its options are those of :mod:`halopipe.planning.options`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halopipe.cli.options import ClusterOption, FileOption, JsonOption, with_options
from halopipe.extra import FaceExtra
from halopipe.planning.options import PlanOptions, SearchOptions, of_a_search
from halopipe.terminal import console, units
from halopipe.terminal.output_files import claimed
from planner.ir.errors import UsageError
from planner.ir.extras import extras, required
from planner.ir.files import same_file
from planner.ir.problem import SAMPLE_DIMS

if TYPE_CHECKING:
    from planner.ir.plan import Plan
    from planner.ir.profile import Profile
    from planner.ir.proof import Proof


@with_options
def plan(
    profile: Annotated[
        Path,
        typer.Argument(metavar="PROFILE", help="A profile, as written by 'halopipe profile'."),
    ],
    *,
    output: FileOption = Path("plan.json"),
    proof: Annotated[
        Path | None,
        typer.Option(
            "--proof",
            metavar="FILE",
            help="Also write a proof that no plan is faster by more than it says; check --proof verifies it.",
        ),
    ] = None,
    cluster: ClusterOption = None,
    options: PlanOptions,
    search: SearchOptions,
    json: JsonOption = False,
) -> None:
    """Search for the best plan -> plan.json. Needs no devices, but for --measure-missing."""
    from halopipe.planning import measure_missing, plan_files

    if proof is not None and (search.ways or search.pareto is not None):
        other = "--ways" if search.ways else "--pareto"
        raise UsageError(f"--proof with {other}", ["a proof is of one plan of a search"], [f"leave out {other}"])
    if proof == output:
        raise UsageError(f"{proof} is to hold the plan and its proof", [], ["--proof another name"])
    _require_use("--quick", not search.quick or search.measure_missing, "--measure-missing")
    files = _Files(profile, cluster, output, json, proof)
    read = [profile, *([cluster] if cluster is not None else [])]
    points = [path for path in read if files.is_point(path)] if search.pareto is not None else []
    with claimed([output, proof, *points], read, replaced=[profile] if search.measure_missing else []):
        if search.measure_missing:
            measure_missing.require_possible(cluster, search.pareto)
        loaded = plan_files.load_profile(profile, cluster=cluster)
        if search.ways:
            _by_ways(loaded, search, options, files)
        elif search.pareto is not None:
            _front(loaded, search, search.pareto, options, files)
        else:
            _best(loaded, search, options, files)


def _require_use(name: str, has_use: bool, needed: str) -> None:
    if not has_use:
        raise UsageError(f"{name} is of no use without {needed}", [], [f"add {needed}", f"leave out {name}"])


def _best(loaded: Profile, search: SearchOptions, options: PlanOptions, files: _Files) -> None:
    """The plan that a search finds, measured to the end where that is asked for."""
    from halopipe.planning import measure_missing, search_progress
    from halopipe.planning.problem import default_schedules, problem_for
    from planner.proof.prove import prove, require_provable

    if files.proof is not None:  # which covers no more
        schedules = options.schedules or default_schedules()
        options = replace(options, allow=options.allow or (SAMPLE_DIMS,), schedules=schedules)
    problem = problem_for(loaded, options)
    if files.proof is not None:
        require_provable(problem)
    measure = measure_missing.measure_here(search.quick) if search.measure_missing else None
    completed = measure_missing.plan_and_store(
        problem,
        lambda asked: search_progress.solve(asked, search.solver),
        measure,
        loaded,
        files.profile,
        console.remark,
    )
    if completed.rounds:
        console.wrote(files.profile)
        fingerprint = completed.plan.inputs.profile_fingerprint
        console.remark(f"its fingerprint is now {fingerprint}: earlier plans are of another")
    of = completed.profile if completed.rounds else loaded
    proof = None if files.proof is None else prove(completed.plan, of)
    files.write(completed.plan, of, options.objective, proof)
    on = ["--cluster", files.cluster] if files.cluster is not None else []
    explained = console.command("explain", files.output, "--profile", files.profile, *on)
    console.wrote(files.output, f"{explained}, or {console.command('run', files.output)}")
    if proof is not None and files.proof is not None:
        bound = f"{units.seconds(proof.bound_s)} (gap {units.percent(proof.gap)})"
        console.remark(f"no plan that the proof covers takes less than {bound}")
        console.wrote(files.proof, console.command("check", files.output, "--proof", files.proof, *on))
    if completed.plan.search.status == "stopped":
        raise typer.Exit(console.INTERRUPTED)


def _front(loaded: Profile, search: SearchOptions, num_points: int, options: PlanOptions, files: _Files) -> None:
    """The plans of a Pareto front, a file each."""
    from halopipe.planning import search_progress
    from halopipe.planning.problem import problem_for

    problem = problem_for(loaded, options)
    front = search_progress.front(problem, search.solver, num_points, search.jobs)
    paths = [files.point(number) for number in range(1, len(front.plans) + 1)]
    for path, plan in zip(paths, front.plans, strict=True):
        files.dump(plan, path)
    console.show(front, as_json=files.json)
    for path in dict.fromkeys(paths):
        console.wrote(path)


def _by_ways(loaded: Profile, search: SearchOptions, options: PlanOptions, files: _Files) -> None:
    """The plan that a way of a transformer is."""
    from halopipe.planning.problem import bytes_of

    if useless := of_a_search(search, options):
        raise UsageError(
            f"--ways says what the plan is, and {', '.join(useless)} what a search may choose",
            ["nothing is searched for with --ways"],
            [f"leave out {', '.join(useless)}", "leave out --ways"],
        )
    asked = (options.global_batch, options.micro_batch, bytes_of(options.memory))
    plans = (extra.plan_by_ways(loaded, search.ways, *asked) for extra in extras(FaceExtra))
    plan = required(plans, "halopipe", "plans by --ways")
    files.write(plan, loaded, options.objective)
    console.wrote(files.output, console.command("run", files.output))


@dataclass(frozen=True, slots=True)
class _Files:
    """What plans are made from and where they go.

    Attributes:
        json: whether the result itself goes to stdout, rather than words about it.
        proof: where its proof goes; None: nowhere.
    """

    profile: Path
    cluster: Path | None
    output: Path
    json: bool
    proof: Path | None = None

    def point(self, number: int) -> Path:
        """Where the plan of a point of a front goes, counted from 1; all into a pipe or device."""
        is_special = self.output.exists() and not self.output.is_file()
        return self.output if number == 1 or is_special else self.output.with_suffix(f".{number}{self.output.suffix}")

    def is_point(self, path: Path) -> bool:
        """Whether the plan of some point would go there."""
        number = path.name.removeprefix(f"{self.output.stem}.").removesuffix(self.output.suffix)
        return number.isdecimal() and same_file(path, self.point(int(number)))

    def dump(self, plan: Plan, path: Path, proof: Proof | None = None) -> Plan:
        """Writes a plan, which remembers where its profile is unless it is for other machines, and its proof."""
        from halopipe.planning import plan_files
        from planner.ir.codec import dumps
        from planner.ir.files import write_texts

        plan = plan if self.cluster is not None else plan_files.remembering(plan, self.profile, path)
        texts = {path: dumps(plan)}
        if proof is not None and self.proof is not None:
            texts[self.proof] = dumps(proof)
        write_texts(texts)
        return plan

    def write(self, plan: Plan, profile: Profile, objective: str, proof: Proof | None = None) -> None:
        """Writes the plan and says what it is; ``profile`` is the one that it was made from."""
        from halopipe.reports import explain
        from planner.ir.codec import dumps
        from planner.layers import fixes_samples, statistics_text

        plan = self.dump(plan, self.output, proof)
        console.emit(dumps(plan) if self.json else explain.headline(plan, objective=objective, profile=profile))
        if statistics := statistics_text(plan.decision, profile.graph):
            whole = "" if fixes_samples(profile.graph) else "; with --batch-statistics whole: of the whole batch"
            console.remark(statistics + whole)
        for line in explain.recomputed_lines(plan, profile):
            console.remark(line.strip())
