"""The smallest largest load of a pipeline: which ideals to cut at, and which device takes each stage.

    minimise    max over stages s of load(J_s minus J_{s-1}, device kind of s)
    over        a chain of ideals: nothing = J_0 below J_1 below ... below J_S = everything
    subject to  at most ``accelerators`` stages on accelerators, at most ``cpus`` on CPUs       (devices are few)
                bytes of a stage on an accelerator within its memory; no CPU-only block there   (Loads.accelerator)

:func:`direct` is the dynamic program over pairs of ideals, device by device, as published; it holds a table of all
pairs.  :func:`search` is for large lattices: it asks "is there a chain of loads at most T?" (``max_load_walk``) for a T
just below the best known, and then for some between that and the lower bound.  What is found is first improved along
an order of blocks that it follows (:func:`along`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np

from planner.peers.clock import check_time
from planner.peers.ideals import bits_of, chain_of
from planner.peers.max_load import Blocks, Floats, Loads
from planner.peers.max_load_walk import ACCELERATOR, CPU, SAME, Chain, Walk, most_left_to_cpus, value_of

MOST_IN_TABLE = 3000
"""Ideals of which a table of all pairs is made."""


def direct(loads: Loads, accelerators: int, cpus: int) -> Chain | None:
    """The best chain, from a table of all pairs; None if there is none."""
    every = np.arange(len(loads.lattice.bits))
    tables = (loads.accelerator(every, every), loads.cpu(every, every) if cpus else None)
    best: dict[tuple[int, int], Floats] = {}
    for c in range(cpus + 1):
        for a in range(accelerators + 1):
            check_time()
            value = np.full(len(every), inf)
            value[0] = 0.0
            for table, before in zip(tables, ((a - 1, c), (a, c - 1)), strict=True):
                if table is not None and before in best:
                    value = np.minimum(value, np.maximum(best[before][:, None], table).min(axis=0))
            best[a, c] = value
    used, at = (accelerators, cpus), len(every) - 1
    largest = float(best[used][at])
    if largest == inf:
        return None
    stages: list[tuple[int, str]] = []
    while at:
        steps = ((tables[0], (used[0] - 1, used[1]), ACCELERATOR), (tables[1], (used[0], used[1] - 1), CPU))
        for table, before, kind in steps:
            if table is None or before not in best:
                continue
            reached = np.maximum(best[before], table[:, at])
            source = int(reached.argmin())
            if reached[source] <= best[used][at]:
                stages += [(loads.lattice.bits[at] & ~loads.lattice.bits[source], kind)] if source != at else []
                used, at = before, source
                break
    return Chain(largest, tuple(reversed(stages)))


def along(blocks: Blocks, memory_bytes: float, accelerators: int, cpus: int, chain: Chain) -> Chain:
    """The best chain in an order of all blocks that ``chain`` follows: its stages' borders move."""
    order = [block for inside, _ in chain.stages for block in bits_of(inside)]
    if len(order) > MOST_IN_TABLE:
        return chain
    found = direct(Loads.of(blocks, chain_of(order), memory_bytes), accelerators, cpus)
    if found is None:
        return chain
    value = value_of(blocks, found.stages)
    return Chain(value, found.stages) if value < chain.value else chain


def lower_bound(blocks: Blocks, accelerators: int, cpus: int) -> float:
    """No chain has a smaller largest load: all work over all devices, and the largest single block."""
    if not accelerators and not cpus:
        return inf
    on_cpu = blocks.cpu_ms if cpus else np.full(blocks.num_blocks, inf)
    on_accelerator = (
        np.where(blocks.cpu_only, inf, blocks.accelerator_ms) if accelerators else np.full_like(on_cpu, inf)
    )
    single = np.minimum(on_cpu, on_accelerator)
    largest = float(single.max(initial=0.0))
    low, high = largest, max(largest, float(single.sum()))
    if high == inf:
        return inf
    while high - low > SAME * high:
        middle = (low + high) / 2
        if most_left_to_cpus(blocks, middle * cpus) + middle * accelerators >= float(blocks.accelerator_ms.sum()):
            high = middle
        else:
            low = middle
    return low


def search(
    blocks: Blocks,
    loads: Loads,
    accelerators: int,
    cpus: int,
    known: Chain | None,
    bound: float,
    out_of_time: Callable[[], bool],
) -> tuple[Chain | None, float]:
    """The best chain and the bound that is proved; equal (within ``SAME``) unless time ran out.

    Args:
        known: a chain to improve on.
        bound: proved before.
    """
    anything = float(blocks.accelerator_ms.sum() + blocks.cpu_ms.sum()) + 2 * sum(cost for _, cost in blocks.values)
    best, low = known, bound
    high = best.value if best else anything * (1 + SAME)
    step = 0
    try:
        while best is None or low < high * (1 - SAME):
            limit = high if best is None else high * (1 - SAME) if step % 3 == 0 else (low + high) / 2
            found = Walk(blocks, loads, accelerators, cpus, limit, out_of_time).chain()
            step += 1
            if found is not None:
                best = along(blocks, loads.memory_bytes, accelerators, cpus, found)
                high = min(high, best.value)
            elif best is None:
                return None, inf
            else:
                low = limit
    except TimeoutError:
        return best, low
    return best, high
