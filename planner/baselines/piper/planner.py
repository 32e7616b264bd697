"""Piper: pipeline, data and tensor parallelism with recomputation, on like devices.

Tarnawski, Narayanan, Phanishayee, "Piper: multidimensional planner for DNN parallelization", NeurIPS 2021, section 5.

    minimise    max over stages of time per micro-batch                                            (``stages``)
    over        a chain of ideals: the layers of each stage; d replicas of t devices for each stage; an option for each
                layer
    subject to  sum of d t <= devices; d divides the micro-batches of a batch                       (``search``)
                memory of each stage, with the data degrees of all stages behind it in flight       (``stages``)

The state is (ideal of what is behind, devices, sum of data degrees).  With one tensor degree the second follows from
the third, and one sweep over the ideals finds the smallest value.  With several, a sweep finds the fewest devices for
stages that take at most T, and T is halved between what is and what is not possible.

Variants: ``piper``, as above with the public code's rule for the options of a stage's layers, exact among such plans;
``equal``, the same number of layers in each stage, one data degree, and the first or the last option throughout: the
PipeDream-2BW-like planner of the paper's tables; ``released``, where the bound is that of any choice of options.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from math import ceil, inf

from planner.baselines.common.answer import OPTIMAL, TIME_LIMIT, Answer, Json, infeasible
from planner.baselines.common.ideals import bits_of
from planner.baselines.piper import search as piper_equal
from planner.baselines.piper.device_budget import Machine
from planner.baselines.piper.format import Instance
from planner.baselines.piper.search import SAME, Cuts, search
from planner.baselines.piper.stages import Stage, choose_options, value_of
from planner.ir.errors import UnknownNameError, UsageError

VARIANTS = ("piper", "equal", "released")


def solve(
    instance: Instance,
    *,
    devices: int | None = None,
    memory_bytes: float | None = None,
    bandwidth_bytes_per_s: float | None = None,
    variant: str = "piper",
    most_replicas: int = sys.maxsize,
    time_limit_s: float = 60.0,
) -> Answer:
    """The smallest time per micro-batch, in the unit of the file.

    Args:
        devices, memory_bytes, bandwidth_bytes_per_s: instead of those of the file.
        variant: one of ``VARIANTS``.
        most_replicas: of a stage.
        time_limit_s: then the best so far is returned, with the bound that is proved.

    Raises:
        UsageError: no devices, no memory or no bandwidth.
        UnknownNameError: there is no such variant.
    """
    machine = Machine(
        instance.devices if devices is None else devices,
        instance.memory_bytes if memory_bytes is None else memory_bytes,
        instance.bandwidth_bytes_per_s if bandwidth_bytes_per_s is None else bandwidth_bytes_per_s,
        most_replicas,
    )
    if min(machine.devices, most_replicas) < 1 or machine.memory_bytes < 0 or not machine.bandwidth_bytes_per_s > 0:
        words = f"{machine.devices} devices, {machine.memory_bytes:g} bytes, {machine.bandwidth_bytes_per_s:g} bytes/s"
        raise UsageError("nothing to plan for", [words], ["give at least one device, and a bandwidth above 0"])
    if variant not in VARIANTS:
        raise UnknownNameError(f"no variant {variant!r}", [f"known: {', '.join(VARIANTS)}"])
    stop_s = time.monotonic() + time_limit_s

    def out_of_time() -> bool:
        return time.monotonic() > stop_s

    equal = piper_equal.best(instance, machine)
    if variant == "equal":
        return _answer(instance, machine, equal, value_of(instance, machine, equal) if equal else inf)
    start = value_of(instance, machine, equal) if equal else inf
    cuts, bound = search(instance, machine, start, out_of_time)
    found = _stages(instance, machine, cuts) if cuts else equal
    if variant == "released" and found:
        known = value_of(instance, machine, found)
        bound = min(bound, search(instance, machine, known, out_of_time, fractional=True)[1])
    return _answer(instance, machine, found, bound)


def _stages(instance: Instance, machine: Machine, found: Cuts) -> tuple[Stage, ...]:
    """With the options of each layer.

    A rule of thumb may do better for more micro-batches in flight than there are: that choice is then taken.
    """
    stages = []
    behind = sum(cut.replicas for cut in found.cuts)
    for cut in found.cuts:
        nodes = tuple(bits_of(found.lattice.bits[cut.above] & ~found.lattice.bits[cut.below]))
        in_flight = ceil(behind / cut.replicas)
        behind -= cut.replicas
        while True:
            chosen = choose_options(instance, machine, nodes, cut.degree, cut.replicas, in_flight)
            if chosen is None or chosen[1] <= cut.time * (1 + SAME):
                break
            in_flight += 1
        if chosen is None:
            raise ArithmeticError(f"the options of {len(nodes)} layers do not take {cut.time} as found before")
        stages.append(Stage(nodes, cut.replicas, cut.degree, chosen[0]))
    return tuple(stages)


def _answer(instance: Instance, machine: Machine, stages: Sequence[Stage] | None, bound: float) -> Answer:
    """With the value summed afresh."""
    if stages is None:
        return infeasible() if bound == inf else Answer(inf, bound, TIME_LIMIT)
    value = value_of(instance, machine, stages)
    proved = value <= bound * (1 + 2 * SAME)
    return Answer(value, value if proved else bound, OPTIMAL if proved else TIME_LIMIT, _plan(instance, stages))


def _plan(instance: Instance, stages: Sequence[Stage]) -> Mapping[str, Json]:
    """Stages in order, with the ids of their layers, and the layers of each that do not take their first option."""
    listed: list[Json] = []
    for stage in stages:
        options = {
            str(instance.nodes[node].number): instance.nodes[node].options[stage.degree][option].name
            for node, option in zip(stage.nodes, stage.options, strict=True)
            if option
        }
        listed.append(
            {
                "data_degree": stage.replicas,
                "tensor_degree": stage.degree,
                "nodes": [instance.nodes[node].number for node in stage.nodes],
                "options": {**options},
            }
        )
    return {"stages": listed}
