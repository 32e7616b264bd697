"""Simulated beside executed: sleeping stages on two hosts whose link has a known rate, real messages between them.

Nothing is computed, so what differs is what the simulator says of messages, order and waiting.  The named peer is the
clock.  The simulator gets the program itself, what its actions sleep, and tables that the same processes measured just
before: how long a message travels, and how long it keeps its sender.  A row is measured / simulated - 1, medians of
steps; beside it stands what the error would be if a send kept its rank for no longer than any other action.  Hosts are
network namespaces (:mod:`benchmarks.devices.testbed`); without the right to make them, rows are of the loopback alone.

On a machine that does other things too the ranks wake up late: ``chrt -r 5 python -m benchmarks.fidelity``.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.devices.sleeping import Case, Order, Points, link_points, step_s
from benchmarks.devices.testbed import INTERFACE, RATES, Testbed, unavailable
from benchmarks.report import Row, at_most, run
from planner.costs.communication.links import NetworkPrices
from planner.costs.simulator.events import execute
from planner.costs.simulator.prices import (
    SlotPrices,
    resources,
    sending_prices,
    transfer_bytes,
    transfer_prices,
)
from planner.costs.simulator.program import compile_program
from planner.ir.cluster import ACROSS_HOSTS, MEASURED, Cluster, DeviceSpec, Link

GOAL_PERCENT = 5.0
SECONDS = (10e-3, 10e-3, 8e-3)
TRANSFER_S = 6e-3
"""What an activation should take on the link: of the order of a forward, so that it matters when it is sent."""

SIZES = tuple(4096 * 2**k for k in range(12))
OVERHEAD_S = 1e-4
"""Of each action in the executor, as profiles of this machine have it."""

LIMIT_S = 300.0
LOOPBACK_BYTES_PER_S = 1e9


def cases(bytes_per_s: float, num_microbatches: int) -> tuple[Case, ...]:
    """The schedules, with messages that take ``TRANSFER_S`` on a link of that rate."""
    size = max(4096, round(bytes_per_s * TRANSFER_S) // 4096 * 4096)
    m, half = num_microbatches, tuple(seconds / 2 for seconds in SECONDS)
    plain = {"GPipe": "gpipe", "1F1B": "1f1b", "1F1B-SO": "1f1b-so", "ZB-H1": "zb-h1"}
    found = [Case(name, schedule, 2, 2, m, SECONDS, size) for name, schedule in plain.items()]
    found.append(Case("interleaved", "interleaved", 2, 4, m, half, size // 2))
    found.append(Case("DAG with a skip", "interleaved", 2, 4, m, half, size // 2, skips=((0, 3),)))
    return tuple(found)


def measure(quick: bool) -> list[Row]:
    """All rates; ``--quick`` takes fewer steps."""
    why = unavailable()
    if why:
        rows = _rows("loopback", None, LOOPBACK_BYTES_PER_S, quick)
        return [Row(f"no testbed, loopback alone: {why}", 0.0, ""), *rows]
    rows = []
    for name, rate in RATES.items():
        with Testbed.build(2, rate) as testbed:
            rows += _rows(name, testbed, rate.payload_bytes_per_s, quick)
    errors = [abs(row.value) for row in rows if row.name.endswith(": error")]
    return [*rows, at_most("mean absolute error", statistics.fmean(errors), "%", GOAL_PERCENT)]


def simulated_s(case: Case, network: NetworkPrices) -> float:
    """The simulator's step."""
    program = case.program()
    compiled = compile_program(program, (1,) * case.num_microbatches)
    sizes = transfer_bytes(program, compiled)
    seconds = [OVERHEAD_S + case.action_s(slot.action) for slot in compiled.actions]
    travels_s, calls_s = transfer_prices(compiled, sizes, network), sending_prices(compiled, sizes, network)
    return execute(compiled, SlotPrices(seconds, travels_s, resources(compiled, network), calls_s)).step_s


def network_of(points: Points, sending: Points = ()) -> NetworkPrices:
    """Two hosts with one device each, and a link of these tables: until a message arrives, and while its call lasts."""
    devices = tuple(DeviceSpec(f"n{rank}/cpu0", "cpu", f"n{rank}", 0) for rank in range(2))
    slope = (points[-1][0] - points[0][0]) / (points[-1][1] - points[0][1])
    link = Link(points[0][1], slope, tuple(points), duplex=True, evidence=MEASURED, sending=tuple(sending))
    return NetworkPrices(Cluster(devices, {ACROSS_HOSTS: link}))


def _rows(name: str, testbed: Testbed | None, bytes_per_s: float, quick: bool) -> Iterator[Row]:
    order_cases = cases(bytes_per_s, 6 if quick else 8)
    found = _execute(testbed, order_cases, 5 if quick else 15)
    points, sending = link_points(SIZES, found)
    last, before = points[-1], points[-3]
    rate = (last[0] - before[0]) / (last[1] - before[1])
    yield Row(f"{name}: bandwidth of large messages / the link's", rate / bytes_per_s, "ratio")
    for case in order_cases:
        measured_s = statistics.median(step_s([each["steps"][case.name] for each in found]))
        predicted_s = simulated_s(case, network_of(points, sending))
        error = 100 * (measured_s / predicted_s - 1)
        yield Row(f"{name}, {case.name}: measured step", 1e3 * measured_s, "ms")
        yield Row(f"{name}, {case.name}: error", error, "%", f"within {GOAL_PERCENT:g}", abs(error) <= GOAL_PERCENT)
        free_s = simulated_s(case, network_of(points))
        yield Row(f"{name}, {case.name}: error if sends were free", 100 * (measured_s / free_s - 1), "%")


def _execute(testbed: Testbed | None, order_cases: tuple[Case, ...], repetitions: int) -> list[Mapping[str, Any]]:
    """What each rank wrote."""
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as ending:
        folder = Path(text)
        Order(str(folder / "store"), 2, order_cases, SIZES, repetitions).write(folder / "order.json")
        interface = INTERFACE if testbed is not None else "lo"
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank in range(2):
            command = [sys.executable, "-m", "benchmarks.devices.sleeping", str(folder / "order.json"), str(rank)]
            whole = command if testbed is None else testbed.command(rank, command)
            ranks.append(subprocess.Popen(whole, env=environment))
            ending.callback(ranks[-1].kill)
        for process in ranks:
            if process.wait(LIMIT_S):
                raise RuntimeError(f"a rank ended with exit code {process.returncode}")
        return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


if __name__ == "__main__":
    raise SystemExit(run("Simulated beside executed steps of sleeping stages on two hosts", measure))
