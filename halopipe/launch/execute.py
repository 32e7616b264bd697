"""A plan inside a training script of one's own: every process that torchrun or Slurm starts is one rank of it.

The script builds the whole model in every process, under the same seed; a rank trains its own stages of it in place.

    with hp.execute(plan, model, loss_fn, optimizer, example=example, clip_norm=1.0) as run:
        for batch in loader:
            loss = run.step(batch)
        print(run.evaluate(held_out).loss)
        run.save("checkpoints")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from cuda_ops.sparse.recipe import PreparedNetwork
from halopipe.launch.rank_device import AS_PLANNED, device_of, opened, seat_of
from halopipe.launch.slurm import job_variables
from halopipe.launch.torchrun import job_stores
from halopipe.training.optimizer_spec import make_optimizer_of, make_scheduler_of, parse_optimizer, parse_scheduler
from halopipe.training.rank import Place, Terms, prepare_rank
from halopipe.training.session import Execution, Kept, Tensors, WatchedSteps
from planner.ir.errors import RankCountError, UsageError
from planner.ir.plan import Plan
from planner.ir.program import Program
from profiler import LoadedModel, load_model
from profiler.source.clouds import is_clouds, load_clouds
from profiler.source.model import Loss, mean_of_squares, parse_varying
from runtime.monitor.activity import Activity
from runtime.monitor.waits import Voice
from runtime.monitor.watch import SETUP_S
from runtime.optim.optimizer import MakeOptimizer, MakeScheduler
from runtime.transport import Transport


def execute(
    plan: Plan,
    model: nn.Module | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    optimizer: str | torch.optim.Optimizer | MakeOptimizer | None = None,
    *,
    example: tuple[Tensors, Tensors] | None = None,
    scheduler: str | MakeScheduler | None = None,
    clip_norm: float = 0.0,
    accumulate: int = 1,
    seed: int = 0,
    deadline_s: float = 120.0,
    compiler: str | Callable[..., Any] | None = None,
    device: str = AS_PLANNED,
    check_first_step: bool = True,
) -> Execution:
    """Joins the job that torchrun started, as the rank that it gave this process.

    Args:
        model: the module that the plan was made for; None: made by the plan's own factory.
        loss_fn: ``loss_fn(output, targets)``, a mean over samples; None: the factory's, or the profiler's default.
        optimizer: an optimiser of the model's parameters, whose class and settings are used for each stage's own; or a
            function that makes one of parameters; or text such as ``AdamW:lr=0.001``; None: the plan's.
        example: (inputs, targets) to capture the model with, of a sparse network (SparseTensor, targets); None: the
            factory's.
        scheduler: a function that makes a schedule of an optimiser, or text such as ``CosineAnnealingLR:T_max=100``;
            stepped once an update.
        clip_norm: largest norm of all gradients together; 0: they are not clipped.
        accumulate: steps whose gradients make up one update.
        seed: of what layers draw, such as dropout: the same numbers under every plan.
        deadline_s: the longest that this rank waits for another.
        compiler: backend of torch.compile for the stages, such as ``inductor``; None: they are not compiled.
        device: ``cpu``: compute there whatever devices the plan names; empty: on those.  What this rank trains is moved
            to its GPU in place; ``model`` is otherwise left on the processor.
        check_first_step: compare loss, gradients and state of the first step with one device, which rank 0 runs on a
            copy of ``model``, where that fits into memory; :class:`NumericsError` on all ranks where they differ.

    Raises:
        UsageError: this process was not started by torchrun, or the ranks were told different things (seed, optimiser,
            clipping, initial weights).
        MissingDeviceError: the GPU that the plan names for this rank is not there.
        RankCountError: the job has another number of ranks than the plan.
        StaleFileError: the plan was made for another model, or the ranks hold different plans.
        CorruptFileError: the plan was edited and divides a layer as it cannot be.
        IllegalProgramError: the plan's program was edited and does not end.
    """
    rank, num_ranks = _position(plan)
    seat = seat_of(plan.decision, rank, device)
    where = device_of(seat)
    terms = Terms(
        plan,
        _maker(optimizer) if optimizer is not None else make_optimizer_of(plan.inputs.optimizer),
        make_scheduler_of(parse_scheduler(scheduler)) if isinstance(scheduler, str) else scheduler,
        seed,
        clip_norm,
        accumulate,
        deadline_s,
        compiler,
        {
            "optimizer": _text(optimizer),
            "scheduler": _text(scheduler),
            "compiler": _text(compiler),
            "check_first_step": str(check_first_step),
        },
    )
    prepared = prepare_rank(terms, where, Activity(), lambda: _loaded(plan, model, loss_fn, example))
    kept = Kept.of(prepared, check=check_first_step) if rank == 0 else None  # before its parameters are moved
    store, board = job_stores(rank, num_ranks)
    voice = Voice(board, plan.decision, rank, deadline_s, deadline_s)

    def open_transport(groups: tuple[tuple[int, ...], ...], program: Callable[[], Program]) -> Transport:
        return opened(seat, where, num_ranks, store, groups, program, SETUP_S)

    place = Place(rank, num_ranks, store, open_transport, voice.activity, voice.others, where)
    ready = prepared.open(place)
    watched = WatchedSteps(terms, place, ready, kept) if check_first_step else None
    return Execution(ready, _users(prepared.model.module), voice, seed, watched)


def _position(plan: Plan) -> tuple[int, int]:
    """Rank and number of ranks, from what torchrun or Slurm left in the environment."""
    os.environ.update(job_variables(os.environ))
    needed = plan.decision.num_ranks
    command = f"torchrun --nproc-per-node {needed} your_script.py"
    try:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise UsageError(
            "this process is no rank of a job", ["RANK and WORLD_SIZE are not set"], [command, "halopipe run plan.json"]
        ) from None
    if num_ranks != needed:
        raise RankCountError(f"the plan has {needed} ranks, the job {num_ranks}", [], [command])
    return rank, num_ranks


def _loaded(
    plan: Plan,
    model: nn.Module | None,
    loss_fn: Callable[..., Tensor] | None,
    example: tuple[Tensors, Tensors] | None,
) -> LoadedModel:
    """The user's parts, those of the plan's factory where there are none."""
    if model is not None and example is not None:
        loss = Loss(loss_fn or mean_of_squares, unpacked=loss_fn is not None and isinstance(example[1], Tensor))
        return _of_example(model, example, loss)
    made = load_model(plan.inputs.model)
    own = cast("Loss", made.loss_fn)  # of what a factory gives, ``load_model`` makes one
    loss = own if loss_fn is None else Loss(loss_fn, own.unpacked)
    if example is not None:
        return _of_example(_users(made.module), example, loss)
    if model is not None and made.clouds is not None:
        model = PreparedNetwork(model, made.clouds.preparation.recipe)
    return replace(made, module=made.module if model is None else model, loss_fn=loss)


def _of_example(model: nn.Module, example: tuple[Any, Tensors], loss: Loss) -> LoadedModel:
    inputs, targets = example[0], _tuple(example[1])
    if not is_clouds(model, inputs):
        return LoadedModel(model, _tuple(inputs), targets, loss)
    found, varying = load_clouds("the example", model, inputs, targets, loss)
    return replace(found, varying=parse_varying("the example", varying, found.tensors))


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
