"""Networks whose rows are divided between two ranks, beside half of the network, and all of it, with nobody to talk to.

Two processes on this machine, each on a core of its own with one thread, that share memory as in a run.  Both run, in
turns and in changing order after a barrier that is not counted, the *ideal half* (the plain module on half of the rows:
no messages, the same load on the machine's memory), *one device* (the plain module on all rows, on one rank while the
other waits) and the divided network, with convolutions computed in three ways:

    linear      what is held while messages travel, then what came is added (``convolution.overlapped``)
    interior    outputs that need nothing of others, then the boundary (Dryden et al. 2019)
    blocking    everything is fetched, then one convolution
    gloo        linear, with messages over gloo

A row is the ideal half's seconds over those of the slower rank; the *speed-up* is one device's over ``linear``'s.
*Overhead*: main-thread CPU time of the forward and backward of one small convolution above that of torch's own.
Gradients of all ways are compared first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.devices.ranks import hide_gpus, on_ranks
from benchmarks.report import Row, at_least, at_most, run
from benchmarks.spatial.sides import (
    INTERIOR,
    Alone,
    Case,
    Convolution,
    Divided,
    Idle,
    Side,
    captured_case,
    mesh_like,
    one_convolution,
    residual_stage,
    stem,
)
from benchmarks.turns import medians, require_equal
from runtime.captured import CapturedModule
from runtime.spatial.convolution.layer import LINEAR, HaloSettings
from runtime.transport import GlooTransport, Transport, open_shared

CASES = [
    Case("mesh-like stack, 512 x 512", mesh_like, (1, 18, 512, 512), 0.97, 1.85),
    Case("mesh-like stack, 256 x 256", mesh_like, (1, 18, 256, 256), 0.95),
    Case("ResNet-50's stage at 56 x 56, 2 samples", residual_stage, (2, 64, 56, 56), 0.90),
    Case("one convolution 64 -> 64, 128 x 128", one_convolution, (1, 64, 128, 128), 0.95),
    Case("ResNet's stem, synchronised batch norm, 4 samples", stem, (4, 3, 224, 224), 0.90),
]
OVERHEAD = "overhead of a convolution, forward and backward"
SETTINGS = {"linear": LINEAR, "interior": INTERIOR, "blocking": HaloSettings("blocking")}
MODES = (*SETTINGS, "gloo")
ONE = "one device"
GOAL_US = 100.0


@dataclass(frozen=True, slots=True)
class Raced:
    """Medians of one rank, by side.

    Attributes:
        cpu_s: of the main thread.
    """

    wall_s: Mapping[str, float]
    cpu_s: Mapping[str, float]


def measure(quick: bool, only: str) -> list[Row]:
    """A block of rows for each case, then the overhead."""
    rows = []
    for case in CASES:
        if only in case.name:
            rows += shares(case, raced(case, 5 if quick else 60))
    if only in OVERHEAD:
        rows += overheads(
            on_ranks(2, lambda transport: race_small(transport, 200 if quick else 2000), opened=open_shared)
        )
    return rows


def shares(case: Case, found: Sequence[Raced]) -> list[Row]:
    """Shares of the ideal half."""
    half_s = max(each.wall_s["half"] for each in found)
    rows = [Row(f"{case.name}: ideal half", 1e3 * half_s, "ms")]
    for mode in MODES:
        share = half_s / max(each.wall_s[mode] for each in found)
        name = f"{case.name}: {mode}"
        rows.append(at_least(name, share, "of ideal", case.goal if mode == "linear" else None))
    speed_up = max(each.wall_s[ONE] for each in found) / max(each.wall_s["linear"] for each in found)
    name = f"{case.name}: speed-up"
    rows.append(at_least(name, speed_up, "times", case.speed_up))
    return rows


def overheads(found: Sequence[Raced]) -> list[Row]:
    """CPU time above the ideal half's."""
    rows = []
    for mode in MODES:
        above_us = max(each.cpu_s[mode] - each.cpu_s["half"] for each in found) * 1e6
        name = f"{OVERHEAD}: {mode}"
        rows.append(at_most(name, above_us, "us CPU", GOAL_US if mode == "linear" else None))
    return rows


def raced(case: Case, steps: int) -> list[Raced]:
    """On both ranks."""
    captured = captured_case(case)
    return on_ranks(2, lambda transport: race(case, captured, transport, steps), opened=open_shared)


def race(case: Case, captured: CapturedModule, transport: Transport, steps: int) -> Raced:
    """All sides in turn, ``steps`` times after some to warm up."""
    divided = {mode: Divided(case, captured, transport, settings) for mode, settings in SETTINGS.items()}
    divided["gloo"] = Divided(case, captured, GlooTransport(), LINEAR)
    for each in divided.values():
        each.step()
    require_equal({mode: each.results for mode, each in divided.items()})
    one = Alone(case, 1) if transport.rank == 0 else Idle()
    return timed({"half": Alone(case, 2), ONE: one, **divided}, transport, steps)


def race_small(transport: Transport, steps: int) -> Raced:
    """A convolution alone, so small that what is around it counts."""
    divided = {mode: Convolution(transport, settings) for mode, settings in SETTINGS.items()}
    divided["gloo"] = Convolution(GlooTransport(), LINEAR)
    return timed({"half": Convolution(transport, None), **divided}, transport, steps)


def timed(sides: Mapping[str, Side], transport: Transport, steps: int) -> Raced:
    """Medians of wall and CPU time."""
    calls = {name: side.step for name, side in sides.items()}
    return Raced(*medians(calls, steps, transport.barrier, (time.perf_counter, time.thread_time)))


if __name__ == "__main__":
    hide_gpus()
    only = {"default": "", "help": "cases whose name holds this text"}
    raise SystemExit(run("Rows divided between 2 ranks, beside the ideal half", measure, own={"--only": only}))
