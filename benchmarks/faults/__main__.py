"""Jobs that lose ranks, hosts, links, memory or their disk, at random: whether each ends as it should.

    python -m benchmarks.faults [--trials N] [--seed N] [--quick] [--json]

A trial is a job of ``halopipe run``'s own function on this host: a plan of two to four ranks, a step every few
milliseconds, evaluation and checkpoints between steps, one fault, and two restarts allowed.  Faults of a rank itself
come in a forward, a backward, an update, in data between steps or in an evaluation, on the first, a middle or the last
layer (:mod:`benchmarks.faults.victim`); faults from outside are signals to a random rank, at any time from its start
on, or while a checkpoint is being written; in some trials the newest checkpoint is damaged as well, as by a bad disk,
before the job goes on.  Some trials fill the job's disk (:mod:`benchmarks.faults.limits`), some are of several hosts,
of which one is lost, or its link (:mod:`benchmarks.faults.hosts`).

A trial ends as it should where the job reaches its last step, its losses and evaluations are bit for bit those of the
same plan without a fault, what is repeated is no more than the interval between checkpoints and the one that was still
being written, which takes longer than a step here (one more where a checkpoint was damaged), and no process, file of a
job or memory is left.  Nothing here is timed
but the recovery: from the end of the ranks to the first step of their successors; and, of jobs on several hosts, from
the end of the deadline to that of the last rank.

Then come ranks and links that are slow, and plans for what is left (:mod:`benchmarks.faults.slow`).  What this machine
gives no right to (network namespaces, a file system, a control group) is left out, and a row says so.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy.cases import DATA_PARALLEL, HYBRID
from benchmarks.devices.testbed import unavailable
from benchmarks.faults import hosts, limits, slow, victim
from benchmarks.faults.jobs import EVERY, STEPS, Outcome, left, memory, own_folder, rows, workers
from benchmarks.faults.victim import Fault
from benchmarks.report import Row, run
from benchmarks.runs import ran
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from runtime.checkpoint import complete_steps
from runtime.checkpoint.folders import DATA_FILE

DEADLINE_S = 5.0
ON_HOSTS = 0.2
ON_DISKS = 0.06
"""Shares of the trials."""
STRAGGLERS = 20
LINKS = 5
"""Jobs with a slow rank, and as many with noise; with a slow link."""

PLANS = {"1f1b/2": 3, DATA_PARALLEL: 2, HYBRID: 4}
"""Ranks by plan: a pipeline, replicas, and a pipeline of replicas."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
EXCEPTION = "exception"
OWN = (*victim.DEEDS, EXCEPTION)
AFTER_STEPS = 4
"""The first batch whose data may raise: data that have not worked for one step, read ahead, are refused for good."""
MOMENTS = (victim.FORWARD, victim.BACKWARD, victim.OPTIMISER, victim.BETWEEN, victim.EVALUATION)
ANY_TIME = "any time"
SAVING = "a save"
_LOOK_S = 0.001


@dataclass(frozen=True, slots=True)
class Trial:
    """One job with one fault.

    Attributes:
        place: layer of a fault of the rank's own; else the rank is drawn.
        at: the call that it comes at; of a signal, the share of the undisturbed job's time.
        damaged: whether the newest checkpoint is damaged too.
    """

    plan: str
    deed: str
    moment: str
    place: int
    at: float
    damaged: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the rank does it to itself."""
        return self.moment not in (ANY_TIME, SAVING)

    def __str__(self) -> str:
        where = f", layer {self.place}" if self.is_own else ""
        return f"{self.deed} in {self.moment}{where}, {self.plan}{', and a damaged checkpoint' * self.damaged}"


def drawn(count: int, seed: int, deeds: Sequence[str] = OWN) -> Iterator[Trial]:
    """Trials: every kind of fault about as often."""
    numbers = random.Random(seed)
    for _ in range(count):
        plan = numbers.choice(list(PLANS))
        damaged = numbers.random() < 0.1
        if numbers.random() < 0.65:
            moment = numbers.choice(MOMENTS)
            micro_batches = {"1f1b/2": 4, HYBRID: 4}.get(plan, 1)
            calls = {victim.FORWARD: STEPS * micro_batches, victim.BACKWARD: STEPS * micro_batches}
            most = calls.get(moment, STEPS if moment != victim.EVALUATION else STEPS // EVERY * victim.HELD_OUT)
            place = numbers.choice((0, victim.LAYERS // 2, victim.LAYERS - 1))
            deed = numbers.choice(deeds)
            at = numbers.randint(1, most)
            if deed == EXCEPTION and moment == victim.BETWEEN:
                at = max(at, AFTER_STEPS)
            yield Trial(plan, deed, moment, place, at, damaged)
        else:
            moment = numbers.choice((ANY_TIME, SAVING))
            yield Trial(plan, numbers.choice(list(SIGNALS)), moment, -1, numbers.random(), damaged)


def measure(quick: bool, trials: int, seed: int) -> list[Row]:
    """All trials, one after the other; ``--quick``: one of each."""
    found: list[Outcome] = []
    no_hosts = unavailable()
    no_disk = limits.no_small_disk()
    on_hosts = 0 if no_hosts else len(hosts.KINDS) if quick else round(ON_HOSTS * trials)
    on_disks = 0 if no_disk else 2 if quick else round(ON_DISKS * trials)
    with hosts.Hosts() as several:
        for trial in hosts.drawn(on_hosts, seed):
            _note(found, partial(several.tried, trial))
    plans = made()
    expected = dict[str, tuple[RunResult, float]]()

    def undisturbed(plan: str) -> tuple[RunResult, float]:
        if plan not in expected:
            with own_folder() as folder:
                began_s = time.monotonic()
                expected[plan] = _job(plans[plan], folder), time.monotonic() - began_s
        return expected[plan]

    for disk in limits.drawn(on_disks, seed, tuple(PLANS), (ANY_TIME, SAVING)):
        alone, _ = undisturbed(disk.plan)
        options = _options(Path("unused"))
        _note(found, partial(limits.tried, disk, plans[disk.plan], alone, options, disk.moment == SAVING))
    with limits.small_group() as group:
        deeds = [deed for deed in OWN if group is not None or deed != victim.KILLED]
        for one in drawn(4 if quick else trials - len(found), seed, deeds):
            _note(found, partial(tried, one, plans[one.plan], *undisturbed(one.plan), group))
    left_out = {"hosts and links": no_hosts, "full disks": no_disk, victim.KILLED: "" if group else "no control group"}
    said = [Row(f"{what} left out, {why}", 0.0, "") for what, why in left_out.items() if why]
    slow_links = [] if no_hosts else slow.link_rows(1 if quick else LINKS)
    ranks = slow.rank_rows(1 if quick else STRAGGLERS, seed)
    return [*said, *rows(found), *ranks, *slow_links, *slow.plan_rows(slow.NETWORKS[: 1 if quick else None])]


def _note(found: list[Outcome], tries: Callable[[], Outcome]) -> None:
    began_s = time.monotonic()
    found.append(one := tries())
    sys.stderr.write(
        f"{len(found)}: {one.trial}: {one.wrong or 'as it should'}, {time.monotonic() - began_s:.1f} s"
        f"{'' if one.beyond_s is None else f', ended {one.beyond_s:.2f} s beyond the deadline'}\n"
    )


def made() -> dict[str, Plan]:
    """The plans, by name."""
    return {name: hosts.plan_of(hosts.profile_of((0,) * ranks), name) for name, ranks in PLANS.items()}


def tried(trial: Trial, plan: Plan, expected: RunResult, alone_s: float, group: Path | None = None) -> Outcome:
    """The job under the fault, and what was left of it.

    Args:
        group: for ranks that are to be killed for memory.
    """
    with own_folder() as folder:
        before = memory()
        if trial.is_own:
            Fault(trial.deed, trial.moment, trial.place, round(trial.at)).plant(folder, group)
        over = threading.Event()
        saboteur = threading.Thread(target=_sabotage, args=(trial, folder, alone_s, over), daemon=True)
        saboteur.start()
        try:
            result = _job(plan, folder)
        except HalopipeError as error:
            return Outcome(trial, f"the job ended: {error.title}")
        finally:
            over.set()
            saboteur.join()
        recoveries = tuple(each.recovery_s for each in result.restarts)
        repeated = sum(each.repeated_steps for each in result.restarts)
        return Outcome(trial, _wrong(trial, result, expected, repeated) or left(folder, before), recoveries, repeated)


def _wrong(trial: Trial, result: RunResult, expected: RunResult, repeated: int) -> str:
    if result.losses != expected.losses:
        return f"other losses: {result.losses} for {expected.losses}"
    if result.scores != expected.scores:
        return f"other evaluations: {result.scores} for {expected.scores}"
    most = EVERY * (3 if trial.damaged else 2)
    if repeated > most * max(1, len(result.restarts)):
        return f"{repeated} steps were repeated, checkpoints are {EVERY} apart"
    return ""


def _job(plan: Plan, folder: Path) -> RunResult:
    return ran(plan, _options(folder))


def _options(folder: Path) -> RunOptions:
    return RunOptions(
        steps=STEPS,
        warmup=0,
        data="benchmarks.faults.victim:data",
        optimizer="benchmarks.faults.victim:optimiser",
        eval_data="benchmarks.faults.victim:held_out",
        eval_every=EVERY,
        checkpoint=str(folder / "saved"),
        checkpoint_every=EVERY,
        restarts=2,
        deadline_s=DEADLINE_S,
        check_first_step=False,
    )


def _sabotage(trial: Trial, folder: Path, alone_s: float, over: threading.Event) -> None:
    """Signals from outside, and damage to what was saved."""
    saved = folder / "saved"
    numbers = random.Random(str(trial))
    if not trial.is_own:
        due: Callable[[], bool] = partial(_later, time.monotonic() + trial.at * alone_s)
        if trial.moment == SAVING:
            due = partial(_is_saving, saved, 1 + int(trial.at * (STEPS // EVERY)))
        while not (due() and (running := workers())):
            if over.wait(_LOOK_S):
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(numbers.choice(running), SIGNALS[trial.deed])
    if trial.damaged:
        while not victim.happened(folder) if trial.is_own else False:
            if over.wait(_LOOK_S):
                return
        steps = complete_steps(saved)
        files = sorted((saved / f"step-{steps[-1]}").rglob(DATA_FILE)) if steps else []
        if files:
            with contextlib.suppress(OSError), numbers.choice(files).open("r+b") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size // 2))
                byte = file.read(1)
                file.seek(-len(byte), os.SEEK_CUR)
                file.write(bytes(255 - each for each in byte))


def _later(then_s: float) -> bool:
    return time.monotonic() >= then_s


def _is_saving(saved: Path, number: int) -> bool:
    """Whether the checkpoint of that number is being written, or was."""
    return any(saved.glob(f"step-{number * EVERY}*"))


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--trials": {"type": int, "default": 200, "help": "how many jobs"},
    "--seed": {"type": int, "default": 0, "help": "what draws their faults"},
}

if __name__ == "__main__":
    raise SystemExit(run("Jobs that lose ranks", measure, own=OPTIONS))
