from __future__ import annotations

import errno
import multiprocessing
import os
import re
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from halopipe.terminal.console import emit, remark, visible
from halopipe.terminal.output_files import claimed, made
from planner.ir.errors import MissingFileError, UsageError
from runtime.checkpoint.folders import MANIFEST_HASH, complete_path, incomplete_path
from tests.halopipe.commands import call

FORK = multiprocessing.get_context("fork")


def hold(path: Path, held: Event, end: Event) -> None:
    with claimed([path]):
        held.set()
        end.wait(20)


@pytest.mark.parametrize("killed", [False, True])
def test_two_processes_do_not_write_one_file_and_the_dead_hold_nothing(tmp_path: Path, killed: bool) -> None:
    held = FORK.Event()
    end = FORK.Event()
    owner = FORK.Process(target=hold, args=(tmp_path / "plan.json", held, end))
    owner.start()
    assert held.wait(20)
    with pytest.raises(UsageError) as error, claimed([tmp_path / "plan.json"]):
        pass
    assert f"process {owner.pid} on " in error.value.render()
    with claimed([tmp_path / "other.json"]):
        pass
    owner.kill() if killed else end.set()
    owner.join(20)
    with claimed([tmp_path / "plan.json"]):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_input_is_not_claimed_for_output_by_any_of_its_names(tmp_path: Path) -> None:
    source = tmp_path / "profile.json"
    source.write_text("x")
    (tmp_path / "link").symlink_to(source)
    os.link(source, tmp_path / "twin")
    for name in ("profile.json", "link", "twin", "./profile.json"):
        with pytest.raises(UsageError, match="is read, and would be replaced"), claimed([tmp_path / name], [source]):
            pass


@pytest.mark.every_case
@pytest.mark.parametrize(
    "words",
    [
        "profile x.py:model -o x.py",
        "profile models:x --on x.yaml -o x.yaml",
        "profile models:x --on h100-dgx --tables x.csv -o x.csv",
        "plan profile.json --cluster x.yaml -o x.yaml",
        "run plan.json --data x.py:batches -o x.py",
        "run plan.json --optimizer x.py:optimizer --trace x.py",
        "run plan.json --eval-data y --eval-metric x.py:metric --trace x.py",
        "export plan.json --to chrome-trace --profile x.json -o x.json",
        "import graph.txt --format pipedream --cluster x.yaml -o x.yaml",
        "ways gpt3-175b --on x.yaml --gpus 8 --global-batch 8 -o x.yaml",
        "cluster x.yaml -o x.yaml",
        "merge x.json other.json -o x.json",
    ],
)
def test_no_verb_puts_its_result_in_the_place_of_what_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (name,) = set(re.findall(r"\bx\.[a-z]+", words))
    Path(name).write_text("mine")
    result = call(*words.split())
    assert result.exit_code == 2
    assert f"{name} is read, and would be replaced" in result.stderr
    assert [(path.name, path.read_text()) for path in Path.cwd().iterdir()] == [(name, "mine")]


@pytest.mark.parametrize(
    "name", ["step-500", "step-0.tmp", "step-9/weights.pt", "step-8/weights.pt", "step-7.damaged-1"]
)
def test_no_output_is_put_where_a_checkpoint_is_or_may_be(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "saved"
    path = tmp_path / "saved" / name
    complete_path(folder, 9).mkdir(parents=True)
    with claimed([folder / "step-9.txt", made(folder / "weights.pt")]):
        pass
    (complete_path(folder, 9) / MANIFEST_HASH).touch()
    assert incomplete_path(folder, 0).name == "step-0.tmp"
    with pytest.raises(UsageError, match="would be taken for a checkpoint"), claimed([made(path)]):
        pass
    with claimed([folder / "step-9.txt", made(folder / "weights.pt")]):
        pass


def test_an_output_is_tried_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError), claimed([tmp_path / "nowhere/plan.json"]):
        raise AssertionError


def test_ranks_other_than_the_first_claim_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with claimed([tmp_path / "timeline.json"]):
        monkeypatch.setenv("RANK", "1")
        with claimed([tmp_path / "timeline.json"]):
            pass


def test_devices_are_claimed_by_nobody() -> None:
    with claimed(["/dev/null"]), claimed(["/dev/null"]):
        assert not Path("/dev/.null.lock").exists()


def test_a_terminal_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    emit("a\x1b[31mb\tc\nd\x9b\u202e\ud800")
    remark("\x07\x7f")
    assert capsys.readouterr() == ("a\\u001b[31mb\tc\nd\\u009b\\u202e\\ud800\n", "\\u0007\\u007f\n")
    assert visible("Zürich, 漢字 ░▓ 5 µs –") == "Zürich, 漢字 ░▓ 5 µs –"


def test_where_a_lock_has_no_room_the_result_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with (
        pytest.raises(MissingFileError, match=r"(?s)cannot write .*plan.json.*No space left"),
        claimed([tmp_path / "plan.json"]),
    ):
        pass
    assert not list(tmp_path.iterdir())
