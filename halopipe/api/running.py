"""Plans that train a module, or answer requests: as one rank of a job, or from a script or notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from halopipe.api import plans
from halopipe.api.arguments import checked
from halopipe.api.files import PlanOrPath, ProfileOrPath, plan_in, profile_in, profile_of
from halopipe.extra import FaceExtra
from halopipe.run_spec.options import ScriptOptions
from halopipe.terminal import console, units
from planner.ir.errors import InfeasibleError
from planner.ir.extras import extras, required
from planner.ir.plan import Plan
from planner.ir.problem import WHOLE
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from halopipe.launch.parallelize import Parallel
    from halopipe.training.session import Execution


@checked
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
        plan: or the name of its file.
        model, loss_fn, example: those that the plan was made for; None: those of the plan's own factory.
        optimizer: an optimiser object of the model, a function that makes one of parameters, or text such as
            ``AdamW:lr=0.001``.
        options: ``scheduler``, ``clip_norm``, ``accumulate``, ``seed``, ``deadline_s``, ``compiler``, ``device``,
            ``check_first_step``, ``on_nan``: as of a run, see :class:`halopipe.run_spec.options.RunOptions`; scheduler
            and compiler may be functions, and a scheduler the object that was made on the optimiser object.

    Raises:
        UsageError: this process is no rank of a job, something is of another type, or ranks were told different things.
        RankCountError: the job has another number of ranks than the plan.
        StaleFileError: the plan was made for another model.
    """
    from halopipe.launch import execute as executing

    return executing.execute(plan_in(plan), model, loss_fn, optimizer, example=example, **options)


@checked
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
    batch_statistics: str = WHOLE,
    quiet: bool = False,
    **options: Unpack[ScriptOptions],
) -> Parallel | Execution:
    """Trains a module on the devices of this host, from a plain script or a notebook cell: no torchrun, no guard.

    Profiles, plans, starts a process for each device, and returns a handle: ``run.step(batch)`` gives the loss,
    ``run.module`` the module as it is trained by now, and ``run.close()``, or the end of a ``with`` block, leaves the
    trained weights in ``module``.  In a loop ``for batch in run.ahead(batches)`` the ranks of a sparse or graph network
    prepare the next batch meanwhile, where the plan says so.  A process that torchrun started becomes a rank, as by
    :func:`execute`; rank 0 plans.

    Args:
        module, example, loss_fn: as of :func:`profile`.
        devices: how many of this host; ``auto``: two cores, or all GPUs.
        optimizer: text, a function of parameters, or an optimiser object of the module's parameters; it stays in the
            script, whatever is done to its learning rates there holds for the next step.
        global_batch: samples a step; 0: those of the example.
        plan: to run, instead of making one; ``profile``: to plan from, instead of measuring.
        quick: measure less, in tens of seconds.
        batch_statistics: of a plan that is made: ``whole``: batch norm sees the whole batch, as in a loop on one
            device; ``micro``: a micro-batch, and more plans are possible.
        quiet: write nothing to stderr: no progress, and not that the first step was one device's.
        options: as of :func:`execute`.

    Raises:
        UsageError: they do not go together; or a job on several hosts has no plan.
        InfeasibleError: no plan fits.
    """
    from halopipe.launch import parallelize as launching
    from halopipe.launch.job_environment import job_rank
    from halopipe.training.optimizer_spec import spec_of

    measured = None if profile is None else profile_in(profile)
    job = job_rank()
    cluster = devices if job is None else job.num_ranks

    def make_plan() -> tuple[Profile, Plan]:
        planned_on = measured or plans.profile(
            module, example, loss_fn=loss_fn, cluster=cluster, optimizer=spec_of(optimizer), quick=quick, quiet=quiet
        )
        best = plans.plan(planned_on, global_batch=global_batch, batch_statistics=batch_statistics, quiet=quiet)
        return planned_on, best if job is None else _on_all(planned_on, best, job.num_ranks, batch_statistics)

    ready_plan = None if plan is None else plan_in(plan)
    its_profile = measured if ready_plan is None else profile_of(ready_plan, profile)
    return launching.parallelize(
        module, example, loss_fn, optimizer, ready_plan, its_profile, make_plan, options, job, quiet=quiet
    )


@checked
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
) -> Any:
    """Answers an endless stream of requests by a plan, on the devices of this host: ``submit`` gives a future answer.

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
    serving = {
        "optimizer": optimizer,
        "options": options,
        "checkpoint": checkpoint,
        "step": step,
        "mode": mode,
        "learn": learn,
        "room": room,
        "check": check_first_answer,
    }
    served = plan_in(plan)
    return required((extra.serve(served, module, **serving) for extra in extras(FaceExtra)), "halopipe", "serving")


def _on_all(profile: Profile, best: Plan, num_ranks: int, batch_statistics: str) -> Plan:
    """The best plan that has something to do for every process of a job; ``best`` itself, if it has."""
    if best.decision.num_ranks == num_ranks:
        return best
    candidates: list[Plan] = []
    batch = best.decision.global_batch
    for rule in (f"*=replicas:{num_ranks}", f"{profile.graph.layers[-1].name}=stage:{num_ranks - 1}"):
        with contextlib.suppress(InfeasibleError):
            candidates.append(plans.plan(profile, global_batch=batch, fix=[rule], batch_statistics=batch_statistics))
    least = min(candidates, key=lambda each: each.prediction.step_s, default=best)
    if least is not best:
        few, all_of_them = (units.seconds(each.prediction.step_s) for each in (best, least))
        console.remark(
            f"a step takes {few} on {units.count(best.decision.num_ranks, 'device')}, {all_of_them} on the {num_ranks} "
            f"that torchrun asks for: --nproc-per-node {best.decision.num_ranks} is faster"
        )
    return least
