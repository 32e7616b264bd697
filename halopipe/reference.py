"""The first steps of a job on one device, kept in a file for the ranks to compare with.

They are the user's own module's; where that draws random numbers, its captured graph's, since the numbers that a plan
draws belong to the nodes of that.

They are done twice where the job is not in float64: how far the two are apart is one device's own rounding error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from halopipe.batches import batches, take
from halopipe.forms import Item, Pair, Tensors
from halopipe.job import NUM_COMPARED, Compared, Job
from halopipe.optimizer import makers_of
from planner.ir.codec import plain
from planner.ir.errors import UsageError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.placing import capture_for, placed
from profiler.source import LoadedModel, load_model
from runtime.batch import InputSpecs, WholeBatch, filled
from runtime.engine import Engine
from runtime.numerics import TOLERANCES, Difference, Tolerance, loss_differences, relative_error, tensor_differences
from runtime.serial import LossOf, drawing_loss, serial_step
from runtime.sites.batch import Preparing
from runtime.stages.captured import captured_model
from runtime.stages.draws import Draw
from runtime.stages.shapes import varying_dims
from runtime.updates.optimizer import StageOptimizer

EXACT = "float64"


@dataclass(frozen=True, slots=True)
class Reference:
    """What one device computed.

    Attributes:
        dtype: as the job's.
        losses: of the compared steps.
        gradient, parameter, buffer: after the first update, by name.
        rounding: relative error of each of them against float64, by kind, then by name (``0``, ``1``, ... for the
            losses); empty in float64.
    """

    dtype: str
    losses: tuple[float, ...]
    gradient: Mapping[str, Tensor]
    parameter: Mapping[str, Tensor]
    buffer: Mapping[str, Tensor]
    rounding: Mapping[str, Mapping[str, float]]


def make_reference(job: Job, device: torch.device | None = None) -> None:
    """Run the first steps and write what came out.

    Args:
        device: of the kind that the ranks compute on, which rounds as they do and draws the same numbers; None: the
            processor.
    """
    where = device or torch.device("cpu")
    found = _run(job, job.source, where)
    if job.source.dtype != EXACT or job.source.autocast:
        exact = _run(job, replace(job.source, dtype=EXACT, autocast=""), where)
        found = replace(found, rounding=_rounding(found, exact))
    torch.save({field.name: getattr(found, field.name) for field in fields(found)}, job.reference_path)


def read_reference(path: Path) -> Reference:
    """What :func:`make_reference` wrote; tensors are mapped, not read."""
    return Reference(**torch.load(path, weights_only=True, mmap=True))


def compare_tensors(reference: Reference, engine: Engine) -> tuple[Compared, ...]:
    """This rank's gradients, parameters and buffers after the first step beside one device's."""
    state = engine.state_dict()
    here = {
        "gradient": engine.gradients(),
        "parameter": {name: tensor for name, tensor in state.items() if name in reference.parameter},
        "buffer": {name: tensor for name, tensor in state.items() if name in reference.buffer},
    }
    return _compared(
        difference
        for kind, tensors in here.items()
        for difference in tensor_differences(
            kind, _on_cpu(tensors), getattr(reference, kind), _tolerance(reference), reference.rounding.get(kind)
        )
    )


def compare_losses(reference: Reference, losses: tuple[float, ...]) -> tuple[Compared, ...]:
    """The losses of the first steps beside one device's."""
    rounding = reference.rounding.get("loss", {}).values()
    return _compared(loss_differences(losses, reference.losses, _tolerance(reference), rounding))


def _run(job: Job, source: ModelSource, device: torch.device) -> Reference:
    options, decision = job.options, job.plan.decision
    model = load_model(source, options.seed)
    stream = batches(options.data, model, decision.global_batch, options.seed)
    draw = Draw(options.seed)
    model, loss_of = _loss_on(device, model, draw, decision)
    loss_of = _shared(loss_of, options.accumulate)
    optimizer = _Optimizer(job, model)
    losses: list[float] = []
    first: dict[str, dict[str, Tensor]] = {}
    for step in range(min(max(NUM_COMPARED, options.accumulate), options.steps)):
        draw.step = step
        inputs, targets = _whole(take(stream, step))
        rows = inputs[0].shape[0] if inputs[0].ndim else decision.global_batch
        planned = filled(min(rows, decision.global_batch), decision.micro_batches)
        losses.append(serial_step(loss_of, optimizer, inputs, targets, tuple(filter(None, planned)), draw))
        if step == options.accumulate - 1:
            parameters = dict(model.module.named_parameters(remove_duplicate=False))
            state = {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}
            first = {
                "gradient": _on_cpu({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}),
                "parameter": _on_cpu({name: tensor for name, tensor in state.items() if name in parameters}),
                "buffer": _on_cpu({name: tensor for name, tensor in state.items() if name not in parameters}),
            }
    return Reference(source.dtype, tuple(losses), **first, rounding={})


class _Optimizer:
    """The run's optimiser on one device, as :func:`runtime.serial.serial_step` uses it."""

    def __init__(self, job: Job, model: LoadedModel) -> None:
        optimizer, scheduler = makers_of(job.options, job.plan.inputs.optimizer)
        self._parameters = dict(model.module.named_parameters())
        self._optimizer = StageOptimizer(self._parameters, optimizer)
        if scheduler is not None:
            self._optimizer.schedule(scheduler)
        self._clip_norm, self._accumulate, self._number = job.options.clip_norm, job.options.accumulate, 0

    def zero_grad(self, set_to_none: bool) -> None:
        if self._number % self._accumulate == 0:
            for parameter in self._parameters.values():
                parameter.grad = None

    def step(self) -> None:
        self._number += 1
        if self._number % self._accumulate == 0:
            if self._clip_norm:
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
            self._optimizer.step()


def _shared(loss_of: LossOf, accumulate: int) -> LossOf:
    """The same loss, whose gradient is that of one of ``accumulate`` steps that make up an update."""
    if accumulate == 1:
        return loss_of

    def shared(inputs: Tensors, targets: Tensors) -> Tensor:
        loss = loss_of(inputs, targets)
        return loss.detach() + (loss - loss.detach()) / accumulate

    return shared


def _whole(item: Item) -> Pair:
    if isinstance(item, list):
        raise UsageError(
            "one device cannot follow micro-batches given one by one",
            ["the data gave a list of them"],
            ["leave out --check-numerics"],
        )
    return item


def _loss_on(device: torch.device, model: LoadedModel, draw: Draw, decision: Decision) -> tuple[LoadedModel, LossOf]:
    """The model on ``device``, and its loss there for batches of the processor."""
    if not _draws(model):
        model = model if device.type == "cpu" else placed(model, device)
        return model, model.loss
    model, found = capture_for(model, device)
    captured = captured_model(found)
    loss_of, preparing = drawing_loss(captured, draw), Preparing.of(decision, captured)
    if preparing is None:
        return model, lambda inputs, targets: loss_of(*model.taken(inputs, targets))

    def of_clouds(inputs: Tensors, targets: Tensors) -> Tensor:
        """Sites in the plan's order: numbers are drawn by row."""
        specs = InputSpecs(captured.fed, captured.graph.samples, varying_dims(captured))
        batch = preparing.batch(WholeBatch(specs, (*inputs, *targets), (inputs[0].shape[0],)))
        return loss_of(tuple(batch.whole(name, 0).to(device) for name in captured.graph.inputs), ())

    return model, of_clouds


@torch.no_grad()
def _draws(model: LoadedModel) -> bool:
    """Whether a forward pass draws random numbers; it leaves no trace."""
    kept = [(buffer, buffer.clone()) for buffer in model.module.buffers()]
    devices = {parameter.device for parameter in model.module.parameters() if parameter.is_cuda}
    with torch.random.fork_rng(devices=devices):
        before = _random_state(devices)
        model.loss(*model.fed)
        after = _random_state(devices)
    for buffer, value in kept:
        buffer.copy_(value)
    return not all(map(torch.equal, before, after))


def _random_state(devices: Iterable[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def _rounding(found: Reference, exact: Reference) -> dict[str, dict[str, float]]:
    losses = zip(found.losses, exact.losses, strict=True)
    errors = {"loss": {str(step): relative_error(*pair) for step, pair in enumerate(losses)}}
    for kind in ("gradient", "parameter", "buffer"):
        differences = tensor_differences(kind, getattr(found, kind), getattr(exact, kind), _tolerance(found))
        errors[kind] = {each.name: each.error for each in differences}
    return errors


def _on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _tolerance(reference: Reference) -> Tolerance:
    return TOLERANCES[getattr(torch, reference.dtype)]


def _compared(differences: Iterable[Difference]) -> tuple[Compared, ...]:
    return tuple(Compared(**plain(each)) for each in differences)
