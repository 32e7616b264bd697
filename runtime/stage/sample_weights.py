"""What the parts of a batch count for, where a loss is not just a mean over samples.

A plan runs the loss on parts of a batch and adds their gradients, weighted by their samples: right for means over
samples.  Other reductions are corrected where samples become one number, so that the same sum gives the loss of the
whole batch as the user's own module computes it (n samples in all, n_p in the part):

    sum          its result times n / n_p
    terms        the sum over the part's targets, times n / (n_p t): t counts the targets of the whole batch that are
                 not ignored, by the weights of their classes
    whole ...    the value for the whole batch in place of the part's

What is needed of the whole batch follows from its inputs alone, so it is found before the step: each rank counts its
own samples, and the ranks of a stage add up.  A stage reads the factors as further inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops.calls import arguments_of, changed_call
from planner.ir.graph import producer
from runtime.captured import CapturedModule, attribute, main_nodes
from runtime.stage.cut import NUM_SAMPLES, NodeRule

SUM = "sum"
TERMS = "terms"
WHOLE_SUM = "whole sum"
WHOLE_MEAN = "whole mean"

_PREFIX = "factor of "
_BY_SUM = 2
"""torch's number of ``reduction="sum"``."""


def is_factor(name: str) -> bool:
    """Whether an input of a stage is such a factor, and no value of the graph."""
    return name.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A layer whose result is corrected.

    Attributes:
        node: its operator.
        reduction: as the capture found it.
        dtype: of the result.
    """

    layer: str
    node: str
    reduction: str
    dtype: torch.dtype

    @property
    def factor(self) -> str:
        """The name of the stage's input."""
        return _PREFIX + self.layer


def weighed_in(model: CapturedModule, layers: Iterable[str]) -> tuple[Weighed, ...]:
    """Those among ``layers``, in the model's order."""
    wanted = frozenset(layers)
    mains = main_nodes(model)
    by_name = model.graph.by_name()
    return tuple(
        Weighed(name, mains[name].name, reduction, getattr(torch, by_name[name].outputs[0].dtype))
        for name, reduction in model.reductions.items()
        if name in wanted
    )


def weighing(inner: NodeRule, weighed: Mapping[str, Weighed]) -> NodeRule:
    """``inner``, and for the operators of ``weighed``, by node, what takes their factor before their own arguments."""

    def rule(node: fx.Node) -> Callable[..., Any] | None:
        function = inner(node)
        one = weighed.get(node.name)
        if one is None:
            return function
        target: Any = node.target
        operator = function or target
        if one.reduction == SUM:
            return partial(_scaled, operator)
        if one.reduction == TERMS:
            return partial(_over_all_terms, operator, target)
        return _of_whole_batch

    return rule


def _scaled(operator: Callable[..., Tensor], factor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result = operator(*args, **kwargs)
    return result * factor.to(result.dtype)


def _over_all_terms(
    operator: Callable[..., Tensor], target: object, factor: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    (prediction, *args), kwargs = changed_call(target, args, kwargs, {"reduction": _BY_SUM})  # type: ignore[assignment]
    if prediction.dtype == torch.float16:  # whose sums are soon beyond its range
        result = operator(prediction.float(), *args, **kwargs) * factor.float()
        return result.to(prediction.dtype)
    return _scaled(operator, factor, prediction, *args, **kwargs)


def _of_whole_batch(factor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return factor


@torch.no_grad()
def weight_of_targets(prediction: Any, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean over classes is divided by: the weights of the targets that are not ignored.

    Args:
        prediction: asked for its number of classes where targets are probabilities, which are never ignored.
    """
    if target.is_floating_point():
        classes: int = prediction.shape[1]
        return torch.full((), target.numel() / classes, dtype=torch.float64, device=target.device)
    is_valid = target != ignore_index
    if weight is None:
        return is_valid.sum().double()
    return (weight.double()[target.where(is_valid, 0)] * is_valid).sum()  # a mask as an index would wait for its device


class Counting:
    """Finds, of a part of a batch, what its targets and masks add to the numbers of the whole batch.

    Attributes:
        weighed: the layers for which there is something to count.
        needed: layers with a value of the whole batch that is known before, and that the counting reads.
        sources: the graph's inputs that are read.
    """

    def __init__(self, model: CapturedModule, weighed: Sequence[Weighed], earlier: Sequence[Weighed] = ()) -> None:
        self.weighed = tuple(weighed)
        nodes = {node.name: node for node in model.graph_module.graph.nodes}
        wanted = [_counted(nodes[one.node], one) for one in self.weighed]
        before = {nodes[one.node]: one for one in earlier}
        read = [argument for _, arguments in wanted for argument in arguments if isinstance(argument, fx.Node)]
        upstream = _upstream(read, before)
        self.needed = tuple(one for node, one in before.items() if node in upstream)
        graph = fx.Graph()
        copies = dict[fx.Node, fx.Node]()
        self._attributes = dict[str, Any]()
        for node in model.graph_module.graph.nodes:
            if node not in upstream:
                continue
            if node in before:
                copies[node] = graph.placeholder(f"known_{node.name}")
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta.clear()
            if node.op == "get_attr":
                target = str(node.target)
                self._attributes[target] = attribute(model.graph_module, target)
        graph.output(
            tuple(
                graph.call_function(function, tuple(fx.map_arg(arguments, copies.__getitem__)))
                for function, arguments in wanted
            )
        )
        self._graph = graph
        names = {f"known_{one.node}": one.factor for one in self.needed}
        places = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
        self._places = tuple(names.get(place, place) for place in places)
        self._sizes = {name: place for name, place in model.sizes.items() if name in places}
        inputs = [place for place in places if place in model.graph.inputs]
        self.sources = tuple(dict.fromkeys((*inputs, *(source for source, _ in self._sizes.values()))))
        self._run: fx.GraphModule | None = None

    @torch.no_grad()
    def of(self, num_samples: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """For each of ``weighed``; means times the number of samples, so that all numbers add up.

        Args:
            tensors: by name the inputs, and the factors of the layers that are ``needed``.
        """
        if self._run is None:
            on_host = {name: value.cpu() for name, value in self._attributes.items()}
            self._run = fx.GraphModule(on_host, self._graph)
        sizes = {name: tensors[source].shape[dim] for name, (source, dim) in self._sizes.items()}
        arguments = {NUM_SAMPLES: num_samples, **sizes, **tensors}
        numbers = self._run(*(arguments[name] for name in self._places))
        return tuple(
            value * num_samples if one.reduction == WHOLE_MEAN else value
            for one, value in zip(self.weighed, numbers, strict=True)
        )


def weights_of_parts(
    model: CapturedModule, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[int]
) -> tuple[float, ...] | None:
    """What the user's own loss of each micro-batch counts for in that of the batch; None: no such weights make it up.

    Args:
        parts: of each micro-batch, the graph's inputs by name.
        rows: samples of each.
    """
    by_rows = tuple(count / sum(rows) for count in rows)
    weighed = weighed_in(model, model.reductions)
    if not weighed or len(rows) == 1:
        return by_rows
    candidates = {by_rows}
    for one in weighed:
        if one.reduction == SUM:
            candidates.add((1.0,) * len(rows))
        elif one.reduction == TERMS:
            (counting,) = countings(model, [one])
            counts = [float(counting.of(count, part)[0]) for count, part in zip(rows, parts, strict=True)]
            candidates.add(tuple(count / sum(counts) if sum(counts) else 0.0 for count in counts))
        else:
            return None  # a part's own value has another meaning there
    is_the_loss = len(weighed) == 1 and weighed[0].layer == producer(model.graph.loss)
    if is_the_loss and len(candidates) > 1:
        candidates.discard(by_rows)
    first = next(iter(candidates))
    return first if all(map(partial(_are_alike, first), candidates)) else None


def _are_alike(weights: Sequence[float], others: Sequence[float]) -> bool:
    return all(abs(a - b) < 1e-15 for a, b in zip(weights, others, strict=True))


def countings(model: CapturedModule, weighed: Sequence[Weighed]) -> tuple[Counting, ...]:
    """What is to be counted for ``weighed``, one after the other: a later one reads what earlier ones found."""
    whole = [one for one in weighed_in(model, model.reductions) if one.reduction in (WHOLE_SUM, WHOLE_MEAN)]
    level: dict[Weighed, int] = {}

    def level_of(one: Weighed) -> int:
        if one not in level:
            needed = Counting(model, [one], [other for other in whole if other != one]).needed
            level[one] = 1 + max(map(level_of, needed), default=0)
        return level[one]

    for one in weighed:
        if one.reduction != SUM:
            level_of(one)
    return tuple(
        Counting(model, [one for one, depth in level.items() if depth == number], _below(level, number))
        for number in sorted(set(level.values()))
    )


def inputs_counted(model: CapturedModule, layers: Iterable[str]) -> tuple[str, ...]:
    """The inputs of which each rank of a stage with these layers reads its samples, to know what parts count for."""
    of_stage = countings(model, weighed_in(model, layers))
    return tuple(dict.fromkeys(name for counting in of_stage for name in counting.sources))


def _below(level: Mapping[Weighed, int], number: int) -> list[Weighed]:
    return [one for one, depth in level.items() if depth < number and one.reduction != TERMS]


def _counted(node: fx.Node, one: Weighed) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """What is counted for a layer, as a function and what it is called with."""
    if one.reduction != TERMS:
        return _float64, (node,)
    arguments = arguments_of(node)
    return weight_of_targets, (None, arguments["target"], arguments["weight"], arguments["ignore_index"])


def _upstream(nodes: list[fx.Node], ends: Collection[fx.Node]) -> set[fx.Node]:
    """What ``nodes`` are made of, as far back as ``ends``."""
    upstream: set[fx.Node] = set()
    while nodes:
        node = nodes.pop()
        if node not in upstream:
            upstream.add(node)
            nodes += () if node in ends else node.all_input_nodes
    return upstream


def _float64(value: Tensor) -> Tensor:
    return value.double()


def factor(one: Weighed, part: int, samples: int, count: Tensor | None) -> Tensor:
    """What a layer takes in one part of a batch.

    Args:
        part: samples of the part; there may be none.
        samples: of the whole batch.
        count: what :class:`Counting` found of the whole batch.
    """
    ratio = torch.tensor(samples / part if part else 0.0, dtype=torch.float64)
    if count is None:
        return ratio
    if one.reduction == TERMS:
        return ratio / count if part else ratio
    return (count / samples if one.reduction == WHOLE_MEAN else count).to(one.dtype)
