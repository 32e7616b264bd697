"""The planner of Tarnawski et al. for throughput: contiguous sets of operators on accelerators and CPUs.

Tarnawski, Phanishayee, Devanur, Mahajan, Nina Paravecino, "Efficient algorithms for device placement of DNN graph
operators", NeurIPS 2020, sections 4 and 5.1.  In pipelined execution the most loaded device sets the pace:

    minimise    max over devices of its load                                     (``max_load``: compute, then send)
    over        the device of every node
    subject to  nodes of one colour on one device, with their backward nodes     (``format.blocks_of``)
                the forward nodes of a device between two ideals                 (``max_load.search``: contiguity)
                bytes on an accelerator within its memory, unsupported nodes on CPUs

Variants of the public code, each a row of its paper's tables:

* ``contiguous``: the above, solved exactly;
* ``linearized``: the same once a depth-first order of the blocks is made a chain (DPL);
* ``pipedream``: branches merged first, as if for PipeDream, then the chain;
* ``single``: everything on one accelerator, whether it fits or not;
* ``free``: contiguity dropped.

Without contiguity, any set of blocks may be on any device (:func:`place`), an integer program:

    minimise    T
    over        x[b, d] in {0, 1}    block b is on device d
                y[v, d] >= 0         value v crosses the border of accelerator d
    subject to  sum over d of x[b, d] = 1                                       each block has a device
                sum over b of time[b, d] x[b, d] + sum over v of cost[v] y[v, d] <= T    loads (no y on a CPU)
                y[v, d] >= x[a, d] - x[b, d]  for neighbouring a, b in a cycle through v's blocks  crossings
                sum over b of size[b] x[b, d] <= memory                         accelerators
                x[b, d] = 0  for the n-th block and accelerators beyond the n-th                 like devices, one order

A value crosses if it has a block on the device and one elsewhere; going once around its blocks in a circle, some step
then leads out of the device, so that one row a step is enough.  Tarnawski et al. (NeurIPS 2020, appendix A) write the
same with one variable for sending and one for receiving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL, TIME_LIMIT, Json, RivalAnswer, infeasible
from planner.extras.baselines.common.ideals import Ideals, chain_of, lattice_of
from planner.extras.baselines.tarnawski.format import (
    Blocks,
    Coloured,
    TarnawskiInstance,
    blocks_of,
    crowded_groups,
    depth_first,
)
from planner.extras.baselines.tarnawski.max_load import (
    ACCELERATOR,
    CPU,
    MOST_IN_TABLE,
    SAME,
    DeviceChain,
    Loads,
    TarnawskiDevices,
    direct,
    lower_bound,
    search,
)
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.graph import bits_of
from planner.solvers.budget import part_of_current

_MOST_CELLS = 60_000_000
"""Numbers that the tables over all ideals may have."""


def solve(
    instance: TarnawskiInstance,
    *,
    accelerators: int | None = None,
    cpus: int | None = None,
    memory_bytes: float | None = None,
    variant: str = "contiguous",
    time_limit_s: float = 60.0,
) -> RivalAnswer:
    """The smallest largest load, in milliseconds.

    Args:
        accelerators, cpus, memory_bytes: instead of those of the file.
        variant: one of ``VARIANTS``.
        time_limit_s: then the best so far is returned, with the bound that is proved.

    Raises:
        UsageError: no devices, or a negative number of them.
        UnknownNameError: there is no such variant.
    """
    devices = TarnawskiDevices(
        instance.accelerators if accelerators is None else accelerators,
        instance.cpus if cpus is None else cpus,
        instance.memory_bytes if memory_bytes is None else memory_bytes,
        part_of_current(time_limit_s),
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


def _contiguous(instance: TarnawskiInstance, devices: TarnawskiDevices) -> RivalAnswer:
    coloured = blocks_of(instance, devices.memory_bytes)
    answer = _over_ideals(instance, coloured, devices)
    if answer is not None:
        return answer
    # Too many ideals.  With blocks that take no time moved although memory is short, as the public code does, there may
    # be few enough; what it finds is a plan, and bounded by the best one that memory does not limit.
    moved = blocks_of(instance, devices.memory_bytes, move_bytes=True)
    bound = lower_bound(moved.blocks, devices.accelerators, devices.cpus)
    relaxed = _over_ideals(instance, moved, devices)
    if relaxed is None:
        start, _ = _on_chain(moved.blocks, devices, depth_first(moved))
        return _answer(instance, moved.blocks, start, bound)
    endless = TarnawskiDevices(devices.accelerators, devices.cpus, inf, devices.budget)
    free = _over_ideals(instance, moved, endless)
    bound = max(bound, free.bound if free is not None else 0.0)
    proved = relaxed.has_plan and relaxed.value <= bound * (1 + SAME)
    return RivalAnswer(relaxed.value, min(bound, relaxed.value), OPTIMAL if proved else TIME_LIMIT, relaxed.plan)


def _over_ideals(instance: TarnawskiInstance, coloured: Coloured, devices: TarnawskiDevices) -> RivalAnswer | None:
    """The exact answer; None if there are too many ideals."""
    blocks = coloured.blocks
    most = _MOST_CELLS // (blocks.num_blocks + 2 * sum(bits.bit_count() - 1 for bits, _ in blocks.values) + 1)
    lattice = lattice_of(Ideals.of(blocks.successors), most)
    if lattice is None:
        return None
    start, _ = _on_chain(blocks, devices, depth_first(coloured))
    loads = Loads.of(blocks, lattice, devices.memory_bytes)
    bound = lower_bound(blocks, devices.accelerators, devices.cpus)
    chain, bound = search(blocks, loads, devices, start, bound)
    return _answer(instance, blocks, chain, bound)


def _linearized(instance: TarnawskiInstance, devices: TarnawskiDevices) -> RivalAnswer:
    coloured = blocks_of(instance, devices.memory_bytes, move_bytes=True)
    return _of_chain(instance, coloured, devices, depth_first(coloured))


def _pipedream(instance: TarnawskiInstance, devices: TarnawskiDevices) -> RivalAnswer:
    coloured = blocks_of(instance, devices.memory_bytes, crowded_groups(instance), move_bytes=True)
    return _of_chain(instance, coloured, devices, depth_first(coloured, largest_first=True))


def _of_chain(
    instance: TarnawskiInstance, coloured: Coloured, devices: TarnawskiDevices, order: Sequence[int]
) -> RivalAnswer:
    chain, bound = _on_chain(coloured.blocks, devices, order)
    return _answer(instance, coloured.blocks, chain, bound)


def _on_chain(blocks: Blocks, devices: TarnawskiDevices, order: Sequence[int]) -> tuple[DeviceChain | None, float]:
    """The best pipeline whose stages follow one another in ``order``, and a bound for such pipelines."""
    loads = Loads.of(blocks, chain_of(order), devices.memory_bytes)
    if blocks.num_blocks < MOST_IN_TABLE:
        chain = direct(loads, devices.accelerators, devices.cpus)
        return chain, chain.value if chain else inf
    bound = lower_bound(blocks, devices.accelerators, devices.cpus)
    return search(blocks, loads, devices, None, bound)


def _single(instance: TarnawskiInstance, devices: TarnawskiDevices) -> RivalAnswer:
    every = range(len(instance.nodes))
    stages = [(every, ACCELERATOR)]
    value = load_of(instance, every, ACCELERATOR)
    return RivalAnswer(value, value, OPTIMAL, plan_of(instance, stages))


def _free(instance: TarnawskiInstance, devices: TarnawskiDevices) -> RivalAnswer:
    start = _contiguous(instance, devices)
    blocks = blocks_of(instance, devices.memory_bytes, ordered=False).blocks
    bound = lower_bound(blocks, devices.accelerators, devices.cpus)
    left_s = max(1.0, devices.budget.clock_s)
    sets, proved = place(blocks, devices.accelerators, devices.cpus, devices.memory_bytes, start.value, left_s)
    bound = max(bound, proved)
    if sets is None:
        if not start.has_plan:
            return infeasible() if bound == inf else RivalAnswer(inf, bound, TIME_LIMIT)
        status = OPTIMAL if start.value <= bound * (1 + SAME) else TIME_LIMIT
        return RivalAnswer(start.value, min(bound, start.value), status, start.plan)
    return _answer(instance, blocks, DeviceChain(0.0, sets), bound)


def _answer(instance: TarnawskiInstance, blocks: Blocks, chain: DeviceChain | None, bound: float) -> RivalAnswer:
    """With the value summed afresh from the instance's own nodes and edges."""
    if chain is None:
        return infeasible() if bound == inf else RivalAnswer(inf, bound, TIME_LIMIT)
    stages = [([n for b in bits_of(inside) for n in blocks.nodes[b]], kind) for inside, kind in chain.stages]
    value = max(load_of(instance, nodes, kind) for nodes, kind in stages)
    proved = value <= bound * (1 + 2 * SAME)
    return RivalAnswer(value, value if proved else bound, OPTIMAL if proved else TIME_LIMIT, plan_of(instance, stages))


def load_of(instance: TarnawskiInstance, nodes: Sequence[int], kind: str) -> float:
    """Load of a device of ``kind`` that has ``nodes``, given as indices."""
    inside = set(nodes)
    if kind == CPU:
        return sum(instance.nodes[node].cpu_ms for node in inside)
    crossing = {src for src, dst in instance.edges if (src in inside) != (dst in inside)}
    return sum(instance.nodes[n].accelerator_ms for n in inside) + sum(instance.nodes[n].transfer_ms for n in crossing)


def plan_of(instance: TarnawskiInstance, stages: Sequence[tuple[Sequence[int], str]]) -> Mapping[str, Json]:
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


def place(
    blocks: Blocks, accelerators: int, cpus: int, memory_bytes: float, known_ms: float, time_limit_s: float
) -> tuple[tuple[tuple[int, str], ...] | None, float]:
    """The sets of blocks with their kinds of device, and the bound that is proved.

    Args:
        known_ms: a value that can be had; only better ones are looked for.

    Returns:
        None for the sets if nothing better than ``known_ms`` was found; the bound is infinite if nothing can be had at
        all, ``known_ms`` if nothing better can.
    """
    from scipy.sparse import eye_array

    from planner.solvers.integer_program import IntegerProgram  # late: HiGHS takes long to load

    devices = [ACCELERATOR] * accelerators + [CPU] * cpus
    costs = np.array([cost for _, cost in blocks.values])
    widths = {"T": 1, "placed": blocks.num_blocks * len(devices), "crosses": len(costs) * accelerators}
    program = IntegerProgram(widths, binary=("placed",), parts=("crosses",))
    placed, crosses = (eye_array(widths[name], format="csr") for name in ("placed", "crosses"))
    columns = np.arange(widths["placed"]).reshape(blocks.num_blocks, -1)
    program.add(1, 1, placed=sum(placed[columns[:, number]] for number in range(len(devices))))
    program.add(0, 0, placed=_barred(blocks, accelerators, len(devices)).reshape(1, -1).astype(np.float64))
    value, leaving, entering = _circles(blocks)
    for number, kind in enumerate(devices):
        here = placed[columns[:, number]]
        if kind == CPU:
            program.add(-inf, 0, T=-np.ones((1, 1)), placed=(blocks.cpu_ms @ here)[None])
            continue
        own = crosses[np.arange(len(costs)) + number * len(costs)]
        program.add(0, inf, placed=here[entering] - here[leaving], crosses=own[value])
        program.add(
            -inf, 0, T=-np.ones((1, 1)), placed=(blocks.accelerator_ms @ here)[None], crosses=(costs @ own)[None]
        )
        if blocks.size_bytes.sum() > memory_bytes:
            program.add(-inf, memory_bytes, placed=(blocks.size_bytes @ here)[None])
    answer = program.minimise(known_ms, time_limit_s)
    if not answer.variables:
        return None, known_ms if answer.status == INFEASIBLE else answer.bound
    sets = tuple(_chosen(answer.variables["placed"].reshape(blocks.num_blocks, -1), devices))
    return sets, float(answer.variables["T"][0]) if answer.status == OPTIMAL else answer.bound


def _barred(blocks: Blocks, accelerators: int, num_devices: int) -> NDArray[np.bool_]:
    """``[blocks, devices]``: where blocks may not be; of like devices heavy blocks go first."""
    position = np.argsort(np.argsort(-blocks.accelerator_ms, kind="stable"))
    barred: NDArray[np.bool_] = (np.arange(num_devices) > position[:, None]) | blocks.cpu_only[:, None]
    barred[:, accelerators:] = False
    return barred


def _circles(blocks: Blocks) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Of each value's blocks in a circle, flat: the value, a block, and the next one."""
    around = [list(bits_of(bits)) for bits, _ in blocks.values]
    value = np.repeat(np.arange(len(around)), np.array([len(circle) for circle in around], dtype=np.intp))
    leaving = np.array([block for circle in around for block in circle], dtype=np.intp)
    entering = np.array([block for circle in around for block in (*circle[1:], circle[0])], dtype=np.intp)
    return value, leaving, entering


def _chosen(placed: NDArray[np.float64], devices: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The set of blocks of each device that has some, and its kind."""
    device_of = placed.argmax(axis=1)
    for number, kind in enumerate(devices):
        inside = sum(1 << block for block in np.flatnonzero(device_of == number).tolist())
        if inside:
            yield inside, kind


VARIANTS: Mapping[str, Callable[[TarnawskiInstance, TarnawskiDevices], RivalAnswer]] = {
    "contiguous": _contiguous,
    "linearized": _linearized,
    "pipedream": _pipedream,
    "single": _single,
    "free": _free,
}
"""What ``solve`` can be asked for, by name."""
