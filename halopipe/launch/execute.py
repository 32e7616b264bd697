"""A plan inside a training script of one's own: every process that torchrun starts is one rank of it.

The script builds the whole model in every process, under the same seed; a rank trains its own stages of it in place.

    with hp.execute(plan, model, loss_fn, optimizer, example=example, clip_norm=1.0) as run:
        for batch in loader:
            loss = run.step(batch)
        print(run.evaluate(held_out).loss)
        run.save("checkpoints")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from halopipe.launch.job_environment import JobRank, job_rank
from halopipe.launch.job_stores import job_stores
from halopipe.planning.measure import no_model
from halopipe.run_spec.options import FIELDS, ON_NAN, TRANSPORTS, ScriptOptions
from halopipe.run_spec.schema import field_faults
from halopipe.terminal.units import require_known
from halopipe.training.optimizer_spec import (
    make_optimizer_of,
    make_scheduler_of,
    parse_optimizer,
    parse_scheduler,
    require_meant,
)
from halopipe.training.rank import JobMember
from halopipe.training.rank_device import DEVICES
from halopipe.training.script_values import ScriptValues
from halopipe.training.session import Execution, TensorOrTuple, users_module
from halopipe.training.single_device import KeptModel, parameters_of
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from planner.passes.versions import updates_within
from profiler import LoadedModel, load_model
from profiler.source.losses import TrainedLoss, own_loss
from profiler.source.model import owners
from profiler.source.parts import model_of
from runtime.numerics.finite import OnNan
from runtime.optim.followed import Followed
from runtime.optim.optimizer import MakeOptimizer, MakeScheduler
from runtime.optim.schedules import SteppedElsewhere, no_schedule, schedules_of
from runtime.rank import RankContext

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.monitor.activity import StatusStore


def execute(
    plan: Plan,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: str | torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    example: tuple[TensorOrTuple, TensorOrTuple] | None = None,
    **options: Unpack[ScriptOptions],
) -> Execution:
    """Joins the job that torchrun started, as the rank that it gave this process.

    Args:
        model: the module that the plan was made for; None: made by the plan's own factory.
        loss_fn: ``loss_fn(output, targets)``, a mean over samples; None: the factory's, or the profiler's default.
        optimizer: an optimiser object of the model's parameters, which each stage's own follows
            (:class:`runtime.optim.followed.Followed`): its groups, its state, and whatever a schedule or the script
            does to its learning rates; or a function that makes one of parameters; or text such as
            ``AdamW:lr=0.001``; None: the plan's.
        example: (inputs, targets) to capture the model with, of a sparse network (SparseTensor, targets); None: the
            factory's.
        options: see :class:`halopipe.run_spec.options.ScriptOptions`.  ``scheduler`` may be an object that was made on
            the optimiser object, or a list of such; they are stepped after each update.  ``device``: empty, the plan's;
            ``cpu``; or a device of this process such as ``cuda:0``: what this rank trains is moved there in place,
            ``model`` is otherwise left on the processor.  ``check_first_step`` compares with one device, which rank 0
            runs on a copy of ``model``, where that fits into memory; :class:`NumericsError` on all ranks where they
            differ.

    Raises:
        UsageError: this process was not started by torchrun, or the ranks were told different things (seed, optimiser,
            clipping, initial weights).
        MissingDeviceError: the device that the plan names for this rank is not there.
        RankCountError: the job has another number of ranks than the plan.
        StaleFileError: the plan was made for another model, or the ranks hold different plans.
        CorruptFileError: the plan was edited and divides a layer as it cannot be.
        IllegalProgramError: the plan's program was edited and does not end.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise no_model(model)
    require_optimizer(optimizer)
    job = _job(plan)
    member, check = member_of_script(plan, optimizer, options, job.planned_rank(plan.decision))
    store, board = job_stores(job.rank, job.num_ranks)
    execution = joined(member, store, board, lambda: loaded_of_script(plan, model, loss_fn, example), check=check)
    execution.values = ScriptValues(owners(model, loss_fn), loss_fn) if isinstance(model, nn.Module) else None
    return execution


def require_optimizer(optimizer: object) -> None:
    """Raises :class:`UsageError` for what is neither an optimiser object, nor text, nor a function that makes one."""
    if optimizer is not None and not isinstance(optimizer, (str, torch.optim.Optimizer)) and not callable(optimizer):
        raise UsageError(
            f"optimizer is {optimizer!r:.60}, of type {type(optimizer).__name__}",
            [],
            ["'AdamW:lr=0.001'", "torch.optim.AdamW(module.parameters())", "a function that makes one of parameters"],
        )


def member_of_script(
    plan: Plan, optimizer: str | torch.optim.Optimizer | MakeOptimizer | None, options: ScriptOptions, rank: int = 0
) -> tuple[JobMember, bool]:
    """A member as a script asks for it, not yet opened; and whether its first step is compared with one device.

    Raises:
        UsageError: an option is out of its limits, or they do not go together.
    """
    chosen = cast("ScriptOptions", {name: FIELDS[name].default for name in ScriptOptions.__annotations__} | options)
    for name in ScriptOptions.__annotations__:
        for fault in field_faults(FIELDS[name], chosen[name]):  # type: ignore[literal-required]  # names of this very type
            raise fault
    require_known("transport", [chosen["transport"]], TRANSPORTS)
    require_known("thing to do about NaN", [chosen["on_nan"]], ON_NAN)
    compiler = chosen["compiler"] or None
    scheduler = _scheduler_parts(chosen["scheduler"])
    make, make_schedules = _makers(plan, optimizer, scheduler)
    check = chosen["check_first_step"]
    context = RankContext(
        plan.decision,
        make,
        rank,
        make_schedules,
        chosen["seed"],
        chosen["clip_norm"],
        chosen["accumulate"],
        OnNan(chosen["on_nan"]),
        chosen["deadline_s"],
        compiler=compiler,
    )
    spelled = {
        "optimizer": _text(optimizer),
        "scheduler": ", ".join(map(_text, scheduler)) or _text(None),
        "compiler": _text(compiler),
        "transport": chosen["transport"],
        "check_first_step": str(check),
    }
    return JobMember(plan, context, spelled, _device(chosen["device"]), chosen["transport"]), check


def joined(
    member: JobMember,
    store: Store,
    board: Store | StatusStore,
    load: Callable[[], LoadedModel],
    *,
    check: bool,
    local_rank: int | None = None,
) -> Execution:
    """One rank of a plan, once all are there; see :meth:`halopipe.training.rank.JobMember.opened`."""
    with member.opened(store, board, is_metered=False, local_rank=local_rank):
        member.prepare(lambda: (load(), None))
        if isinstance(member.context.optimizer, Followed):
            member.context.optimizer.recognise(parameters_of(member.model, member.context.model))
        is_first = member.context.rank == 0  # who runs one device, of the model before its parameters are moved
        kept = (KeptModel.of(member) if is_first else KeptModel(member)) if check else None
        member.agree()
        member.join()
        member.keep_open()
        return Execution(member, kept)


def _job(plan: Plan) -> JobRank:
    """What torchrun left in the environment."""
    needed = plan.decision.num_ranks
    command = f"torchrun --nproc-per-node {needed} your_script.py"
    job = job_rank()
    if job is None:
        raise UsageError(
            "this process is no rank of a job", ["RANK and WORLD_SIZE are not set"], [command, "halopipe run plan.json"]
        )
    job.require_size(plan.decision)
    return job


def loaded_of_script(
    plan: Plan,
    model: nn.Module | None,
    loss_fn: Callable[..., Tensor] | None,
    example: tuple[TensorOrTuple, TensorOrTuple] | None,
) -> LoadedModel:
    """The user's parts, those of the plan's factory where there are none."""
    if model is not None and example is not None:
        return _of_example(model, example, loss_fn)
    made = load_model(plan.inputs.model)
    own = cast("TrainedLoss", made.loss_fn)  # of what a factory gives, ``load_model`` makes one
    function = own.function if loss_fn is None else loss_fn
    if example is not None:
        return _of_example(users_module(made.module), example, None if function is own_loss else function)
    if model is not None and made.clouds is not None:
        prepared: Any = made.module
        model = type(prepared)(model, prepared.recipe)
    return replace(made, module=made.module if model is None else model, loss_fn=replace(own, function=function))


def _of_example(model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None) -> LoadedModel:
    has_targets = example[1] is not None and not (isinstance(example[1], (tuple, list)) and not example[1])
    return model_of("the example", (model, example if loss_fn is not None or has_targets else example[0], loss_fn))


def _scheduler_parts(scheduler: Any) -> list[Any]:
    """The schedules that were asked for, one after another: objects, and functions that make one of an optimiser.

    Raises:
        UsageError: one is neither.
    """
    listed = scheduler if isinstance(scheduler, (list, tuple)) else [scheduler] if scheduler else []
    parts = [make_scheduler_of(parse_scheduler(each)) if isinstance(each, str) else each for each in listed]
    for each in parts:
        if not (isinstance(each, (LRScheduler, SteppedElsewhere)) or callable(each)):
            raise no_schedule(each)
    return parts


def _makers(
    plan: Plan, optimizer: str | torch.optim.Optimizer | MakeOptimizer | None, scheduler: Sequence[Any]
) -> tuple[MakeOptimizer, MakeScheduler | None]:
    """What makes the stages' optimisers, and the schedules of each; an optimiser object has schedules of its own.

    Raises:
        UsageError: the optimiser cannot be divided, or a schedule belongs to another one.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return _followed(plan, optimizer, scheduler), None
    for each in scheduler:
        if isinstance(each, LRScheduler):
            raise UsageError(
                f"the {type(each).__name__} belongs to an optimiser object, and another optimiser is used",
                [f"it was made on a {type(each.optimizer).__name__}"],
                ["give that optimiser as well", "give a function that makes the schedule of an optimiser"],
            )
    if optimizer is None:
        make = make_optimizer_of(plan.inputs.optimizer)
    else:
        make = make_optimizer_of(parse_optimizer(optimizer)) if isinstance(optimizer, str) else optimizer
    return make, (lambda made: _made_on(made, scheduler)) if scheduler else None


def _followed(plan: Plan, optimizer: torch.optim.Optimizer, scheduler: Sequence[Any]) -> Followed:
    for group in optimizer.param_groups:
        require_meant(type(optimizer).__name__, group)
    if not scheduler:
        return Followed(optimizer)
    if updates_within(plan.decision.rows()):
        raise UsageError(
            f"schedule {plan.decision.schedule} updates the weights within a step, "
            "that of an optimiser object is stepped once a step",
            [],
            ["an optimiser by text or function", "halopipe plan --schedule 1f1b"],
        )
    if isinstance(scheduler[0], SteppedElsewhere):
        return Followed(optimizer, scheduler[0])
    return Followed(optimizer, schedules_of(_made_on(optimizer, scheduler)))  # once: the stages follow it


def _made_on(optimizer: torch.optim.Optimizer, scheduler: Sequence[Any]) -> list[LRScheduler]:
    made = [each if isinstance(each, LRScheduler) else each(optimizer) for each in scheduler]
    return [one for each in made for one in (each if isinstance(each, (list, tuple)) else [each])]


def _device(asked: str | torch.device) -> str | torch.device:
    """As :class:`halopipe.training.rank.JobMember` takes it.

    Raises:
        UsageError: it is no device, or one that torch has not here.
    """
    if isinstance(asked, str) and asked in DEVICES:
        return asked
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"device {str(asked)!r} cannot be used",
            str(error).splitlines()[:1],
            ["leave it out: the devices that the plan names", "cpu"],
        ) from error
    return "cpu" if device.type == "cpu" else device


def _text(asked: object) -> str:
    """What was asked for, such that two ranks that were told the same have the same text."""
    if isinstance(asked, torch.optim.Optimizer):
        settings = [{key: value for key, value in group.items() if key != "params"} for group in asked.param_groups]
        return f"{type(asked).__name__} {settings}"
    if isinstance(asked, LRScheduler):
        return f"{type(asked).__name__}, then {asked.get_last_lr()}"
    if asked is None or isinstance(asked, str):
        return str(asked)
    return f"{getattr(asked, '__module__', '')}.{getattr(asked, '__qualname__', type(asked).__qualname__)}"
