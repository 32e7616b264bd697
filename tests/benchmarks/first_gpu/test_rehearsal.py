"""The command: what it refuses, and the same steps on the processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.first_gpu import __main__ as program
from benchmarks.report import Row, read

HOME = Path(__file__).parents[3]
DOCUMENT = HOME / "docs" / "gpu.md"


def rehearsed(folder: Path, steps: str) -> list[Row]:
    assert program.main(["--rehearse", "--step", steps, "--results", str(folder)]) == 0
    return [Row(**row) for row in json.loads((folder / "first_gpu.json").read_text("utf-8"))]


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


def test_without_a_gpu_it_says_so_and_names_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "may_have_gpus", lambda: False)
    assert program.main(["--results", str(tmp_path)]) == 2
    assert "--rehearse" in capsys.readouterr().err


def test_missing_packages_are_named_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "_is_there", lambda package: package not in ("pydantic", "PyYAML"))
    assert program.main(["--rehearse", "--results", str(tmp_path)]) == 2
    assert "packages are missing: pydantic PyYAML;" in capsys.readouterr().err


def test_the_list_says_what_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list", "--results", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(program.STEPS)
    assert all(line.endswith("not run") for line in lines)


def test_a_step_that_there_is_not_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["--step", "kernel", "--results", str(tmp_path)])
    assert "there is no step kernel; there are machine, tests," in capsys.readouterr().err


def test_a_call_whose_time_is_over_begins_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--rehearse", "--minutes", "0.001", "--results", str(tmp_path)]) == 0
    assert "not begun, the time is over: machine, tests" in capsys.readouterr().out


def test_the_readme_says_where_a_gpu_was_tried() -> None:
    row = next(line for line in (HOME / "README.md").read_text("utf-8").splitlines() if line.startswith("| [One GPU]"))
    card = next(name for name in (each.name for each in read("first_gpu")) if "card NVIDIA" in name)
    assert card.rpartition(" ")[2] in row


def test_the_document_says_what_each_step_finds_out() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert [name for name in program.STEPS if f"| `{name}` |" not in text] == []
