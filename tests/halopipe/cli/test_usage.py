"""What a person mistypes: each ends with exit code 2, names the option with its value, and what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.halopipe.commands import call


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ("plan p.json --rank 2", ["No such option: --rank", "--ranks"]),
        ("run p.json --stpes 3", ["No such option: --stpes", "--steps"]),
        ("plan p.json --ranks -1", ["'--ranks'", "greater than or equal to 0"]),
        ("plan p.json --ranks two", ["'--ranks'", "valid integer"]),
        ("plan p.json --gap 1%", ["'--gap'", "valid number"]),
        ("plan p.json --gap nan", ["'--gap'", "greater than or equal to 0"]),
        ("plan p.json --micro-batch 1,2", ["'--micro-batch'", "valid integer"]),
        ("plan p.json --ranks 1 --ranks 2", ["--ranks is given more than once", "keep one of them: --ranks 2"]),
        ("plan p.json -o a.json --output b.json", ["--output is given more than once", "--output b.json"]),
        ("plan p.json q.json", ["unexpected extra argument(s) (q.json)", "Usage: halopipe plan [OPTIONS] {PROFILE}"]),
        ("compare", ["Missing argument 'PLAN...'", "Usage: halopipe compare [OPTIONS]"]),
        ("export p.json", ["Missing option '--to'"]),
        ("exlpain p.json", ["No such command 'exlpain'", "'explain'"]),
        ("run p.json --resume autom", ["--resume knows no 'autom'", "try: --resume auto (did you mean that?)"]),
        ("run --replan fre p.json", ["--replan knows no 'fre'", "try: --replan free (did you mean that?)"]),
    ],
)
def test_what_is_mistyped_is_named_with_what_was_meant(arguments: str, lines: list[str]) -> None:
    result = call(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    assert result.stderr.startswith("error[H200] ")
    assert [line for line in lines if line not in result.stderr] == [], result.stderr
    assert "\n  try: halopipe" in result.stderr or "did you mean" in result.stderr or "keep one" in result.stderr


def test_an_option_with_many_values_and_a_flag_may_come_again(folder: Path) -> None:
    again = ["--micro-batch", "1", "--micro-batch", "2", "--json", "--json"]
    result = call("plan", "profile.json", "--global-batch", "4", *again)
    assert result.exit_code == 0, result.stderr


def test_a_file_called_nearly_as_the_word_of_an_option_is_that_file(folder: Path) -> None:
    (folder / "autos").write_text("{")
    result = call("run", "--resume", "autos")
    assert "autos is not JSON" in result.stderr


@pytest.mark.parametrize(
    ("option", "needed"), [(["--quick"], "--measure-missing"), (["--halo-depth", "2"], "--allow sample,spatial")]
)
def test_an_option_that_would_do_nothing_is_refused(folder: Path, option: list[str], needed: str) -> None:
    result = call("plan", "profile.json", *option)
    assert (result.exit_code, f"error[H200] {option[0]} is of no use without {needed}" in result.stderr) == (2, True)


def test_nothing_at_all_shows_the_help() -> None:
    result = call()
    assert result.exit_code == 2
    assert "profile" in result.output
    assert "error" not in result.output
