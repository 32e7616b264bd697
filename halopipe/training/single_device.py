"""The first steps of a job on one device: those of the user's own module, called as the user would call it.

Where the module draws random numbers, they are answered with those that the plan draws
(:mod:`runtime.stage.random.user_module`); of a sparse network, it is given the sites that were prepared for it.

A batch is given whole, in one call, where no layer mixes samples or keeps count of its calls: then nothing of how it
was cut can be in the result.  Else it is given in the plan's micro-batches, which is what a plan means (decision 0001).

The steps are done twice where the job is not in float64: how far the two are apart is one device's own rounding error.
Both begin with the same weights and read the same batches.  Where a module in float64 computes parts of it in a lower
precision (a norm or a softmax that is cast to float32), what that rounds is seen by a second run as well, whose weights
are other ones by as much as that precision rounds.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from cuda_ops._torch import tree_leaves
from cuda_ops.calls import arguments_of
from cuda_ops.dense.data_dependent import is_unit
from cuda_ops.dense.state_writes import attributes_viewed, written
from cuda_ops.device.host import available_bytes
from halopipe.data.factories import BatchItem
from halopipe.data.sources import batches, take
from halopipe.run_spec.job import NUM_COMPARED, REFERENCE_RANK, Job
from halopipe.terminal.units import count, size
from halopipe.training.rank import JobMember, member_of
from halopipe.training.reference import Reference
from halopipe.training.shared_capture import load
from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Plan
from planner.passes.versions import updates_within
from profiler.capture.graph import capture, capture_for, placed
from profiler.source.copies import copied
from profiler.source.model import LoadedModel, casts_to, named_buffers, named_parameters
from profiler.source.parts import cast_module
from runtime.captured import CapturedModule
from runtime.monitor.failure import write_error
from runtime.numerics.compare import TOLERANCES, relative_error, sketches, tensor_differences
from runtime.numerics.single_device import LossOfStep, StepTensors, serial_step, serial_step_each
from runtime.optim.followed import Followed
from runtime.optim.optimizer import StageOptimizer
from runtime.pipeline.microbatches import InputSpecs, WholeBatch, filled
from runtime.pipeline.routing import CPU
from runtime.rank import RankContext
from runtime.stage.random.streams import CounterRng
from runtime.stage.random.user_module import Answers, UnlikeDrawsError
from runtime.stage.sample_weights import weights_of_parts
from runtime.stage.shapes import step_inputs

_log = logging.getLogger(__name__)

EXACT = torch.float64
_TORCH = str(Path(torch.__file__).parent)
WHOLE = "the user's module on the whole batch"
IN_PARTS = "the user's module on one micro-batch after another"


def make_reference(job: Job, device: torch.device | None = None) -> Reference:
    """Runs the first steps.

    Args:
        device: of the kind that the ranks compute on, which rounds as they do and draws the same numbers; None: the
            processor.
    """
    options = job.options
    member = member_of(job, REFERENCE_RANK)
    where = device or CPU
    reason = why_not_compared(job.plan, where, is_asked=options.check_numerics)
    if reason:
        return Reference(skipped=reason)
    model, captured = load(job.source, options.seed)
    if job.plan.inputs.model.sizes:
        model = replace(model, sizes=job.plan.inputs.model.sizes)  # as the ranks are fed
        captured = None
    wanted = max(NUM_COMPARED, options.accumulate) if options.check_numerics else options.accumulate
    try:
        if captured is None:
            model, captured = capture_for(model, where)
        stream = batches(options.data, model, job.plan.decision.global_batch, options.seed)
        items = [take(stream, step) for step in range(min(wanted, options.steps))]
        reference = reference_of(member, model, items, where, captured)
    except UnsupportedModelError as error:
        if options.check_numerics:
            raise
        reference = Reference(error=write_error(error))
    if options.check_numerics and reference.skipped:
        raise UnsupportedModelError("one device has no such step", [reference.skipped], ["leave out --check-numerics"])
    return reference


def why_not_compared(plan: Plan, device: torch.device, *, is_asked: bool = False) -> str:
    """Why one device cannot do a plan's first step, or has none like it; empty: it can.

    Args:
        is_asked: by the user to do it, whatever memory there is.
    """
    if updates_within(plan.decision.rows()):
        return f"schedule {plan.decision.schedule} updates the weights within a step, which one device does not do"
    needed = _needed_bytes(plan, 1)
    available = _available_bytes(plan, device)
    if not is_asked and needed > available:
        return f"one device would need about {size(needed)}, {size(max(available, 0))} are free beside the job"
    return ""


@dataclass(slots=True)
class KeptModel:
    """The model of a script as it was before the first step, which rank 0 runs on one device itself.

    Attributes:
        model: a copy; None where it could not be kept, for the ``reason``.
        optimizer: the user's object as it was; None: the member's own makes one.
        items: what the steps so far read.
    """

    member: JobMember
    model: LoadedModel | None = None
    reason: str = ""
    optimizer: Followed | None = None
    items: list[BatchItem] = field(default_factory=list)

    @classmethod
    def of(cls, member: JobMember) -> KeptModel:
        """A copy, where there is memory for it and one device has such a step."""
        reason = why_not_compared(member.plan, CPU)
        made = member.context.optimizer
        if reason:
            return cls(member, reason=reason)
        try:
            kept = made.as_it_is() if isinstance(made, Followed) else None
            return cls(member, copied(member.model), optimizer=kept)
        except Exception as error:  # noqa: BLE001 - the user's module may refuse in any way
            return cls(member, reason=f"the model cannot be copied: {type(error).__name__}: {error}")

    def reference(self) -> Reference:
        """What one device gives; where there is nothing to compare with, people are told why."""
        reference = Reference(skipped=self.reason) if self.model is None else self._run(self.model)
        if reference.skipped:
            _log.warning("the first step was not compared with one device: %s", reference.skipped)
        return reference

    def first_batch(self) -> tuple[LoadedModel, CapturedModule, BatchItem] | None:
        """The model, its capture, and the first of the items."""
        return None if self.model is None else (self.model, capture(self.model), self.items[0])

    def _run(self, model: LoadedModel) -> Reference:
        try:
            made = self.member.context.optimizer
            if self.optimizer is not None and isinstance(made, Followed):
                self.optimizer.settings = made.settings  # as the ranks' are led by for their first update
            context = replace(self.member.context, optimizer=self.optimizer or made)
            own = JobMember(self.member.plan, context)
            return reference_of(own, copied(model), self.items, context.device or CPU)
        except UnsupportedModelError as error:
            return Reference(error=write_error(error))
        except Exception as error:  # noqa: BLE001 - whatever the user's module raises, and memory that runs out
            return Reference(skipped=f"one device could not run it: {type(error).__name__}: {error}")


def _needed_bytes(plan: Plan, micro_batches: int) -> int:
    """The most that one device takes, by what the plan predicts for all ranks together; with its twin in float64."""
    return 3 * micro_batches * _job_bytes(plan)


def _available_bytes(plan: Plan, device: torch.device) -> int:
    """What is free where one device runs, once the job has taken what it is predicted to take there."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) - max(
            (rank.peak_bytes for rank in plan.prediction.ranks), default=0
        )
    return available_bytes() - _job_bytes(plan)


def _job_bytes(plan: Plan) -> int:
    return sum(rank.peak_bytes for rank in plan.prediction.ranks)


def reference_of(
    member: JobMember,
    model: LoadedModel,
    items: Sequence[BatchItem],
    device: torch.device,
    captured: CapturedModule | None = None,
) -> Reference:
    """Runs ``items``, a step each; ``model`` is trained by it.

    Args:
        captured: of ``model``, for ``device``; None: it is captured here.

    Raises:
        UnsupportedModelError: the model draws other random numbers than its captured graph.
    """
    dtype = next(iter(_float_dtypes(model)), torch.get_default_dtype())
    is_exact = dtype == EXACT and model.autocast is None
    twin, reason = (None, "") if is_exact else _twin(model)
    if captured is None:
        model, captured = capture_for(model, device)
    lowered = _lowered(captured) if is_exact else {}
    lowest = max(lowered, key=lambda each: torch.finfo(each).eps, default=None)
    if is_exact:
        twin, no_twin = _twin(model)
        reason = no_twin if lowest is not None else ""
        depth = 1.0 if lowest is not None else math.sqrt(len(captured.graph.layers))  # each layer rounds by chance
        _disturb(twin, depth * torch.finfo(lowest or EXACT).eps)
    try:
        reference = _run(member, model, captured, items)
    except UnlikeDrawsError as error:
        raise UnsupportedModelError(
            "one device cannot draw what the plan draws, so the two cannot be compared",
            [str(error)],
            ["--no-check-first-step, in place of --check-numerics if asked: nothing then tells whether it is right"],
        ) from error
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = next((each for each in reversed(frames) if not each.filename.startswith(_TORCH)), frames[-1])
        raise UnsupportedModelError(
            f"one device of type {device.type} cannot run the module, so the two cannot be compared",
            [str(error).partition("\n")[0], f"raised at {own.filename}:{own.lineno}"],
            [
                "make tensors where the inputs are: torch.zeros(..., device=x.device)",
                "--no-check-first-step: stages make theirs on the plan's devices anyhow",
            ],
        ) from error
    if twin is not None and not reference.skipped:
        try:
            twin = twin if device.type == "cpu" else placed(twin, device)
            reference = replace(reference, rounding=_rounding(reference, _run(member, twin, captured, items)))
        except Exception as error:  # noqa: BLE001 - whatever a module with dtypes of its own raises
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if reason:
        witness = f"{reference.witness}; its own rounding is not known, as it does not run in float64 ({reason})"
        reference = replace(reference, witness=witness)
    if lowest is not None and not reference.skipped:
        layers = list(dict.fromkeys(lowered[lowest]))
        through = f"values pass through {_name(lowest)} in {count(len(layers), 'layer')}, {layers[0]} first"
        witness = f"{reference.witness}; {through}, and differences are accepted up to what that rounds"
        reference = replace(reference, lowest=_name(lowest), witness=witness)
    return replace(reference, dtype=_name(model.autocast or dtype))


def _lowered(captured: CapturedModule) -> dict[torch.dtype, list[str]]:
    """By precision below float64, the layers that make such values of trained parameters or of inputs."""
    trained = {name for name, each in captured.graph_module.named_parameters() if each.requires_grad}
    layers_of: dict[torch.dtype, list[str]] = {}
    fed: set[torch.fx.Node] = set()
    for node in captured.graph_module.graph.nodes:
        made = {each.dtype for each in _floats(node)}
        if node.op == "call_function" and not fed.isdisjoint(node.all_input_nodes):
            inner = node.target.module.graph.nodes if is_unit(node) else ()
            for dtype in made.union(*({each.dtype for each in _floats(part)} for part in inner)):
                if torch.finfo(dtype).eps > torch.finfo(EXACT).eps:
                    layers_of.setdefault(dtype, []).append(captured.layer_of_node[node.name])
            fed.update([node] if made else ())
        elif (made and node.op == "placeholder") or (node.op == "get_attr" and node.target in trained):
            fed.add(node)
    return layers_of


def _floats(node: torch.fx.Node) -> list[Tensor]:
    leaves = tree_leaves(node.meta.get("val"))
    return [each for each in leaves if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex())]


@torch.no_grad()
def _disturb(model: LoadedModel | None, share: float) -> None:
    """Makes every trained number larger or smaller by this share of it, in the same way each time."""
    generator = torch.Generator().manual_seed(0)
    for parameter in _once(named_parameters(model.owners)).values() if model else ():
        signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
        parameter.mul_(1 + share * signs.to(parameter))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mixes(captured: CapturedModule) -> bool:
    """Whether a batch in parts may give something else than the batch whole, or leave other buffers.

    A loss over the sites of clouds is weighted by clouds, which only parts show; unless the capture says otherwise.
    """
    is_by_cloud = captured.preparation is not None and not captured.reductions
    if captured.mixing or not captured.polymorphic or is_by_cloud:
        return True
    graph = captured.graph_module.graph
    viewed = attributes_viewed(graph)
    return any(written(node, viewed) or _normalises_samples(node) for node in graph.nodes if node.op == "call_function")


def losses_of(model: LoadedModel, captured: CapturedModule, context: RankContext) -> LossOfStep:
    """The loss of a micro-batch by the user's own module, which is given the sites that the plan is given."""
    if captured.preparation is None or not Answers(captured, CounterRng(context.seed)):
        return model.loss
    from runtime.sparse.preparing import preparing  # late: other networks do without

    prepared = preparing(context.decision, captured)
    device = model.inputs[0].device
    specs = step_inputs(captured)

    def loss_of(inputs: StepTensors, targets: StepTensors) -> Tensor:
        """Sites in the plan's order: numbers are drawn by row."""
        batch = prepared.batch(WholeBatch(specs, (*inputs, *targets), (inputs[0].shape[0],)))
        tensors = model.cast(tuple(batch.whole(name, 0).to(device) for name in captured.graph.inputs))
        return model.loss_of_prepared(tensors[: len(model.inputs)], tensors[len(model.inputs) :])

    return loss_of


def rows_of(item: BatchItem, micro_batches: Sequence[int], specs: InputSpecs) -> tuple[int, ...]:
    """The samples of each micro-batch of a batch."""
    batches = item if isinstance(item, list) else [item]
    samples = [specs.samples(zip(specs.specs, (*inputs, *targets), strict=True)) for inputs, targets in batches]
    if isinstance(item, list):
        return tuple(samples)
    return tuple(filter(None, filled(min(samples[0], sum(micro_batches)), tuple(micro_batches))))


def parts_of(item: BatchItem, rows: Sequence[int], specs: InputSpecs) -> list[tuple[StepTensors, StepTensors]]:
    """The micro-batches of a batch, of ``rows`` samples each."""
    if isinstance(item, list):
        return list(item)
    inputs, targets = item
    starts = (sum(rows[:number]) for number in range(len(rows)))
    parts = (specs.part((*inputs, *targets), start, count) for start, count in zip(starts, rows, strict=True))
    return [(part[: len(inputs)], part[len(inputs) :]) for part in parts]


def _run(member: JobMember, model: LoadedModel, captured: CapturedModule, items: Sequence[BatchItem]) -> Reference:
    specs = step_inputs(captured)
    if not member.plan.decision.trains:
        return _evaluated(member, model, specs, items[:1])
    draw = CounterRng(member.context.seed)
    answers = Answers(captured, draw)
    whole = _is_whole(member.plan, model, captured, answers)
    loss_of = _shared(losses_of(model, captured, member.context), member.context.accumulate)
    parameters = named_parameters(model.owners)
    buffers = named_buffers(model.owners)
    optimizer = cast("torch.optim.Optimizer", _Optimizer(member.context, parameters))  # has what a step calls
    losses: list[float] = []
    first: dict[str, Any] = {}
    for step, item in enumerate(items):
        draw.step = step
        rows = rows_of(item, member.plan.decision.micro_batches, specs)
        if whole and not isinstance(item, list):
            inputs, targets = map(model.cast, item)
            losses.append(serial_step(loss_of, optimizer, inputs, targets, rows, answers=answers, whole=True))
        else:
            parts = [(model.cast(inputs), model.cast(targets)) for inputs, targets in parts_of(item, rows, specs)]
            weights = () if isinstance(item, list) else _weights(captured, parts, rows)
            if weights is None:
                return Reference(skipped="its loss is no mean over samples, and the batch cannot be run whole")
            losses.append(serial_step_each(loss_of, optimizer, parts, rows, answers=answers, weights=weights))
        if step == member.context.accumulate - 1:
            first = {
                "gradient": sketches({name: p.grad for name, p in parameters.items() if p.grad is not None}),
                "parameter": sketches(parameters),
                "buffer": sketches(buffers),
            }
    return Reference("", tuple(losses), **first, witness=WHOLE if whole else IN_PARTS)


def _is_whole(plan: Plan, model: LoadedModel, captured: CapturedModule, answers: Answers) -> bool:
    """Whether the batch is run at once: it fits, or is one micro-batch, and does the same whole as in parts."""
    num_parts = len(plan.decision.micro_batches)
    fits = num_parts == 1 or _needed_bytes(plan, num_parts) <= _available_bytes(plan, model.inputs[0].device)
    prepares_draws = captured.preparation is not None and answers
    return bool(fits and answers.in_parts and not mixes(captured) and not prepares_draws)


def _weights(
    captured: CapturedModule, parts: Sequence[tuple[StepTensors, StepTensors]], rows: Sequence[int]
) -> tuple[float, ...] | None:
    """What the losses of micro-batches count for; None: they do not make up that of the batch."""
    if not captured.reductions or captured.preparation is not None:
        return tuple(count / sum(rows) for count in rows)
    names = captured.graph.inputs
    named = [dict(zip(names, (*inputs, *targets), strict=True)) for inputs, targets in parts]
    return weights_of_parts(captured, named, rows)


@torch.no_grad()
def _evaluated(member: JobMember, model: LoadedModel, specs: InputSpecs, items: Sequence[BatchItem]) -> Reference:
    """The loss in evaluation mode: all that a plan of forward passes has."""
    model.module.eval()
    losses = []
    for item in items:
        rows = rows_of(item, member.plan.decision.micro_batches, specs)
        parts, counts = (item, rows) if isinstance(item, list) else ([item], (sum(rows),))
        losses_of_parts = (model.loss(model.cast(inputs), model.cast(targets)).item() for inputs, targets in parts)
        weighted = (loss * count for loss, count in zip(losses_of_parts, counts, strict=True))
        losses.append(sum(weighted) / sum(rows))
    return Reference("", tuple(losses), witness=f"{WHOLE}, in evaluation mode")


class _Optimizer:
    """The run's optimiser on one device, as :func:`runtime.numerics.single_device.serial_step` uses it.

    An object of the user's own is copied whole with its parameters, and steps itself.
    """

    def __init__(self, context: RankContext, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = {name: each for name, each in _once(parameters).items() if each.requires_grad}
        own = cast("dict[str, torch.nn.Parameter]", parameters)  # parameters all, which are tensors elsewhere
        self._step: Callable[[], object]
        if isinstance(context.optimizer, Followed):
            self._step = context.optimizer.whole(own).step
        else:
            optimizer = StageOptimizer({name: own[name] for name in self._parameters}, context.optimizer)
            if context.scheduler is not None:
                optimizer.schedule(context.scheduler)
            self._step = optimizer.step
        self._clip_norm = context.clip_norm
        self._accumulate = context.accumulate
        self._number = 0

    def zero_grad(self, set_to_none: bool) -> None:
        if self._number % self._accumulate == 0:
            for parameter in self._parameters.values():
                parameter.grad = None

    def step(self) -> None:
        self._number += 1
        if self._number % self._accumulate == 0:
            if self._clip_norm:
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._clip_norm)
            self._step()


def _shared(loss_of: LossOfStep, accumulate: int) -> LossOfStep:
    """The same loss, whose gradient is that of one of ``accumulate`` steps that make up an update."""
    if accumulate == 1:
        return loss_of

    def shared(inputs: StepTensors, targets: StepTensors) -> Tensor:
        loss = loss_of(inputs, targets)
        return loss.detach() + (loss - loss.detach()) / accumulate

    return shared


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _twin(model: LoadedModel) -> tuple[LoadedModel | None, str]:
    """The same in float64, with the values that it has; None, and why, where it cannot be copied."""
    try:
        twin = copied(model)
    except Exception as error:  # noqa: BLE001 - the user's module may refuse in any way
        return None, f"it cannot be copied: {error}"
    for module in twin.owners.values():
        cast_module(module, EXACT)
    return replace(twin, casts=casts_to(EXACT, _FLOATS), autocast=None).with_cast_example(), ""


def _normalises_samples(node: torch.fx.Node) -> bool:
    return "batch_norm" in str(node.target) and arguments_of(node).get("training") is not False


def parameters_of(model: LoadedModel, captured: CapturedModule) -> dict[str, torch.nn.Parameter]:
    """By all their names: the module's own, those of the loss, and the graph's."""
    of_graph = dict(captured.graph_module.named_parameters(remove_duplicate=False))
    return {**named_parameters(model.owners), **of_graph}


def _once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    first: dict[int, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(id(tensor), name)
    return {name: tensors[name] for name in first.values()}


def _float_dtypes(model: LoadedModel) -> list[torch.dtype]:
    parameter_dtypes = [each.dtype for each in model.module.parameters() if each.is_floating_point()]
    return parameter_dtypes or [each.dtype for each in model.inputs if each.is_floating_point()]


def _rounding(rounded: Reference, exact: Reference) -> dict[str, dict[str, float]]:
    losses = zip(rounded.losses, exact.losses, strict=True)
    errors = {"loss": {str(step): relative_error(*pair) for step, pair in enumerate(losses)}}
    for kind in ("gradient", "parameter", "buffer"):
        differences = tensor_differences(kind, getattr(rounded, kind), getattr(exact, kind), TOLERANCES[torch.float32])
        errors[kind] = {each.name: each.error for each in differences}
    return errors
