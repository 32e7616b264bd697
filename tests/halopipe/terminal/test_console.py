from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from halopipe.terminal import console
from halopipe.terminal.console import Reporter
from planner.ir.errors import InfeasibleError, MissingFileError, UsageError
from tests.halopipe.commands import process


class Clock:
    """Stands in for ``time``: goes on when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(console, "time", made)
    monkeypatch.delenv("RANK", raising=False)
    return made


def test_off_a_terminal_there_is_a_line_every_ten_seconds(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter("profiling") as reporter:
        for second in range(25):
            clock.now_s = second
            reporter.update(second, 100, f"layer {second}")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "profiling 10 %: layer 10 (10.0 s, 90.0 s left)",
        "profiling 20 %: layer 20 (20.0 s, 80.0 s left)",
    ]


@pytest.mark.parametrize(("start_s", "pause_s"), [(0.0, 0.0), (30.0, 0.0), (6.0, 20.0)])
def test_what_is_left_is_right_within_a_factor_of_two_soon_after_the_start(
    clock: Clock, capsys: pytest.CaptureFixture[str], start_s: float, pause_s: float
) -> None:
    with Reporter("running") as reporter:
        clock.now_s = start_s
        for step in range(1, 401):
            clock.now_s += 0.5 + pause_s * (step == 2) + 2.0 * (step % 50 == 0)
            reporter.update(step, 400, f"step {step}")
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    assert len(lines) > 5
    for line in lines:
        passed_s, left_s = (float(text.split(" s")[0]) for text in line.partition("(")[2].split(", "))
        truly_s = clock.now_s - passed_s
        assert truly_s < 15 or truly_s / 2 < left_s < truly_s * 2, line


def test_a_search_says_how_long_it_may_take_at_most(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter("searching") as reporter:
        clock.now_s = 20.0
        reporter.update(20, 60, "best 412 ms", 40.0, at_most=True)
    assert capsys.readouterr().err == "searching 33 %: best 412 ms (20.0 s, at most 40.0 s left)\n"


def test_other_ranks_than_the_first_say_nothing(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with Reporter("running") as reporter:
        clock.now_s = 60.0
        reporter.update(1, 2, "step 1")
    assert capsys.readouterr().err == ""


def test_on_a_narrow_terminal_nothing_is_cut_and_nothing_is_on_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for columns in ("80", "40"):
        monkeypatch.setenv("COLUMNS", columns)
        with Reporter("searching") as reporter:
            reporter.update(1, 2, "best 412 ms [gap], bound 400 ms, 31 simulated", 12.0)
        shown = capsys.readouterr()
        assert shown.out == ""
    assert "…" not in shown.err
    assert "searching50%" in "".join(shown.err.split())


def test_progress_fits_eighty_columns(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = "best 412 ms, gap 3.1 %, bound 400 ms, 31 simulated"

    def shown(numbers: str) -> list[str]:
        with Reporter("searching") as reporter:
            clock.now_s += 12
            reporter.update(1, 2, numbers, 44.0, at_most=True)
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
        lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
        assert max(map(len, lines)) <= 80
        return lines

    assert shown(search) == ["searching 50 %: best 412 ms, gap 3.1 % (12.0 s, at most 44.0 s left)"]
    assert shown("x" * 90)[0].endswith("x… (12.0 s, at most 44.0 s left)")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    bar, numbers = shown(search)[-2:]
    assert re.fullmatch(r"searching 50 % .* at most 44.0 s left", bar)
    assert numbers == search
    assert "".join(shown("x" * 90)).count("x") % 90 == 0, "what is longer goes on in a line below"


def test_torchrun_is_told_the_error_and_not_where_to_look_for_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    error = UsageError("there is no module 'nowhere'", ["neither installed nor here"], ["path/file.py:factory"])
    assert console.report(error) == error.exit_code
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=error.exit_code, error_file=str(path))
    last_words = str(ChildFailedError("halopipe", {1: failure}))
    assert textwrap.indent(error.render(), "  ") in last_words
    assert "To enable traceback" not in last_words
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert console.report(error) == error.exit_code


def failing(error: BaseException) -> typer.Typer:
    single = typer.Typer(pretty_exceptions_enable=False)

    def verb() -> None:
        raise error

    single.command()(console.reported(verb))
    return single


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (KeyboardInterrupt(), 130, ["interrupted\n"]),
        (
            InfeasibleError("no plan fits", ["n0/cpu0"], ["--micro-batch 1"]),
            4,
            ["error[H401] no plan fits\n  n0/cpu0\n  try: --micro-batch 1\n"],
        ),
        (
            ZeroDivisionError("oops"),
            1,
            ["error[H100] ZeroDivisionError: oops\n  this is a bug in halopipe; please report", "Traceback"],
        ),
        (
            ModuleNotFoundError("No module named 'planner.extras.x'", name="planner.extras.x"),
            2,
            ["error[H200] planner.extras.x is missing\n", "try: install halopipe again"],
        ),
    ],
    ids=["ctrl-c", "an error of ours", "a bug", "an extra that is not there"],
)
def test_whatever_ends_a_verb_is_told_with_its_exit_code(error: BaseException, exit_code: int, said: list[str]) -> None:
    result = CliRunner().invoke(failing(error), [])
    assert result.exit_code == exit_code
    assert result.stderr.startswith(said[0])
    assert [text for text in said if text not in result.stderr] == []
    assert ("Traceback" in result.stderr) == (exit_code == 1)


def test_the_share_never_falls_nor_exceeds_the_whole(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter("running") as reporter:
        for turn, step in enumerate((50, 20, 51, 130), start=1):  # a loss after step 50; a search beyond its limit
            clock.now_s = 10.0 * turn
            reporter.update(step, 100, f"step {step}", 1.0)
    shown = [line.split(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["running 50 %", "running 50 %", "running 51 %", "running 100 %"]


def test_what_stdout_cannot_write_is_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    console.emit("30 µs – F0░·· é 😀")
    console.emit_json({"é": "µ😀"})
    line, _, rest = written.getvalue().decode("ascii").partition("\n")
    assert line == "30 us - F0-.. \\u00e9 \\ud83d\\ude00"
    assert json.loads(rest) == {"é": "µ😀"}


def test_a_verb_ends_well_where_stdout_is_for_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    told = process("devices", cwd=tmp_path)
    assert (told.returncode, told.stderr) == (0, "")
    assert "A100" in told.stdout


@pytest.mark.parametrize("text", ["a result", ""])
def test_a_full_disk_behind_standard_output_is_said(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(MissingFileError, match=r"(?s)cannot write to standard output.*No space left"):
            console.emit(text)


@pytest.mark.parametrize(
    ("error", "said", "remedy"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.json"), "error[H301] cannot write x.json\n  No space", ""),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), "x" * 999), "error[H301] cannot use xxx", ""),
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "error[H3", "ulimit -n"),
    ],
    ids=["a full disk", "a name too long", "too few files"],
)  # fmt: skip
def test_what_the_machine_has_too_little_of_is_no_bug(
    error: OSError, said: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.report(error) == 3
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert f"\n  try: {remedy}" in shown
    assert "Traceback" not in shown
