"""The checkpoints of a run: when they are written, and which one a run goes on from.

A checkpoint as runs read it: what it holds beside the model's state, and whether it is this model's.

    data/epoch, data/batches, data/samples     the position in the data
    run/step, run/seed                         steps done; what data and dropout are drawn with

Its fingerprint is the model's: plans are made anew as machines come and go, and any plan of the model goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halopipe.data.sources import Position
from halopipe.run_spec.options import RunOptions
from halopipe.terminal import units
from planner.ir.errors import HalopipeError, MissingFileError, StaleFileError, UsageError
from planner.ir.files import replaced
from planner.ir.fingerprint import fingerprint
from planner.ir.graph import Graph
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
    """The checkpoint to go on from, which rank 0 chooses for all; None where the run begins anew.

    Raises:
        UsageError: all steps are done already, or updates are made of another number of steps now.
        MissingFileError, CorruptFileError: there is none, or it is damaged.
        StaleFileError: it is another model's.
    """
    if not options.resume:
        return None
    saved = open_saved(options.checkpoint, graph, _chosen(options, store, rank))
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


def _chosen(options: RunOptions, store: Store, rank: int) -> int:
    """The step of the checkpoint that rank 0 found; what it raises, all raise: the others would wait for its word."""
    if rank == 0:
        try:
            store.set(_CHOSEN, str(Checkpoint.open(options.checkpoint).manifest.step))
        except HalopipeError as error:
            store.set(_CHOSEN, write_error(error))
            raise
    text = store.get(_CHOSEN).decode()
    if not text.isdecimal():
        raise read_error(text)
    return int(text)


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
    mine = fingerprints_of(graph)["model"]
    theirs = saved.checkpoint.manifest.fingerprints.get("model", _NONE)
    if theirs != mine:
        raise StaleFileError(
            f"{saved.checkpoint.path} belongs to another model",
            [f"checkpoint: {theirs}", f"here: {mine}"],
            ["run the plan of the model that was saved, in the same dtype", "another --checkpoint folder"],
        )
    return saved


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
