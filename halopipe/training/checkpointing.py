"""The checkpoints of a run: when they are written, and which one a run goes on from.

A checkpoint as runs read it: what it holds beside the model's state, and whether it is this model's.

    data/epoch, data/batches, data/samples     the position in the data
    run/step, run/seed                         steps done; what data and dropout are drawn with
    run/plan, run/micro_batches                the plan in words; samples of each micro-batch
    run/failures, run/seconds, run/ended       of a job that chooses its interval: what it has seen so far
    run/weights_alone                          the checkpoint was made of a plain state dict

Its fingerprint is the model's: plans are made anew as machines come and go, and any plan of the model goes on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from halopipe.data.sources import Position
from halopipe.run_spec.options import IF_ANY, RunOptions
from halopipe.run_spec.result import Saves
from halopipe.terminal import units
from halopipe.terminal.units import AUTO_INTERVAL
from halopipe.training.rank_device import hosts_of
from halopipe.training.save_times import EndRequest, SaveTimes
from planner.ir.errors import (
    CheckpointError,
    CorruptFileError,
    EndedError,
    HalopipeError,
    StaleFileError,
    UsageError,
)
from planner.ir.fingerprint import fingerprint
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Plan
from runtime.checkpoint import BackgroundSaver, Checkpoint, Number, RankState, complete_steps, joined, save
from runtime.checkpoint.folders import complete_path, set_aside
from runtime.checkpoint.training_state import STEP
from runtime.engine import Engine
from runtime.monitor.activity import Activity
from runtime.monitor.failure import read_error, write_error
from runtime.pipeline.executor import NOTHING, SAVE, STOP
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store

_CHOSEN = "resume"
"""The store's key for the step that a run goes on from."""

SAVE_S = 600.0
"""Longest time until a checkpoint is on disk."""

_log = logging.getLogger(__name__)


def resumed(options: RunOptions, graph: Graph, store: Store, rank: int) -> Saved | None:
    """The checkpoint to go on from, the one that was settled on or rank 0 chooses; None where the run begins anew.

    Raises:
        UsageError: all steps are done already, or updates are made of another number of steps now.
        MissingFileError, CorruptFileError: there is none, or it is damaged.
        StaleFileError: it is another model's.
    """
    if not options.resume:
        return None
    step = options.resume_step
    if step < 0:
        newest = said_by_rank_0(store, _CHOSEN, rank, lambda: str(Checkpoint.open(options.checkpoint).manifest.step))
        step = int(newest)
    saved = open_saved(options.checkpoint, graph, step)
    if saved.step % options.accumulate:
        raise UsageError(
            f"{saved.checkpoint.path} lies between updates of {options.accumulate} steps each",
            [f"it was saved after {saved.step}"],
            ["--accumulate as it was"],
        )
    if saved.step >= options.steps:
        raise UsageError(
            f"all {options.steps} steps are done",
            [f"{saved.checkpoint.path} was saved after {saved.step}"],
            [f"--steps {saved.step + options.steps}"],
        )
    return saved


def said_by_rank_0(store: Store, key: str, rank: int, make: Callable[[], str]) -> str:
    """What ``make`` gives on rank 0, told to all; what it raises there, all raise: they would wait for its word."""
    if rank == 0:
        try:
            told = {"said": make()}
        except HalopipeError as error:
            store.set(key, json.dumps({"error": write_error(error)}))
            raise
        store.set(key, json.dumps(told))
    found = json.loads(store.get(key))
    if "error" in found:
        raise read_error(found["error"])
    return str(found["said"])


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins.

    Attributes:
        options: of the run; what it goes on from is decided.
        step: steps done before; with ``--resume`` alone they are not known before the ranks are there, and 0 here.
        skipped: a line for each damaged checkpoint that is newer.
    """

    options: RunOptions
    step: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def is_end(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.options.steps

    @property
    def lines(self) -> tuple[str, ...]:
        """What people should know of it."""
        path = complete_path(Path(self.options.checkpoint), self.step)
        return (*self.skipped, *([f"going on from {path}"] if self.step and not self.is_end else []))

    @property
    def end(self) -> str:
        """Says so."""
        return f"all {self.options.steps} steps are done: {complete_path(Path(self.options.checkpoint), self.step)}"


def settled(plan: Plan, options: RunOptions, *, began_anew: bool = False) -> Start:
    """Where a run of ``plan`` begins: with ``--resume auto`` after the newest sound checkpoint, or anew without any.

    Args:
        began_anew: whether all checkpoints there are of this very job, which began without any.  Where none of them is
            sound, they are set aside and it begins anew: nothing is lost that it could not do again.

    Raises:
        CorruptFileError: there are checkpoints, and none of them is sound.
        StaleFileError: all steps are done, of another model.
    """
    if options.resume != IF_ANY:
        return Start(options)
    try:
        checkpoint, skipped = newest_sound(options.checkpoint)
    except CorruptFileError as error:
        if not began_anew:
            raise
        checkpoint, skipped = None, _all_set_aside(Path(options.checkpoint), error.details)
    if checkpoint is None:
        return Start(replace(options, resume=False), skipped=skipped)
    step = checkpoint.manifest.step
    start = Start(replace(options, resume=True, resume_step=step), step, skipped)
    if start.is_end and options.dtype in ("", plan.inputs.model.dtype):
        _require_model(Saved(checkpoint), plan.inputs.model_fingerprint)
    return start


def _all_set_aside(folder: Path, faults: Sequence[str]) -> tuple[str, ...]:
    """Renames all checkpoints of ``folder``, none of which is sound; a line for each, the newest first."""
    steps = reversed(complete_steps(folder))
    return tuple(f"{fault}; it is kept as {set_aside(folder, step)}" for step, fault in zip(steps, faults, strict=True))


def newest_sound(folder: str | Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest checkpoint without a fault, every byte of which was hashed, and a line for each that is passed over.

    None where there is no checkpoint at all.

    Raises:
        CorruptFileError: there are some, and none of them is sound.
        NewerFileError: a newer release wrote it, and would go on from it.
    """
    steps, faults = complete_steps(folder), list[CorruptFileError]()
    for step in reversed(steps):
        try:
            checkpoint = Checkpoint.open(folder, step)
            checkpoint.verify()
        except CorruptFileError as error:
            faults.append(error)
            continue
        return checkpoint, tuple(f"{fault.title} and passed over: {fault.details[0]}" for fault in faults)
    if faults:
        raise CorruptFileError(
            f"no checkpoint in {folder} is sound",
            [f"{fault.title}: {fault.details[0]}" for fault in faults],
            ["another --checkpoint folder, to begin anew"],
        )
    return None, ()


def settled_by_rank_0(
    plan: Plan,
    options: RunOptions,
    store: Store,
    rank: int,
    settle: Callable[[Plan, RunOptions], Start] = settled,
) -> Start:
    """The same for all ranks of a job; see :func:`settled`, which is what rank 0 calls by default."""

    def look() -> str:
        found = settle(plan, options)
        return json.dumps([found.options.resume, found.options.resume_step, found.step, found.skipped])

    if options.resume != IF_ANY:
        return Start(options)
    resume, resume_step, step, skipped = json.loads(said_by_rank_0(store, "start", rank, look))
    return Start(replace(options, resume=resume, resume_step=resume_step), step, tuple(skipped))


class Checkpoints:
    """Writes the checkpoints of a run while it goes on; all ranks call the same.

    A save that fails while steps are left, as on a full disk, is told, and tried again at the next interval: the last
    good checkpoint is still there.  One at the end of the job ends it with the error.

    Args:
        gather: waits for all ranks, however long one of them writes.
        seed: of what is drawn.
        decision: of the plan.
        begun: what the run goes on from; None: it begins anew.
        end: whether somebody asked this process to end.

    Attributes:
        is_due: whether to save after the step that was noted last; the same on all ranks.
    """

    def __init__(
        self,
        options: RunOptions,
        engine: Engine,
        graph: Graph,
        transport: Transport,
        gather: Callable[[], object],
        seed: int,
        decision: Decision,
        begun: Saved | None,
        activity: Activity,
        end: EndRequest,
    ) -> None:
        self._folder, self._accumulate, self._steps = options.checkpoint, options.accumulate, options.steps
        self._last = engine.num_steps
        self._engine, self._rank, self._activity, self._end = engine, transport.rank, activity, end
        self._fingerprints, self._seed, self._decision = fingerprints_of(graph), seed, decision
        failures, ran_s = (0, 0.0) if begun is None else begun.history
        self._times = SaveTimes.of(options, len(set(hosts_of(decision))), failures, ran_s)
        self._has_history = options.checkpoint_every == AUTO_INTERVAL
        self._saver: BackgroundSaver | None = None
        self._is_writing = self.is_due = False
        engine.asking.mine = self._wish
        if options.checkpoint:
            self._saver = BackgroundSaver(
                options.checkpoint,
                transport.rank,
                transport.world_size,
                gather,
                keep=options.keep,
                deadline_s=SAVE_S,
            )

    @property
    def saves(self) -> Saves:
        """What was saved, and what it cost."""
        return self._times.saves

    def stepped(self, step_s: float) -> None:
        """Note a step, which took so long with its waits."""
        self._times.stepped(step_s, beside_writing=self._is_writing)
        agreed = self._engine.asking.agreed == SAVE
        self.is_due = agreed or self._times.is_due_after(self._engine.num_steps)
        if self._saver is not None and self._is_writing and not self._saver.is_writing:
            self._is_writing = False
            self._say(self._saver.failure)

    def save(self, position: Position) -> None:
        """Begin to save; training may go on once this returns."""
        if self._saver is None:
            return
        with self._times.saving():
            self._settle(self._saver)
            self._begin(self._saver, position, is_last=False)
        self._is_writing = True

    def finish(self, position: Position) -> None:
        """Save the last state unless that is done, and wait until it is on disk.

        Raises:
            CheckpointError: it could not be saved.
        """
        if self._saver is None:
            return
        if self._last == self._engine.num_steps:
            self._saver.wait()
            return
        with self._times.saving(is_last=True):
            self._settle(self._saver)
            self._begin(self._saver, position, is_last=True)
            self._saver.wait()

    def end(self, position: Position) -> NoReturn:
        """Save the last state and end the job, which somebody asked for.

        Raises:
            EndedError: it is on disk.
            CheckpointError: it could not be saved.
        """
        self.finish(position)
        num_steps, why = self._engine.num_steps, self._end.why or "another rank was asked"
        done = f"after {units.count(num_steps, 'step')}" if num_steps else "before its first step"
        saved = complete_path(Path(self._folder), num_steps)
        there = bool(self._folder) and saved.exists()
        raise EndedError(
            f"the job ended {done}: {why}",
            [f"saved as {saved}" if there else "nothing was to be saved"],
            ["--resume, to go on from there"] if there else ["run it again"],
        )

    def _settle(self, saver: BackgroundSaver) -> None:
        """Until the last save is on disk, or known to have failed."""
        try:
            saver.wait()
        except CheckpointError as error:
            self._times.failed()
            if self._is_writing:  # nobody has looked since it ended
                self._say(error)
        self._is_writing = False

    def _begin(self, saver: BackgroundSaver, position: Position, *, is_last: bool) -> None:
        self._last = self._engine.num_steps
        numbers = numbers_of(self._decision)
        if self._has_history:
            is_last = is_last or self._last == self._steps
            numbers |= {FAILURES: self._times.failures, RAN: self._times.seconds_run, ENDED: is_last}
        state = with_numbers(self._engine.state(), self._rank, self._seed, position, numbers)
        saver.save(self._last, state, self._fingerprints)

    def _wish(self) -> int:
        """What this rank asks of all before a step: rank 0's clock says when to save, whoever is asked to end tells."""
        num_steps = self._engine.num_steps
        if self._end.why and num_steps % self._accumulate == 0:
            return STOP
        return SAVE if self._rank == 0 and self._times.is_due and (num_steps + 1) % self._accumulate == 0 else NOTHING

    def _say(self, error: HalopipeError | None) -> None:
        """Tell people that a checkpoint was not saved, while the job goes on; rank 0 does."""
        if error is None or self._rank:
            return
        text = "; ".join([error.title, *error.details, "the job goes on, and tries again at the next interval"])
        _log.warning("%s", text)
        self._activity.remark = text


def save_now(
    folder: str | Path,
    engine: Engine,
    graph: Graph,
    transport: Transport,
    gather: Callable[[], object],
    decision: Decision,
    *,
    seed: int,
    keep: int,
) -> None:
    """Save what all ranks have, each calling this; returns once it is on disk.

    Args:
        gather: waits for all ranks.
        seed: of what is drawn.
        keep: so many checkpoints stay; 0: all.
    """
    save(
        folder,
        engine.num_steps,
        with_numbers(engine.state(), transport.rank, seed, None, numbers_of(decision)),
        transport.rank,
        transport.world_size,
        gather,
        fingerprints_of(graph),
        keep=keep,
    )


def with_numbers(
    state: RankState, rank: int, seed: int, position: Position | None, more: Mapping[str, Number] | None = None
) -> RankState:
    """``state`` and what belongs to the run; rank 0 writes that."""
    numbers: dict[str, Number] = {SEED: seed, **(more or {})}
    if position is not None:
        numbers |= {f"{DATA}/{name}": getattr(position, name) for name in ("epoch", "batches", "samples")}
    return joined((state, RankState({}, {}, numbers, frozenset(numbers) if rank == 0 else frozenset())))


def numbers_of(decision: Decision) -> dict[str, Number]:
    """What a checkpoint tells of the plan that it was saved by."""
    return {PLAN: plan_text(decision), MICRO_BATCHES: " ".join(map(str, decision.micro_batches))}


def other_micro_batches(saved: Saved, engine: Engine, decision: Decision) -> str:
    """What people should know who go on from ``saved`` by a plan of other micro-batches; empty: it makes no difference.

    Steps are then those of one device all the same, but not those that the plan before would have made.
    """
    before, layers = saved.micro_batches, engine.layers_by_micro_batch
    if not layers or before in ((), decision.micro_batches):
        return ""
    shown = f"layer{'s' * (len(layers) > 1)} {', '.join(layers[:_SHOWN])}"
    shown += f" and {len(layers) - _SHOWN} more" * (len(layers) > _SHOWN)
    was, now = map(units.micro_batches, (before, decision.micro_batches))
    return (
        f"{saved.checkpoint.path} was saved by {was}, this plan has {now}: random draws or statistics of {shown} "
        "go by micro-batch, and are others from here on than by the plan before; "
        f"to keep them: halopipe plan --micro-batch {max(before)}"
    )


_SHOWN = 3
SEED, PLAN, MICRO_BATCHES = "run/seed", "run/plan", "run/micro_batches"
DATA = "data"
FAILURES, RAN, ENDED = "run/failures", "run/seconds", "run/ended"
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, and where the run stood."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Training steps done."""
        return int(self.checkpoint.number(STEP) or 0)

    def seed(self, otherwise: int) -> int:
        """Of what was drawn."""
        return int(self.checkpoint.number(SEED) or 0) if SEED in self.checkpoint else otherwise

    @property
    def history(self) -> tuple[int, float]:
        """How often the job has failed, and how long it ran; after a save that was not its last, once more."""
        if RAN not in self.checkpoint:
            return 0, 0.0
        failures, ended = (int(self.checkpoint.number(key) or 0) for key in (FAILURES, ENDED))
        return failures + (not ended), float(self.checkpoint.number(RAN) or 0.0)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Samples of each micro-batch of the plan that saved it; empty where it does not say."""
        told = str(self.checkpoint.number(MICRO_BATCHES)) if MICRO_BATCHES in self.checkpoint else ""
        return tuple(map(int, told.split()))

    @property
    def position(self) -> Position:
        """In the data."""
        keys = [f"{DATA}/{name}" for name in ("epoch", "batches", "samples")]
        return Position(*(int(self.checkpoint.number(key) or 0) for key in keys if key in self.checkpoint))


def fingerprints_of(graph: Graph) -> dict[str, str]:
    """What a checkpoint and whoever reads it must agree on."""
    return {"model": fingerprint(graph)}


def open_saved(folder: str | Path, graph: Graph, step: int | None = None) -> Saved:
    """The checkpoint of ``step``, by default the newest complete one, of the model that ``graph`` is of.

    Raises:
        MissingFileError, CorruptFileError: there is none, or it is damaged.
        StaleFileError: it is another model's.
    """
    saved = Saved(Checkpoint.open(folder, step))
    _require_model(saved, fingerprints_of(graph)["model"])
    return saved


def _require_model(saved: Saved, mine: str) -> None:
    theirs = saved.checkpoint.manifest.fingerprints.get("model", _NONE)
    if theirs != mine:
        raise StaleFileError(
            f"{saved.checkpoint.path} belongs to another model",
            [f"checkpoint: {theirs}", f"here: {mine}"],
            ["run the plan of the model that was saved, in the same dtype", "another --checkpoint folder"],
        )


def plan_text(decision: Decision) -> str:
    """``2 stages on 3 ranks, 1f1b, 4 micro-batches``."""
    counted = (
        units.count(len(decision.stages), "stage") + f" on {units.count(decision.num_ranks, 'rank')}",
        decision.schedule,
        units.count(len(decision.micro_batches), "micro-batch", "micro-batches")
        + (f" of {decision.num_slices} token slices" if decision.token_slices else ""),
    )
    return ", ".join(counted)
