"""Saving: every rank writes its folder, then rank 0 makes it a checkpoint, or nobody does.

    rank 0          rank 1 ...
    empty folder
    ------------ barrier ------------
    rank-0/         rank-1/               each forces its files to disk and leaves a manifest of its part
    ------------ barrier ------------
    one manifest, rename                  only where all parts are there and fit together
    ------------ barrier ------------

A rank that fails still comes to the barriers: no other waits for it, and all of them raise.

Which old checkpoints may go once there is a new one.

Saving while training goes on: a copy in memory is written by a thread, and the next save waits for the last.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from planner.ir.errors import CheckpointError, HalopipeError, InputFileError, UsageError
from runtime.checkpoint.folders import (
    MANIFEST,
    MANIFEST_HASH,
    begin,
    complete,
    complete_path,
    complete_steps,
    discard,
    incomplete_path,
    incomplete_steps,
    make,
    rank_name,
    remove,
    set_aside,
    write_file,
)
from runtime.checkpoint.manifest import from_text, manifest_hash, merged, to_text
from runtime.checkpoint.reader import Checkpoint
from runtime.checkpoint.state import RankState
from runtime.checkpoint.writer import saved_tensors, write_rank
from runtime.timeouts import SAVE_S

_log = logging.getLogger(__name__)


def rotate(folder: Path, step: int, keep: int) -> None:
    """Delete what is older than the last ``keep`` sound checkpoints up to ``step``, and what crashes left before it.

    Later steps, of a run that went on from there, are left alone.  What cannot be deleted stays, with a warning.
    """
    kept = 1
    try:
        for other in reversed([other for other in complete_steps(folder) if other < step]):
            if kept >= keep:
                remove(folder, other)
            elif _is_sound(folder, other, every_byte=False):
                kept += 1
        for other in incomplete_steps(folder):
            if other < step:
                discard(folder, other)
    except (OSError, InputFileError) as error:
        _log.warning("old checkpoints in %s could not all be deleted: %s", folder, error)


_LOOK_AGAIN_S = 0.02
_SHARE = "a folder that all hosts share"


def save(
    folder: str | Path,
    step: int,
    state: RankState,
    rank: int,
    num_ranks: int,
    barrier: Callable[[], object],
    fingerprints: Mapping[str, str],
    *,
    keep: int = 0,
) -> None:
    """Save a checkpoint; every rank calls this, and returns once it is complete and on disk.

    Args:
        folder: of all checkpoints of the run, the same for all ranks.
        step: number of steps done; the checkpoint is ``folder/step-N``.
        state: what this rank has.
        barrier: waits for all ranks; called three times.
        fingerprints: of model, plan, ...; the same on all ranks.
        keep: this many checkpoints, this one included, are kept and older ones deleted; 0 keeps all.

    Raises:
        UsageError: there is a sound checkpoint of this step; it is never overwritten.  A damaged one is set aside.
        CheckpointError: a rank could not save its part, or parts do not fit together; older checkpoints are as before.
    """
    part = SavedPart(Path(folder), step, rank, num_ranks)
    failure = part.prepare() if rank == 0 else None
    barrier()
    failure = failure or part.write(state, fingerprints)
    barrier()
    if rank == 0:
        failure = failure or part.finish()
    barrier()
    part.conclude(failure)
    if rank == 0 and keep:
        rotate(Path(folder), step, keep)


class SavedPart:
    """One rank's part in saving one checkpoint.

    ``prepare``, ``write`` and ``finish`` return what went wrong instead of raising it, for the other ranks wait.
    """

    def __init__(self, folder: Path, step: int, rank: int, num_ranks: int) -> None:
        if step < 0 or not 0 <= rank < num_ranks:
            raise ValueError(f"step {step} of rank {rank} of {num_ranks}")
        self._folder = folder
        self._step = step
        self._rank = rank
        self._num_ranks = num_ranks
        self._path = incomplete_path(folder, step)

    def prepare(self) -> HalopipeError | None:
        """Rank 0: make an empty folder."""
        try:
            make(self._folder)
            if complete_path(self._folder, self._step).exists():
                if _is_sound(self._folder, self._step):
                    return self._exists()
                aside = set_aside(self._folder, self._step)
                _log.warning("the checkpoint of step %d is damaged; it is now %s", self._step, aside)
            begin(self._folder, self._step)
        except (OSError, InputFileError) as error:
            return self._failed("rank 0 could not make its folder", self._with_room(error))
        return None

    def write(self, state: RankState, fingerprints: Mapping[str, str]) -> HalopipeError | None:
        """Write this rank's folder and, last, the manifest of it."""
        if complete_path(self._folder, self._step).exists():
            return self._exists()
        tensors = map(state.tensors.__getitem__, {*saved_tensors(state).values()})
        # those that cannot be written are left to who tries
        num_bytes = sum(tensor.nbytes for tensor in tensors if tensor.layout is torch.strided) + _SMALL_BYTES
        try:
            disk = shutil.disk_usage(self._folder)
            if disk.total and num_bytes > disk.free:  # it is not filled to find that out
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            manifest = write_rank(self._path, self._step, state, self._rank, self._num_ranks, fingerprints)
            write_file(self._record(self._rank), to_text(manifest).encode())
        except (OSError, RuntimeError, ValueError, CheckpointError) as error:
            explained = self._with_room(error, num_bytes)
            self._tell(explained)
            return self._failed(f"rank {self._rank} could not write its part", explained)
        return None

    def finish(self) -> HalopipeError | None:
        """Rank 0, when all ranks have written: make it a checkpoint, or take it away."""
        try:
            self._complete()
        except (OSError, HalopipeError) as error:
            if complete_path(self._folder, self._step).exists():  # and the other ranks will see it
                _log.warning("the checkpoint of step %d may not outlive a loss of power: %s", self._step, error)
                return None
            return self._failed("rank 0 could not complete it", self._with_room(error))
        return None

    def all_written(self, deadline_s: float) -> None:
        """Wait until every rank has left a manifest or word of its failure, or the deadline is over."""
        end = time.monotonic() + deadline_s
        ranks = range(self._num_ranks)
        while time.monotonic() < end and not all(
            self._record(rank).exists() or self._word(rank).exists() for rank in ranks
        ):
            time.sleep(_LOOK_AGAIN_S)

    def conclude(self, failure: HalopipeError | None) -> None:
        """Raise what went wrong, here or elsewhere; rank 0 takes away what is not complete.

        Raises:
            UsageError, CheckpointError: the checkpoint is not complete.
        """
        if failure is None and not complete_path(self._folder, self._step).exists():
            failure = CheckpointError(
                f"the checkpoint of step {self._step} was not saved",
                [f"rank {self._rank} wrote its part; another rank says why it failed"],
                [_SHARE],
            )
        if failure is None:
            return
        try:
            if self._rank == 0:
                discard(self._folder, self._step)
        except OSError as error:
            _log.warning("%s could not be deleted: %s", self._path, error)
        raise failure

    def _complete(self) -> None:
        silent = [rank for rank in range(self._num_ranks) if not self._record(rank).exists()]
        if silent:
            raise CheckpointError(
                f"ranks have not written their part: {', '.join(map(str, silent))}",
                [f"rank {rank}: {self._word_of(rank)}" for rank in silent],
                [_SHARE],
            )
        records = [self._record(rank) for rank in range(self._num_ranks)]
        whole = merged(from_text(record.read_text("utf-8"), str(record)) for record in records)
        content = to_text(whole).encode()
        write_file(self._path / MANIFEST, content)
        write_file(self._path / MANIFEST_HASH, manifest_hash(content))
        for record in records:
            record.unlink()
        complete(self._folder, self._step)

    def _record(self, rank: int) -> Path:
        return self._path / f"{rank_name(rank)}.json"

    def _word(self, rank: int) -> Path:
        return self._path / f"{rank_name(rank)}.failed"

    def _tell(self, error: Exception) -> None:
        """Leave word for rank 0, if the disk takes it; without, rank 0 finds that there is no manifest."""
        shutil.rmtree(self._path / rank_name(self._rank), ignore_errors=True)  # a full disk then has room for the word
        try:
            write_file(self._word(self._rank), str(error).encode())
        except OSError as failure:
            _log.debug("rank %d cannot leave word: %s", self._rank, failure)

    def _word_of(self, rank: int) -> str:
        try:
            return self._word(rank).read_text("utf-8", errors="replace") or "it failed"
        except OSError:
            return "no word of it"

    def _exists(self) -> UsageError:
        path = complete_path(self._folder, self._step)
        return UsageError(
            f"there is a checkpoint of step {self._step}",
            [f"{path} is complete and sound; it is not overwritten"],
            ["another folder", f"remove {path}"],
        )

    def _with_room(self, error: Exception, num_bytes: int = 0) -> Exception:
        """The error; of a full disk with what this rank needs, what is free, and which disk it is.

        Args:
            num_bytes: of its tensors, and what is kept for what is written beside them.
        """
        if not isinstance(error, OSError) or error.errno not in _FULL:
            return error
        mount = self._folder.absolute()
        while not os.path.ismount(mount):
            mount = mount.parent
        needs = f"rank {self._rank} needs {num_bytes} bytes, " if num_bytes else ""
        room = f"{needs}{shutil.disk_usage(mount).free} are free on the disk of {mount}"
        return OSError(error.errno, f"{error.strerror}: {room}")

    def _failed(self, what: str, error: Exception) -> CheckpointError:
        title = f"the checkpoint of step {self._step} was not saved: {what}"
        if isinstance(error, HalopipeError):
            return CheckpointError(title, [error.title, *error.details], error.remedies)
        try:
            older = ", ".join(map(str, complete_steps(self._folder))) or "none"
        except InputFileError as unreadable:
            older = f"unknown, {unreadable.title}"
        remedies = [_SHARE] if isinstance(error, FileNotFoundError) else []
        if isinstance(error, OSError) and not remedies:
            remedies = [f"free space, or another folder than {self._folder}"]
            remedies += ["--keep 2: older checkpoints are deleted"] * (error.errno in _FULL and older != "none")
        return CheckpointError(title, [str(error), f"complete checkpoints there: steps {older}"], remedies)


def _is_sound(folder: Path, step: int, *, every_byte: bool = True) -> bool:
    try:
        checkpoint = Checkpoint.open(folder, step)
        if every_byte:
            checkpoint.verify()
    except InputFileError:
        return False
    return True


_FULL = (errno.ENOSPC, errno.EDQUOT)
_SMALL_BYTES = 64 * 1024
"""Room for manifests and names, beside tensors."""


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
        barrier: Callable[[], object],
        *,
        keep: int = 0,
        deadline_s: float = SAVE_S,
    ) -> None:
        self._folder = Path(folder)
        self._rank = rank
        self._num_ranks = num_ranks
        self._barrier = barrier
        self._keep = keep
        self._deadline_s = deadline_s
        self._copies: dict[str, Tensor] = {}
        self._running: tuple[SavedPart, threading.Thread] | None = None
        self._failure: HalopipeError | None = None

    @property
    def failure(self) -> HalopipeError | None:
        """What went wrong with the last save as far as this rank knows, which is all on rank 0 once it is written."""
        return None if self.is_writing else self._failure

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a save is being written."""
        return self._running is not None and self._running[1].is_alive()

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
        if self._rank:
            thread.join()
        self._barrier()
        if self._rank == 0:  # its thread waits for the files of the others, which are there now
            thread.join()
        failure = self._failure
        self._failure = None
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
        stored = saved_tensors(state)
        self._copies = {
            name: self._copied(name, state.tensors[name].detach()) for name in dict.fromkeys(stored.values())
        }
        copies = {key: self._copies[name] for key, name in stored.items()}
        slices = {key: state.slices[key] for key in stored if key in state.slices}
        boxes = {key: state.boxes[key] for key in stored if key in state.boxes}
        writes = frozenset(stored) | (state.writes & state.numbers.keys())
        return RankState(copies, slices, dict(state.numbers), writes, boxes)

    def _copied(self, key: str, tensor: Tensor) -> Tensor:
        old = self._copies.get(key)
        if old is None or (old.dtype, old.shape, old.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            old = torch.empty_like(tensor, device="cpu")
        return old.copy_(tensor)
