"""The mean loss over evaluation data, and the accuracy of models that classify."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halopipe.data.feeds import Consumer
from halopipe.run_spec.result import Score
from planner.ir.errors import UsageError
from planner.ir.graph import Graph, TensorSpec, producer
from runtime.engine import Engine, Evaluation
from runtime.pipeline.microbatches import Batch, part_in
from runtime.stage.captured import judging_layer

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


def classes_of(graph: Graph) -> Classes | None:
    """None where the loss is not one of classes: of one value of numbers and one of integers."""
    judging = judging_layer(graph)
    values = graph.values()
    logits = [name for name in judging.inputs if values[name].is_float and name not in graph.inputs]
    targets = [name for name in judging.inputs if values[name].dtype == "int64"]
    if len(logits) != 1 or len(targets) != 1 or len(judging.inputs) != 2:
        return None
    dim = _class_dim(values[logits[0]], values[targets[0]])
    return None if dim is None else Classes(logits[0], targets[0], dim)


def evaluate(engine: Engine, consumer: Consumer, batches: Iterable[Batch]) -> Score:
    """Evaluate on all ``batches``; all ranks call this, and get the same.

    Raises:
        UsageError: there is no batch.
    """
    classes = classes_of(consumer.graph)
    sums = torch.zeros(4, dtype=torch.float64)  # losses times samples, samples, right answers, questions
    is_empty = True
    for batch in batches:
        is_empty = False
        found = engine.evaluate_on(batch)
        if found.loss is not None and consumer.transport.rank == loss_rank(consumer):
            sums[0] += found.loss * found.num_samples
            sums[1] += found.num_samples
        if classes is not None:
            right, asked = _answers(consumer, classes, found)
            sums[2] += right
            sums[3] += asked
    if is_empty:
        raise UsageError(
            "there is no data to evaluate on", ["not a single batch was given"], ["--eval-data with samples in it"]
        )
    consumer.transport.all_reduce(sums, consumer.ranks, consumer.deadline_s)
    total, samples, right_answers, questions = sums.tolist()
    return Score(engine.num_steps, total / samples, int(samples), right_answers / questions if questions else None)


def loss_rank(consumer: Consumer) -> int:
    """The first rank that makes the loss."""
    decision, graph = consumer.decision, consumer.graph
    return min(decision.stages[decision.layers[producer(graph.loss)].stage].ranks)


def _answers(consumer: Consumer, classes: Classes, found: Evaluation) -> tuple[int, int]:
    """Of this rank's part; none where the right classes are made by another stage, or no rank has all classes."""
    graph, batch = consumer.graph, found.batch
    spec, right, asked = graph.values()[classes.logits], 0, 0
    for m, outputs in found.outputs.items():
        if classes.logits not in outputs:
            continue
        box, logits = outputs[classes.logits]
        dim = classes.dim % len(box)
        if len(box[dim]) != spec.shape[dim]:
            continue
        place, targets = (*box[:dim], *box[dim + 1 :]), None
        if classes.target in outputs and outputs[classes.target][0] == place:
            targets = outputs[classes.target][1]
        elif classes.target in graph.inputs:
            whole = replace(graph.inputs[classes.target], shape=tuple(batch.shapes(m)[classes.target]))
            targets = part_in(batch, classes.target, m, place, whole).to(logits.device)
        if targets is not None:
            counts = classes.count(logits, targets)
            right, asked = right + counts[0], asked + counts[1]
    return right, asked


def _class_dim(logits: TensorSpec, target: TensorSpec) -> int | None:
    if len(logits.shape) < 2:
        return None
    if target.shape == (logits.shape[0], *logits.shape[2:]):
        return 1
    return -1 if target.shape == logits.shape[:-1] else None
