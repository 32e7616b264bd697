"""From a model to a profile, and from a profile to plans.

A call takes the fields of its dataclass (:func:`halopipe.api.arguments.call_of`): those of the lists of options that
the command line has too (:mod:`halopipe.planning.options`), and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halopipe.api.arguments import call_of, checked
from halopipe.api.files import ProfileOrPath, profile_in, remember
from halopipe.extra import FaceExtra
from halopipe.planning import search_progress, solve
from halopipe.planning.options import DEFAULT_SOLVER, MEASURING, MeasurementOptions, PlanOptions, ProfileOptions
from halopipe.planning.problem import problem_for
from planner.ir.cluster import Cluster
from planner.ir.extras import extras, required
from planner.ir.options import asked_as
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers.progress import Progress

if TYPE_CHECKING:
    from halopipe.planning.pareto import Front


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileCall(MeasurementOptions):
    """What :func:`profile` takes."""

    model: str | Path | Callable[..., Any] = field(kw_only=False)
    example: Any = field(default=None, kw_only=False)
    device: str = "cpu"
    allow: Sequence[str] = ()
    loss_fn: Callable[..., Any] | None = None
    varying: Mapping[str, Any] | None = None
    arguments: Mapping[str, Any] | None = None
    cluster: int | str = "auto"
    local_losses: int = 0
    unfinished: str | Path | None = None
    quiet: bool = False


@call_of(ProfileCall)
def profile(asked: ProfileCall) -> Profile:
    """Measures what every layer, device and link of this machine costs for ``model``.

    Args:
        model: a module, which is trained as it is (modes, weights); or a factory of one, ``pkg.mod:factory``,
            ``path/file.py:factory`` or the function itself; or a file of ``torch.save`` or ``torch.export.save``.
            Measuring and training happen in other processes: a module is written to ``.halopipe/`` in the working
            folder, from where they load it, and the profile names the file with its SHA-256.
        example: of a module, what it is called with: a tuple of inputs, a dict of them by keyword, or one; and with
            ``loss_fn`` (inputs, targets).  Nested in any way; what is no tensor is a constant.
        loss_fn: ``loss_fn(output, targets)``, a mean over samples, or a dict or tuple of losses, summed; None: the
            module's own, ``output.loss``, or a number, a dict of numbers or ``(logits, loss)`` that it returns.
        varying: which other sizes than the number of samples vary (:mod:`profiler.source.source`).
        input_shape: shape of the example, samples first; empty: ``example``, or the factory's own.
        arguments: keyword arguments of the factory; anything that JSON can hold.
        cluster: number of workers on this host (a worker is one core, or one GPU), or ``auto``: two cores, or all GPUs.
        device: ``cpu``; ``cuda``: the GPUs of this host; ``auto``: these, if there are enough of them.
        optimizer: an :class:`Optimizer`, or text such as ``SGD:lr=0.1,momentum=0.9``.
        sizes: micro-batch sizes to measure; empty: as many as reading between them needs, 1 and the batch among them.
        dtype: of parameters and activations; empty: the module's own, of what a factory makes float32.
        autocast: ``bfloat16``: operators that gain by it compute in that dtype, parameters stay in float32.
        allow: families of dims that plans may cut layers along, of ``sample``, ``spatial``, ``channel``; with more than
            the samples, parts of layers are measured at their own shapes as well: a shard's kernel may run at another
            speed than a share of the whole.
        num_ranks: ranks that parts are measured for; 0: the workers.
        elementwise: operators (``mylib::op``) that treat every element by itself, which halopipe cannot know.
        local_losses: of a factory of an ``nn.Sequential``, blocks that are each trained by a loss of their own, without
            gradients between them; this changes the optimisation.  0: none.
        quick: fewer sizes and runs, one process: faster, less exact.
        num_processes: fresh processes that measure the same, the median counts; 0: three, or one if ``quick``.
        transport: that links between cores are measured over, ``shared`` (memory) or ``gloo``; empty: shared, where it
            can be had.
        measure_machine: measure links within the host anew, also where an earlier profile of this boot has kept them.
        unfinished: file that keeps what is measured: a call that was interrupted goes on with it; removed at the end.
        on: ``h100-dgx``, ``a100-dgx`` or a cluster file: of machines that are not here, by models of their kernels;
            then ``cluster`` is how many devices of a system, and what says how to measure is not given.
        tables: kernels of your own for ``on``, as CSV.
        quiet: show no progress on stderr: a bar on a terminal, a line every ten seconds elsewhere.

    Raises:
        UsageError: the model cannot be found, built or captured; the text says which.
    """
    from halopipe.planning import measure

    source = measure.source_of(
        asked.model,
        asked.input_shape,
        asked.arguments or {},
        asked.dtype,
        asked.autocast,
        asked.elementwise,
        example=asked.example,
        loss_fn=asked.loss_fn,
        varying=asked.varying,
        local_losses=asked.local_losses,
    )
    kept = Path(asked.unfinished) if asked.unfinished is not None else None
    options = ProfileOptions(
        workers=measure.num_workers(asked.cluster),
        resume=kept is not None,
        **{each.name: getattr(asked, each.name) for each in fields(MeasurementOptions)},
    )
    if asked.on or asked.tables:
        of_no_use = {each.name for each in fields(asked) if getattr(asked, each.name) != each.default}
        refused = sorted(of_no_use & {*MEASURING, "unfinished"})
        profiles = (extra.profile_on(source, options, refused, quiet=True) for extra in extras(FaceExtra))
        return required(profiles, "halopipe", "profiles of machines that are not here")
    measured = measure.measure(source, options, unfinished=kept, quiet=asked.quiet)
    if kept is not None:
        kept.unlink(missing_ok=True)
    return measured


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlansCall(PlanOptions):
    """What calls take that have a solver search, perhaps for machines that one does not have."""

    profile: ProfileOrPath = field(kw_only=False)
    cluster: str | Path | Cluster | None = None
    solver: str = DEFAULT_SOLVER

    def problem(self, loaded: Profile) -> Problem:
        """What is asked of the profile, on these machines."""
        return problem_for(loaded if self.cluster is None else on_cluster(loaded, self.cluster), self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCall(_PlansCall):
    """What :func:`plan` takes."""

    progress: Progress | None = None
    measure_missing: bool = False
    quiet: bool = False


@call_of(PlanCall)
def plan(asked: PlanCall) -> Plan:
    """The best plan for a profile.

    Args:
        profile: or the name of its file.
        cluster: machines one does not have: a cluster file, or a :class:`Cluster`; see
            :mod:`halopipe.planning.plan_files`.
        measure_missing: measure on this machine what the plan and its close rivals use and the profile lacks, and plan
            again, up to three rounds.  Give the profile by its file: what was measured is written back to it.
        progress: called with how far the search is, in place of a bar.
        quiet: show no progress on stderr.
        memory: most that a plan may use on any device: bytes, or text such as ``2GiB``; 0: what the device has.
        global_batch, micro_batch, schedules, objective, ...: see :class:`halopipe.planning.options.PlanOptions`.

    Raises:
        UsageError: what is asked for does not exist, or is of another type.
        InfeasibleError: no plan fits; the text names what binds and what would fit.
    """
    from halopipe.planning import measure_missing as missing

    if asked.measure_missing:
        missing.require_possible(asked.cluster)
    loaded = profile_in(asked.profile)
    completed = missing.plan_and_store(
        asked.problem(loaded),
        lambda problem: search_progress.shown(problem, asked.solver, asked.progress, quiet=asked.quiet),
        missing.measure_here(quiet=asked.quiet) if asked.measure_missing else None,
        loaded,
        None if isinstance(asked.profile, Profile) else Path(asked.profile),
    )
    return remember(completed.plan, completed.profile)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoCall(_PlansCall):
    """What :func:`pareto` takes."""

    num_points: int = 0
    jobs: int = 1


@call_of(ParetoCall)
def pareto(asked: ParetoCall) -> Front:
    """The Pareto front of step time and memory: the best step under each memory limit, every point a plan.

    Args:
        profile: or the name of its file.
        num_points: about how many; 0: all there are.
        cluster, solver, memory, ...: as of :func:`plan`; ``memory`` is the largest limit that is tried.
        jobs: processes that share out the searches of ``num_points`` plans, which are the same for any number.  They
            import the script that calls: more than one only under ``if __name__ == "__main__"``.

    Raises:
        InfeasibleError: no plan fits.
        UsageError: fewer than one process.
        WorkerDiedError: a process of several died.
    """
    from halopipe.planning import pareto as fronts

    problem = asked.problem(profile_in(asked.profile))
    front = fronts.front(problem, asked.num_points, asked.solver, jobs=asked.jobs)
    for one in front.plans:
        remember(one, problem.profile)
    return front


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselinesCall(PlanOptions):
    """What :func:`baselines` takes."""

    profile: ProfileOrPath = field(kw_only=False)
    time_limit_s: float = asked_as(Problem, "time_limit_s", default=inf)
    jobs: int = 1


@call_of(BaselinesCall)
def baselines(asked: BaselinesCall) -> tuple[Plan, ...]:
    """The published strategies on the same profile, those that fit.

    Args:
        profile: or the name of its file.
        time_limit_s: for all of them together.  Without it each takes what its authors state, or as long as a search
            of ours.
        jobs: processes that share them out, as of :func:`pareto`.
        memory, global_batch, ...: as of :func:`plan`.

    Raises:
        UsageError: what is asked for does not exist.  A strategy that does not fit is left out.
    """
    within_s = asked.time_limit_s
    options = asked if within_s < inf else replace(asked, time_limit_s=PlanOptions().time_limit_s)
    problem = problem_for(profile_in(asked.profile), options)
    baseline_plans = solve.solve_baselines(problem, within_s=within_s, jobs=asked.jobs).plans.values()
    return tuple(remember(one, problem.profile) for one in baseline_plans)


@checked
def on_cluster(profile: ProfileOrPath, cluster: str | Path | Cluster) -> Profile:
    """The profile as it would be on other machines; see :func:`halopipe.planning.plan_files.on_cluster`.

    Args:
        profile: or the name of its file.
        cluster: a cluster file, or a :class:`Cluster`.

    Raises:
        CorruptFileError: the file is wrong; all its faults are named.
        MissingMeasurementError: no source states a figure that a layer needs.
    """
    from halopipe.planning import plan_files

    return plan_files.on_cluster(profile_in(profile), cluster)
