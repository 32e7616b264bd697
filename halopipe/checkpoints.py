"""The checkpoints of a run: when they are written, and which one a run goes on from."""

from __future__ import annotations

from pathlib import Path

from torch import distributed as dist

from halopipe.datasets import Position
from halopipe.runs import RunOptions
from halopipe.saved import DATA, SEED, Saved, fingerprints_of, open_saved
from planner.ir.errors import UsageError
from planner.ir.graph import Graph
from runtime.checkpoint import BackgroundSaver, Checkpoint, Number, RankState, joined, save
from runtime.engine import Engine
from runtime.transport import Transport


def resumed(options: RunOptions, graph: Graph, store: dist.Store, rank: int) -> Saved | None:
    """The checkpoint to go on from, which rank 0 chooses for all; None where the run begins anew.

    Raises:
        UsageError: all steps are done already, or updates are made of another number of steps now.
        MissingFileError, CorruptFileError: there is none, or it is damaged.
        StaleFileError: it is another model's.
    """
    if not options.resume:
        return None
    key = "resume"
    if rank == 0:
        store.set(key, str(Checkpoint.open(options.checkpoint).manifest.step))
    saved = open_saved(options.checkpoint, graph, int(store.get(key).decode()))
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


class Checkpoints:
    """Writes the checkpoints of a run while it goes on; all ranks call the same.

    Args:
        seed: of what is drawn.
    """

    def __init__(
        self, options: RunOptions, engine: Engine, graph: Graph, transport: Transport, deadline_s: float, seed: int
    ) -> None:
        self._every, self._last, self._engine, self._rank = options.checkpoint_every, 0, engine, transport.rank
        self._fingerprints, self._seed = fingerprints_of(graph), seed
        self._saver: BackgroundSaver | None = None
        if options.checkpoint:
            self._saver = BackgroundSaver(
                options.checkpoint,
                transport.rank,
                transport.world_size,
                lambda: transport.barrier(deadline_s),
                keep=options.keep,
            )

    def after_step(self, position: Position) -> None:
        """Save if it is time to; training may go on once this returns."""
        if self._every and self._engine.num_steps % self._every == 0:
            self._save(position)

    def finish(self, position: Position) -> None:
        """Save the last state unless that is done, and wait until it is on disk.

        Raises:
            CheckpointError: a checkpoint could not be saved.
        """
        if self._saver is not None:
            if self._last != self._engine.num_steps:
                self._save(position)
            self._saver.wait()

    def _save(self, position: Position) -> None:
        if self._saver is not None:
            self._last = self._engine.num_steps
            self._saver.save(
                self._last, with_numbers(self._engine.state(), self._rank, self._seed, position), self._fingerprints
            )


def save_now(
    folder: str | Path, engine: Engine, graph: Graph, transport: Transport, deadline_s: float, *, seed: int, keep: int
) -> None:
    """Save what all ranks have, each calling this; returns once it is on disk."""
    save(
        folder,
        engine.num_steps,
        with_numbers(engine.state(), transport.rank, seed, None),
        transport.rank,
        transport.world_size,
        lambda: transport.barrier(deadline_s),
        fingerprints_of(graph),
        keep=keep,
    )


def with_numbers(state: RankState, rank: int, seed: int, position: Position | None) -> RankState:
    """``state`` and what belongs to the run; rank 0 writes that."""
    numbers: dict[str, Number] = {SEED: seed}
    if position is not None:
        numbers |= {f"{DATA}/{name}": getattr(position, name) for name in ("epoch", "batches", "samples")}
    return joined((state, RankState({}, {}, numbers, frozenset(numbers) if rank == 0 else frozenset())))
