"""Jobs that lose ranks, at random: whether each ends as it should, with the curve of a job that lost nobody.

    python -m benchmarks.faults [--trials N] [--seed N] [--quick] [--json]

A trial is a job of ``halopipe run``'s own function on this host: a plan of two to four ranks, a step every few
milliseconds, evaluation and checkpoints between steps, one fault, and two restarts allowed.  Faults of a rank itself
come in a forward, a backward, an update, in data between steps or in an evaluation, on the first, a middle or the last
layer (:mod:`benchmarks.faults.victim`); faults from outside are signals to a random rank, at any time from its start
on, or while a checkpoint is being written; in some trials the newest checkpoint is damaged as well, as by a bad disk,
before the job goes on.

A trial ends as it should where the job reaches its last step, its losses and evaluations are bit for bit those of the
same plan without a fault, what is repeated is no more than the interval between checkpoints (one more where a
checkpoint was damaged or was being written), and no process, file of a job or memory is left.  Nothing here is timed
but the recovery: from the end of the ranks to the first step of their successors.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.accuracy.cases import DATA_PARALLEL, HYBRID, Network
from benchmarks.accuracy.plans import case
from benchmarks.faults import victim
from benchmarks.faults.victim import Fault
from benchmarks.memory import cluster_of, memory_profile
from benchmarks.report import Row, at_least, at_most, run
from cuda_ops.device.host import process_state
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Optimizer
from profiler import load_model
from profiler.capture.graph import capture
from runtime.checkpoint import complete_steps
from runtime.checkpoint.reader import DATA_FILE

STEPS, EVERY, DEADLINE_S = 12, 3, 5.0
GOAL_S = 6.0
PLANS = {"1f1b/2": 3, DATA_PARALLEL: 2, HYBRID: 4}
"""Ranks by plan: a pipeline, replicas, and a pipeline of replicas."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
OWN = (*victim.DEEDS, "exception", "out of memory")
MOMENTS = (victim.FORWARD, victim.BACKWARD, victim.OPTIMISER, victim.BETWEEN, victim.EVALUATION)
ANY_TIME, SAVING = "any time", "a save"
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial.

    Attributes:
        wrong: why it did not end as it should; empty if it did.
        recoveries_s: of each restart.
        repeated: steps done again.
    """

    trial: Trial
    wrong: str
    recoveries_s: tuple[float, ...] = ()
    repeated: int = 0


def drawn(count: int, seed: int) -> Iterator[Trial]:
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
            yield Trial(plan, numbers.choice(OWN), moment, place, numbers.randint(1, most), damaged)
        else:
            moment = numbers.choice((ANY_TIME, SAVING))
            yield Trial(plan, numbers.choice(list(SIGNALS)), moment, -1, numbers.random(), damaged)


def measure(trials: int, seed: int, quick: bool) -> list[Row]:
    """All trials, one after the other."""
    plans = made()
    expected: dict[str, tuple[RunResult, float]] = {}
    found: list[Outcome] = []
    for number, trial in enumerate(drawn(4 if quick else trials, seed), 1):
        if trial.plan not in expected:
            with _folder() as folder:
                began_s = time.monotonic()
                expected[trial.plan] = _job(plans[trial.plan], folder), time.monotonic() - began_s
        began_s = time.monotonic()
        found.append(tried(trial, plans[trial.plan], *expected[trial.plan]))
        took_s = time.monotonic() - began_s
        sys.stderr.write(f"{number}: {trial}: {found[-1].wrong or 'as it should'}, {took_s:.1f} s\n")
    return list(rows(found))


def rows(found: Sequence[Outcome]) -> Iterator[Row]:
    """What is asked of all."""
    good = [each for each in found if not each.wrong]
    yield Row("trials", len(found), "")
    yield at_least("ended as they should", len(good), "", len(found))
    for name, of in (("fault", lambda t: t.deed), ("moment", lambda t: t.moment), ("plan", lambda t: t.plan)):
        counts, well = Counter(of(each.trial) for each in found), Counter(of(each.trial) for each in good)
        for kind, count in sorted(counts.items()):
            yield at_least(f"{name} {kind}: of {count} as they should", well[kind], "", count)
    recoveries = [s for each in found for s in each.recoveries_s]
    if recoveries:
        yield Row("restarts", len(recoveries), "")
        yield at_most("recovery, median", statistics.median(recoveries), "s", GOAL_S)
        yield Row("recovery, largest", max(recoveries), "s")
    yield at_most("steps repeated, most", max((each.repeated for each in found), default=0), "steps", 3 * EVERY)


def made() -> dict[str, Plan]:
    """The plans, by name."""
    source = ModelSource("benchmarks.faults.victim:network")
    network = Network(source, victim.SAMPLES, (1, 2, 4, 8))
    model = load_model(source)
    profile = replace(memory_profile(network, capture(model), model), optimizer=Optimizer("Adam", {"lr": 1e-2}, 2.0))
    return {
        name: case(Problem(replace(profile, cluster=cluster_of(ranks)), network.samples), name, pads=False).plan
        for name, ranks in PLANS.items()
    }


def tried(trial: Trial, plan: Plan, expected: RunResult, alone_s: float) -> Outcome:
    """The job under the fault, and what was left of it."""
    with _folder() as folder:
        before = _memory()
        if trial.is_own:
            Fault(trial.deed, trial.moment, trial.place, round(trial.at)).plant(folder)
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
        return Outcome(trial, _wrong(trial, result, expected, repeated) or _left(folder, before), recoveries, repeated)


def _wrong(trial: Trial, result: RunResult, expected: RunResult, repeated: int) -> str:
    if result.losses != expected.losses:
        return f"other losses: {result.losses} for {expected.losses}"
    if result.scores != expected.scores:
        return f"other evaluations: {result.scores} for {expected.scores}"
    most = EVERY * (2 if trial.damaged or not trial.is_own else 1) + (trial.moment == SAVING) * EVERY
    if repeated > most * max(1, len(result.restarts)):
        return f"{repeated} steps were repeated, checkpoints are {EVERY} apart"
    return ""


def _left(folder: Path, before: set[str]) -> str:
    """Processes of the job, files of it, memory."""
    end_s = time.monotonic() + 2.0
    while (workers := _workers()) and time.monotonic() < end_s:
        time.sleep(0.05)
    files = [path.name for path in folder.glob("halopipe-*")]
    memory = sorted(_memory() - before)
    return "; ".join(
        f"{what} left: {', '.join(map(str, each))}"
        for what, each in (("processes", workers), ("folders", files), ("memory", memory))
        if each
    )


def _job(plan: Plan, folder: Path) -> RunResult:
    options = RunOptions(
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
    result = run_plan(plan, options)
    if result is None:
        raise RuntimeError("this benchmark runs outside torchrun")
    return result


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary directory of its own, for this process and those that it starts."""
    with tempfile.TemporaryDirectory() as name:
        before = os.environ.get("TMPDIR")
        os.environ["TMPDIR"], tempfile.tempdir = name, None
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = None
            if before is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = before


def _sabotage(trial: Trial, folder: Path, alone_s: float, over: threading.Event) -> None:
    """Signals from outside, and damage to what was saved."""
    saved, numbers = folder / "saved", random.Random(str(trial))
    if not trial.is_own:
        due: Callable[[], bool] = partial(_later, time.monotonic() + trial.at * alone_s)
        if trial.moment == SAVING:
            due = partial(_is_saving, saved, 1 + int(trial.at * (STEPS // EVERY)))
        while not (due() and (workers := _workers())):
            if over.wait(_LOOK_S):
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(numbers.choice(workers), SIGNALS[trial.deed])
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


def _workers() -> list[int]:
    """Processes that the forking servers of this process have forked."""
    numbers = [int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal()]
    parents = {number: state.parent for number in numbers if (state := process_state(number)) is not None}
    mine = {number for number, parent in parents.items() if parent == os.getpid()}
    return [number for number, parent in parents.items() if parent in mine]


def _memory() -> set[str]:
    shared = Path("/dev/shm")
    return {path.name for path in shared.iterdir()} if shared.is_dir() else set()


def main() -> int:
    """Parse ``--trials`` and ``--seed``, and what every benchmark takes."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options, rest = parser.parse_known_args()

    def measured(quick: bool) -> list[Row]:
        return measure(options.trials, options.seed, quick)

    return run("Jobs that lose ranks", measured, rest)


if __name__ == "__main__":
    raise SystemExit(main())
