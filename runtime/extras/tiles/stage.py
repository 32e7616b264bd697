"""Runs layers of a divided stage in blocks: each rank through a whole block, tile by tile, without exchanges inside.

    a block of three convolutions, two ranks, two tiles a rank; H: rows of the halo, fetched once, before the block

        rank 0   | tile 0 | tile 1 |H            tile 1 reads its rows, two or three of tile 0's, and the halo
        rank 1                   H| tile 0 | tile 1 |

Every tile is run by the block's own function on the division of that tile (:mod:`planner.extras.tiles.division`), in
which each rank holds all that its tile reads, so that op rules find nothing to exchange.  What is handed on is put
together; what is a sum (a loss, a global pool) is added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from planner.extras.tiles.division import BlockDivision, BlockedDivision, ends_of
from planner.ir.box import Box, intersect, volume
from planner.ir.graph import Graph, producer
from planner.ir.plan import Block
from planner.layers.division import Division
from runtime.pipeline.routing import cuts_of, narrowed, slices
from runtime.recent import Recent
from runtime.spatial.decompose import DividedStage
from runtime.spatial.exchange import Exchange
from runtime.stage.cut import StageFunction

MakeFunction = Callable[[frozenset[str], tuple[str, ...]], StageFunction]
"""The function of some layers of the stage that gives these values, in evaluation mode."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Layers that are run together.

    Attributes:
        block: which of the stage's; None: they are run as layers of a divided stage are.
        last: values of which nobody after this segment asks.
    """

    function: StageFunction
    block: int | None
    last: tuple[str, ...] = ()


def in_blocks(
    make: MakeFunction,
    like: StageFunction,
    outputs: tuple[str, ...],
    graph: Graph,
    layers: Sequence[str],
    blocks: Sequence[Block],
    divided: DividedStage,
) -> StageFunction:
    """A stage in evaluation mode whose layers are run in blocks; others as they are.

    Args:
        like: the stage in training, whose inputs, sizes and attributes it takes in the same order.
        outputs: the values wanted.
        layers: of the stage, in order.
    """
    segments = [
        _Segment(make(frozenset(names), _handed_on(graph, names, outputs, number is not None)), number)
        for names, number in _stretches(layers, blocks)
    ]
    kept = set(outputs)
    with_last = []
    for segment in reversed(segments):
        read = [value for value in segment.function.inputs if value not in kept]
        with_last.append(replace(segment, last=tuple(read)))
        kept.update(read)
    run = _BlockedRun(tuple(reversed(with_last)), like, outputs, divided)
    return replace(like, function=run, outputs=outputs, traced=None)


def _stretches(layers: Sequence[str], blocks: Sequence[Block]) -> Iterable[tuple[tuple[str, ...], int | None]]:
    """The stage's layers as blocks, each with its number, and others one by one: what is read no more can go."""
    first = 0
    for number, block in enumerate(blocks):
        start = layers.index(block.layers[0])
        yield from (((name,), None) for name in layers[first:start])
        yield block.layers, number
        first = start + len(block.layers)
    yield from (((name,), None) for name in layers[first:])


def _handed_on(graph: Graph, names: Iterable[str], outputs: tuple[str, ...], is_block: bool) -> tuple[str, ...]:
    inside = frozenset(names)
    ends = ends_of(graph, inside)
    if is_block:
        return ends
    own = (value for value in outputs if producer(value) in inside)
    return tuple(dict.fromkeys((*ends, *own)))


class _BlockedRun:
    """``(num_samples, *sizes, *inputs, *attributes) -> outputs``, as a stage's function is called."""

    def __init__(
        self, segments: tuple[_Segment, ...], like: StageFunction, outputs: tuple[str, ...], divided: DividedStage
    ) -> None:
        self._segments = segments
        self._outputs = outputs
        self._divided = divided
        self._sizes = like.sizes
        self._inputs = like.inputs
        self._attributes = tuple(like.attributes)
        self._exchanges = Recent[tuple[int, int], tuple[Division, dict[str, Exchange]]]()

    def __call__(self, num_samples: int, *arguments: object) -> tuple[Tensor, ...]:
        names = (*self._sizes, *self._inputs, *self._attributes)
        by_name = dict(zip(names, arguments, strict=True))
        del arguments
        division = self._divided.division
        if not isinstance(division, BlockedDivision):
            raise TypeError("a stage with blocks was not told what is run")
        for segment in self._segments:
            if segment.block is None:
                made = _called(segment.function, num_samples, by_name)
            else:
                made = self._in_tiles(segment, num_samples, by_name, division)
            for value in segment.last:
                del by_name[value]
            by_name.update(made)
            del made
        return tuple(_tensor(by_name[value]) for value in self._outputs)

    def _in_tiles(
        self, segment: _Segment, num_samples: int, by_name: dict[str, object], division: BlockedDivision
    ) -> dict[str, Tensor]:
        block = division.blocks[segment.block or 0]
        position = self._divided.peers.position
        values = [name for name in segment.function.inputs if name in block.wanted]
        pieces = self._fetched(segment, division, block, {name: _tensor(by_name[name]) for name in values})
        outputs: dict[str, Tensor] = {}
        try:
            for tile in block.tiles:
                self._divided.enter(tile)
                inputs = {name: _covering(pieces[name], tile.held(name)[position]) for name in values}
                made = _called(segment.function, num_samples, {**by_name, **inputs})
                del inputs
                while made:  # what a tile made must be gone before the next one begins
                    self._put(outputs, *made.popitem(), block, tile, division)
        finally:
            self._divided.enter(division)
        return outputs

    def _put(
        self,
        outputs: dict[str, Tensor],
        value: str,
        tensor: Tensor,
        block: BlockDivision,
        tile: Division,
        division: Division,
    ) -> None:
        """A tile's part of what is handed on; where tiles overlap they have computed the same."""
        if value in block.summed:
            outputs[value] = outputs[value] + tensor if value in outputs else tensor
            return
        position = self._divided.peers.position
        made = tile.held(value)[position]
        owned = division.owned(value)[position]
        part = intersect(made, owned)
        if part == owned and value not in outputs:
            outputs[value] = narrowed(tensor, cuts_of(owned, made))
            return
        if value not in outputs:
            outputs[value] = tensor.new_empty(tuple(map(len, owned)))
        if part is not None:
            outputs[value][slices(part, owned)] = tensor[slices(part, made)]

    def _fetched(
        self, segment: _Segment, division: Division, block: BlockDivision, by_name: dict[str, Tensor]
    ) -> dict[str, list[tuple[Box, Tensor]]]:
        """What this rank has of each value for all its tiles, and what it got of others: one exchange a value."""
        key = (id(division), segment.block or 0)
        if key not in self._exchanges:
            peers = self._divided.peers
            made = {}
            for value in by_name:
                held = division.held(value)
                wanted = block.wanted[value]
                made[value] = peers.exchange(held, wanted, division.moves_to(value, wanted))
            self._exchanges[key] = division, made
        exchanges = self._exchanges[key][1]
        arriving = {value: exchanges[value].start(x) for value, x in by_name.items()}
        return {value: [(exchanges[value].held, x), *arriving[value].wait()] for value, x in by_name.items()}


def _called(function: StageFunction, num_samples: int, by_name: dict[str, object]) -> dict[str, Tensor]:
    """The outputs by name."""
    names = (*function.sizes, *function.inputs, *function.attributes)
    outputs = function.function(num_samples, *(by_name[name] for name in names))
    return dict(zip(function.outputs, outputs, strict=True))


def _covering(pieces: list[tuple[Box, Tensor]], box: Box) -> Tensor:
    """The tensor that covers ``box``: a view of one piece, or parts of several put together."""
    own = pieces[0][1]
    if not volume(box):
        return own.new_empty(tuple(map(len, box)))
    for place, tensor in pieces:
        if intersect(box, place) == box:
            return narrowed(tensor, cuts_of(box, place))
    assembled = own.new_zeros(tuple(map(len, box)))
    for place, tensor in pieces:
        part = intersect(box, place)
        if part is not None:
            assembled[slices(part, box)] = tensor[slices(part, place)]
    return assembled


def _tensor(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{value!r} is no tensor")
    return value
