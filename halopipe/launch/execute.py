"""A plan inside a training script of one's own: every process that torchrun starts is one rank of it.

The script builds the whole model in every process, under the same seed; a rank trains its own stages of it in place.

    with hp.execute(plan, model, loss_fn, optimizer, example=example, clip_norm=1.0) as run:
        for batch in loader:
            loss = run.step(batch)
        print(run.evaluate(held_out).loss)
        run.save("checkpoints")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from cuda_ops.sparse.recipe import PreparedNetwork
from halopipe.launch.job_environment import JobRank, job_rank
from halopipe.launch.torchrun import job_stores
from halopipe.run_spec.options import FIELDS, ScriptOptions
from halopipe.training.check_options import out_of_limits
from halopipe.training.optimizer_spec import make_optimizer_of, make_scheduler_of, parse_optimizer, parse_scheduler
from halopipe.training.rank import Terms, open_rank
from halopipe.training.session import Execution, Kept, Tensors, WatchedSteps
from planner.ir.errors import UsageError
from planner.ir.plan import Plan
from profiler import LoadedModel, load_model
from profiler.source.model import Loss, own_loss
from profiler.source.parts import model_of
from runtime.optim.optimizer import MakeOptimizer


def execute(
    plan: Plan,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: str | torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    example: tuple[Tensors, Tensors] | None = None,
    **options: Unpack[ScriptOptions],
) -> Execution:
    """Joins the job that torchrun started, as the rank that it gave this process.

    Args:
        model: the module that the plan was made for; None: made by the plan's own factory.
        loss_fn: ``loss_fn(output, targets)``, a mean over samples; None: the factory's, or the profiler's default.
        optimizer: an optimiser of the model's parameters, whose class and settings are used for each stage's own; or a
            function that makes one of parameters; or text such as ``AdamW:lr=0.001``; None: the plan's.
        example: (inputs, targets) to capture the model with, of a sparse network (SparseTensor, targets); None: the
            factory's.
        options: see :class:`halopipe.run_spec.options.ScriptOptions`; of ``device``: what this rank trains is moved to
            its GPU in place, ``model`` is otherwise left on the processor.  ``check_first_step`` compares with one
            device, which rank 0 runs on a copy of ``model``, where that fits into memory; :class:`NumericsError` on all
            ranks where they differ.

    Raises:
        UsageError: this process was not started by torchrun, or the ranks were told different things (seed, optimiser,
            clipping, initial weights).
        MissingDeviceError: the GPU that the plan names for this rank is not there.
        RankCountError: the job has another number of ranks than the plan.
        StaleFileError: the plan was made for another model, or the ranks hold different plans.
        CorruptFileError: the plan was edited and divides a layer as it cannot be.
        IllegalProgramError: the plan's program was edited and does not end.
    """
    job = _job(plan)
    rank = job.rank_of(plan.decision)
    chosen = cast("ScriptOptions", {name: FIELDS[name].default for name in ScriptOptions.__annotations__} | options)
    for name in ScriptOptions.__annotations__:
        for fault in out_of_limits(name, chosen[name]):  # type: ignore[literal-required]  # names of this very type
            raise fault
    scheduler, compiler = chosen["scheduler"] or None, chosen["compiler"] or None
    check_first_step = chosen["check_first_step"]
    terms = Terms(
        plan,
        _maker(optimizer) if optimizer is not None else make_optimizer_of(plan.inputs.optimizer),
        make_scheduler_of(parse_scheduler(scheduler)) if isinstance(scheduler, str) else scheduler,
        chosen["seed"],
        chosen["clip_norm"],
        chosen["accumulate"],
        chosen["deadline_s"],
        compiler,
        {
            "optimizer": _text(optimizer),
            "scheduler": _text(scheduler),
            "compiler": _text(compiler),
            "check_first_step": str(check_first_step),
        },
    )
    store, board = job_stores(job.rank, job.num_ranks)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(open_rank(terms, rank, store, board, device=chosen["device"], is_metered=False))
        prepared = own.prepare(lambda: _loaded(plan, model, loss_fn, example))
        kept = Kept.of(terms, prepared, check=check_first_step) if rank == 0 else None  # before parameters are moved
        opened = own.open(prepared)
        watched = WatchedSteps(terms, own.place, opened, kept) if check_first_step else None
        return Execution(opened, _users(prepared.model.module), stack.pop_all().close, terms.seed, watched)


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


def _loaded(
    plan: Plan,
    model: nn.Module | None,
    loss_fn: Callable[..., Tensor] | None,
    example: tuple[Tensors, Tensors] | None,
) -> LoadedModel:
    """The user's parts, those of the plan's factory where there are none."""
    if model is not None and example is not None:
        return _of_example(model, example, loss_fn)
    made = load_model(plan.inputs.model)
    own = cast("Loss", made.loss_fn)  # of what a factory gives, ``load_model`` makes one
    function = own.function if loss_fn is None else loss_fn
    if example is not None:
        return _of_example(_users(made.module), example, None if function is own_loss else function)
    if model is not None and made.clouds is not None:
        model = PreparedNetwork(model, made.clouds.preparation.recipe)
    return replace(made, module=made.module if model is None else model, loss_fn=replace(own, function=function))


def _of_example(model: nn.Module, example: Any, loss_fn: Callable[..., Any] | None) -> LoadedModel:
    has_targets = example[1] is not None and not (isinstance(example[1], (tuple, list)) and not example[1])
    return model_of("the example", (model, example if loss_fn is not None or has_targets else example[0], loss_fn))


def _users(module: nn.Module) -> nn.Module:
    """The user's own module."""
    return module.network if isinstance(module, PreparedNetwork) else module


def _maker(optimizer: str | torch.optim.Optimizer | MakeOptimizer) -> MakeOptimizer:
    """A function that makes an optimiser like the one given.

    Raises:
        UsageError: it treats its parameters in different ways, or has taken steps already.
    """
    if isinstance(optimizer, str):
        return make_optimizer_of(parse_optimizer(optimizer))
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    settings = [_settings(group) for group in optimizer.param_groups]
    if any(other != settings[0] for other in settings[1:]) or optimizer.state:
        raise UsageError(
            f"this {type(optimizer).__name__} cannot be divided over stages",
            [f"it has {len(settings)} groups of parameters, and state of {len(optimizer.state)} parameters"],
            ["give a function instead: lambda parameters: torch.optim.SGD(parameters, lr=0.1)"],
        )
    cls: Any = type(optimizer)
    accepted = {key: value for key, value in settings[0].items() if key in optimizer.defaults}
    return lambda parameters: cls(parameters, **accepted)


def _text(asked: object) -> str:
    """What was asked for, such that two ranks that were told the same have the same text."""
    if isinstance(asked, torch.optim.Optimizer):
        return f"{type(asked).__name__} {[_settings(group) for group in asked.param_groups]}"
    if asked is None or isinstance(asked, str):
        return str(asked)
    return f"{getattr(asked, '__module__', '')}.{getattr(asked, '__qualname__', type(asked).__qualname__)}"


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _tuple(value: Tensors) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
