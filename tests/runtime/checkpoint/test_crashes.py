"""A save that fails anywhere leaves the newest complete checkpoint as it was, and the next save goes well."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import torch

from planner.ir.errors import CheckpointError
from runtime.checkpoint import Checkpoint, complete_steps
from tests.runtime.checkpoint.cases import of_two_ranks, save_all, try_save, whole
from tests.runtime.checkpoint.faults import Faults, die, in_child, installed, raising
from tests.sampling import some

MOST = 24
"""Operations that `make test` lets fail, from the first to the last of all; `make test-all` all."""


def save_step(folder: Path, step: int, keep: int = 0) -> int:
    """Save it without a fault; how many operations that took."""
    with installed(Faults(None, die)) as faults:
        save_all(folder, step, of_two_ranks(seed=step), keep)
    return faults.count


def prepare(folder: Path) -> None:
    """Complete checkpoints of steps 1 and 2, and what a crash left of step 3."""
    for step in (1, 2):
        save_step(folder, step)
    shutil.copytree(folder / "step-2", folder / "step-3.tmp")


def restore(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


def check(folder: Path) -> int:
    """The newest checkpoint is whole and holds what was saved; its step."""
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    step = checkpoint.manifest.step
    assert all(torch.equal(checkpoint.read(key), tensor) for key, tensor in whole(seed=step).items())
    assert checkpoint.number("run/step") == step
    return step


def num_operations(source: Path, folder: Path, keep: int) -> int:
    restore(source, folder)
    count = save_step(folder, 3, keep)
    assert check(folder) == 3
    return count


def test_a_process_that_dies_anywhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "checkpoints"
    prepare(source)
    count = num_operations(source, folder, keep=1)
    assert count > 70
    found = []
    for first in some(range(count), MOST):
        restore(source, folder)

        def crash(first: int = first) -> None:
            with installed(Faults(first, die)):
                save_all(folder, 3, of_two_ranks(seed=3), keep=1)

        assert in_child(crash) == 9
        found.append(check(folder))
        if found[-1] == 2:
            save_step(folder, 3)
            assert check(folder) == 3
        assert not (folder / "step-3.tmp").exists()
    assert set(found) == {2, 3}
    assert found == sorted(found)  # once it is complete, it stays so


def test_an_operation_that_fails_once_anywhere(tmp_path: Path) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "checkpoints"
    prepare(source)
    for first in some(range(num_operations(source, folder, keep=1)), MOST):
        restore(source, folder)
        with installed(Faults(first, raising(errno.EIO))):
            errors = try_save(folder, 3, of_two_ranks(seed=3), keep=1)
        if check(folder) == 3:
            assert errors == [None, None]
        else:
            assert all(isinstance(error, CheckpointError) for error in errors), errors
            assert any("Input/output error" in str(error) for error in errors)
            assert complete_steps(folder) == (1, 2)
            save_step(folder, 3)
            assert check(folder) == 3


def test_a_disk_that_is_full_from_anywhere_on(tmp_path: Path) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "checkpoints"
    prepare(source)
    for first in some(range(num_operations(source, folder, keep=0)), MOST):
        restore(source, folder)
        with installed(Faults(first, raising(errno.ENOSPC), lasting=True)):
            errors = try_save(folder, 3, of_two_ranks(seed=3))
        if check(folder) == 3:
            assert errors == [None, None]
            continue
        assert all(isinstance(error, CheckpointError) for error in errors), errors
        text = "\n".join(map(str, errors))
        assert "No space left on device" in text
        assert f"try: free space, or another folder than {folder}" in text
        assert "complete checkpoints there: steps 1, 2" in text
        assert not any(folder.glob("*.tmp/rank-*")), first
