"""The checkpoints of a run: when they are written, and which one a run goes on from.

A checkpoint as runs read it: what it holds beside the model's state, and whether it is this model's.

    data/epoch, data/batches, data/samples     the position in the data
    run/step, run/seed                         steps done; what data and dropout are drawn with

Its fingerprint is the model's: plans are made anew as machines come and go, and any plan of the model goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halopipe.data.sources import Position
from halopipe.run_spec.options import IF_ANY, RunOptions
from halopipe.terminal import units
from planner.ir.errors import CorruptFileError, HalopipeError, MissingFileError, StaleFileError, UsageError
from planner.ir.files import replaced
from planner.ir.fingerprint import fingerprint
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from runtime.checkpoint import (
    BackgroundSaver,
    Checkpoint,
    Number,
    RankState,
    complete_steps,
    joined,
    save,
    whole_state_dict,
)
from runtime.checkpoint.folders import complete_path
from runtime.checkpoint.state import MODEL
from runtime.checkpoint.training_state import STEP
from runtime.engine import Engine
from runtime.monitor.failure import read_error, write_error
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store

_CHOSEN = "resume"
"""The store's key for the step that a run goes on from."""

SAVE_S = 600.0
"""Longest time until a checkpoint is on disk."""


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


def settled(plan: Plan, options: RunOptions) -> Start:
    """Where a run of ``plan`` begins: with ``--resume auto`` after the newest sound checkpoint, or anew without any.

    Raises:
        CorruptFileError: there are checkpoints, and none of them is sound.
        StaleFileError: all steps are done, of another model.
    """
    if options.resume != IF_ANY:
        return Start(options)
    checkpoint, skipped = newest_sound(options.checkpoint)
    if checkpoint is None:
        return Start(replace(options, resume=False))
    step = checkpoint.manifest.step
    start = Start(replace(options, resume=True, resume_step=step), step, skipped)
    if start.is_end and options.dtype in ("", plan.inputs.model.dtype):
        _require_model(Saved(checkpoint), plan.inputs.model_fingerprint)
    return start


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


def settled_by_rank_0(plan: Plan, options: RunOptions, store: Store, rank: int) -> Start:
    """The same for all ranks of a job; see :func:`settled`."""

    def look() -> str:
        found = settled(plan, options)
        return json.dumps([found.options.resume, found.options.resume_step, found.step, found.skipped])

    if options.resume != IF_ANY:
        return Start(options)
    resume, resume_step, step, skipped = json.loads(said_by_rank_0(store, "start", rank, look))
    return Start(replace(options, resume=resume, resume_step=resume_step), step, tuple(skipped))


class Checkpoints:
    """Writes the checkpoints of a run while it goes on; all ranks call the same.

    Args:
        seed: of what is drawn.
    """

    def __init__(self, options: RunOptions, engine: Engine, graph: Graph, transport: Transport, seed: int) -> None:
        self._every, self._last, self._engine, self._rank = options.checkpoint_every, 0, engine, transport.rank
        self._fingerprints, self._seed = fingerprints_of(graph), seed
        self._saver: BackgroundSaver | None = None
        if options.checkpoint:
            self._saver = BackgroundSaver(
                options.checkpoint,
                transport.rank,
                transport.world_size,
                lambda: transport.barrier(SAVE_S),
                keep=options.keep,
                deadline_s=SAVE_S,
            )

    @property
    def is_due(self) -> bool:
        """Whether to save after this step."""
        return bool(self._every) and self._engine.num_steps % self._every == 0

    def finish(self, position: Position) -> None:
        """Save the last state unless that is done, and wait until it is on disk.

        Raises:
            CheckpointError: a checkpoint could not be saved.
        """
        if self._saver is not None:
            if self._last != self._engine.num_steps:
                self.save(position)
            self._saver.wait()

    def save(self, position: Position) -> None:
        """Begin to save; training may go on once this returns.

        Raises:
            CheckpointError: the one before could not be saved.
        """
        if self._saver is not None:
            self._last = self._engine.num_steps
            self._saver.save(
                self._last, with_numbers(self._engine.state(), self._rank, self._seed, position), self._fingerprints
            )


def save_now(folder: str | Path, engine: Engine, graph: Graph, transport: Transport, *, seed: int, keep: int) -> None:
    """Save what all ranks have, each calling this; returns once it is on disk."""
    save(
        folder,
        engine.num_steps,
        with_numbers(engine.state(), transport.rank, seed, None),
        transport.rank,
        transport.world_size,
        lambda: transport.barrier(SAVE_S),
        fingerprints_of(graph),
        keep=keep,
    )


def with_numbers(state: RankState, rank: int, seed: int, position: Position | None) -> RankState:
    """``state`` and what belongs to the run; rank 0 writes that."""
    numbers: dict[str, Number] = {SEED: seed}
    if position is not None:
        numbers |= {f"{DATA}/{name}": getattr(position, name) for name in ("epoch", "batches", "samples")}
    return joined((state, RankState({}, {}, numbers, frozenset(numbers) if rank == 0 else frozenset())))


SEED = "run/seed"
DATA = "data"
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


def describe(checkpoint: Checkpoint) -> str:
    """What a checkpoint holds, in a few lines."""
    saved, manifest = Saved(checkpoint), checkpoint.manifest
    at, num_bytes = saved.position, sum(files.data_bytes for files in manifest.folders.values())
    num_weights = sum(key.startswith(MODEL) for key in manifest.tensors)
    ranks = units.count(manifest.num_ranks, "rank")
    weights = units.count(num_weights, "parameter or buffer", "parameters and buffers")
    others = [str(step) for step in complete_steps(checkpoint.path.parent) if step != manifest.step]
    lines = [
        f"{checkpoint.path}: {units.count(saved.step, 'step')} done",
        f"  {units.size(num_bytes)}, saved by {ranks}, torch {manifest.torch_version}",
        f"  {weights}, model {manifest.fingerprints.get('model', _NONE)}",
        f"  data: {units.count(at.batches, 'batch', 'batches')} of epoch {at.epoch}",
    ]
    return "\n".join([*lines, *([f"  other steps there: {', '.join(others)}"] if others else [])])


def write_state_dict(checkpoint: Checkpoint, path: Path) -> None:
    """Parameters and buffers as a plain file of torch, for ``module.load_state_dict(torch.load(path))``.

    Raises:
        CorruptFileError: the checkpoint is damaged.
        MissingFileError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as stream:
            torch.save(whole_state_dict(checkpoint), stream)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError where there is no folder
        raise MissingFileError(f"cannot write {path}", str(error).splitlines()[:1]) from error
