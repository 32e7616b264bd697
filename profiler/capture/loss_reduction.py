"""Where a graph goes from samples to numbers, and how the parts of a batch make up the number of the whole of it.

    mean     of samples: parts weigh by their samples
    sum      over samples: parts weigh 1
    terms    mean over those targets that are not ignored, by the weights of their classes: parts weigh by these
    whole    of inputs alone (the sum of a mask): every part is given the value of the whole batch, which follows from
             that of the parts as their sum (``whole sum``) or mean (``whole mean``)

Behind such numbers a loss may only do what is linear in them; values of inputs alone are constants there, so that a
mean over what a mask leaves, ``(mask * x).sum() / mask.sum()``, is linear.  Whatever is not (the root of a mean, the
largest of a batch, a softmax over the samples) needs the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import HigherOrderOperator, OpOverload
from cuda_ops.calls import arguments_of, draws
from cuda_ops.dense.data_dependent import is_unit
from cuda_ops.dense.state_writes import attributes_viewed, written
from cuda_ops.operator_table import SAME, operator_row
from planner.ir.graph import MIXES_SAMPLES
from planner.layers.elementwise import PLACES
from profiler.capture.functional import is_write
from profiler.capture.operators import nodes_in
from profiler.capture.sizes import NUM_SAMPLES
from profiler.capture.trace import TracedModel
from profiler.source.model import is_alike

MEAN = "mean"
SUM = "sum"
TERMS = "terms"
WHOLE_SUM = "whole sum"
WHOLE_MEAN = "whole mean"

DIVIDED = "divided"
"""Of a sum that becomes a mean at once: it is divided by the number of its samples."""

_PAIR = 2
_BY_MEAN = 1
"""torch's number of ``reduction="mean"``."""


def is_reduction(node: fx.Node, traced: TracedModel) -> bool:
    """Whether it makes of samples one tensor that does not grow with them."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, Tensor)
        and not traced.grows(value)
        and any(traced.grows(argument.meta.get("val")) for argument in node.all_input_nodes)
    )


def of_inputs_alone(traced: TracedModel) -> frozenset[fx.Node]:
    """What follows from the inputs and from constants by a few cheap operators, without parameters and draws."""
    changing = _written(traced.module.graph)
    nodes: set[fx.Node] = set()
    for node in traced.module.graph.nodes:
        if node.op == "placeholder":
            nodes.add(node)
        elif node.op == "get_attr":
            if node.target not in traced.parameters and node.target not in changing:
                nodes.add(node)
        elif node.op == "call_function" and _is_cheap(node) and all(each in nodes for each in node.all_input_nodes):
            nodes.add(node)
    return frozenset(nodes)


def _is_cheap(node: fx.Node) -> bool:
    if isinstance(node.target, OpOverload):
        return not draws(node.target) and not is_write(node) and not operator_row(node.target).heavy
    return not isinstance(node.target, HigherOrderOperator)


def _written(graph: fx.Graph) -> frozenset[str]:
    """Buffers that the graph writes."""
    behind = attributes_viewed(graph)
    return frozenset(buffer for node in graph.nodes for buffer in written(node, behind))


def is_over_terms(node: fx.Node) -> bool:
    """Whether it is a mean over targets that are classes, of which some may be ignored or weigh more."""
    if node.op != "call_function" or operator_row(node.target).terms != PLACES:
        return False
    arguments = arguments_of(node)
    target = arguments["target"].meta.get("val")
    return arguments["reduction"] == _BY_MEAN and isinstance(target, Tensor) and not target.is_floating_point()


def knows_terms(node: fx.Node, of_inputs: frozenset[fx.Node]) -> bool:
    """Of such a mean, whether the targets that count are known before the step."""
    arguments = arguments_of(node)
    read = [value for value in (arguments["target"], arguments["weight"]) if isinstance(value, fx.Node)]
    return all(value in of_inputs for value in read)


def all_count(node: fx.Node) -> bool:
    """Of a mean over classes, whether its targets are the likeliest class of something, and no class is ignored."""
    arguments = arguments_of(node)
    if arguments["ignore_index"] >= 0:
        return False
    target = arguments["target"]
    while isinstance(target, fx.Node) and operator_row(target.target).moves and target.args:
        target = target.args[0]
    return arguments["weight"] is None and isinstance(target, fx.Node) and operator_row(target.target).name == "argmax"


def likely(node: fx.Node) -> tuple[str, ...]:
    """What a reduction may be, by its operator, in the order in which it is tried; of our own making: either.

    Of what follows from data a mean over two samples may be theirs and over others not: ``loss[mask].mean()``.
    """
    if is_unit(node):
        return (SUM,) if _ends_in_sum(node) else ()
    arguments = arguments_of(node)
    row = operator_row(node.target)
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return MEAN, SUM
    if "reduction" in arguments:
        return (MEAN,) if arguments["reduction"] == _BY_MEAN else (SUM,)
    if row.sums:
        return (SUM,)
    return (MEAN,) if row.name == "mean" else ()


def _ends_in_sum(unit: fx.Node) -> bool:
    """Whether all that it makes are sums."""
    target: Any = unit.target
    made = nodes_in(target.module.graph.output_node().args)
    return all(operator_row(each.target).sums for each in made)


def is_linear(node: fx.Node, reduced: set[fx.Node]) -> bool:
    """Whether a number made of others is linear in those ``reduced`` from samples, constants added."""
    row = operator_row(node.target)
    made = node.meta["val"]
    is_rounded = not (made.is_floating_point() or made.is_complex())
    if is_rounded and any(each in reduced and each.meta["val"].is_floating_point() for each in node.all_input_nodes):
        return False
    if row.linear == "all":
        return True
    places = [index for index, value in enumerate(node.args) if _reads(value, reduced)]
    if any(_reads(value, reduced) for value in node.kwargs.values()) or len(places) != 1:
        return False
    if row.linear == "first":
        return places[0] == 0 and not node.kwargs.get("rounding_mode")
    return row.linear == "each" and (row.name != "where" or places[0] > 0)


def _reads(value: Any, nodes: set[fx.Node]) -> bool:
    return any(node in nodes for node in nodes_in((value,)))


def is_divided_by_samples(node: fx.Node, traced: TracedModel) -> bool:
    """Whether all that is made of a sum is a mean: it is divided by a number of samples, or of what each has."""
    readers = list(node.users)
    return bool(readers) and all(_divides(reader, node, traced) for reader in readers)


def _divides(reader: fx.Node, value: fx.Node, traced: TracedModel) -> bool:
    row = operator_row(reader.target)
    if row.name in ("div", "true_divide", "divide") and reader.args[0] is value:
        size = reader.args[1]
        return isinstance(size, fx.Node) and is_number_of_samples(size, traced)
    is_scaled = row.name == "mul" and not any(isinstance(other, fx.Node) for other in reader.args if other is not value)
    return (is_scaled or row.name == "neg" or row.elements == SAME) and is_divided_by_samples(reader, traced)


def is_number_of_samples(size: fx.Node, traced: TracedModel) -> bool:
    """Whether an integer is the number of samples, or a multiple of it."""
    if size.op == "placeholder":
        return size.target == NUM_SAMPLES
    value = size.meta.get("val")
    return isinstance(value, torch.SymInt) and traced.symbols.depends_on_samples(value)


def reaching(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that the loss is made of, as opposed to those that only update buffers."""
    nodes: set[fx.Node] = set()
    reading: list[fx.Node] = [node for node in graph.nodes if node.op == "output"]
    while reading:
        node = reading.pop()
        if node not in nodes:
            nodes.add(node)
            reading += node.all_input_nodes
    return frozenset(nodes)


@dataclass(eq=False)
class Executed:
    """One execution of the graph.

    Attributes:
        values: of the nodes that are read again.
        summed: of means over classes, the sum that they divide by the number of terms.
    """

    values: dict[fx.Node, Any] = field(default_factory=dict)
    summed: dict[fx.Node, Tensor] = field(default_factory=dict)


class Numbers:
    """Values without a sample dim: how parts make up those that samples are reduced to, and what is made of these.

    Args:
        runs: on two samples together and on each alone.
    """

    def __init__(self, traced: TracedModel, runs: Sequence[Executed]) -> None:
        self._traced = traced
        self._runs = runs
        self._of_inputs = of_inputs_alone(traced)
        self._reduced: set[fx.Node] = set()
        self._divided: set[fx.Node] = set()
        self.reductions: dict[fx.Node, str] = {}

    def is_one(self, node: fx.Node) -> bool:
        """Whether it is such a value: reduced from samples, or made of those that are."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or self._traced.grows(value):
            return False
        return is_reduction(node, self._traced) or any(argument in self._reduced for argument in node.all_input_nodes)

    def judged(self, node: fx.Node, is_known: bool) -> str:
        """Whether it mixes samples; the parts go on with values whose mean is that of the pair.

        Args:
            is_known: whether there are values to compare; else the operator alone decides.
        """
        reduction = self._reduction(node, is_known) if is_reduction(node, self._traced) else self._made(node)
        of_inputs = node in self._of_inputs
        if not of_inputs:
            self._reduced.add(node)
        if reduction == DIVIDED:
            self._divided.add(node)
            return ""
        if reduction is None:
            return self._go_on_as_the_pair(node, MIXES_SAMPLES)
        if reduction in (SUM, TERMS, WHOLE_SUM, WHOLE_MEAN):
            self.reductions[node] = reduction
        if of_inputs:
            return self._go_on_as_the_pair(node, "")
        whole: Any
        alone: list[Any]
        whole, *alone = (run.values.get(node) for run in self._runs)
        if not is_known or whole is None or any(value is None for value in alone):
            return ""
        if reduction == SUM:
            alone = [value * _PAIR for value in alone]
        elif reduction == TERMS:
            alone = self._by_terms(node, whole)
        if not is_alike(whole, (alone[0] + alone[1]) / _PAIR):
            self.reductions.pop(node, None)
            return self._go_on_as_the_pair(node, MIXES_SAMPLES)
        for run, value in zip(self._runs[1:], alone, strict=True):
            run.values[node] = value
        return ""

    def _made(self, node: fx.Node) -> str | None:
        if any(argument in self._divided for argument in node.all_input_nodes):
            return DIVIDED if is_divided_by_samples(node, self._traced) else MEAN
        return MEAN if is_linear(node, self._reduced) else None

    def _reduction(self, node: fx.Node, is_known: bool) -> str | None:
        if any(argument in self._reduced for argument in node.all_input_nodes):
            return None  # of samples and of numbers together: not linear, or not known to be
        values = (argument.meta.get("val") for argument in node.all_input_nodes)
        if any(self._traced.site_dims(each) for each in values):
            return None  # sites that two parts have in common count once on one device
        if is_over_terms(node):
            if knows_terms(node, self._of_inputs):
                return TERMS
            return MEAN if all_count(node) else None
        reduction = next((each for each in likely(node) if not is_known or self._is(node, each)), None)
        if node in self._of_inputs:
            is_fixed = all(isinstance(size, int) for size in node.meta["val"].shape)
            return f"whole {reduction}" if reduction is not None and is_fixed else None
        if reduction == SUM and is_divided_by_samples(node, self._traced):
            return DIVIDED
        return reduction

    def _is(self, node: fx.Node, reduction: str) -> bool:
        whole, *alone = (run.values[node] for run in self._runs)
        total = alone[0] + alone[1]
        if reduction == SUM:
            return is_alike(whole, total)
        return whole.is_floating_point() and is_alike(whole, total / _PAIR)

    def _by_terms(self, node: fx.Node, whole: Tensor) -> list[Tensor]:
        """Each part's sum over the number of terms of the pair; of a pair without a term, what the pair has."""
        totals = [run.summed[node] for run in self._runs]
        number = totals[0] / whole
        if not bool(number.isfinite()) or not bool(number):
            return [whole, whole]
        return [total / number * _PAIR for total in totals[1:]]

    def _go_on_as_the_pair(self, node: fx.Node, answer: str) -> str:
        values = [run.values.get(node) for run in self._runs]
        if values[0] is not None:
            for run in self._runs[1:]:
                if node in run.values:
                    run.values[node] = values[0]
        return answer
