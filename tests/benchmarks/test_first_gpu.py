"""The first hour on a GPU: steps are resumed, errors are rows, what hangs is ended, and a rehearsal does the same."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks.first_gpu import __main__ as program
from benchmarks.first_gpu.frame import Bench, Outcome, Parts, Results, run_steps
from benchmarks.report import Row, read

HOME = Path(__file__).parents[2]


def three(bench: Bench) -> Parts:
    """All well."""
    return _parts(bench, a=_nothing, b=_nothing, c=_nothing)


def faulty(bench: Bench) -> Parts:
    """The second raises, the fourth dies."""
    return _parts(bench, first=_nothing, raises=_raise, between=_nothing, dies=_die, last=_nothing)


def endless(bench: Bench) -> Parts:
    """The second never ends."""
    return _parts(bench, quick=_nothing, slow=partial(time.sleep, 3600.0))


def without_parts(bench: Bench) -> Parts:
    raise ValueError("no parts today")


def _parts(bench: Bench, **deeds: Callable[[], object]) -> Parts:
    return {name: partial(_part, bench, name, deed) for name, deed in deeds.items()}


def _part(bench: Bench, name: str, deed: Callable[[], object]) -> Iterator[Row]:
    with bench.file("ran").open("a", encoding="utf-8") as file:
        file.write(f"{name}\n")
    deed()
    yield Row(f"{name}: one", 1.0, "s")


def _nothing() -> None:
    pass


def _raise() -> None:
    raise KeyError("on purpose")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ran(bench: Bench) -> list[str]:
    """The parts that ran, in order."""
    return bench.file("ran").read_text("utf-8").split() if bench.file("ran").exists() else []


def run(folder: Path, step: str, **options: float) -> Results:
    results = Results(Bench(folder, rehearses=True), ["before", step])
    run_steps({step: f"tests.benchmarks.test_first_gpu:{step}"}, results, **options)
    return results


def rows_in(folder: Path) -> list[Row]:
    return [Row(**row) for row in json.loads((folder / "first_gpu.json").read_text("utf-8"))]


def test_what_is_done_is_written_and_not_done_again_nor_counts_for_the_gpu(tmp_path: Path) -> None:
    bench = Bench(tmp_path, rehearses=True)
    Results(bench, ["three"]).add(Outcome("three", "b", "cpu", rows=(Row("b: before", 2.0, "s"),)))
    for _ in range(2):
        run(tmp_path, "three")
        assert ran(bench) == ["a", "c"]
    shown = {row.name: row.value for row in rows_in(tmp_path) if not row.name.endswith("took")}
    assert shown == {"three: b: before": 2.0, "three: a: one": 1.0, "three: c: one": 1.0}
    assert Results(Bench(tmp_path), []).done() == set()


def test_an_error_or_a_death_is_a_row_and_the_next_parts_go_on_in_this_call_and_the_failed_in_the_next(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, rehearses=True)
    results = run(tmp_path, "faulty")
    assert ran(bench) == ["first", "raises", "between", "dies", "last"]
    raised, died = [row.name for row in rows_in(tmp_path) if not row.holds]
    assert raised.startswith("faulty: raises: KeyError: 'on purpose'")
    assert died.startswith("faulty: dies: ")
    assert any(word in died for word in ("signal 9", "SIGKILL", "killed"))
    assert results.done() == {("faulty", name) for name in ("first", "between", "last")}
    run(tmp_path, "faulty")
    assert ran(bench)[5:] == ["raises", "dies"]
    assert "Traceback" in (tmp_path / "log.txt").read_text("utf-8")


@pytest.mark.parametrize(("step", "why"), [("endless", "ended at its limit of 1 s"), ("without_parts", "no parts")])
def test_a_step_that_hangs_is_ended_and_one_without_parts_says_why(tmp_path: Path, step: str, why: str) -> None:
    results = run(tmp_path, step, **({"limit_s": 1.0} if step == "endless" else {}))
    assert results.done() <= {("endless", "quick")}
    (outcome,) = [each for each in results.outcomes.values() if each.error]
    assert why in outcome.error


def rehearsed(folder: Path, steps: str) -> list[Row]:
    assert program.main(["--rehearse", "--step", steps, "--results", str(folder)]) == 0
    return rows_in(folder)


def test_kernels_and_exchanges_do_on_the_processor_what_they_do_on_a_gpu(tmp_path: Path) -> None:
    rows = rehearsed(tmp_path, "kernels,exchanges")
    assert [row.name for row in rows if not row.holds] == []
    names = {row.name for row in rows}
    assert "kernels: convolution, weight gradient, float32: error" in names
    assert {f"exchanges: sum of 1 MiB: {transport}" for transport in ("shared", "gloo")} <= names


@pytest.mark.exhaustive("every step, with networks that are small: a minute of a machine that does nothing else")
@pytest.mark.timeout(900)
def test_the_whole_rehearsal_ends_without_an_error(tmp_path: Path) -> None:
    rows = rehearsed(tmp_path, ",".join(program.STEPS))
    assert [row.name for row in rows if not row.holds] == []
    assert {row.name.partition(":")[0] for row in rows} == set(program.STEPS)
    for dtype in ("float64", "float32", "bfloat16"):
        assert any(f", {dtype}: first steps are one device's" in row.name for row in rows)


def test_what_cannot_be_run_is_said_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "may_have_gpus", lambda: False)
    assert program.main(["--results", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().err
    monkeypatch.setattr(program, "_is_there", lambda package: package not in ("pydantic", "PyYAML"))
    assert program.main(["--rehearse", "--results", str(tmp_path)]) == 2
    assert "packages are missing: pydantic PyYAML;" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        program.main(["--step", "kernel", "--results", str(tmp_path)])
    assert "there is no step kernel; there are machine, tests," in capsys.readouterr().err


def test_the_list_says_what_is_done_and_a_call_whose_time_is_over_begins_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["--list", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(program.STEPS)
    assert all(line.endswith("not run") for line in lines)
    assert program.main(["--rehearse", "--minutes", "0.001", "--results", str(tmp_path)]) == 0
    assert "not begun, the time is over: machine, tests" in capsys.readouterr().out


def test_documents_say_where_a_gpu_was_tried_and_what_each_step_finds_out() -> None:
    row = next(line for line in (HOME / "README.md").read_text("utf-8").splitlines() if line.startswith("| [One GPU]"))
    card = next(name for name in (each.name for each in read("first_gpu")) if "card NVIDIA" in name)
    assert card.rpartition(" ")[2] in row
    text = (HOME / "docs" / "gpu.md").read_text("utf-8")
    assert [name for name in program.STEPS if f"| `{name}` |" not in text] == []
