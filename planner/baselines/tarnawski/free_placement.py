"""Placement without contiguity: any set of blocks on any device, as an integer program.

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

from collections.abc import Sequence
from math import inf

import numpy as np
import pulp

from planner.baselines.common.ideals import bits_of
from planner.baselines.tarnawski.max_load import ACCELERATOR, CPU, Blocks

_OPTIMAL = 1
"""``sol_status`` of a proved optimum; a solver that ran out of time may still call its ``status`` optimal."""

_FEASIBLE = 2
"""HiGHS's ``kSolutionStatusFeasible``."""


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
    devices = [ACCELERATOR] * accelerators + [CPU] * cpus
    problem = pulp.LpProblem("free_placement", pulp.LpMinimize)
    largest = problem.add_variable("T", 0, None if known_ms == inf else known_ms)
    problem.setObjective(largest)
    chosen = _placed(problem, blocks, accelerators, cpus)
    for number, kind in enumerate(devices):
        column = [chosen[block][number] for block in range(blocks.num_blocks)]
        times = blocks.accelerator_ms if kind == ACCELERATOR else blocks.cpu_ms
        load = [(x, float(times[block])) for block, x in enumerate(column) if x is not None]
        if kind == ACCELERATOR:
            load += _crossings(problem, blocks, number, column)
            sizes = [(x, float(blocks.size_bytes[block])) for block, x in enumerate(column) if x is not None]
            if blocks.size_bytes.sum() > memory_bytes:
                problem.addConstraint(pulp.LpAffineExpression(sizes) <= memory_bytes)
        problem.addConstraint(pulp.LpAffineExpression(load) <= largest)
    problem.solve(pulp.HiGHS(msg=False, timeLimit=time_limit_s, gapRel=0, threads=1))
    return _read(problem, chosen, devices, known_ms)


def _placed(
    problem: pulp.LpProblem, blocks: Blocks, accelerators: int, cpus: int
) -> list[list[pulp.LpVariable | None]]:
    """``[block][device]``: the binaries, None where the block cannot be."""
    by_weight = np.argsort(-blocks.accelerator_ms, kind="stable").tolist()
    chosen: list[list[pulp.LpVariable | None]] = [[] for _ in by_weight]
    for position, block in enumerate(by_weight):
        for device in range(accelerators + cpus):
            here = device > position or bool(blocks.cpu_only[block]) if device < accelerators else False
            name = f"x_{block}_{device}"
            chosen[block].append(None if here else problem.add_variable(name, cat=pulp.LpBinary))
        problem.addConstraint(pulp.lpSum(x for x in chosen[block] if x is not None) == 1)
    return chosen


def _crossings(
    problem: pulp.LpProblem, blocks: Blocks, device: int, column: Sequence[pulp.LpVariable | None]
) -> list[tuple[pulp.LpVariable, float]]:
    """The values that cross the border of an accelerator, with their costs."""
    found = []
    for value, (bits, cost) in enumerate(blocks.values):
        crosses = problem.add_variable(f"y_{value}_{device}", 0, 1)
        around = list(bits_of(bits))
        for here, there in zip(around, [*around[1:], around[0]], strict=True):
            inside, outside = column[here], column[there]
            if inside is not None:
                problem.addConstraint(crosses >= (inside if outside is None else inside - outside))
        found.append((crosses, cost))
    return found


def _read(
    problem: pulp.LpProblem, chosen: Sequence[Sequence[pulp.LpVariable | None]], kinds: Sequence[str], known_ms: float
) -> tuple[tuple[tuple[int, str], ...] | None, float]:
    if problem.sol_status == pulp.LpSolutionInfeasible:
        return None, known_ms
    info = problem.solverModel.getInfo()
    bound = max(0.0, info.mip_dual_bound)
    if info.primal_solution_status != _FEASIBLE:
        return None, bound
    sets = [0] * len(kinds)
    for block, row in enumerate(chosen):
        weights = [0.0 if x is None else pulp.value(x) for x in row]
        sets[int(np.argmax(weights))] |= 1 << block
    if problem.sol_status == _OPTIMAL:
        bound = pulp.value(problem.objective)
    return tuple((inside, kind) for inside, kind in zip(sets, kinds, strict=True) if inside), bound
