"""What a job pays for surviving while nothing happens to it: its checkpoints, and looking for NaN.

*Saves*: steps in rounds, every other one after a save, in turns: what a round with a save takes more, in the median, is
what a save costs the training, whatever a run counts (:class:`halopipe.training.save_times.SaveTimes`), which is told
beside it.  The share is that of the interval which the same run would choose (``--checkpoint-every auto``) if it failed
every ten minutes, when saves are as frequent as they may be.

*Looking for NaN*: the same engine with ``--on-nan stop`` and with ``ignore``, a step of each by turns; and ``ignore``
twice, which shows what is noise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.devices.ranks import on_ranks
from benchmarks.executor.sides import NUM_RANKS, Case, Ours
from benchmarks.report import Row, at_most
from benchmarks.turns import WARM_UP, medians
from halopipe.data.sources import Position
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import Saves
from halopipe.terminal.units import AUTO_INTERVAL
from halopipe.training.checkpointing import Checkpoints
from halopipe.training.save_times import EndRequest
from runtime.checkpoint import Checkpoint
from runtime.numerics.finite import OnNan
from runtime.transport import Transport, open_shared

CASE = Case("1f1b", width=512, num_layers=16, rows=128, num_microbatches=8)
MTBF_S = 600.0
GOAL_SHARE = 1.0
GOAL_NAN = 1.01
STEPS_A_ROUND = 6
"""The files are written while so many steps are made."""
_SIDES: Mapping[str, OnNan] = {"stop": OnNan.STOP, "ignore": OnNan.IGNORE, "ignore again": OnNan.IGNORE}


@dataclass(frozen=True, slots=True)
class Rounds:
    """Of one rank: seconds of rounds without a save and with one, by turns; what was counted; bytes of a checkpoint."""

    without_s: tuple[float, ...]
    with_s: tuple[float, ...]
    counted: Saves
    num_bytes: int


def measure(quick: bool) -> list[Row]:
    """Rows of saves, then of NaN."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rounds = 3 if quick else 25
        found = on_ranks(NUM_RANKS, lambda transport: saving(CASE, transport, folder, rounds), opened=open_shared)
    steps = 10 if quick else 60
    seconds = on_ranks(NUM_RANKS, lambda transport: looking(CASE, transport, steps), opened=open_shared)
    return [*save_rows(found), *nan_rows(seconds)]


def save_rows(found: Sequence[Rounds]) -> list[Row]:
    """The rank where saves cost most."""
    cost_s = max(
        statistics.median(more - less for less, more in zip(r.without_s, r.with_s, strict=True)) for r in found
    )
    counted = max((each.counted for each in found), key=lambda saves: saves.seconds)
    share = 100 * max(0.0, cost_s) / (max(0.0, cost_s) + counted.interval_s)
    step_s = max(statistics.median(each.without_s) for each in found) / STEPS_A_ROUND
    return [
        Row("a save: bytes of the checkpoint", found[0].num_bytes / 2**20, "MiB"),
        Row("a save: a step beside it", 1e3 * step_s, "ms"),
        Row("a save: training stands still", 1e3 * counted.stood_s / counted.number, "ms"),
        Row("a save: costs the training", 1e3 * cost_s, "ms"),
        Row("a save: costs the training, as a run counts it", 1e3 * counted.seconds / counted.number, "ms"),
        Row("saves: interval of auto, a failure every 10 min", counted.interval_s, "s"),
        at_most("saves: share of the time at that interval", share, "%", GOAL_SHARE),
    ]


def nan_rows(seconds: Sequence[Mapping[str, float]]) -> list[Row]:
    """The slower rank."""
    step_s = {side: max(each[side] for each in seconds) for side in _SIDES}
    return [
        *(Row(f"on-nan, step: {side}", 1e3 * step_s[side], "ms") for side in _SIDES),
        Row("on-nan, step: ignore again / ignore", step_s["ignore again"] / step_s["ignore"], "ratio"),
        at_most("on-nan, step: stop / ignore", step_s["stop"] / step_s["ignore"], "ratio", GOAL_NAN),
    ]


def saving(case: Case, transport: Transport, folder: Path, rounds: int) -> Rounds:
    """Rounds of steps, each without and with a save at its start."""
    side = Ours(case, transport, OnNan.STOP)
    side.start()
    for _ in range(WARM_UP):
        side.step()
    options = RunOptions(checkpoint=str(folder), checkpoint_every=AUTO_INTERVAL, mtbf_s=MTBF_S, keep=1)
    kept = Checkpoints(options, side.engine, (0, 0.0), EndRequest(options.grace_s))
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * (rounds + 1)):
        saves = bool(number % 2)
        transport.barrier()
        begun_s = time.perf_counter()
        if saves:
            kept.save(Position())
        for _ in range(STEPS_A_ROUND):
            step_begun_s = time.perf_counter()
            side.step()
            kept.stepped(time.perf_counter() - step_begun_s)
        if number > 1:  # the first save takes its memory
            taken[saves].append(time.perf_counter() - begun_s)
    counted = kept.saves
    kept.finish(Position())
    manifest = Checkpoint.open(folder).manifest
    num_bytes = sum(files.data_bytes for files in manifest.folders.values())
    return Rounds(tuple(taken[False]), tuple(taken[True]), counted, num_bytes)


def looking(case: Case, transport: Transport, steps: int) -> dict[str, float]:
    """Median seconds of a step by side, by turns and in changing order."""
    sides = {name: Ours(case, transport, on_nan) for name, on_nan in _SIDES.items()}
    for side in sides.values():
        side.start()
    (step_s,) = medians({name: side.step for name, side in sides.items()}, steps, transport.barrier)
    return step_s
