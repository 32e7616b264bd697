"""The planner of Tarnawski et al. for throughput: contiguous sets of operators on accelerators and CPUs.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino, "Efficient algorithms for device placement of DNN graph
operators", NeurIPS 2020, sections 4 and 5.1.  In pipelined execution the most loaded device sets the pace:

    minimise    max over devices of its load                                     (``max_load``: compute, then send)
    over        the device of every node
    subject to  nodes of one colour on one device, with their backward nodes     (``tarnawski_blocks``)
                the forward nodes of a device between two ideals                 (``max_load_search``: contiguity)
                bytes on an accelerator within its memory, unsupported nodes on CPUs

Variants of the public code, each a row of its paper's tables:

* ``contiguous``: the above, solved exactly;
* ``linearized``: the same once a depth-first order of the blocks is made a chain (DPL);
* ``pipedream``: branches merged first, as if for PipeDream, then the chain;
* ``single``: everything on one accelerator, whether it fits or not;
* ``free``: contiguity dropped (``free_placement``: an integer program).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from planner.formats.dnn_partitioning import Instance
from planner.ir.errors import UnknownNameError, UsageError
from planner.peers.answer import OPTIMAL, TIME_LIMIT, Answer, Json, infeasible
from planner.peers.ideals import Ideals, bits_of, chain_of, lattice_of
from planner.peers.max_load import Blocks, Loads
from planner.peers.max_load_search import MOST_IN_TABLE, direct, lower_bound, search
from planner.peers.max_load_walk import ACCELERATOR, CPU, SAME, Chain
from planner.peers.tarnawski_blocks import Coloured, blocks_of, crowded_groups, depth_first

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
    from planner.peers.free_placement import place  # loads PuLP and HiGHS, which only this variant needs

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
