"""Names of checkpoint folders, and changes to them that a crash cannot leave half done.

    FOLDER/step-100/                 complete
    FOLDER/step-120/manifest.json    complete: what is where, with hashes
                    manifest.sha256  the hash of that
                    rank-0/          tensors.safetensors
                    rank-1/
    FOLDER/step-140.tmp/             being written, or left by a crash: never read
    FOLDER/step-80.damaged-1/        found damaged when step 80 was saved again: kept, never read
    FOLDER/.halopipe.lock           of the job that writes there, see :mod:`runtime.checkpoint.lock`

A folder gets its final name in one rename, after every file and folder in it has been forced to disk.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from planner.ir.errors import MissingFileError

MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
DATA_FILE = "tensors.safetensors"

_COMPLETE = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_INCOMPLETE = re.compile(r"step-(0|[1-9][0-9]{0,17})\.tmp")


def complete_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is once it is complete."""
    return folder / f"step-{step}"


def incomplete_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is while it is written."""
    return folder / f"step-{step}.tmp"


def rank_name(rank: int) -> str:
    """Name of a rank's folder in a checkpoint."""
    return f"rank-{rank}"


def complete_steps(folder: str | Path) -> tuple[int, ...]:
    """Steps that ``folder`` has complete checkpoints of, growing; none where there is no such folder.

    Raises:
        MissingFileError: the folder cannot be read.
    """
    return _steps(Path(folder), _COMPLETE)


def incomplete_steps(folder: Path) -> tuple[int, ...]:
    """Steps whose saving was begun and not ended, growing."""
    return _steps(folder, _INCOMPLETE)


def force_to_disk(folder: Path) -> None:
    """Names that were made, changed or removed in ``folder`` outlive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a file and force it to disk; whoever looks sees all of it or none."""
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.rename(part, path)


def make(folder: Path) -> None:
    """Make a folder and those around it, so that they outlive a loss of power."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        force_to_disk(path.parent)


def begin(folder: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of ``step`` to; what a crash left there is removed."""
    discard(folder, step)
    path = incomplete_path(folder, step)
    path.mkdir()
    force_to_disk(folder)
    return path


def discard(folder: Path, step: int) -> None:
    """Delete what there is of an incomplete checkpoint."""
    path = incomplete_path(folder, step)
    if path.exists():
        shutil.rmtree(path)


def complete(folder: Path, step: int) -> None:
    """Give the written checkpoint of ``step`` its final name; a rename onto another checkpoint fails, by the system."""
    force_to_disk(incomplete_path(folder, step))
    os.rename(incomplete_path(folder, step), complete_path(folder, step))
    force_to_disk(folder)


def set_aside(folder: Path, step: int) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again; nothing is deleted."""
    number = 1
    while (target := folder / f"step-{step}.damaged-{number}").exists():
        number += 1
    os.rename(complete_path(folder, step), target)
    force_to_disk(folder)
    return target


def remove(folder: Path, step: int) -> None:
    """Delete a complete checkpoint; it stops being one before its first file goes."""
    discard(folder, step)
    os.rename(complete_path(folder, step), incomplete_path(folder, step))
    force_to_disk(folder)
    discard(folder, step)


def _steps(folder: Path, pattern: re.Pattern[str]) -> tuple[int, ...]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise MissingFileError(f"cannot read {folder}", [error.strerror or str(error)]) from None
    return tuple(sorted(int(match[1]) for name in names if (match := pattern.fullmatch(name))))
