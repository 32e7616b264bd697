"""One layer of a divided stage, as its local form sees it: this rank's part, and how it gets what it reads.

The arguments of its operator with all that the part reads of them; which ranks combine statistics or partial sums.

Parts of tensors by boxes in global coordinates, and flat places in space, as pooling with indices gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from planner.ir.box import Box, Interval
from planner.ir.errors import StageFailedError
from planner.ir.graph import Graph, Layer
from planner.ir.plan import Decision
from planner.layers import kind
from planner.layers.boxes import as_boxes
from planner.layers.division import Division, LayerDivision, divides
from planner.layers.shards import summing_ranks
from runtime.pipeline.routing import cuts_of, narrowed
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import Exchange, PeerGroup, redistribute
from runtime.spatial.node_call import InputIndex
from runtime.transport.base import exchange_key

T = TypeVar("T")


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

    peers: PeerGroup
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
        self.position: int = self.peers.position
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
            cached = self._exchanges[index] = self.peers.exchange(
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
