"""Training as people do it, on one device and by a plan: clipping, schedules, several batches an update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.models.example import Example
from profiler.models.gpt import GPT, gpt
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.numerics.single_device import serial_step
from tests.runtime.plans import Trained, batch_of, run_ranks

STEPS = 5


def tied_gpt(*, input_shape: tuple[int, ...] = (4, 6)) -> Example:
    """A GPT whose output's weight is its token embedding."""
    torch.manual_seed(0)
    module, tensors, loss = gpt(input_shape=input_shape, vocabulary=17, width=8, layers=2, heads=2, context=8)
    assert isinstance(module, GPT)
    module.head.weight = module.token.weight
    with torch.no_grad():
        module.token.weight.mul_(20)  # gradients large enough for clipping to matter
    return module, tensors, loss


def tied_model() -> LoadedModel:
    """The tied GPT in float64."""
    return load_model(ModelSource(f"{__name__}:tied_gpt", {}, (4, 6), "float64"))


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay for what has dims; each element by itself."""
    deep = [parameter for parameter in parameters if parameter.ndim >= 2]
    flat = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 0.002}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.003)


def sharded(decision: Decision, zero: int = 1) -> Decision:
    """The same with optimisers divided over the ranks of each stage, and what else ``zero`` says."""
    return replace(decision, stages=tuple(replace(stage, sharded=True, zero=zero) for stage in decision.stages))


def alone(
    model: LoadedModel,
    micro_batches: tuple[int, ...],
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
    scheduler: Callable[..., Any] | None = None,
    clip_norm: float = 0.0,
    accumulate: int = 1,
    steps: int = STEPS,
) -> tuple[Trained, list[float]]:
    """One device: torch's own clipping, and the norms that it gave."""
    twin = copy.deepcopy(model)
    norms: list[float] = []
    made = optimizer(list(twin.module.parameters()))
    schedule = None if scheduler is None else scheduler(made)
    step_once = made.step

    def clip_and_step() -> None:
        if clip_norm:
            norms.append(torch.nn.utils.clip_grad_norm_(twin.module.parameters(), clip_norm).item())
        step_once()

    losses = []
    for first in range(0, steps, accumulate):
        batches = [batch_of(model, sum(micro_batches), step) for step in range(first, first + accumulate)]
        inputs, targets = (tuple(map(torch.cat, zip(*(batch[i] for batch in batches), strict=True))) for i in (0, 1))
        stepper = _Stepper(made, clip_and_step)
        losses.append(serial_step(twin.loss, stepper, inputs, targets, micro_batches * accumulate))
        if schedule is not None:
            schedule.step()
    gradients = {name: parameter.grad for name, parameter in twin.module.named_parameters()}
    return Trained(losses, gradients, twin.module.state_dict()), norms


class _Stepper:
    """An optimiser whose step does more."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self.zero_grad = optimizer.zero_grad
        self.step = step


def by_plan(
    model: LoadedModel, decision: Decision, steps: int = STEPS, **options: Any
) -> tuple[Trained, list[float | None]]:
    """All ranks as threads; losses, norms and state must be the same on each of them.

    Gradients are not given where optimisers are divided.
    """
    batches = [batch_of(model, decision.global_batch, step) for step in range(steps)]
    options = {"optimizer": adamw, **options}
    states: dict[int, dict[str, torch.Tensor]] = {}
    engines, results = run_ranks(model, decision, batches, states=states, **options)
    gradients: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    divided = any(stage.sharded for stage in decision.stages)
    for rank, engine in enumerate(engines):
        for found, more in ((gradients, {} if divided else engine.gradients()), (state, states[rank])):
            for name, tensor in more.items():
                assert torch.equal(found.setdefault(name, tensor), tensor), f"ranks differ in {name}"
    norms = [{result[step].gradient_norm for result in results} for step in range(steps)]
    assert all(len(each) == 1 for each in norms)
    losses = [next(r[step].loss for r in results if r[step].loss is not None) for step in range(steps)]
    return Trained(losses, gradients, state), [each.pop() for each in norms]


cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=7)
