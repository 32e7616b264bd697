"""The calls: profile, plan, compare (with baselines), explain, execute; and what one may ask of a plan.

Profiles and plans are given as objects or by the names of their files.  A plan remembers its profile, as long as the
process lasts: what asks about a plan needs no profile if the plan was made here, or was read from a file that has its
``profile.json`` beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from halopipe.planning import problem as problems
from halopipe.planning import solve
from halopipe.planning.compare import Comparison
from halopipe.terminal import units
from planner.ir import codec
from planner.ir.cluster import Cluster
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.files import write_text
from planner.ir.plan import Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from halopipe.launch.parallelize import Parallel
    from halopipe.planning.pareto import Front
    from halopipe.planning.problem import Asked
    from halopipe.planning.shadow_prices import Prices
    from halopipe.planning.what_if import Answer
    from halopipe.run_spec.options import ScriptOptions
    from halopipe.serving.serving import Serving
    from halopipe.training.session import Execution
    from planner.ir.graph import Graph
    from planner.ir.problem import Problem
    from planner.ir.profile import Optimizer
    from planner.ir.timeline import TimelineFile
    from planner.layers.receptive_field import ReceptiveField
    from planner.solvers import Progress

__all__ = [
    "Comparison",
    "Execution",
    "baselines",
    "compare",
    "execute",
    "explain",
    "load",
    "on_cluster",
    "parallelize",
    "pareto",
    "plan",
    "prices",
    "profile",
    "receptive_field",
    "report",
    "save",
    "serve",
    "what_if",
    "why_not",
]

PlanOrPath = Plan | str | Path
ProfileOrPath = Profile | str | Path

_MOST_REMEMBERED = 8
_made_from: dict[str, Profile | Path] = {}
"""By the fingerprint that plans have of it: the profile, or the file of a plan that was made from it."""


def load(path: str | Path) -> Profile | Plan | TimelineFile:
    """What a file holds that halopipe wrote: a profile, a plan, or the timelines of a run.

    Raises:
        MissingFileError, CorruptFileError, NewerFileError: the file cannot be used; the text says why.
    """
    found: Profile | Plan | TimelineFile = codec.load_any(path)
    if isinstance(found, Plan):
        _remember(found, Path(path))
    return found


def save(thing: Profile | Plan | TimelineFile, path: str | Path) -> None:
    """Writes a profile, a plan or timelines: the file that the commands read.

    Raises:
        UsageError: it is something else.
        MissingFileError: the folder is missing or cannot be written.
    """
    if type(thing) not in [cls for cls, _ in codec.FORMATS.values()]:
        kinds = ", ".join(codec.FORMATS)
        raise UsageError(f"a {type(thing).__name__} is not kept in a file", [f"files hold: {kinds}"])
    codec.dump(thing, path)


def profile(
    model: str | Path | Callable[..., Any],
    example: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    varying: Mapping[str, Any] | None = None,
    input_shape: Sequence[int] = (),
    arguments: Mapping[str, Any] | None = None,
    cluster: int | str = "auto",
    device: str = "cpu",
    optimizer: str | Optimizer = "SGD",
    sizes: Sequence[int] = (),
    dtype: str = "",
    autocast: str = "",
    allow: Sequence[str] = (),
    num_ranks: int = 0,
    elementwise: Sequence[str] = (),
    local_losses: int = 0,
    quick: bool = False,
    num_processes: int = 0,
    transport: str = "",
    unfinished: str | Path | None = None,
    on: str = "",
    tables: Sequence[str | Path] = (),
) -> Profile:
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
        unfinished: file that keeps what is measured: a call that was interrupted goes on with it; removed at the end.
        on: ``h100-dgx``, ``a100-dgx`` or a cluster file: of machines that are not here, by models of their kernels;
            then ``cluster`` is how many devices of a system, and what says how to measure is not given.
        tables: kernels of your own for ``on``, as CSV.

    Raises:
        UsageError: the model cannot be found, built or captured; the text says which.
    """
    from halopipe.planning import measure

    kept = Path(unfinished) if unfinished is not None else None
    source = measure.source_of(
        model,
        input_shape,
        arguments or {},
        dtype,
        autocast,
        elementwise,
        example=example,
        loss_fn=loss_fn,
        varying=varying,
        local_losses=local_losses,
    )
    if on or tables:
        given = {"allow": allow, "num_ranks": num_ranks, "quick": quick, "num_processes": num_processes}
        given |= {"device": device != "cpu", "transport": transport, "unfinished": unfinished}
        refused = sorted(name for name, value in given.items() if value)
        workers = measure.num_workers(cluster)
        return measure.modelled(source, on, workers, optimizer, tuple(sizes), tables, refused=refused, quiet=True)
    found = measure.measure(
        source,
        num_workers=measure.num_workers(cluster),
        device=device,
        optimizer=optimizer,
        sizes=tuple(sizes),
        allow=allow,
        num_ranks=num_ranks,
        quick=quick,
        num_processes=num_processes,
        transport=transport,
        unfinished=kept,
        resume=kept is not None,
        quiet=True,
    )
    if kept is not None:
        kept.unlink(missing_ok=True)
    return found


def plan(
    profile: ProfileOrPath,
    *,
    cluster: str | Path | Cluster | None = None,
    solver: str = solve.DEFAULT_SOLVER,
    memory: str | int = 0,
    progress: Progress | None = None,
    measure_missing: bool = False,
    **asked: Unpack[Asked],
) -> Plan:
    """The best plan for a profile.

    Args:
        profile: or the name of its file.
        cluster: machines one does not have: a cluster file, or a :class:`Cluster`; see
            :mod:`halopipe.planning.clusters`.
        measure_missing: measure on this machine what the plan and its close rivals use and the profile lacks, and plan
            again, up to three rounds.  Give the profile by its file: what was measured is written back to it.
        memory: most that a plan may use on any device: bytes, or text such as ``2GiB``; 0: what the device has.
        asked: ``global_batch``, ``micro_batch``, ``schedules``, ``num_ranks``, ``max_stages``, ``gap``,
            ``time_limit_s``, ``objective``, ``allow``, ``recompute``, ``shard``, ``zero``, ``fix``, ``forbid``,
            ``calibration``: see :func:`halopipe.planning.problem.make_problem`.

    Raises:
        InfeasibleError: no plan fits; the text names what binds and what would fit.
    """
    loaded = _profile(profile)
    problem = _problem(loaded, cluster, memory, asked)
    if not measure_missing:
        return _remember(solve.solve(problem, solver, progress), problem.profile)
    from halopipe.planning import measure_missing as missing

    missing.require_possible(cluster)
    completed = missing.plan_and_measure(
        problem, lambda each: solve.solve(each, solver, progress), missing.measure_here(quiet=True)
    )
    if completed.rounds and not isinstance(profile, Profile):
        codec.dump(missing.stored(loaded, completed.profile), profile)
    return _remember(completed.plan, completed.profile)


def pareto(
    profile: ProfileOrPath,
    *,
    num_points: int = 0,
    cluster: str | Path | Cluster | None = None,
    solver: str = solve.DEFAULT_SOLVER,
    memory: str | int = 0,
    **asked: Unpack[Asked],
) -> Front:
    """The Pareto front of step time and memory: the best step under each memory limit, every point a plan.

    Args:
        num_points: about how many; 0: all there are.
        asked: as of :func:`plan`.
    """
    from halopipe.planning import pareto as fronts

    problem = _problem(_profile(profile), cluster, memory, asked)
    front = fronts.front(problem, num_points, solver)
    for one in front.plans:
        _remember(one, problem.profile)
    return front


def explain(plan: PlanOrPath, profile: ProfileOrPath | None = None) -> str:
    """Why this plan, in words and pictures; more of it where its profile is known.

    Raises:
        StaleFileError: the plan was made from another profile than the one given.
    """
    from halopipe.reports import explain as explaining

    return explaining.explain(_plan(plan), _profile_of(plan, profile))


def receptive_field(
    of: ProfileOrPath | Graph, layer: str, box: Mapping[str, tuple[int, int]] | None = None
) -> ReceptiveField:
    """What an output of a network reads of its inputs; see :func:`planner.layers.receptive_field.receptive_field`.

    Args:
        of: a profile, its file, or a graph (``profile.graph``).
        layer: its name; ``layer:1`` for its second output.
        box: by dim of the output where it starts and stops, ``{"height": (0, 4), "width": (0, 4)}``; of dims left out
            the one element in the middle.

    Raises:
        UnknownNameError: no layer makes that.
        UsageError: the box does not lie in the output, or neighbours depend on the data.
    """
    from planner.ir.graph import Graph
    from planner.layers import receptive_field as fields

    return fields.receptive_field(of if isinstance(of, Graph) else _profile(of).graph, layer, box)


def report(plan: PlanOrPath, *others: PlanOrPath | Profile | TimelineFile, output: str | Path = "report.html") -> None:
    """Writes one offline page about a plan: network, step, memory, rivals, proof, how each figure is known.

    Args:
        others: the plan's profile, if it is not remembered; the timelines of a run; rivals, in any order.

    Raises:
        UsageError: bokeh is not installed, or a timeline is of another plan.
    """
    from halopipe.reports import report as reporting

    sources = reporting.read([plan, *others], remembered=remembered(_plan(plan)))
    write_text(output, reporting.page(sources))


def remembered(plan: Plan) -> Profile | None:
    """The profile that the plan was made from, if this process made or read it."""
    return _profile_of(plan, None)


def why_not(plan: PlanOrPath, *asked: ProfileOrPath | None) -> Answer:
    """Why the plan is not another one; see :func:`halopipe.planning.what_if.why_not`.

    Args:
        asked: ``question``, such as ``dp=4``; or ``profile, question``.
    """
    from halopipe.planning import what_if as asking

    profile, question = _question(plan, asked)
    return asking.why_not(_plan(plan), profile, question)


def what_if(plan: PlanOrPath, *asked: ProfileOrPath | None) -> Answer:
    """What would be best if; see :func:`halopipe.planning.what_if.what_if`.

    Args:
        asked: ``question``, such as ``n1/gpu0.memory=32GiB``; or ``profile, question``.

    Raises:
        UsageError: the question is not understood, or the plan's profile is not known.
    """
    from halopipe.planning import what_if as asking

    profile, question = _question(plan, asked)
    return asking.what_if(_plan(plan), _needed(plan, profile), question)


def prices(plan: PlanOrPath, profile: ProfileOrPath | None = None, time_limit_s: float = 60.0) -> Prices:
    """What one more GiB, one more device, a link twice as fast would save.

    See :func:`halopipe.planning.shadow_prices.prices`.

    Raises:
        UsageError: the plan's profile is not known.
    """
    from halopipe.planning import shadow_prices

    return shadow_prices.prices(_plan(plan), _needed(plan, _profile_of(plan, profile)), time_limit_s)


def on_cluster(profile: ProfileOrPath, cluster: str | Path | Cluster) -> Profile:
    """The profile as it would be on other machines; see :func:`halopipe.planning.clusters.on_cluster`."""
    from halopipe.planning import clusters

    return clusters.on_cluster(_profile(profile), cluster)


def baselines(profile: ProfileOrPath, **asked: Unpack[Asked]) -> tuple[Plan, ...]:
    """The published strategies on the same profile, those that fit.

    Args:
        asked: as of :func:`plan`.
    """
    problem = problems.make_problem(_profile(profile), **asked)
    found = solve.solve_baselines(problem).plans.values()
    return tuple(_remember(one, problem.profile) for one in found)


def compare(*plans: PlanOrPath, **named: PlanOrPath) -> Comparison:
    """Plans beside one another, the first as the reference; those without a name get that of their solver."""
    found: dict[str, Plan] = {}
    for one in map(_plan, plans):
        name, number = one.search.solver, 2
        while name in found:
            name, number = f"{one.search.solver} {number}", number + 1
        found[name] = one
    found.update({name: _plan(one) for name, one in named.items()})
    first = next(iter((*plans, *named.values())))
    return Comparison(found, profile=_profile_of(first, None))


def execute(
    plan: PlanOrPath,
    model: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    *,
    example: Any = None,
    **options: Unpack[ScriptOptions],
) -> Execution:
    """Joins the torchrun job as one rank of ``plan``; see :func:`halopipe.launch.execute.execute`.

    Args:
        optimizer: an optimiser object of the model, a function that makes one of parameters, or text such as
            ``AdamW:lr=0.001``.
        options: ``scheduler``, ``clip_norm``, ``accumulate``, ``seed``, ``deadline_s``, ``compiler``, ``device``,
            ``check_first_step``, ``on_nan``: as of a run, see :class:`halopipe.run_spec.options.RunOptions`; scheduler
            and compiler may be functions, and a scheduler the object that was made on the optimiser object.
    """
    from halopipe.launch import execute as executing

    return executing.execute(_plan(plan), model, loss_fn, optimizer, example=example, **options)


def parallelize(
    module: Any,
    example: Any = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    devices: int | str = "auto",
    optimizer: Any = "SGD",
    global_batch: int = 0,
    plan: PlanOrPath | None = None,
    profile: ProfileOrPath | None = None,
    quick: bool = True,
    **options: Unpack[ScriptOptions],
) -> Parallel | Execution:
    """Trains a module on the devices of this host, from a plain script or a notebook cell: no torchrun, no guard.

    Profiles, plans, starts a process for each device, and returns a handle: ``run.step(batch)`` gives the loss,
    ``run.module`` the module as it is trained by now, and ``run.close()``, or the end of a ``with`` block, leaves the
    trained weights in ``module``.  A process that torchrun started becomes a rank, as by :func:`execute`; rank 0 plans.

    Args:
        module, example, loss_fn: as of :func:`profile`.
        devices: how many of this host; ``auto``: two cores, or all GPUs.
        optimizer: text, a function of parameters, or an optimiser object of the module's parameters; it stays in the
            script, whatever is done to its learning rates there holds for the next step.
        global_batch: samples a step; 0: those of the example.
        plan: to run, instead of making one; ``profile``: to plan from, instead of measuring.
        quick: measure less, in tens of seconds.
        options: as of :func:`execute`.

    Raises:
        UsageError: they do not go together; or a job on several hosts has no plan.
        InfeasibleError: no plan fits.
    """
    from halopipe.launch import parallelize as launching
    from halopipe.launch.job_environment import job_rank
    from halopipe.training.optimizer_spec import spec_of

    measured, job = None if profile is None else _profile(profile), job_rank()
    cluster = devices if job is None else job.num_ranks

    def make_plan() -> tuple[Profile, Plan]:
        found = measured or _measure(
            module, example, loss_fn=loss_fn, cluster=cluster, optimizer=spec_of(optimizer), quick=quick
        )
        best = _make_plan(found, global_batch=global_batch)
        return found, best if job is None else _on_all(found, best, job.num_ranks)

    given = None if plan is None else _plan(plan)
    known = measured if given is None else _profile_of(given, profile)
    return launching.parallelize(module, example, loss_fn, optimizer, given, known, make_plan, options, job)


def serve(
    plan: PlanOrPath,
    module: Any = None,
    *,
    mode: str = "module",
    learn: bool = False,
    room: int = 0,
    checkpoint: str | Path = "",
    step: int | None = None,
    optimizer: Any = None,
    check_first_answer: bool = True,
    **options: Unpack[ScriptOptions],
) -> Serving:
    """Answers an endless stream of requests by a plan, on the devices of this host; see :class:`Serving`.

    Each stage works on a request of its own at the same time, and keeps state of its own: buffers that layers write.

    Args:
        module: whose weights the ranks begin with; None: those that the plan's factory makes.
        mode: ``module``: batch norm and dropout as the module was planned, part by part; ``eval``: evaluation mode.
        learn: whether each stage updates its weights after each request, by a loss of its own
            (``halopipe profile --local-loss``).  **This changes the optimisation.**
        room: requests that may be on their way before the next waits; 0: twice the stages, and two.
        checkpoint: a folder of checkpoints whose weights are served; ``step``: which one, the newest if None.
        optimizer: for ``learn``; text or a function of parameters; None: the plan's.
        check_first_answer: whether the model's example is answered first, and compared with one device.
        options: as of :func:`execute`.

    Raises:
        UsageError: the plan does not learn by local losses alone, or this process is a rank of a job.
        UnsupportedModelError: the module's output cannot be had of the captured graph.
        NumericsError: the first answer is not one device's.
    """
    from halopipe.serving import serving

    return serving.open_serving(
        _plan(plan),
        module,
        optimizer=optimizer,
        options=options,
        checkpoint=checkpoint,
        step=step,
        mode=mode,
        learn=learn,
        room=room,
        check=check_first_answer,
    )


def _on_all(profile: Profile, best: Plan, num_ranks: int) -> Plan:
    """The best plan that has something to do for every process of a job; ``best`` itself, if it has."""
    if best.decision.num_ranks == num_ranks:
        return best
    found: list[Plan] = []
    for rule in (f"*=replicas:{num_ranks}", f"{profile.graph.layers[-1].name}=stage:{num_ranks - 1}"):
        with contextlib.suppress(InfeasibleError):
            found.append(plan(profile, global_batch=best.decision.global_batch, fix=[rule]))
    least = min(found, key=lambda each: each.prediction.step_s, default=best)
    if least is not best:
        from halopipe.terminal import console

        few, all_of_them = (units.seconds(each.prediction.step_s) for each in (best, least))
        console.remark(
            f"a step takes {few} on {units.count(best.decision.num_ranks, 'device')}, {all_of_them} on the {num_ranks} "
            f"that torchrun asks for: --nproc-per-node {best.decision.num_ranks} is faster"
        )
    return least


_measure, _make_plan = profile, plan  # where an argument is called so


def _problem(profile: Profile, cluster: str | Path | Cluster | None, memory: str | int, asked: Asked) -> Problem:
    memory_bytes = units.parse_size(memory) if isinstance(memory, str) else memory
    on = profile if cluster is None else on_cluster(profile, cluster)
    return problems.make_problem(on, memory_bytes=memory_bytes, **asked)


def _profile(given: ProfileOrPath) -> Profile:
    return given if isinstance(given, Profile) else solve.load_profile(given)


def _plan(given: PlanOrPath) -> Plan:
    return given if isinstance(given, Plan) else _remember(solve.load_plan(given), Path(given))


def _remember(plan: Plan, profile: Profile | Path) -> Plan:
    """Where the plan's profile is: the profile itself, rather than the plan's file."""
    key = plan.inputs.profile_fingerprint
    known = _made_from.pop(key, None)
    _made_from[key] = known if isinstance(known, Profile) else profile
    while len(_made_from) > _MOST_REMEMBERED:
        _made_from.pop(next(iter(_made_from)))
    return plan


def _profile_of(plan: PlanOrPath, given: ProfileOrPath | None) -> Profile | None:
    """The one given, else the one remembered, if there is one; under the corrections that the plan was made under."""
    plan = _plan(plan)
    if given is not None:
        return solve.require_profile(_profile(given), plan, given if isinstance(given, (str, Path)) else "PROFILE")
    known = _made_from.get(plan.inputs.profile_fingerprint)
    if isinstance(known, Path):
        return solve.profile_of(plan, known, None)
    return None if known is None else plan.inputs.as_seen(known)


def _needed(plan: PlanOrPath, profile: Profile | None) -> Profile:
    if profile is None:
        where = "made by another process" if isinstance(plan, Plan) else f"no profile.json beside {plan} is its own"
        raise UsageError(
            "this searches again, which needs the profile that the plan was made from",
            [f"none is given, and none is remembered: {where}"],
            ["give the profile, or the name of its file, behind the plan"],
        )
    return profile


def _question(plan: PlanOrPath, asked: tuple[ProfileOrPath | None, ...]) -> tuple[Profile | None, str]:
    """The profile that is given or remembered, and the question."""
    match asked:
        case (str() as question,):
            return _profile_of(plan, None), question
        case (profile, str() as question):
            return _profile_of(plan, profile), question
    raise TypeError("a plan and a question are asked for, or a plan, its profile and a question")


def __getattr__(name: str) -> Any:
    if name == "Execution":  # its module loads torch
        from halopipe.training.session import Execution

        return Execution
    raise AttributeError(f"module 'halopipe.api' has no attribute {name!r}")
