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
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.sparse.recipe import PreparedNetwork
from halopipe.execution import Batch as Batch
from halopipe.execution import Execution as Execution
from halopipe.execution import Tensors
from halopipe.feeding import consumer_of
from halopipe.joining import job_stores
from halopipe.optimizer import make_optimizer_of, make_scheduler_of, parse_optimizer, parse_scheduler
from halopipe.seats import AS_PLANNED, device_of, opened, seat_of
from halopipe.slurm import job_variables
from planner.check.layouts import require_possible
from planner.ir.errors import RankCountError, UsageError
from planner.ir.fingerprint import fingerprint, require_match
from planner.ir.plan import Plan
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler import LoadedModel, load_model
from profiler.clouds import is_clouds, load_clouds
from profiler.placing import capture_for
from profiler.source import Loss, mean_of_squares
from profiler.varying import parse_varying
from runtime.build import check_layers, groups_of
from runtime.engine import Engine
from runtime.jobs.launch import SETUP_S
from runtime.jobs.voice import Voice
from runtime.pieces import CPU
from runtime.stages.captured import captured_model
from runtime.updates.optimizer import MakeOptimizer, MakeScheduler


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

    Raises:
        UsageError: this process was not started by torchrun.
        MissingDeviceError: the GPU that the plan names for this rank is not there.
        RankCountError: the job has another number of ranks than the plan.
        StaleFileError: the plan was made for another model.
        CorruptFileError: the plan was edited and divides a layer as it cannot be.
        IllegalProgramError: the plan's program was edited and does not end.
    """
    rank, num_ranks = _position(plan)
    seat = seat_of(plan.decision, rank, device)
    where = device_of(seat)
    loaded, captured = capture_for(_loaded(plan, model, loss_fn, example), where or CPU, whole=False)
    require_match(
        "model",
        plan.inputs.model_fingerprint,
        fingerprint(captured.graph),
        "profile and plan this model, or run the plan with the model it was made for",
    )
    check_layers(plan.decision, captured.graph)
    require_possible(plan.decision, captured.graph)
    program = Boundaries.of_decision(captured.graph, plan.decision).program(plan.decision)
    validate(program)
    store, board = job_stores(rank, num_ranks)
    groups = groups_of(plan.decision, captured.graph)
    transport = opened(seat, where, num_ranks, store, groups, lambda: program, SETUP_S)
    voice = Voice(board, plan.decision, rank, deadline_s, deadline_s)
    model_given = captured_model(captured)
    engine = Engine(
        plan.decision,
        model_given,
        loaded.module,
        transport,
        _maker(optimizer) if optimizer is not None else make_optimizer_of(plan.inputs.optimizer),
        scheduler=make_scheduler_of(parse_scheduler(scheduler)) if isinstance(scheduler, str) else scheduler,
        seed=seed,
        clip_norm=clip_norm,
        accumulate=accumulate,
        deadline_s=deadline_s,
        compiler=compiler,
        device=where,
        activity=voice.activity,
        others=voice.others,
    )
    consumer = consumer_of(plan.decision, model_given, transport, deadline_s)
    return Execution(engine, consumer, _users(loaded.module), voice, seed)


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
    loss = made.loss_fn if loss_fn is None else Loss(loss_fn, made.loss_fn.unpacked)
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


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _tuple(value: Tensors) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
