"""Saving while training goes on: a copy in memory is written by a thread, and the next save waits for the last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from planner.ir.errors import HalopipeError
from runtime.checkpoint.saving import SavedPart, rotate
from runtime.checkpoint.state import RankState
from runtime.checkpoint.writer import place_of, saved_tensors


class BackgroundSaver:
    """Saves checkpoints of one rank in the background; all ranks call the same methods in the same order.

    No thread meets the barrier, whose messages would mix with those of training: rank 0's looks for the files of the
    others.  What is written takes this rank's saved bytes once more, on the CPU.

    Args:
        folder, rank, num_ranks, barrier, keep: as of :func:`~runtime.checkpoint.save`.
        deadline_s: longest that rank 0's thread waits for the other ranks to write.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        num_ranks: int,
        barrier: Callable[[], None],
        *,
        keep: int = 0,
        deadline_s: float = 600.0,
    ) -> None:
        self._folder, self._rank, self._num_ranks, self._barrier = Path(folder), rank, num_ranks, barrier
        self._keep, self._deadline_s = keep, deadline_s
        self._copies: dict[str, Tensor] = {}
        self._running: tuple[SavedPart, threading.Thread] | None = None
        self._failure: HalopipeError | None = None

    def save(self, step: int, state: RankState, fingerprints: Mapping[str, str]) -> None:
        """Wait for the last save, copy ``state`` and begin to write it; the tensors may change once this returns.

        Raises:
            UsageError, CheckpointError: the last save failed, or this step has a checkpoint.
        """
        self.wait()
        part = SavedPart(self._folder, step, self._rank, self._num_ranks)
        self._failure = part.prepare() if self._rank == 0 else None
        self._barrier()
        copy = self._copy(state)
        thread = threading.Thread(target=self._write, args=(part, step, copy, fingerprints), daemon=True)
        self._running = part, thread
        thread.start()

    def wait(self) -> None:
        """Return once the last save is complete and on disk on all ranks; at once if there was none.

        Raises:
            UsageError, CheckpointError: it failed.
        """
        if self._running is None:
            return
        part, thread = self._running
        self._running = None
        thread.join()
        failure, self._failure = self._failure, None
        self._barrier()
        part.conclude(failure)

    def _write(self, part: SavedPart, step: int, state: RankState, fingerprints: Mapping[str, str]) -> None:
        self._failure = self._failure or part.write(state, fingerprints)
        if self._rank or self._failure:
            return
        part.all_written(self._deadline_s)
        self._failure = part.finish()
        if self._failure is None and self._keep:
            rotate(self._folder, step, self._keep)

    def _copy(self, state: RankState) -> RankState:
        """A state of copies, one for each tensor however many keys it has; their memory is used again and again."""
        keys = saved_tensors(state)
        first: dict[object, str] = {}
        copies: dict[str, Tensor] = {}
        for key in keys:
            tensor = state.tensors[key].detach()
            name = first.setdefault(place_of(tensor) or key, key)
            copies[key] = self._copied(key, tensor) if name == key else copies[name]
        self._copies = {key: copies[key] for key in first.values()}
        slices = {key: state.slices[key] for key in keys if key in state.slices}
        boxes = {key: state.boxes[key] for key in keys if key in state.boxes}
        writes = frozenset(keys) | (state.writes & state.numbers.keys())
        return RankState(copies, slices, dict(state.numbers), writes, boxes)

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        old = self._copies.get(key)
        if old is None or (old.dtype, old.shape, old.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            old = torch.empty_like(tensor, device="cpu")
        return old.copy_(tensor)
