"""Where a run goes on: the checkpoint that it begins with, chosen once for all ranks, and whether it is this model's.

Its fingerprint is the model's: plans are made anew as machines come and go, and any plan of the model goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from halopipe.data.sources import Position
from halopipe.run_spec.options import IF_ANY, RunOptions
from halopipe.terminal import units
from halopipe.training.checkpointing import DATA, ENDED, FAILURES, MICRO_BATCHES, RAN, SEED, fingerprints_of
from planner.ir.errors import CorruptFileError, HalopipeError, StaleFileError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Decision, Plan
from runtime.checkpoint.folders import MANIFEST, complete_path, complete_steps, set_aside
from runtime.checkpoint.manifest import damaged
from runtime.checkpoint.reader import Checkpoint
from runtime.checkpoint.training_state import STEP
from runtime.engine import Engine
from runtime.monitor.failure import read_error, write_error

if TYPE_CHECKING:
    from cuda_ops._torch import Store

_CHOSEN = "resume"
"""The store's key for the step that a run goes on from."""

_SHOWN = 3
_ANEW = "--checkpoint FOLDER --resume auto: another folder, to begin anew"
_NONE = "none"


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, and where the run stood."""

    checkpoint: Checkpoint

    @property
    def step(self) -> int:
        """Training steps done."""
        return int(self.checkpoint.amount(STEP))

    def seed(self, otherwise: int) -> int:
        """Of what was drawn."""
        return int(self.checkpoint.amount(SEED)) if SEED in self.checkpoint else otherwise

    @property
    def history(self) -> tuple[int, float]:
        """How often the job has failed, and how long it ran; after a save that was not its last, once more."""
        if RAN not in self.checkpoint:
            return 0, 0.0
        failures, ended = (int(self.checkpoint.amount(key)) for key in (FAILURES, ENDED))
        return failures + (not ended), float(self.checkpoint.amount(RAN))

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Samples of each micro-batch of the plan that saved it; empty where it does not say."""
        sizes = str(self.checkpoint.number(MICRO_BATCHES)) if MICRO_BATCHES in self.checkpoint else ""
        if not all(number.isdecimal() for number in sizes.split()):
            raise damaged(self.checkpoint.path, f"{MANIFEST} says that {MICRO_BATCHES} are {sizes!r}, which are none")
        return tuple(map(int, sizes.split()))

    @property
    def position(self) -> Position:
        """In the data."""
        keys = [f"{DATA}/{name}" for name in ("epoch", "batches", "samples")]
        return Position(*(int(self.checkpoint.amount(key)) for key in keys if key in self.checkpoint))

    def other_micro_batches(self, engine: Engine, decision: Decision) -> str:
        """What people should know who go on from it by a plan of other micro-batches; empty: it makes no difference.

        Steps are then those of one device all the same, but not those that the plan before would have made.
        """
        before = self.micro_batches
        layers = engine.layers_by_micro_batch
        if not layers or before in ((), decision.micro_batches):
            return ""
        shown = f"layer{'s' * (len(layers) > 1)} {', '.join(layers[:_SHOWN])}"
        shown += f" and {len(layers) - _SHOWN} more" * (len(layers) > _SHOWN)
        was, now = map(units.micro_batches, (before, decision.micro_batches))
        return (
            f"{self.checkpoint.path} was saved by {was}, this plan has {now}: random draws or statistics of {shown} "
            "go by micro-batch, and are others from here on than by the plan before; "
            f"to keep them: halopipe plan --micro-batch {max(before)}"
        )


def resumed(options: RunOptions, graph: Graph, store: Store, rank: int) -> Saved:
    """The checkpoint to go on from, the one that was settled on or rank 0 chooses.

    Raises:
        UsageError: all steps are done already, or updates are made of another number of steps now.
        MissingFileError, CorruptFileError: there is none, or it is damaged.
        StaleFileError: it is another model's.
    """
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
            answer = {"said": make()}
        except HalopipeError as error:
            store.set(key, json.dumps({"error": write_error(error)}))
            raise
        store.set(key, json.dumps(answer))
    message = json.loads(store.get(key))
    if "error" in message:
        raise read_error(message["error"])
    return str(message["said"])


@dataclass(frozen=True, slots=True)
class ResumePoint:
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


def resume_point(plan: Plan, options: RunOptions, *, began_anew: bool = False) -> ResumePoint:
    """Where a run of ``plan`` begins: with ``--resume auto`` after the newest sound checkpoint, or anew without any.

    Args:
        began_anew: whether all checkpoints there are of this very job, which began without any.  Where none of them is
            sound, they are set aside and it begins anew: nothing is lost that it could not do again.

    Raises:
        CorruptFileError: there are checkpoints, and none of them is sound.
        StaleFileError: all steps are done, of another model.
    """
    if options.resume != IF_ANY:
        return ResumePoint(options)
    try:
        checkpoint, skipped = newest_sound(options.checkpoint)
    except CorruptFileError as error:
        if not began_anew:
            raise
        checkpoint = None
        skipped = _all_set_aside(Path(options.checkpoint), error.details)
    if checkpoint is None:
        return ResumePoint(replace(options, resume=False), skipped=skipped)
    step = checkpoint.manifest.step
    start = ResumePoint(replace(options, resume=True, resume_step=step), step, skipped)
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
    steps = complete_steps(folder)
    faults = list[CorruptFileError]()
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
            [_ANEW],
        )
    return None, ()


def resume_point_by_rank_0(
    plan: Plan,
    options: RunOptions,
    store: Store,
    rank: int,
    settle: Callable[[Plan, RunOptions], ResumePoint] = resume_point,
) -> ResumePoint:
    """The same for all ranks of a job; see :func:`resume_point`, which is what rank 0 calls by default."""

    def look() -> str:
        start = settle(plan, options)
        return json.dumps([start.options.resume, start.options.resume_step, start.step, start.skipped])

    if options.resume != IF_ANY:
        return ResumePoint(options)
    resume, resume_step, step, skipped = json.loads(said_by_rank_0(store, "start", rank, look))
    return ResumePoint(replace(options, resume=resume, resume_step=resume_step), step, tuple(skipped))


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
            ["run the plan of the model that was saved, in the same dtype", _ANEW],
        )
