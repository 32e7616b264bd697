"""Two jobs never write into one folder, and no lock outlives its owner for long."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from cuda_ops.device.host import process_state
from planner.ir.errors import MissingFileError, UsageError
from runtime.checkpoint import lock
from runtime.checkpoint.lock import LOCK, STALE_S, LockOwner, held
from tests.runtime.checkpoint.faults import in_child


def leave(folder: Path, owner: LockOwner, age_s: float = 0.0) -> Path:
    """The lock of ``owner``, who renewed it so long ago."""
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def elsewhere(**changes: object) -> LockOwner:
    return replace(LockOwner.here({}), host="node9", place="node9 another boot", pid=1, **changes)


def test_a_folder_is_held_by_one_job_and_free_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "saved"
    with held(folder):
        with pytest.raises(UsageError, match="another job writes its checkpoints into") as caught, held(folder):
            pass
        assert f"process {os.getpid()} on " in caught.value.details[0]
        assert "another folder for checkpoints" in caught.value.remedies
    assert list(tmp_path.iterdir()) == []  # nothing was written
    with held(folder):
        pass


def test_a_folder_that_a_failure_leaves_empty_is_gone_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ZeroDivisionError), held(tmp_path / "old"):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), held(tmp_path / "old" / "new" / "saved"):
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    with held(tmp_path / "new" / "saved"):
        (tmp_path / "new" / "saved" / "step-1").mkdir()
    assert (tmp_path / "new" / "saved" / "step-1").exists()


def test_a_job_that_was_killed_gives_the_folder_up_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def killed() -> None:
        with held(tmp_path):
            os._exit(9)

    assert in_child(killed) == 9
    assert (tmp_path / LOCK).exists()
    with caplog.at_level(logging.WARNING), held(tmp_path):
        assert re.search(r"taken over from process \d+ on .*: it has ended", caplog.text)
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_came_again_is_not_the_same_process(tmp_path: Path) -> None:
    mine = LockOwner.here({})
    leave(tmp_path, replace(mine, started=mine.started - 1))
    with held(tmp_path):
        pass
    leave(tmp_path, replace(mine, pid=os.getppid(), started=lock._started(os.getppid())))
    with pytest.raises(UsageError), held(tmp_path):
        pass


def test_a_job_of_another_host_is_believed_until_it_was_silent_for_long(tmp_path: Path) -> None:
    leave(tmp_path, elsewhere(), STALE_S / 2)
    with pytest.raises(UsageError) as caught, held(tmp_path):
        pass
    assert "process 1 on node9, since " in caught.value.details[0]
    assert re.search(r"start again in (29|30) s, or remove .*/\.halopipe\.lock", caught.value.remedies[1])
    leave(tmp_path, elsewhere(), STALE_S + 1)
    with held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"TORCHELASTIC_RUN_ID": "abc", "SLURM_JOB_ID": "7"}, "torchrun abc"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, "slurm 7.0"),
        ({"SLURM_JOB_ID": "7"}, "slurm 7.batch"),
        ({}, ""),
    ],
)
def test_the_same_job_may_start_again_on_another_host(
    tmp_path: Path, environment: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LockOwner.here(environment).job == name
    leave(tmp_path, elsewhere(job=name))
    here = LockOwner.here(environment)
    monkeypatch.setattr(LockOwner, "here", lambda: here)
    if not name:
        with pytest.raises(UsageError), held(tmp_path):
            pass
        return
    with held(tmp_path):
        assert lock._owner(tmp_path / LOCK) == here


def since(value: object) -> str:
    """A lock that another host took then."""
    return json.dumps(asdict(elsewhere()) | {"since_s": value})


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[1]", '{"pid": "x"}', "\0", *map(since, (1e30, -1, "today", float("nan"), None))],
    ids=["nothing", "an object", "a list", "a name", "a zero", "far", "before", "a day", "no number", "null"],
)
def test_a_lock_that_says_nothing_is_waited_for_as_one_of_another_host(tmp_path: Path, text: str) -> None:
    path = tmp_path / LOCK
    path.write_text(text)
    with pytest.raises(UsageError, match="not known"), held(tmp_path):
        pass
    os.utime(path, (0, 0))
    with held(tmp_path):
        pass
    path.touch()
    (tmp_path / f"{LOCK}.taking").touch()  # of one that ended just then
    for left in tmp_path.iterdir():
        os.utime(left, (0, 0))
    with held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_find_a_stale_lock_one_gets_the_folder(tmp_path: Path) -> None:
    leave(tmp_path, elsewhere(), STALE_S + 1)
    (tmp_path / f"{LOCK}.taking").write_text(json.dumps(asdict(replace(LockOwner.here({}), started=1))))
    together = threading.Barrier(8)
    over = threading.Barrier(8)

    def race(number: int) -> bool:
        together.wait(10.0)
        try:
            with held(tmp_path):
                over.wait(10.0)
                return True
        except UsageError:
            over.wait(10.0)
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, range(8))) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.every_case
@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", [LOCK, f"{LOCK}.taking"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_is_no_file_in_the_place_of_a_lock_is_refused_without_a_wait(tmp_path: Path, name: str, kind: str) -> None:
    leave(tmp_path, elsewhere(), STALE_S + 1)
    place = tmp_path / name
    other = tmp_path / "other"
    place.unlink(missing_ok=True)
    os.mkfifo(other)
    {"pipe": lambda: os.mkfifo(place), "folder": place.mkdir, "link": lambda: place.symlink_to(other)}[kind]()
    with pytest.raises(MissingFileError, match=f"{name} is in the way") as caught, held(tmp_path):
        pass
    assert caught.value.remedies == (f"remove {place}",)


@pytest.mark.timeout(10)
def test_a_pipe_that_takes_the_place_of_a_lock_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    with held(tmp_path):
        (tmp_path / LOCK).unlink()
        os.mkfifo(tmp_path / LOCK)
    assert (tmp_path / LOCK).is_fifo()  # what somebody else put there stays


def test_a_zombie_holds_nothing(tmp_path: Path) -> None:
    mine = LockOwner.here({})
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its exit code
    state = process_state(child)
    assert state is not None
    assert state.state == "Z"
    leave(tmp_path, replace(mine, pid=child, started=state.started))
    with held(tmp_path):
        pass
    os.waitpid(child, 0)


def test_one_that_was_killed_while_it_took_a_lock_away_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_PATIENCE_S", 0.1)
    dead = replace(LockOwner.here({}), started=1)
    turn = tmp_path / f"{LOCK}.taking"
    leave(tmp_path, dead)
    turn.write_text(json.dumps(asdict(dead)))
    with held(tmp_path):
        pass
    leave(tmp_path, dead)
    turn.write_text(json.dumps(asdict(elsewhere())))  # of another host: it may still be at it
    with pytest.raises(UsageError, match="another job") as caught, held(tmp_path):
        pass
    assert re.search(r"start again in (59|60) s, or remove .*\.taking", caught.value.remedies[1])


def test_where_the_system_tells_nothing_of_processes_a_lock_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "process_state", lambda pid: None)
    monkeypatch.setattr(lock, "_place", lambda: "")
    with held(tmp_path), pytest.raises(UsageError, match="another job"), held(tmp_path):
        pass


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.json, "dumps", lambda value: _no_room())
    with pytest.raises(MissingFileError, match="cannot write into"), held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def _no_room() -> str:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def until(is_there: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10.0
    while not is_there() and time.monotonic() < end_s:
        time.sleep(0.005)
    assert is_there()


def test_it_is_renewed_and_one_that_was_taken_over_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    path = tmp_path / LOCK
    with held(tmp_path):
        os.utime(path, (0, 0))
        until(lambda: path.stat().st_mtime > 1e6)
        leave(tmp_path, elsewhere())
        until(lambda: "has taken over the folder" in caplog.text)
    assert path.exists()  # it is another's


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MissingFileError, match=r"cannot write into .*file/x"), held(tmp_path / "file" / "x"):
        pass
