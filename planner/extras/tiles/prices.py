"""What a stage of a forward plan costs whose layers are run in blocks (:class:`planner.ir.plan.Block`).

    a block    its ranks meet where they fetch what it reads, in one exchange for each value; then each goes through its
               tiles alone:  max over ranks of the sum over tiles and layers, overlaps computed again included
    others     layer by layer, the slowest rank counts, as in ``stage_cost``
    memory     by rank, the most at any layer of any tile: values that are held whole (of the rank's part: what earlier
               blocks handed on and somebody still reads, what this one fetched and hands on), values of the tile that
               are still read, and what the layer needs while it runs (``workspace``)

Sums over tiles (a global pool's) are counted once a tile.  Ignored: what putting tiles together takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.costs.communication.collectives import call_s
from planner.costs.communication.resharding import exchange_s
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import FORWARD, LayoutPrices
from planner.costs.stages.stage_cost import Array, StageCost, stage_cost
from planner.extras.tiles.division import BlockDivision, BlockedDivision, in_blocks
from planner.extras.tiles.workspace import box_bytes, transient_bytes
from planner.ir.box import subtract, volume
from planner.ir.cluster import PIECES
from planner.ir.graph import BYTES_PER_ELEMENT, Layer, output_of, producer, value_name
from planner.ir.plan import Block
from planner.layers.division import Division, LayerDivision


def stage_cost_in_blocks(
    prices: LayoutPrices, chosen: Mapping[int, ShardingSpec], blocks: Sequence[Block]
) -> StageCost:
    """What the layers ``chosen`` (by index in the graph) cost in a forward plan, some of them in ``blocks``.

    Raises:
        MissingMeasurementError: the profile says nothing about a number of samples that an option uses.
    """
    graph = prices.cost_model.graph
    placed = {prices.layers[index].name: chosen[index].placement(0) for index in sorted(chosen)}
    plain = Division.placed(graph, placed, len(prices.ranks), prices.samples)
    division = in_blocks(graph, plain, blocks)
    inside = {name for block in blocks for name in block.layers}
    alone = frozenset(index for index in chosen if prices.layers[index].name not in inside)
    unblocked = stage_cost(prices, chosen, alone)
    costs = [_block_cost(prices, division, block) for block in division.blocks]
    (forward_s,), *others = unblocked.compute_s
    return replace(
        unblocked,
        compute_s=((forward_s + sum(cost.slowest_s for cost in costs),), *others),
        exchange_forward_s=unblocked.exchange_forward_s + sum(cost.exchange_s for cost in costs),
        unrecorded_bytes=_peaks(prices, division),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _BlockCost:
    """Seconds of a block: of its slowest rank, and of its exchanges and sums."""

    slowest_s: float
    exchange_s: float


def _block_cost(prices: LayoutPrices, division: Division, block: BlockDivision) -> _BlockCost:
    seconds = np.zeros(len(prices.ranks))
    summed_s = 0.0
    index = {layer.name: number for number, layer in enumerate(prices.layers)}
    for name in block.layers:
        number = index[name]
        options = tuple(ShardingSpec.of(option.layout) for option in block.shards[name].options)
        shards = replace(block.shards[name], sized=prices.sized(number), options=options)
        seconds += prices.cost_of_part(number, shards)[FORWARD].sum(axis=0)
        summed_s += float(prices.sums(number, shards).statistics_s[0].sum())
    return _BlockCost(float(seconds.max()), summed_s + _fetching_s(prices, division, block))


def _fetching_s(prices: LayoutPrices, division: Division, block: BlockDivision) -> float:
    """Seconds of what is exchanged before a block."""
    seconds = 0.0
    for value, wanted in block.wanted.items():
        part = np.zeros((len(prices.ranks), len(prices.ranks)))
        for move in division.moves_to(value, wanted):
            part[move.src, move.dst] += volume(move.box) * BYTES_PER_ELEMENT[_dtype(division, value)]
        if part.any():
            around = float(call_s(prices.cost_model.cluster, PIECES, part.sum(axis=0).max()))
            seconds += float(exchange_s(part, prices.ranks, prices.cost_model.network)) + around
    return seconds


def _dtype(division: Division, value: str) -> str:
    name, output = output_of(value)
    return division.layers[name].layer.outputs[output].dtype


def _peaks(prices: LayoutPrices, division: BlockedDivision) -> Array:
    """``[ranks]``: the most that a forward pass holds beside the batch, parameters and buffers."""
    index = {layer.name: number for number, layer in enumerate(prices.layers)}
    last_read = _last_readers(prices, division)
    peaks = np.zeros(len(prices.ranks))
    in_block = {name: block for block in division.blocks for name in block.layers}
    for member in range(len(prices.ranks)):
        held: dict[str, int] = {}
        done: set[str] = set()
        for name in division.layers:
            if name in done:
                continue
            block = in_block.get(name)
            names = (name,) if block is None else block.layers
            ends = _made_by(division.layers[name]) if block is None else block.ends
            sizes = {value: box_bytes(division.held(value)[member], _dtype(division, value)) for value in ends}
            fetched = 0 if block is None else _fetched_bytes(division, block, member)
            tiles = _tiles(division, block)
            inner = max(_tile_peak(prices, index, names, ends, tile, division, member) for tile in tiles)
            is_tiled = block is not None and len(block.tiles) > 1  # otherwise what is made is what is handed on
            own = sum(sizes.values()) if is_tiled else 0
            peaks[member] = max(peaks[member], sum(held.values()) + own + fetched + inner)
            held |= sizes
            done.update(names)
            held = {value: size for value, size in held.items() if not done.issuperset(last_read[value])}
    return peaks


def _tiles(division: Division, block: BlockDivision | None) -> Iterable[Division]:
    return (division,) if block is None else block.tiles


def _made_by(layer: LayerDivision) -> tuple[str, ...]:
    return tuple(value_name(layer.layer.name, number) for number in range(len(layer.layer.outputs)))


def _last_readers(prices: LayoutPrices, division: Division) -> dict[str, set[str]]:
    """By value, the layers of the stage after which nobody reads it; a name of no layer: it stays to the end."""
    readers: dict[str, set[str]] = {value: set() for layer in division.layers.values() for value in _made_by(layer)}
    loss = producer(prices.cost_model.graph.loss)
    for layer in prices.layers:
        for value in layer.inputs:
            if value in readers:
                readers[value].add(layer.name)
                if layer.kind == "loss" or layer.name == loss:
                    readers[value].add("")  # what is judged by is given out
    for value in readers:
        readers[value] = readers[value] or ({""} if producer(value) == loss else set())
    return readers


def _fetched_bytes(division: Division, block: BlockDivision, member: int) -> int:
    """What a rank gets of others for all its tiles, and the copy in which a tile has that and its own rows together."""
    num_bytes = 0
    for value, wanted in block.wanted.items():
        if division.makes(value) and volume(wanted[member]):
            dtype = _dtype(division, value)
            parts = subtract(wanted[member], division.held(value)[member])
            num_bytes += sum(box_bytes(part, dtype) for part in parts)
            num_bytes += max(box_bytes(tile.held(value)[member], dtype) for tile in block.tiles) if parts else 0
    return num_bytes


def _tile_peak(
    prices: LayoutPrices,
    index: Mapping[str, int],
    names: Sequence[str],
    ends: Sequence[str],
    tile: Division,
    whole: Division,
    member: int,
) -> int:
    """The most while a tile runs, beside what is held whole; ``whole``: the division of all tiles."""
    inside = frozenset(names)
    steps: list[tuple[Layer, dict[str, int], int]] = []
    for name in names:
        layer = tile.layers[name]
        sized = prices.sized(index[name])
        read = [boxes[member] for boxes in layer.needed]
        there = [(tile if producer(v) in inside else whole).held(v)[member] for v in layer.layer.inputs]
        made = {
            value: box_bytes(layer.held[number][member], spec.dtype)
            for number, (value, spec) in enumerate(zip(_made_by(layer), layer.layer.outputs, strict=True))
        }
        steps.append((layer.layer, made, transient_bytes(sized, read, layer.done[member], there)))
    return most_live_bytes(steps, ends)


def most_live_bytes(steps: Sequence[tuple[Layer, dict[str, int], int]], ends: Collection[str]) -> int:
    """The most that values hold while layers run in turn, and what the layer that runs needs.

    Args:
        steps: a layer, the bytes of the values that it makes, and what it needs while it runs.
        ends: values that stay to the end; others go when all layers that read them have run.
    """
    left = Counter(value for layer, _, _ in steps for value in set(layer.inputs))
    live: dict[str, int] = {}
    most = 0
    for layer, made, needs in steps:
        live |= made
        most = max(most, sum(live.values()) + needs)
        left.subtract(set(layer.inputs))
        live = {value: size for value, size in live.items() if left[value] > 0 or value in ends}
    return most
