"""The planner of Tarnawski et al. for throughput: contiguous sets of operators on accelerators and CPUs.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino, "Efficient algorithms for device placement of DNN graph
operators", NeurIPS 2020, sections 4 and 5.1.  In pipelined execution the most loaded device sets the pace:

    minimise    max over devices of its load                                     (``max_load``: compute, then send)
    over        the device of every node
    subject to  nodes of one colour on one device, with their backward nodes     (below)
                the forward nodes of a device between two ideals                 (``max_load.search``: contiguity)
                bytes on an accelerator within its memory, unsupported nodes on CPUs

Variants of the public code, each a row of its paper's tables:

* ``contiguous``: the above, solved exactly;
* ``linearized``: the same once a depth-first order of the blocks is made a chain (DPL);
* ``pipedream``: branches merged first, as if for PipeDream, then the chain;
* ``single``: everything on one accelerator, whether it fits or not;
* ``free``: contiguity dropped (``free_placement``: an integer program).

What the planner of Tarnawski et al. may not divide, as in the public code (throughput-dp/dp.cpp).

Nodes of one colour are one block, with their backward nodes.  Order comes from the forward pass: an edge between
forward nodes, and for a colour of backward nodes alone the reverse of the backward edges that touch it.  Blocks on a
cycle become one.  A block that takes no time, and whose only neighbour shares every value that it makes or reads, moves
to that neighbour: no device gets more to do, and every pipeline stays one.  It may need memory there, so that it stays
where it is if it occupies some and not everything fits one device; the public code moves it all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from planner.baselines.common.answer import OPTIMAL, TIME_LIMIT, Answer, Json, infeasible
from planner.baselines.common.ideals import Contraction, Ideals, bits_of, chain_of, contract, lattice_of
from planner.baselines.tarnawski.format import Instance
from planner.baselines.tarnawski.max_load import (
    ACCELERATOR,
    CPU,
    MOST_IN_TABLE,
    SAME,
    Blocks,
    Chain,
    Loads,
    direct,
    lower_bound,
    search,
)
from planner.ir.errors import UnknownNameError, UsageError

_MOST_CELLS = 60_000_000
"""Numbers that the tables over all ideals may have."""


@dataclass(frozen=True, slots=True)
class Devices:
    """What there is to place on.

    Attributes:
        memory_bytes: of each accelerator.
        stop_s: when to answer with the best so far, on the monotonic clock.
    """

    accelerators: int
    cpus: int
    memory_bytes: float
    stop_s: float

    def out_of_time(self) -> bool:
        """Whether to answer now."""
        return time.monotonic() > self.stop_s


def solve(
    instance: Instance,
    *,
    accelerators: int | None = None,
    cpus: int | None = None,
    memory_bytes: float | None = None,
    variant: str = "contiguous",
    time_limit_s: float = 60.0,
) -> Answer:
    """The smallest largest load, in milliseconds.

    Args:
        accelerators, cpus, memory_bytes: instead of those of the file.
        variant: one of ``VARIANTS``.
        time_limit_s: then the best so far is returned, with the bound that is proved.

    Raises:
        UsageError: no devices, or a negative number of them.
        UnknownNameError: there is no such variant.
    """
    devices = Devices(
        instance.accelerators if accelerators is None else accelerators,
        instance.cpus if cpus is None else cpus,
        instance.memory_bytes if memory_bytes is None else memory_bytes,
        time.monotonic() + time_limit_s,
    )
    counts = (devices.accelerators, devices.cpus)
    if min(counts) < 0 or sum(counts) == 0 or devices.memory_bytes < 0:
        raise UsageError(
            "nothing to place on",
            [f"{counts[0]} accelerators of {devices.memory_bytes:g} bytes, {counts[1]} CPUs"],
            ["give at least one accelerator or CPU, and no negative numbers"],
        )
    if variant not in VARIANTS:
        raise UnknownNameError(f"no variant {variant!r}", [f"known: {', '.join(VARIANTS)}"])
    return VARIANTS[variant](instance, devices)


def _contiguous(instance: Instance, devices: Devices) -> Answer:
    coloured = blocks_of(instance, devices.memory_bytes)
    answer = _over_ideals(instance, coloured, devices)
    if answer is not None:
        return answer
    # Too many ideals.  With blocks that take no time moved although memory is short, as the public code does, there may
    # be few enough; what it finds is a plan, and bounded by the best one that memory does not limit.
    moved = blocks_of(instance, devices.memory_bytes, move_bytes=True)
    bound = lower_bound(moved.blocks, devices.accelerators, devices.cpus)
    found = _over_ideals(instance, moved, devices)
    if found is None:
        start, _ = _on_chain(moved.blocks, devices, depth_first(moved))
        return _answer(instance, moved.blocks, start, bound)
    endless = Devices(devices.accelerators, devices.cpus, inf, devices.stop_s)
    free = _over_ideals(instance, moved, endless)
    bound = max(bound, free.bound if free is not None else 0.0)
    proved = found.found and found.value <= bound * (1 + SAME)
    return Answer(found.value, min(bound, found.value), OPTIMAL if proved else TIME_LIMIT, found.plan)


def _over_ideals(instance: Instance, coloured: Coloured, devices: Devices) -> Answer | None:
    """The exact answer; None if there are too many ideals."""
    blocks = coloured.blocks
    most = _MOST_CELLS // (blocks.num_blocks + 2 * sum(bits.bit_count() - 1 for bits, _ in blocks.values) + 1)
    lattice = lattice_of(Ideals.of(blocks.successors), most)
    if lattice is None:
        return None
    start, _ = _on_chain(blocks, devices, depth_first(coloured))
    loads = Loads.of(blocks, lattice, devices.memory_bytes)
    bound = lower_bound(blocks, devices.accelerators, devices.cpus)
    found, bound = search(blocks, loads, devices.accelerators, devices.cpus, start, bound, devices.out_of_time)
    return _answer(instance, blocks, found, bound)


def _linearized(instance: Instance, devices: Devices) -> Answer:
    coloured = blocks_of(instance, devices.memory_bytes, move_bytes=True)
    return _of_chain(instance, coloured, devices, depth_first(coloured))


def _pipedream(instance: Instance, devices: Devices) -> Answer:
    coloured = blocks_of(instance, devices.memory_bytes, crowded_groups(instance), move_bytes=True)
    return _of_chain(instance, coloured, devices, depth_first(coloured, largest_first=True))


def _of_chain(instance: Instance, coloured: Coloured, devices: Devices, order: Sequence[int]) -> Answer:
    found, bound = _on_chain(coloured.blocks, devices, order)
    return _answer(instance, coloured.blocks, found, bound)


def _on_chain(blocks: Blocks, devices: Devices, order: Sequence[int]) -> tuple[Chain | None, float]:
    """The best pipeline whose stages follow one another in ``order``, and a bound for such pipelines."""
    loads = Loads.of(blocks, chain_of(order), devices.memory_bytes)
    if blocks.num_blocks < MOST_IN_TABLE:
        found = direct(loads, devices.accelerators, devices.cpus)
        return found, found.value if found else inf
    bound = lower_bound(blocks, devices.accelerators, devices.cpus)
    return search(blocks, loads, devices.accelerators, devices.cpus, None, bound, devices.out_of_time)


def _single(instance: Instance, devices: Devices) -> Answer:
    every = range(len(instance.nodes))
    stages = [(every, ACCELERATOR)]
    value = load_of(instance, every, ACCELERATOR)
    return Answer(value, value, OPTIMAL, plan_of(instance, stages))


def _free(instance: Instance, devices: Devices) -> Answer:
    from planner.baselines.tarnawski.free_placement import place  # loads PuLP and HiGHS, which only this variant needs

    start = _contiguous(instance, devices)
    blocks = blocks_of(instance, devices.memory_bytes, ordered=False).blocks
    bound = lower_bound(blocks, devices.accelerators, devices.cpus)
    left_s = max(1.0, devices.stop_s - time.monotonic())
    sets, proved = place(blocks, devices.accelerators, devices.cpus, devices.memory_bytes, start.value, left_s)
    bound = max(bound, proved)
    if sets is None:
        if not start.found:
            return infeasible() if bound == inf else Answer(inf, bound, TIME_LIMIT)
        status = OPTIMAL if start.value <= bound * (1 + SAME) else TIME_LIMIT
        return Answer(start.value, min(bound, start.value), status, start.plan)
    return _answer(instance, blocks, Chain(0.0, sets), bound)


def _answer(instance: Instance, blocks: Blocks, found: Chain | None, bound: float) -> Answer:
    """With the value summed afresh from the instance's own nodes and edges."""
    if found is None:
        return infeasible() if bound == inf else Answer(inf, bound, TIME_LIMIT)
    stages = [([n for b in bits_of(inside) for n in blocks.nodes[b]], kind) for inside, kind in found.stages]
    value = max(load_of(instance, nodes, kind) for nodes, kind in stages)
    proved = value <= bound * (1 + 2 * SAME)
    return Answer(value, value if proved else bound, OPTIMAL if proved else TIME_LIMIT, plan_of(instance, stages))


def load_of(instance: Instance, nodes: Sequence[int], kind: str) -> float:
    """Load of a device of ``kind`` that has ``nodes``, given as indices."""
    inside = set(nodes)
    if kind == CPU:
        return sum(instance.nodes[node].cpu_ms for node in inside)
    crossing = {src for src, dst in instance.edges if (src in inside) != (dst in inside)}
    return sum(instance.nodes[n].accelerator_ms for n in inside) + sum(instance.nodes[n].transfer_ms for n in crossing)


def plan_of(instance: Instance, stages: Sequence[tuple[Sequence[int], str]]) -> Mapping[str, Json]:
    """Devices in the pipeline's order, each with its load and the ids of its nodes."""
    devices: list[Json] = [
        {
            "kind": kind,
            "load_ms": load_of(instance, nodes, kind),
            "size_bytes": sum(instance.nodes[node].size_bytes for node in nodes),
            "nodes": [instance.nodes[node].number for node in sorted(nodes)],
        }
        for nodes, kind in stages
    ]
    return {"devices": devices}


VARIANTS: Mapping[str, Callable[[Instance, Devices], Answer]] = {
    "contiguous": _contiguous,
    "linearized": _linearized,
    "pipedream": _pipedream,
    "single": _single,
    "free": _free,
}
"""What ``solve`` can be asked for, by name."""


_FRESH_COLOUR = 2**31 - 1 - 12_345_678
"""Nodes without a colour get numbers below this one, as in the public code: orders of blocks depend on them."""

_PASSED_OVER = {32: (4, 37), 64: (4, 37), 96: (2, 100, 40, 137, 46, 142), 192: (2, 100, 40, 137, 46, 142)}
"""By number of nodes, those whose edges the ``-pipeDream`` row leaves out: the public code knows its own BERT-24 and
GNMT by their size, and their inputs by number."""


@dataclass(frozen=True, slots=True)
class Coloured:
    """Blocks, and the colour that each has in the public code."""

    blocks: Blocks
    colours: tuple[int, ...]


def blocks_of(
    instance: Instance,
    memory_bytes: float,
    together: Iterable[Sequence[int]] = (),
    move_bytes: bool = False,
    ordered: bool = True,
) -> Coloured:
    """The blocks of an instance.

    Args:
        memory_bytes: of an accelerator.
        together: nodes that stay together besides those of a colour.
        move_bytes: move blocks that take no time also where memory may be short.
        ordered: whether devices take contiguous sets; if not, blocks have no successors, and cycles do no harm.
    """
    colour = colours_of(instance)
    edges = _order(instance, colour) if ordered else []
    groups = [*_classes(colour), *together]
    careful = sum(node.size_bytes for node in instance.nodes) > memory_bytes and not move_bytes
    while True:
        merged = contract(len(instance.nodes), edges, groups)
        blocks = _blocks(instance, merged)
        moves = _moves(blocks, careful, ordered)
        if not moves:
            return Coloured(blocks, tuple(min(colour[node] for node in found) for found in merged.blocks))
        for block, home in moves:
            groups.append((merged.blocks[home][0], merged.blocks[block][0]))
            for node in merged.blocks[block]:
                colour[node] = colour[merged.blocks[home][0]]


def colours_of(instance: Instance) -> list[int]:
    """The colour of each node; fresh ones where the file gives none."""
    colours: list[int] = []
    fresh = _FRESH_COLOUR
    for node in instance.nodes:
        fresh -= node.colour is None
        colours.append(fresh if node.colour is None else node.colour)
    return colours


def crowded_groups(instance: Instance) -> list[tuple[int, ...]]:
    """Nodes that the ``-pipeDream`` row keeps together: those that send within one biconnected component.

    PipeDream plans for chains, so that parallel branches are first merged.
    """
    import networkx as nx  # costs 0.2 s to load, and only this row needs it

    colour = colours_of(instance)
    ordered = sorted(set(colour))
    backward = {each: ordered[-1] + 1 + number for number, each in enumerate(ordered)}
    merged = [backward[c] if node.backward else c for c, node in zip(colour, instance.nodes, strict=True)]
    left_out = _PASSED_OVER.get(len(instance.nodes), ())
    edges = {(merged[src], merged[dst]) for src, dst in instance.edges}
    kept = {(src, dst) for src, dst in edges if src != dst and src not in left_out}
    senders: list[tuple[int, ...]] = []
    for component in nx.biconnected_component_edges(nx.Graph(sorted(kept))):
        pairs = {pair for src, dst in component for pair in ((src, dst), (dst, src))}
        senders.append(tuple(sorted({src for src, dst in pairs & kept})))
    at = {vertex: [n for n, found in enumerate(merged) if found == vertex] for vertex in set(merged)}
    return [tuple(node for sender in group for node in at[sender]) for group in senders]


def depth_first(coloured: Coloured, largest_first: bool = False) -> tuple[int, ...]:
    """The public code's linear order: of the blocks that are ready one that became so last, larger colours first.

    Args:
        largest_first: whether to begin with the largest colour of those that need nothing, or the smallest.  There
            their order is that of a hash table, which each contraction reverses: ``-pipeDream`` has one more than
            ``-linearize``.
    """
    successors, key = coloured.blocks.successors, coloured.colours.__getitem__
    missing = [0] * len(successors)
    for found in successors:
        for after in found:
            missing[after] += 1
    sources = (block for block, count in enumerate(missing) if not count)
    ready = sorted(sources, key=key, reverse=not largest_first)
    order: list[int] = []
    while ready:
        order.append(ready.pop())
        for after in sorted(successors[order[-1]], key=key):
            missing[after] -= 1
            if not missing[after]:
                ready.append(after)
    return tuple(order)


def _classes(colour: Sequence[int]) -> list[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for node, each in enumerate(colour):
        found.setdefault(each, []).append(node)
    return [tuple(nodes) for nodes in found.values()]


def _order(instance: Instance, colour: Sequence[int]) -> list[tuple[int, int]]:
    nodes = instance.nodes
    forward = {each for each, node in zip(colour, nodes, strict=True) if not node.backward}
    edges = [(src, dst) for src, dst in instance.edges if not nodes[dst].backward]
    mirrored = [(dst, src) for src, dst in instance.edges if nodes[src].backward and nodes[dst].backward]
    return edges + [(a, b) for a, b in mirrored if not {colour[a], colour[b]} <= forward]


def _blocks(instance: Instance, merged: Contraction) -> Blocks:
    nodes = instance.nodes

    def sums(numbers: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.bincount(merged.block_of, weights=numbers, minlength=len(merged.blocks)).astype(np.float64)

    cpu_only = sums([not node.on_accelerator for node in nodes]) > 0
    touched = [1 << block for block in merged.block_of]
    for src, dst in instance.edges:
        touched[src] |= 1 << merged.block_of[dst]
    values: dict[int, float] = {}
    for node, bits in zip(nodes, touched, strict=True):
        if node.transfer_ms > 0 and bits & (bits - 1):
            values[bits] = values.get(bits, 0.0) + node.transfer_ms
    return Blocks(
        nodes=merged.blocks,
        successors=merged.successors,
        accelerator_ms=np.where(cpu_only, 0.0, sums([node.accelerator_ms for node in nodes])),
        cpu_ms=sums([node.cpu_ms for node in nodes]),
        size_bytes=sums([node.size_bytes for node in nodes]),
        cpu_only=cpu_only,
        values=tuple(values.items()),
    )


def _moves(blocks: Blocks, careful: bool, ordered: bool) -> list[tuple[int, int]]:
    """(block, neighbour to move it to), no block in two of them."""
    near = [sum(1 << after for after in found) for found in blocks.successors]
    for block, found in enumerate(blocks.successors):
        for after in found:
            near[after] |= 1 << block
    sharing = [((1 << blocks.num_blocks) - 1) ^ 1 << block for block in range(blocks.num_blocks)]
    for bits, _ in blocks.values:
        for block in bits_of(bits):
            sharing[block] &= bits
    idle = (blocks.accelerator_ms == 0) & (blocks.cpu_ms == 0) & ~blocks.cpu_only
    if careful:
        idle &= blocks.size_bytes == 0
    moves: list[tuple[int, int]] = []
    moved = 0
    for block in np.flatnonzero(idle).tolist():
        homes = sharing[block]
        if ordered and near[block]:
            homes &= near[block] if near[block].bit_count() == 1 else 0
        homes &= ~moved
        if homes and not moved >> block & 1:
            home = next(bits_of(homes))
            moves.append((block, home))
            moved |= 1 << block | 1 << home
    return moves
