"""The mean loss over evaluation data, the accuracy of models that classify, and metrics of one's own.

A *metric* has ``update(*values)`` and ``compute()``, as those of torchmetrics.  It is given what the user's loss
function is called with, ``(output, targets)``, or the outputs of the module and tensors of the batch that are named: of
each batch once, whole and in order, whatever the plan.  The parts that ranks have are put together on all of them.
(Micro-batches that are given one by one, and those of clouds, are a call each.)
``compute`` gives a number, or numbers by name.  A function without
arguments makes one metric, or several by name, anew for each evaluation; ``pkg.mod:function`` names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor

from halopipe.data.factories import failure_of
from halopipe.run_spec.result import Score
from planner.ir.box import Box, Interval, hull, whole
from planner.ir.errors import FactoryError, HalopipeError, UsageError
from planner.ir.graph import INTERLEAVES_SAMPLES, SAMPLE, Graph, TensorSpec, producer
from profiler.source.source import find_factory
from runtime.captured import LossCall, compares, judging_layer
from runtime.engine import Engine, EvaluationResult
from runtime.optim.whole_state import united
from runtime.pipeline.microbatches import Batch, MicroBatches, WholeBatch, part_in
from runtime.pipeline.routing import Piece, assemble
from runtime.rank import RankContext

IGNORED = -100
"""Targets that ``cross_entropy`` leaves out."""


@dataclass(frozen=True, slots=True)
class Classes:
    """Where a model that classifies has its answers.

    Attributes:
        logits: the value that holds a number for each class, ``dim`` being that of the classes.
        target: the input, or a value made of it, that holds the right classes.
    """

    logits: str
    target: str
    dim: int

    def count(self, logits: Tensor, targets: Tensor) -> tuple[int, int]:
        """Right answers, and questions."""
        asked = targets != IGNORED
        right = (logits.argmax(self.dim) == targets) & asked
        return int(right.sum()), int(asked.sum())


def classes_of(graph: Graph, read: Sequence[str] = ()) -> Classes | None:
    """None where ``read`` (by default, what the loss reads) is not one value of numbers and one of integers."""
    values = graph.values()
    read = read or judging_layer(graph).inputs
    logits = [name for name in read if values[name].is_float and name not in graph.inputs]
    targets = [name for name in read if values[name].dtype == "int64"]
    if len(logits) != 1 or len(targets) != 1 or len(read) != 2:
        return None
    dim = _class_dim(values[logits[0]], values[targets[0]])
    return None if dim is None else Classes(logits[0], targets[0], dim)


class Metric(Protocol):
    """See the module."""

    def update(self, *values: Any) -> object:
        """Take what the loss function is called with, of a batch."""
        ...

    def compute(self) -> Any:
        """What is to be known of all that was taken."""
        ...


MakeMetrics = Callable[[], "Metric | Mapping[str, Metric]"]


def values_named(names: Sequence[str], context: RankContext) -> tuple[str, ...]:
    """The values of the graph that a user calls so: outputs of the module, and tensors of the batch.

    Raises:
        UsageError: there is no such one, or the loss is not made of it.
    """
    batch = context.graph.inputs if context.preparation is None else {}
    unknown = [name for name in names if name not in context.outputs and name not in batch]
    if unknown:
        raise UsageError(
            f"evaluation cannot be given {unknown[0]!r}",
            [
                f"outputs of the module that the loss is made of: {', '.join(sorted(context.outputs)) or 'none'}",
                f"tensors of a batch: {', '.join(batch) or 'none by name'}",
            ],
            ["add another output to the loss, times 0: what no loss is made of is not computed"],
        )
    return tuple(context.outputs.get(name, name) for name in names)


def evaluate(
    engine: Engine,
    batches: Iterable[Batch],
    metric: str | MakeMetrics = "",
    outputs: Sequence[str] = (),
) -> Score:
    """Evaluate on all ``batches``; all ranks call this, and get the same.

    Args:
        engine: of this rank.
        batches: as steps read them.
        metric: makes metrics of one's own, or the name of what does; empty for none.
        outputs: names of the module's outputs and of tensors of the batch, which accuracy is told of and metrics are
            given, in this order; none: what the loss function is called with.

    Raises:
        UsageError: there is no batch; or what is to be read is not to be had, at all or under this plan.
        FactoryError: the metric cannot be made, or fails.
    """
    context = engine.context
    graph = engine.context.graph
    compared = values_named(outputs, context) if outputs else judging_layer(graph).inputs
    call = metric_call(context, outputs) if metric else LossCall((), tuple)
    kept = dict.fromkeys((*call.values, *compared))
    made = [value for value in kept if value not in graph.inputs]
    own = _Own(metric, context, call) if metric else None
    classes = classes_of(graph, compared)
    sums = torch.zeros(4, dtype=torch.float64)  # losses times samples, samples, right answers, questions
    is_empty = True
    for batch in batches:
        is_empty = False
        evaluation = engine.evaluate_on(batch, made)
        if evaluation.loss is not None and context.rank == context.loss_rank:
            sums[0] += evaluation.loss * evaluation.num_samples
            sums[1] += evaluation.num_samples
        if classes is not None:
            right, asked = _answers(graph, classes, evaluation)
            sums[2] += right
            sums[3] += asked
        if own is not None:
            own.take(evaluation)
    if is_empty:
        raise UsageError(
            "there is no data to evaluate on", ["not a single batch was given"], ["--eval-data with samples in it"]
        )
    context.transport.all_reduce(sums, context.ranks)
    total, samples, right_answers, questions = sums.tolist()
    accuracy = right_answers / questions if questions else None
    metrics = {} if own is None else own.computed()
    return Score(engine.num_steps, total / samples, int(samples), accuracy, metrics)


def metric_call(context: RankContext, outputs: Sequence[str] = ()) -> LossCall:
    """What metrics are given: outputs and tensors of the batch by their names, else what the loss function is.

    Raises:
        UsageError: it is not to be had, at all or under this plan.
    """
    call = LossCall(values_named(outputs, context), tuple) if outputs else _call_of_loss(context)
    decision = context.decision
    values = context.graph.values()
    interleaved = {layer.name for layer in context.graph.layers if INTERLEAVES_SAMPLES in layer.attributes}
    for name in call.values:
        if name in context.graph.inputs or values[name].has_sites:
            continue
        ranks = decision.stages[decision.layers[producer(name)].stage].ranks
        is_by_sample = values[name].dims.count(SAMPLE) == 1 and producer(name) not in interleaved
        if not is_by_sample and len(decision.micro_batches) * len(ranks) > 1:
            raise UsageError(
                f"a metric cannot be given {name}, which is not made of one sample after another",
                [f"the plan has {len(decision.micro_batches)} micro-batches, and {len(ranks)} ranks that make it"],
                ["a plan with one micro-batch, and one rank that makes it", *_named_instead(context)],
            )
    return call


def _call_of_loss(context: RankContext) -> LossCall:
    """How the loss function is called; of a module whose output is not known, what the layer of the loss compares."""
    call = context.loss_call
    judging = judging_layer(context.graph)
    if call is None and compares(judging):
        return LossCall(judging.inputs, tuple)
    if call is None:
        raise UsageError(
            "it is not known what metrics are to be given",
            ["the module makes its loss itself, of several terms; or its output holds what is no tensor"],
            _named_instead(context),
        )
    if "" in call.values:
        raise UsageError(
            "metrics cannot be given what the loss function is called with",
            [f"the loss is not made of all tensors in the module's output: number {call.values.index('')} is left out"],
            _named_instead(context),
        )
    return call


def _named_instead(context: RankContext) -> list[str]:
    if not context.outputs:
        return ["a module whose output is a tensor, or holds tensors in tuples, lists and dicts"]
    names = ",".join([*context.outputs, *([] if context.preparation is not None else context.graph.inputs)])
    return [f"name what metrics are to be given, in order, of {names} (--eval-outputs; outputs= in a script)"]


class _Own:
    """Metrics of one's own, on one rank; all ranks have the same, and give them the same."""

    def __init__(self, metric: str | MakeMetrics, context: RankContext, call: LossCall) -> None:
        self._name = metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
        make = find_factory(metric) if isinstance(metric, str) else metric
        made = self._calling(make)
        metrics = made if isinstance(made, Mapping) else {self._name.rpartition(":")[2].rpartition(".")[2]: made}
        for name, each in metrics.items():
            if not (callable(getattr(each, "update", None)) and callable(getattr(each, "compute", None))):
                raise FactoryError(
                    f"{self._name} makes no metric",
                    [f"{name} is a {type(each).__name__}, without update(prediction, target) or compute()"],
                    ["a metric of torchmetrics", "a class with these two methods"],
                )
        self._metrics: Mapping[str, Metric] = metrics
        self._context = context
        self._call = call

    def take(self, evaluation: EvaluationResult) -> None:
        """Hands on what ranks have of a batch."""
        context = self._context
        call = self._call
        pieces = united(_pieces(context.graph, evaluation, call.values), context.transport)
        micro_batches = list(_put_together(pieces))
        is_whole = context.preparation is None and not isinstance(evaluation.batch, MicroBatches)
        for values in [_joined_batch(context.graph, call.values, micro_batches)] if is_whole else micro_batches:
            for metric in self._metrics.values():
                self._calling(partial(metric.update, *call.arguments(values)))

    def computed(self) -> dict[str, float]:
        """By name."""
        numbers: dict[str, float] = {}
        for name, metric in self._metrics.items():
            value = self._calling(metric.compute)
            several = value.items() if isinstance(value, Mapping) else [("", value)]
            for part, each in several:
                called = part if len(self._metrics) == 1 and part else f"{name}.{part}".rstrip(".")
                try:
                    numbers[called] = float(each)
                except (TypeError, ValueError, RuntimeError) as error:
                    raise FactoryError(
                        f"{self._name}: {called} is no number",
                        [f"compute() gave {each!r}"],
                        ["a number, or a dict of them"],
                    ) from error
        return numbers

    def _calling(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except HalopipeError:
            raise
        except Exception as error:
            raise failure_of(self._name, error) from error


def _joined_batch(graph: Graph, read: Sequence[str], micro_batches: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
    """The values of a batch, of those of its micro-batches; of what has no samples each has the whole."""
    if len(micro_batches) == 1:
        return micro_batches[0]
    values = graph.values()
    by_value = zip(read, *micro_batches, strict=True)
    return [
        torch.cat(parts, values[name].dims.index(SAMPLE)) if SAMPLE in values[name].dims else parts[0]
        for name, *parts in by_value
    ]


def _pieces(graph: Graph, evaluation: EvaluationResult, read: Sequence[str]) -> dict[str, Tensor]:
    """What this rank has of the values ``read``, by micro-batch, place among them, and where it lies."""
    pieces = {}
    values = graph.values()
    for m, outputs in evaluation.outputs.items():
        shapes = evaluation.batch.shapes(m)
        for number, name in enumerate(read):
            if name in outputs:
                box, tensor = outputs[name]
            elif name in graph.inputs:
                shape = tuple(shapes[name])
                is_here = isinstance(evaluation.batch, WholeBatch | MicroBatches)
                box = whole(shape) if is_here else _beside(outputs, values, shape, name)
                tensor = _part(graph, evaluation, name, m, box)
            else:
                continue
            pieces[json.dumps([m, number, [[interval.start, interval.stop] for interval in box]])] = tensor
    return pieces


def _part(graph: Graph, evaluation: EvaluationResult, name: str, microbatch: int, box: Box) -> Tensor:
    """The part ``box`` of an input of the model."""
    spec = replace(graph.inputs[name], shape=tuple(evaluation.batch.shapes(microbatch)[name]))
    return part_in(evaluation.batch, name, microbatch, box, spec)


def _without(box: Box, dim: int) -> Box:
    return (*box[: dim % len(box)], *box[dim % len(box) + 1 :])


def _beside(outputs: Mapping[str, Piece], values: Mapping[str, TensorSpec], shape: tuple[int, ...], name: str) -> Box:
    """The part of an input of the loss, ``shape`` in all, that belongs to the part of the prediction that is here."""
    made = next((each for each in outputs if values[each].is_float), next(iter(outputs)))
    box = outputs[made][0]
    prediction = values[made]
    target = values[name]
    if target.shape == prediction.shape:
        return box
    dim = _class_dim(prediction, target)
    if dim is not None:
        return _without(box, dim)
    place = list(whole(shape))
    if SAMPLE in target.dims:
        by = target.dims.index(SAMPLE)
        of = prediction.dims.index(SAMPLE) if SAMPLE in prediction.dims else 0
        others = [len(interval) for number, interval in enumerate(box) if number != of]
        if others != [extent for number, extent in enumerate(prediction.shape) if number != of]:
            raise UsageError(
                f"a metric cannot be given {name}, which belongs to {made}",
                [f"{made} {prediction.shape} is divided over more than samples, {name} is {target.shape}"],
                ["halopipe plan --solver data-parallel", "a target of the prediction's own form"],
            )
        length = target.shape[by]
        rows = prediction.shape[of]  # of as many samples
        place[by] = Interval(box[of].start * length // rows, -(-box[of].stop * length // rows))
    return tuple(place)


def _put_together(pieces: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
    """What metrics read, by micro-batch."""
    by_microbatch: dict[int, dict[int, list[Piece]]] = {}
    for key, tensor in pieces.items():
        m, number, place = json.loads(key)
        box = tuple(Interval(*ends) for ends in place)
        by_microbatch.setdefault(m, {}).setdefault(number, []).append((box, tensor))
    for _, read in sorted(by_microbatch.items()):
        yield [joined(read[number], read[number][0][1].dtype) for number in sorted(read)]


def joined(pieces: Sequence[Piece], dtype: torch.dtype) -> Tensor:
    """What pieces of several ranks are together."""
    return assemble(pieces, reduce(hull, (box for box, _ in pieces)), dtype)


def _answers(graph: Graph, classes: Classes, evaluation: EvaluationResult) -> tuple[int, int]:
    """Of this rank's part; none where the right classes are made by another stage, or no rank has all classes."""
    right = asked = 0
    num_classes = graph.values()[classes.logits].shape[classes.dim]
    for m, outputs in evaluation.outputs.items():
        if classes.logits not in outputs:
            continue
        box, logits = outputs[classes.logits]
        if len(box[classes.dim]) != num_classes:
            continue
        place = _without(box, classes.dim)
        targets = None
        if classes.target in outputs and outputs[classes.target][0] == place:
            targets = outputs[classes.target][1]
        elif classes.target in graph.inputs:
            targets = _part(graph, evaluation, classes.target, m, place).to(logits.device)
        if targets is not None:
            counts = classes.count(logits, targets)
            right = right + counts[0]
            asked = asked + counts[1]
    return right, asked


def _class_dim(logits: TensorSpec, target: TensorSpec) -> int | None:
    if len(logits.shape) < 2:
        return None
    if target.shape == (logits.shape[0], *logits.shape[2:]):
        return 1
    return -1 if target.shape == logits.shape[:-1] else None
