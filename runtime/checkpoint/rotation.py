"""Which old checkpoints may go once there is a new one."""

from __future__ import annotations

import logging
from pathlib import Path

from planner.ir.errors import InputFileError
from runtime.checkpoint.folders import complete_steps, discard, incomplete_steps, remove
from runtime.checkpoint.reader import Checkpoint

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
            elif _opens(folder, other):
                kept += 1
        for other in incomplete_steps(folder):
            if other < step:
                discard(folder, other)
    except (OSError, InputFileError) as error:
        _log.warning("old checkpoints in %s could not all be deleted: %s", folder, error)


def _opens(folder: Path, step: int) -> bool:
    try:
        Checkpoint.open(folder, step)
    except InputFileError:
        return False
    return True
