from __future__ import annotations

import sys

import pytest

from halopipe.terminal import console
from halopipe.terminal.console import Reporter


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


def test_other_ranks_than_the_first_say_nothing(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with Reporter("running") as reporter:
        clock.now_s = 60.0
        reporter.update(1, 2, "step 1")
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_that_leaves_nothing_on_stdout(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Reporter("searching") as reporter:
        reporter.update(1, 2, "best 412 ms [gap]")
    assert capsys.readouterr().out == ""
