"""One layer of a divided stage, as its local form sees it: this rank's part, and how it gets what it reads.

Integers of a captured graph that follow from the number of samples and other sizes, for one layer's own rows.

In a divided stage layers may have different numbers of samples on one rank, so no integer holds for all of them: each
layer's are worked out from its own.

The arguments of an operator with all that this rank's part reads of them.

Which ranks of a divided stage combine statistics or partial sums of a layer.

How one node of a captured graph is called on a part: arguments by name, and which inputs of its layer they are.

Parts of tensors by boxes in global coordinates.

Flat places in space, as pooling with indices gives them: from those in a part to those in the whole tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from cuda_ops._torch import schema_of
from planner.ir.box import Box, Interval
from planner.ir.errors import StageFailedError
from planner.ir.graph import Graph, Layer, producer
from planner.ir.plan import Decision
from planner.layers import kind
from planner.layers.boxes import as_boxes
from planner.layers.division import Division, LayerDivision, divides
from planner.layers.shards import summing_ranks
from runtime.pipeline.routing import cuts_of, narrowed
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import Exchange, PeerGroup, redistribute
from runtime.transport.base import exchange_key


def depends(value: Any) -> bool:
    """Whether an argument is, or holds, an integer that the graph computes."""
    computed: list[bool] = []

    def look(node: fx.Node) -> fx.Node:
        computed.append(_is_integer(node))
        return node

    fx.map_arg(value, look)
    return any(computed)


def evaluate(value: Any, sizes: Mapping[str, int]) -> Any:
    """``value`` with numbers in place of the nodes that compute them.

    Args:
        sizes: by placeholder, the number of samples included.
    """
    values: dict[fx.Node, Any] = {}

    def number(node: fx.Node) -> Any:
        if node not in values:
            if node.op == "placeholder":
                values[node] = sizes[str(node.target)]
            else:
                function: Any = node.target
                values[node] = function(*fx.map_arg(node.args, number), **fx.map_arg(node.kwargs, number))
        return values[node]

    return fx.map_arg(value, number)


def _is_integer(node: fx.Node) -> bool:
    if node.op == "placeholder" and "val" not in node.meta:
        return True  # the number of samples, or another size that varies
    value = node.meta.get("val")
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


T = TypeVar("T")

InputIndex = int | tuple[int | None, ...] | None
"""Which input of a layer an argument of its operator is; for a list of tensors, which one each of them is."""


@dataclass(eq=False)
class LayerShard:
    """One layer on this rank, for one number of samples.

    Attributes:
        division: of the layer.
        operator: the name that it has in ``torch.ops.aten``; empty: none is known.
        group: global ranks that combine statistics or partial sums of this rank's part of the layer.
        training: as opposed to evaluation.
        inputs_of: by argument of the operator, which inputs of the layer it is.
        integers: by argument, what it is where it depends on the number of samples.
        later: for weight gradients that may wait; None where there is nobody to run them.
        memo: for what a form works out once.
        place: of the layer among its stage's keys, see :meth:`key`; None if exchanges have none.
        is_read: whether another layer reads what it makes, be it one of another stage.
    """

    wire: PeerGroup
    whole: Division
    division: LayerDivision
    group: tuple[int, ...]
    training: bool = True
    inputs_of: Mapping[str, InputIndex] = field(default_factory=dict)
    integers: Mapping[str, Any] = field(default_factory=dict)
    later: DeferredGradients | None = None
    memo: dict[object, Any] = field(default_factory=dict)
    is_read: bool = False
    place: int | None = None
    _exchanges: dict[int, Exchange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layer: Layer = self.division.layer
        self.operator: str = str(self.layer.attributes.get("op", "")).partition(".")[2].partition(".")[0]
        self.position: int = self.wire.position
        self.own: Box = self.division.own[self.position]
        self.done: Box = self.division.done[self.position]
        self.is_first: bool = self.division.is_first[self.position]
        self.is_empty: bool = not all(map(len, self.done))

    def input_of(self, argument: str) -> InputIndex:
        """Which input of the layer an argument is; None for parameters, buffers, constants and numbers."""
        return self.inputs_of.get(argument)

    def needed(self, index: int) -> Box:
        """What this rank's part reads of an input; it may reach outside the tensor."""
        return self.division.needed[index][self.position]

    def held(self, index: int) -> Box:
        """What this rank has of an input before it gets the rest."""
        return self.whole.held(self.layer.inputs[index])[self.position]

    def exchange(self, index: int) -> Exchange:
        """How this rank gets what it needs of an input, as far as it lies inside the tensor."""
        cached = self._exchanges.get(index)
        if cached is None:
            name = self.layer.name
            value = self.layer.inputs[index]
            held = self.whole.held(value)
            wanted = self.whole.wanted(name, index)
            cached = self._exchanges[index] = self.wire.exchange(
                held, wanted, self.whole.moves(name, index), self.key(index)
            )
        return cached

    def key(self, number: int) -> int | None:
        """Names exchange ``number`` of the layer: of its inputs, then that of statistics; even, and below 2**30."""
        if self.place is None or self.whole.number is None:
            return None
        return exchange_key(self.whole.number, self.place + number, self.training)

    def get(self, index: int, x: Tensor) -> Tensor:
        """What this rank needs of an input, inside the tensor; ``x`` is what it holds of it.  Differentiable."""
        return redistribute(x, self.exchange(index))


def worked_out_once(make: Callable[[LayerShard], T]) -> Callable[[LayerShard], T]:
    """``make``, called when it is first asked about a shard."""

    @wraps(make)
    def kept(shard: LayerShard) -> T:
        if make not in shard.memo:
            shard.memo[make] = make(shard)
        made: T = shard.memo[make]
        return made

    return kept


def gathered(shard: LayerShard, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments``, in which every value of the graph covers what the part needs of it.

    Exchanges run in the order of the layer's inputs, which is the same on every rank.
    """
    operands = dict(arguments)
    for name, index in shard.inputs_of.items():
        if isinstance(index, int):
            operands[name] = shard.get(index, arguments[name])
        elif index is not None:
            operands[name] = [
                each if at is None else shard.get(at, each) for at, each in zip(index, arguments[name], strict=True)
            ]
    return operands


def group_of(layer: LayerDivision, ranks: tuple[int, ...], position: int) -> tuple[int, ...]:
    """Global ranks that combine statistics or partial sums with ``position``, by growing number; itself included.

    Those of a layer without any sum are the ranks of the stage (:func:`planner.layers.shards.summing_ranks`).
    """
    groups = summing_ranks(layer.layer, as_boxes(layer.own), as_boxes(layer.owned[0]))
    members = next(members for members in groups if position in members)
    return tuple(sorted(ranks[member] for member in members))


def groups_in(decision: Decision, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """All groups of a plan that combine something, each once."""
    combining: dict[tuple[int, ...], None] = {}
    for number, stage in enumerate(decision.stages):
        if not divides(decision, number, graph):
            continue
        division = Division.of(graph, decision, number, max(decision.micro_batches))
        for layer in division.layers.values():
            if kind(layer.layer.kind).REDUCTION:
                groups = (group_of(layer, stage.ranks, position) for position in range(len(stage.ranks)))
                combining |= dict.fromkeys(group for group in groups if len(group) > 1)
    return tuple(combining)


@dataclass(frozen=True, slots=True)
class NodeCall:
    """How one node is called, worked out once.

    Attributes:
        names: of the operator's arguments, by place; empty where it has no schema.
        keywords: of those, the ones that are given by name only.
        defaults: of the arguments that the node leaves out.
        inputs: by argument, which inputs of the layer it is.
        integers: by argument, those that depend on sizes, as the graph has them.
    """

    names: tuple[str, ...]
    keywords: frozenset[str]
    defaults: Mapping[str, Any]
    inputs: Mapping[str, InputIndex]
    integers: Mapping[str, Any]

    @classmethod
    def of(cls, node: fx.Node, layer: Layer, value_of_node: Mapping[str, str]) -> NodeCall:
        """The call of ``node``, of ``layer``; ``value_of_node`` says which values nodes are, by name."""
        schema = schema_of(node.target)
        parameters = () if schema is None else tuple(schema.arguments)
        names = tuple(argument.name for argument in parameters) or tuple(f"argument_{k}" for k in range(len(node.args)))
        keywords = frozenset(argument.name for argument in parameters if argument.kwarg_only)
        defaults = {argument.name: argument.default_value for argument in parameters if argument.has_default_value()}
        arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        places = _InputPlaces(layer, value_of_node)
        inputs = {name: places.of(value) for name, value in arguments.items()}
        return cls(
            names,
            keywords,
            defaults,
            {name: index for name, index in inputs.items() if index is not None},
            {name: value for name, value in arguments.items() if depends(value)},
        )

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """By name."""
        return {**self.defaults, **dict(zip(self.names, args, strict=False)), **kwargs}

    def operator(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which takes arguments by place, called with all of them by name."""
        places = tuple(name for name in self.names if name not in self.keywords)
        keywords = self.keywords

        def call(**arguments: Any) -> Any:
            named = {name: arguments[name] for name in keywords if name in arguments}
            return function(*[arguments[name] for name in places if name in arguments], **named)

        return call


class _InputPlaces:
    """Which inputs of a layer the nodes are that it reads, in the order in which it reads them."""

    def __init__(self, layer: Layer, value_of_node: Mapping[str, str]) -> None:
        self._layer = layer
        self._value_of_node = value_of_node
        self._reads = Counter[str]()

    def of(self, value: Any) -> InputIndex:
        """Of an argument; None where it is no input."""
        if isinstance(value, fx.Node):
            return self._index(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, fx.Node) for each in value):
            indices = tuple(self._index(each) if isinstance(each, fx.Node) else None for each in value)
            return indices if any(index is not None for index in indices) else None
        return None

    def _index(self, node: fx.Node) -> int | None:
        """The n-th reading of a value is its n-th place among the inputs."""
        value = self._value_of_node.get(node.name)
        if value is None or producer(value) == self._layer.name or value not in self._layer.inputs:
            return None
        places = [index for index, name in enumerate(self._layer.inputs) if name == value]
        self._reads[value] += 1
        return places[min(self._reads[value], len(places)) - 1]


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of a tensor that covers ``box``."""
    return tuple(map(len, box))


def within(x: Tensor, covered: Box, wanted: Box) -> Tensor:
    """The part ``wanted`` of ``x``, which covers ``covered``; a view."""
    return narrowed(x, cuts_of(wanted, covered))


def broadcast_part(x: Tensor, shape: tuple[int, ...], box: Box) -> Tensor:
    """What the part ``box`` of a result of ``shape`` reads of a constant that is broadcast to it.

    Along a dim the constant may be whole, be this rank's part already (a parameter is), or have extent 1.

    Raises:
        StageFailedError: it is none of that.
    """
    first = len(shape) - x.ndim
    if first < 0:
        raise _unlike(x, shape, box)
    for dim, extent in enumerate(x.shape):
        interval = box[first + dim]
        if extent in (1, len(interval)):
            continue
        if extent != shape[first + dim]:
            raise _unlike(x, shape, box)
        x = x.narrow(dim, interval.start, len(interval))
    return x


def along(x: Tensor, dim: int, extent: int, interval: Interval) -> Tensor:
    """The part ``interval`` along ``dim`` of a constant, which has all of ``extent`` there or is the part already."""
    if x.shape[dim] == len(interval):
        return x
    if x.shape[dim] != extent:
        raise _unlike(x, (extent,), (interval,))
    return x.narrow(dim, interval.start, len(interval))


def picked(x: Tensor, dim: int, places: Iterable[int]) -> Tensor:
    """The rows of ``x`` along ``dim`` at ``places``, which may repeat; a view where they follow one another."""
    rows = list(places)
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return x if len(rows) == x.shape[dim] else x.narrow(dim, rows[0], len(rows))
    return x.index_select(dim, torch.tensor(rows, device=x.device))


def _unlike(x: Tensor, shape: tuple[int, ...], box: Box) -> StageFailedError:
    where = ", ".join(map(str, box))
    return StageFailedError(f"a constant of shape {tuple(x.shape)} does not belong to the part {where} of {shape}", [])


def global_places(places: Tensor, local: Sequence[int], starts: Sequence[int], extents: Sequence[int]) -> Tensor:
    """Places in a tensor with dims ``extents``, of ``places`` in a part of it.

    Args:
        places: counted along the last dims together, the last one fastest.
        local: extents of the part.
        starts: where the part begins.
    """
    flat = torch.zeros_like(places)
    step = 1
    for length, start, extent in reversed(list(zip(local, starts, extents, strict=True))):
        flat += (places % length + start) * step
        places = places // length
        step *= extent
    return flat
