"""Places to cut the network between two stages, as ideals of its DAG, and what certainly crosses there.

An ideal is a set of layers that holds, with a layer, all it reads from; the stages of a pipeline are the differences of
a growing chain of ideals.  All ideals are looked at while there are at most ``MANY_IDEALS``; else the prefixes of the
graph's own order of layers.  Left out are, of larger networks, ideals that part a layer from one that it stays with for
nothing (``followers``), and, where no schedule allows it, those that part layers which share a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from planner.costs.communication.stage_transfers import bytes_read
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import Array, running
from planner.ir.graph import Graph, bits_of, producer
from planner.ir.problem import Problem
from planner.layers.boundary import without_gradient
from planner.solvers.best_first.followers import followers

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]

MANY_IDEALS = 640

FEW_LAYERS = 24
"""Layers up to which networks are also cut next to layers that cost nothing: another stage lets those before it keep
more micro-batches, and under some schedules there have to be as many stages as layers."""

MANY_CONTENTS = 16
MANY_PAIRS = 400_000
"""Sorts of stages that start at a cut that are told apart, by what they read; fewer where there are many cuts."""


@dataclass(frozen=True, slots=True, eq=False)
class Crossings:
    """What a stage certainly hands to the one that starts at its end; a row for each different way to get there.

    Attributes:
        slot: the sort of the next stage, see ``GraphCuts.slots``.
        linked: it certainly reads from the stage before; has_gradient: and a gradient comes back.
        forward_bytes, backward_bytes: per sample, at least.
    """

    slot: Numbers
    linked: Flags
    has_gradient: Flags
    forward_bytes: Array
    backward_bytes: Array


@dataclass(frozen=True, slots=True)
class LayerValue:
    """What a layer makes for others: layers by index, bytes per sample that each reader reads."""

    maker: int
    readers: tuple[tuple[int, float], ...]
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class Handed:
    """What a stage hands to a later one: bytes per sample, at least."""

    source: int
    destination: int
    forward_bytes: float
    backward_bytes: float
    has_gradient: bool


@dataclass(frozen=True, slots=True, eq=False)
class GraphCuts:
    """All cuts, the empty ideal first and the whole network last, by growing number of layers.

    Stages that start at one cut are of several sorts, by what they read of what was made before.

    Attributes:
        members: 1 where a layer (second index) is in the ideal (first index).
        inside: whether an ideal (first) is a part of another (second), and smaller.
        content: the sort of the stage between two cuts.
        slots: a number for each cut and sort of stage that starts there; -1 where there are fewer sorts.
        crossings, crossing_of: what crosses, and the row of that for the sort of the next stage (first index) and the
            cuts of the stage before; -1 where there is none.
        values: what is read by other layers than its maker.
        depth: of the deepest layer between two cuts: layers on the longest path to it.
        edges: how many values layers of one ideal (first) make for layers of another (second); none where the cuts are
            a chain.
        num_left_out: ideals that were seen and not kept.
        complete: whether all ideals were looked at.
        merges_orders: whether one order of stages that do not depend on one another stands for all (``disorder``).
        sizes: layers in each ideal.
    """

    members: Array
    inside: Flags
    content: Numbers
    slots: Numbers
    crossings: Crossings
    crossing_of: Numbers
    values: tuple[LayerValue, ...]
    depth: Array
    edges: Array
    num_left_out: int
    complete: bool
    merges_orders: bool
    sizes: Numbers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", self.members.sum(axis=1).astype(np.int64))

    @property
    def last(self) -> int:
        """The number of the whole network."""
        return len(self.members) - 1

    @property
    def are_in_order(self) -> bool:
        """Whether every one is inside all that come after it: the network has no branches."""
        return self.complete and bool(np.triu(self.inside, 1).sum() == self.last * (self.last + 1) / 2)

    def handed(self, chain: tuple[int, ...]) -> tuple[Handed, ...]:
        """What the stages between the cuts of ``chain`` hand to one another."""
        stage_of = self.stage_of(chain)
        by_pair: dict[tuple[int, int], list[float]] = {}
        for value in self.values:
            source = stage_of[value.maker]
            most: dict[int, float] = {}
            for reader, num_bytes in value.readers:
                if stage_of[reader] != source:
                    most[stage_of[reader]] = max(most.get(stage_of[reader], 0.0), num_bytes)
            for destination, num_bytes in most.items():
                total = by_pair.setdefault((source, destination), [0.0, 0.0, 0.0])
                total[0] += num_bytes
                total[1] += num_bytes * value.has_gradient
                total[2] += value.has_gradient
        return tuple(Handed(*pair, there, back, count > 0) for pair, (there, back, count) in sorted(by_pair.items()))

    def disorder(self, first: int | Numbers, cut: int, lasts: Numbers) -> Flags:
        """Elementwise, which stages from ``cut`` to ``lasts`` should come before the one from ``first`` to ``cut``.

        Stages that do not depend on one another may come in any order.  Prefixes and complete pipelines are bounded in
        one, that of their depth, which stands for all: whatever bounds read of a pipeline is a fact of its stages as a
        DAG.  That is what a stage takes, what one certainly hands to another, how many stages depend on one another
        after it, and that a stage keeps no more micro-batches than one whose outputs it takes gradients of.  None
        of these changes where two neighbours that do not depend on one another change places; and as such an exchange
        brings the less deep one forward, exchanges lead from every order to one without disorder.  The step does
        depend on the order, in which ranks send and take messages of several stages: complete pipelines are simulated
        in each (``candidates.stage_orders``).  Where numbers of stages matter in other ways, orders are not merged.
        """
        edges = self.edges[cut, lasts] - self.edges[cut, cut] - self.edges[first, lasts] + self.edges[first, cut]
        return np.asarray((edges == 0) & (self.depth[cut, lasts] < self.depth[first, cut]))

    def largest(self, by_layer: Array) -> Array:
        """The largest value of the layers between two cuts (first, last)."""
        return _largest_between(self.members, by_layer)

    def sums(self, by_layer: Array) -> Array:
        """The sum over each ideal."""
        if self.complete:
            return np.asarray(self.members @ by_layer)
        return np.asarray(running(by_layer)[self.sizes])

    def chain(self, weight: Array, most: int) -> list[int]:
        """Cuts that follow one another, about ``most``, spread evenly by the ``weight`` before each.

        All that follow one another, where there are no more cuts than that.
        """
        chain = [0]
        wanted = 1
        for cut in range(1, self.last):
            is_far = self.last < most or weight[cut] * most >= wanted * weight[-1]
            if is_far and self.inside[chain[-1], cut]:
                chain.append(cut)
                wanted = int(weight[cut] * most / weight[-1]) + 1
        return [*chain, self.last]

    def layers(self, first: int, last: int) -> tuple[int, ...]:
        """The layers between two cuts, by index."""
        return tuple(int(n) for n in np.flatnonzero(self.members[last] > self.members[first]))

    def stage_of(self, chain: tuple[int, ...]) -> tuple[int, ...]:
        """The stage of each layer in the pipeline of stages between the cuts of ``chain``."""
        counted = self.members[list(chain[1:])].sum(axis=0)
        return tuple((len(chain) - 1 - counted).astype(np.int64).tolist())


def cuts_of(
    cost_model: CostModel,
    most: int = MANY_IDEALS,
    parts_ties: bool = True,
    parts_free: bool = False,
    merges_orders: bool = True,
) -> GraphCuts:
    """The places to cut that are worth trying.

    Args:
        parts_ties: whether layers that share a parameter may be in several stages.
        parts_free: also next to layers that cost nothing (``FEW_LAYERS``), unless the places are too many then.
        merges_orders: whether nothing but the order of messages depends on the numbers of stages.
    """
    graph = cost_model.graph
    reads = _reads(graph)
    blocks = _blocks(len(graph.layers), {})
    if not parts_free or _all_ideals(reads, blocks, most) is None:
        blocks = _blocks(len(graph.layers), followers(cost_model))
    ties = [] if parts_ties else [sum(1 << layer for layer in layers) for layers in graph.tied_layers().values()]
    ideals = _all_ideals(reads, blocks, most)
    complete = ideals is not None
    if ideals is None:
        ideals = [(1 << count) - 1 for count in range(len(graph.layers) + 1)]
    whole = [block for block in blocks + ties if block.bit_count() > 1]
    kept = [ideal for ideal in ideals if not any(ideal & block and block & ~ideal for block in whole)]
    return _cuts(graph, reads, kept, len(ideals) - len(kept), complete, merges_orders)


def may_part_free(problem: Problem) -> bool:
    """Whether to cut next to layers that cost nothing: where that is cheap, and where rules may ask for it."""
    return bool(problem.fix or problem.forbid) or len(problem.graph.layers) <= FEW_LAYERS


def _packed(member: Array) -> int:
    return int.from_bytes(np.packbits(member.astype(bool), bitorder="little").tobytes(), "little")


def _cuts(
    graph: Graph, reads: list[int], kept: list[int], num_left_out: int, complete: bool, merges_orders: bool
) -> GraphCuts:
    kept = sorted(kept, key=lambda ideal: (ideal.bit_count(), ideal))
    count = len(graph.layers)
    members = np.zeros((len(kept), count))
    for number, ideal in enumerate(kept):
        text = np.frombuffer(ideal.to_bytes(count // 8 + 1, "little"), dtype=np.uint8)
        members[number] = np.unpackbits(text, bitorder="little")[:count]
    sizes = members.sum(axis=1)
    if complete:
        inside = (members @ members.T == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
    else:  # a chain
        inside = np.triu(np.ones((len(kept), len(kept)), dtype=bool), 1)
    read = _read_bytes(graph)
    content, slots, held = _contents(members, inside, read, reads)
    values = _values(graph, read)
    crossings, crossing_of = _crossings(values, members, slots, held, read)
    depth = _largest_between(members, _depths(reads))
    edges = _edges(members, reads) if complete else np.zeros((0, 0))
    cuts = GraphCuts(
        *(members, inside, content, slots, crossings, crossing_of, tuple(values.values()), depth, edges),
        num_left_out=num_left_out,
        complete=complete,
        merges_orders=complete and merges_orders,
    )
    if cuts.merges_orders:
        _forbid_disorder(cuts)
    return cuts


def _reads(graph: Graph) -> list[int]:
    """By layer, the layers it reads from, as a bit set."""
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    made_by = [{index[producer(v)] for v in layer.inputs if producer(v) in index} for layer in graph.layers]
    return [sum(1 << position for position in makers) for makers in made_by]


def _all_ideals(reads: list[int], blocks: list[int], most: int) -> list[int] | None:
    """Every ideal that holds each of ``blocks`` as a whole or not at all; None if there are more than ``most``."""
    if len(blocks) > most:
        return None
    needs = {block: reduce(or_, (reads[layer] for layer in bits_of(block))) & ~block for block in blocks}
    ideals = {0}
    pending = [0]
    for ideal in pending:
        for block, needed in needs.items():
            if ideal & block or needed & ~ideal:
                continue
            grown = ideal | block
            if grown not in ideals:
                if len(ideals) > most:
                    return None
                ideals.add(grown)
                pending.append(grown)
    return pending


def _blocks(count: int, stays: Mapping[int, int]) -> list[int]:
    """The layers in blocks that are not cut, as bit sets."""
    block = {layer: 1 << layer for layer in range(count)}
    for layer, other in stays.items():
        joined = block[layer] | block[other]
        for member in bits_of(joined):
            block[member] = joined
    return list(dict.fromkeys(block.values()))


def _read_bytes(graph: Graph) -> list[dict[str, float]]:
    """By layer, the bytes per sample that it reads of each value that another layer makes."""
    values = graph.values()
    made = {layer.name for layer in graph.layers}
    return [
        {value: size for value, size in bytes_read(layer, values, graph.samples) if producer(value) in made}
        for layer in graph.layers
    ]


def _values(graph: Graph, read: list[dict[str, float]]) -> dict[str, LayerValue]:
    """By name, what is read by other layers than its maker."""
    index = {layer.name: position for position, layer in enumerate(graph.layers)}
    specs = graph.values()
    readers: dict[str, list[tuple[int, float]]] = {}
    for layer, read_by_layer in enumerate(read):
        for value, num_bytes in read_by_layer.items():
            readers.setdefault(value, []).append((layer, num_bytes))
    silent = without_gradient(graph)
    return {
        value: LayerValue(index[producer(value)], tuple(read_by_layer), specs[value].is_float and value not in silent)
        for value, read_by_layer in readers.items()
    }


def _contents(
    members: Array, inside: Flags, read: list[dict[str, float]], reads: list[int]
) -> tuple[Numbers, Numbers, dict[tuple[int, int], list[int]]]:
    """The sorts of stages that start at each cut: which readers of what was made before they certainly hold.

    Readers of most bytes are told apart first, until there are too many sorts.

    Returns:
        The sort of the stage between two cuts; slots; and by (cut, sort) the readers that it holds.
    """
    count = len(members)
    most = int(min(MANY_CONTENTS, max(1, MANY_PAIRS // count**2)))
    content = np.zeros((count, count), dtype=np.int64)
    slots = np.full((count, most), -1, dtype=np.int64)
    held: dict[tuple[int, int], list[int]] = {}
    sizes = np.array([sum(by_value.values()) for by_value in read])
    for cut in range(count - 1):
        ends = np.flatnonzero(inside[cut])
        ideal = _packed(members[cut])
        outside = [layer for layer in np.flatnonzero(members[cut] == 0).tolist() if reads[layer] & ideal]
        readers = sorted(outside, key=lambda layer: -sizes[layer])
        content[cut, ends], sorts = _sorts(members[ends[:, None], readers] > 0, readers, most)
        slots[cut, : len(sorts)] = 0
        held |= {(cut, sort): own for sort, own in enumerate(sorts)}
    used = slots >= 0
    slots[used] = np.arange(int(used.sum()))
    return content, slots[:, : 1 + int(np.flatnonzero(used.any(axis=0)).max())], held


def _sorts(holds: Flags, readers: list[int], most: int) -> tuple[Numbers, list[list[int]]]:
    """The sort of each stage, by the readers that it holds, at most ``most`` sorts; by sort, those that it is known by.

    Args:
        holds: ``[stages, readers]``.
    """
    kept: list[int] = []
    sorts = np.zeros((1, 0), dtype=bool)
    which = np.zeros(len(holds), dtype=np.int64)
    for reader, is_held in zip(readers, holds.T, strict=True):
        pairs, sort_of = np.unique(2 * which + is_held, return_inverse=True)
        if len(pairs) <= most:
            which = sort_of.reshape(-1)
            sorts = np.column_stack([sorts[pairs // 2], pairs % 2 > 0])
            kept.append(reader)
    return which, [[reader for reader, flag in zip(kept, row, strict=True) if flag] for row in sorts]


def _forbid_disorder(cuts: GraphCuts) -> None:
    """Takes those sorts of stages out of ``crossing_of`` that should come before the stage before; see ``disorder``."""
    for cut in range(1, cuts.last):
        lasts = np.flatnonzero(cuts.inside[cut])
        sort_of = cuts.content[cut, lasts]
        firsts = np.flatnonzero(cuts.inside[:, cut])
        wrong = cuts.disorder(firsts[:, None], cut, lasts)
        for sort in np.unique(sort_of):
            cuts.crossing_of[sort, firsts[wrong[:, sort_of == sort].all(axis=1)], cut] = -1


def _depths(reads: list[int]) -> Array:
    depths = np.zeros(len(reads))
    for layer, needed in enumerate(reads):
        depths[layer] = 1 + max((depths[maker] for maker in bits_of(needed)), default=0.0)
    return depths


def _edges(members: Array, reads: list[int]) -> Array:
    adjacent = np.zeros((len(reads), len(reads)))
    for layer, needed in enumerate(reads):
        adjacent[list(bits_of(needed)), layer] = 1
    return np.asarray(members @ adjacent @ members.T)


def _crossings(
    values: Mapping[str, LayerValue],
    members: Array,
    slots: Numbers,
    held: Mapping[tuple[int, int], list[int]],
    read: list[dict[str, float]],
) -> tuple[Crossings, Numbers]:
    crossing_of = np.full((slots.shape[1], len(members), len(members)), -1, dtype=np.int64)
    rows: list[Array] = []
    for (cut, sort), readers in held.items():
        if cut:
            which, facts = _handed_over(values, members[: cut + 1], [read[layer] for layer in readers])
            crossing_of[sort, :cut, cut] = len(rows) + which
            rows += [np.concatenate(([slots[cut, sort]], own)) for own in facts]
    table = np.array(rows) if rows else np.zeros((1, 5))
    crossings = Crossings(
        table[:, 0].astype(np.int64), table[:, 1] > 0, table[:, 2] > 0, table[:, 3].copy(), table[:, 4].copy()
    )
    return crossings, crossing_of


def _handed_over(
    values: Mapping[str, LayerValue], before: Array, read: list[dict[str, float]]
) -> tuple[Numbers, list[Array]]:
    """What a stage is handed that starts at the last of some cuts: by the cut where the one before starts, a number.

    And by number how many values the stage before makes of what is read, how many have gradients, and bytes there and
    back.

    Args:
        before: members of the cuts.
        read: by reader that it certainly holds, bytes of each value.
    """
    needed: dict[str, float] = {}
    for by_value in read:
        for value, num_bytes in by_value.items():
            needed[value] = max(needed.get(value, 0.0), num_bytes)
    crossing = [(values[value], size) for value, size in needed.items() if before[-1, values[value].maker]]
    facts = np.array([(1.0, value.has_gradient, size, size * value.has_gradient) for value, size in crossing])
    which, made_before = _distinct(before[:-1, [value.maker for value, _ in crossing]] > 0)
    return which, [(~flags) @ facts.reshape(-1, 4) for flags in made_before]


def _distinct(flags: Flags) -> tuple[Numbers, Flags]:
    """The distinct rows, and which of them each row is."""
    which = np.zeros(len(flags), dtype=np.int64)
    distinct = np.zeros((1, 0), dtype=bool)
    for column in flags.T:
        pairs, which = np.unique(2 * which + column, return_inverse=True)
        distinct = np.column_stack([distinct[pairs // 2], pairs % 2 > 0])
    return which.reshape(-1), distinct


def _largest_between(members: Array, by_layer: Array) -> Array:
    """The largest value of the layers between two ideals."""
    count = len(members)
    largest = np.zeros((count, count))
    if not (members[1:] >= members[:-1]).all():  # no chain
        for layer in np.argsort(by_layer, kind="stable"):
            if by_layer[layer] > 0:
                has = members[:, layer] > 0
                largest[np.ix_(~has, has)] = by_layer[layer]
        return largest
    if count > 1 and by_layer.any():
        of_piece = np.where(members[1:] > members[:-1], by_layer, 0.0).max(axis=1)
        pieces = np.triu(np.broadcast_to(of_piece, (count - 1, count - 1)))
        np.maximum.accumulate(pieces, axis=1, out=largest[:-1, 1:])
    return largest
