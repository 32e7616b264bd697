"""What the executor costs and reaches, beside torch.distributed.pipelining in the same run.

Two processes on this machine, each on a core of its own with one thread.  The same network, micro-batches and schedule
run under halopipe's engine, through shared memory as a run does and over gloo, and under torch's, which has gloo
(``benchmarks.executor.sides``): a step of each by turns and in changing order, so that whatever else the machine does
hits all, after a barrier that is not counted. Gradients of the first step are compared: all do the same.

*Overhead*: a network so small that its own operators hardly count; a step divided by its actions (forwards, backwards,
sends and receives, counted alike), microseconds per action of the busier rank.  ``bare`` is the same forwards and
backwards called directly; what remains above it is overhead.  Main-thread CPU alone flatters a runtime whose messages
are moved by gloo's thread, hence two more clocks.  A rank that waits looks for its message before it sleeps, which is
processor time like any other: a row of its own says how much, by the clock, hence where nobody else had its core.

*Real work*: linear layers of several milliseconds an action.  The ideal is the simulator's step for the very program
that was executed, each action at the median of its own measured time and messages for free; what a step takes beyond it
is waiting that the schedule does not ask for.  Memory: all that torch's allocator is asked for from the making of the
engine (or of torch's stages) over three steps, the parameters, and what messages take of shared memory; each side in
fresh processes of its own, the fuller rank.  torch has no 1F1B-SO, its runtime of action lists runs ours; its 1F1B and
GPipe are loops of their own.

*Upkeep*: what saves and looking for NaN cost a job (:mod:`benchmarks.executor.upkeep`).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.devices.ranks import hide_gpus, on_ranks
from benchmarks.executor import upkeep
from benchmarks.executor.sides import NUM_RANKS, Bare, Case, Ours, Theirs
from benchmarks.report import Row, at_least, at_most, run
from benchmarks.runs import simulated_s
from benchmarks.turns import WARM_UP, no_collector, require_equal, turns
from planner.ir.program import Program
from planner.ir.schedule import MESSAGE, Action, Op
from planner.ir.timeline import Span
from runtime.memory import storage_bytes, with_peak
from runtime.transport import GlooTransport, SharedMemoryTransport, Transport, open_shared

OVERHEAD = [Case(name, width=16, num_layers=2, rows=2, num_microbatches=16) for name in ("gpipe", "1f1b")]
REAL = [
    Case(name, width=512, num_layers=16, rows=128, num_microbatches=8, stages_per_rank=per_rank)
    for name, per_rank in (("1f1b", 1), ("gpipe", 1), ("1f1b-so", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
]
GOAL_US = 60.0
GOAL_IDEAL = 0.97
GOAL_STEP = 0.95
GOAL_WALL = 0.5
OURS = "halopipe"
GLOO = "halopipe over gloo"
TORCH = "torch.distributed.pipelining"
CLOCKS: Mapping[str, Callable[[], float]] = {
    "main-thread CPU": time.thread_time,
    "process CPU": time.process_time,  # gloo's own thread counted as well
    "wall": time.perf_counter,
}


@dataclass(frozen=True, slots=True)
class Raced:
    """What one rank measured of a case, medians.

    Attributes:
        seconds: of a step, by side and clock.
        action_s: of an action of ours, by side, stage and operation.
        step_s: of our step from the common start to this rank's end, by side.
        looked_s: of our step through shared memory, in which this rank looked for what was not there yet.
        program: that was executed.
    """

    seconds: Mapping[str, Mapping[str, float]]
    action_s: Mapping[str, Mapping[tuple[int, Op], float]]
    step_s: Mapping[str, float]
    looked_s: float
    program: Program


def measure(quick: bool) -> list[Row]:
    """Rows of overhead, then of real work, then of upkeep; ``quick`` asks the memory of one schedule."""
    overhead = _raced(OVERHEAD, 15 if quick else 200)
    rows = [row for case, *found in zip(OVERHEAD, *overhead, strict=True) for row in overhead_rows(case, found)]
    cases = REAL[:-1] if quick else REAL
    for case, *found in zip(cases, *_raced(cases, 5 if quick else 40), strict=True):
        rows += work_rows(case, found)
        rows += [] if quick and case != cases[0] else memory_rows(case)
    return [*rows, *upkeep.measure(quick)]


def _raced(cases: Sequence[Case], steps: int) -> list[list[Raced]]:
    """By rank, then by case."""
    return on_ranks(
        NUM_RANKS,
        lambda transport: [race(case, transport, steps) for case in cases],
        opened=partial(open_shared, required=True),
    )


def overhead_rows(case: Case, found: Sequence[Raced]) -> list[Row]:
    """Microseconds per action on each clock, the busier rank."""
    actions = 4 * case.num_microbatches  # of each rank: a forward, a backward, a send and a receive per micro-batch
    rows = []
    for clock in CLOCKS:
        of_side = {side: max(each.seconds[side][clock] for each in found) / actions * 1e6 for side in found[0].seconds}
        name = f"{case.schedule}, {clock}"
        most = GOAL_WALL if clock == "wall" else 1.0
        rows += [
            at_most(f"{name}: {OURS}", of_side[OURS], "us", GOAL_US if clock == "main-thread CPU" else None),
            Row(f"{name}: {GLOO}", of_side[GLOO], "us"),
            Row(f"{name}: {TORCH}", of_side[TORCH], "us"),
            Row(f"{name}: bare forwards and backwards", of_side["bare"], "us"),
            at_most(f"{name}: {OURS} / torch", of_side[OURS] / of_side[TORCH], "ratio", most),
        ]
    busier = max(found, key=lambda each: each.seconds[OURS]["main-thread CPU"])
    looked_us = busier.looked_s / actions * 1e6
    return [*rows, Row(f"{case.schedule}, main-thread CPU: {OURS}, of it looking for messages", looked_us, "us")]


def work_rows(case: Case, found: Sequence[Raced]) -> list[Row]:
    """The step beside the simulated ideal and beside torch's."""
    wall_s = {side: max(each.seconds[side]["wall"] for each in found) for side in (OURS, GLOO, TORCH)}
    rows = [Row(f"{case.schedule}, step: {side}", 1e3 * seconds, "ms") for side, seconds in wall_s.items()]
    for side in (OURS, GLOO):
        costs = {key: seconds for each in found for key, seconds in each.action_s[side].items()}
        ideal = ideal_s(found[0].program, (case.rows,) * case.num_microbatches, costs)
        reached = ideal / max(each.step_s[side] for each in found)
        goal = GOAL_IDEAL if side == OURS else None
        rows.append(at_least(f"{case.schedule}, step: simulated ideal / {side}", reached, "ratio", goal))
    return [*rows, at_most(f"{case.schedule}, step: {OURS} / torch", wall_s[OURS] / wall_s[TORCH], "ratio", GOAL_STEP)]


def memory_rows(case: Case) -> list[Row]:
    """Peak memory of both sides."""
    ours, theirs = (
        max(on_ranks(NUM_RANKS, lambda transport, s=side: peak_bytes(s, case, transport), opened=open_shared))
        for side in (OURS, TORCH)
    )
    return [
        Row(f"{case.schedule}, peak memory: {OURS}", ours / 2**20, "MiB"),
        Row(f"{case.schedule}, peak memory: {TORCH}", theirs / 2**20, "MiB"),
        at_most(f"{case.schedule}, peak memory: {OURS} / torch", ours / theirs, "ratio", 1.0),
    ]


def race(case: Case, transport: Transport, steps: int) -> Raced:
    """All sides in turn, ``steps`` times after some to warm up; and, where a rank has one stage, the bare calls."""
    ours = {OURS: Ours(case, transport), GLOO: Ours(case, GlooTransport())}
    sides: dict[str, Any] = {**ours, TORCH: Theirs(case, transport, ours[OURS].program)}
    for side in sides.values():
        side.start()
        side.step()
    require_equal({name: side.gradients() for name, side in sides.items()})
    if case.stages_per_rank == 1:
        sides["bare"] = Bare(case, transport)
    seconds: dict[str, dict[str, list[float]]] = {side: {clock: [] for clock in CLOCKS} for side in sides}
    action_s: dict[str, defaultdict[tuple[int, Op], list[float]]] = {name: defaultdict(list) for name in ours}
    step_s: dict[str, list[float]] = {name: [] for name in ours}
    looked_s: list[float] = []
    with no_collector():
        for number, name in turns(sides, steps, WARM_UP, between=gc.collect):  # behind it caches are cold
            side = sides[name]
            transport.barrier()  # what one rank waits for the other must not count for who comes next
            looked_before_s = _looked_s(transport)
            before = {clock: read() for clock, read in CLOCKS.items()}
            side.step()
            if number >= 0:
                for clock, read in CLOCKS.items():
                    seconds[name][clock].append(read() - before[clock])
                if name == OURS:
                    looked_s.append(_looked_s(transport) - looked_before_s)
                if name in ours:
                    step_s[name].append(side.step_s)
                    for key, value in durations(side.spans):
                        action_s[name][key].append(value)
    return Raced(
        {side: {clock: statistics.median(values) for clock, values in by.items()} for side, by in seconds.items()},
        {name: {key: statistics.median(values) for key, values in by.items()} for name, by in action_s.items()},
        {name: statistics.median(values) for name, values in step_s.items()},
        statistics.median(looked_s),
        ours[OURS].program,
    )


def _looked_s(transport: Transport) -> float:
    return transport.segments.looked_s if isinstance(transport, SharedMemoryTransport) else 0.0


def durations(spans: Iterable[Span]) -> Iterable[tuple[tuple[int, Op], float]]:
    """((stage, operation), seconds) of all that is no message."""
    for span in spans:
        action = Action.parse(span.action)
        if action.op not in MESSAGE:
            yield (action.stage, action.op), span.stop_s - span.start_s


def ideal_s(program: Program, micro_batches: tuple[int, ...], seconds: Mapping[tuple[int, Op], float]) -> float:
    """The simulated step of ``program`` with these costs of actions, by stage and operation; messages cost nothing."""
    return simulated_s(program, micro_batches, lambda action: seconds.get((action.stage, action.op), 0.0))


def peak_bytes(side: str, case: Case, transport: Transport) -> int:
    """The most memory that this rank has in use over three steps, its stages' parameters included."""
    ours = Ours(case, transport)
    runner: Ours | Theirs = ours if side == OURS else Theirs(case, transport, ours.program)
    del ours
    held = storage_bytes(runner.held)
    gc.collect()

    def run_steps() -> None:
        runner.start()
        for _ in range(3):
            runner.step()

    with_peak(lambda: None)  # the first use of the profiler takes seconds, which a peer would wait for
    transport.barrier()
    tensors = held + with_peak(run_steps)[1]
    messages = transport.segments.used_bytes if side == OURS and isinstance(transport, SharedMemoryTransport) else 0
    return tensors + messages


if __name__ == "__main__":
    hide_gpus()
    raise SystemExit(run("The executor beside torch.distributed.pipelining, 2 ranks", measure))
