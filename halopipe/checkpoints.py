"""The checkpoints of a run: when they are written, and which one a run goes on from."""

from __future__ import annotations

from pathlib import Path

from torch import distributed as dist

from halopipe.datasets import Position
from halopipe.runs import RunOptions
from halopipe.saved import DATA, SEED, Saved, fingerprints_of, open_saved
from planner.ir.errors import HalopipeError, UsageError
from planner.ir.graph import Graph
from runtime.checkpoint import BackgroundSaver, Checkpoint, Number, RankState, joined, save
from runtime.engine import Engine
from runtime.jobs.failure import read_error, write_error
from runtime.transport import Transport

_CHOSEN = "resume"
"""The store's key for the step that a run goes on from."""

SAVE_S = 600.0
"""Longest time until a checkpoint is on disk."""


def resumed(options: RunOptions, graph: Graph, store: dist.Store, rank: int) -> Saved | None:
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


def _chosen(options: RunOptions, store: dist.Store, rank: int) -> int:
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
