"""Each remedy that names a command or an option works when it is followed to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.robustness.refusals import Refusal, commands_of, rows, verdict

ROWS = rows()
CHEAP, DEAR = ([row for row in ROWS if row.is_dear == is_dear] for is_dear in (False, True))


@pytest.mark.every_case
@pytest.mark.parametrize("row", CHEAP, ids=lambda row: row.name)
def test_the_remedies_of_a_refusal_work(row: Refusal, tmp_path: Path) -> None:
    assert verdict(row, tmp_path) == ""


@pytest.mark.exhaustive("ranks train, serve and save, after each remedy: seconds")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("row", DEAR, ids=lambda row: row.name)
def test_the_remedies_of_a_refusal_to_run_work(row: Refusal, tmp_path: Path) -> None:
    assert verdict(row, tmp_path) == ""


def test_a_command_that_works_and_a_remedy_without_a_command_are_no_rows(tmp_path: Path) -> None:
    assert "is not refused" in verdict(Refusal("", ("compare", "plan.json")), tmp_path)
    (tmp_path / "other").mkdir()
    assert "no remedy names a command" in verdict(Refusal("", ("plan", "nowhere.json")), tmp_path / "other")


PLAN = Refusal("", ("plan", "profile.json", "--gap", "2", "-o", "a.json"), {"another name": "b.json"})
RUN = Refusal("", ("run", "plan.json", "--check-numerics"))


@pytest.mark.parametrize(
    ("remedy", "row", "commands"),
    [
        ("2 percent is --gap 0.02", PLAN, ["plan profile.json -o a.json --gap 0.02"]),
        ("leave --gap out", PLAN, ["plan profile.json -o a.json"]),
        ("-o another name", PLAN, ["plan profile.json --gap 2 -o b.json"]),
        ("--ranks 2, or --memory 1GiB", PLAN, ["plan profile.json --gap 2 -o a.json --ranks 2"]),
        ("--ranks 2 in place of --gap", PLAN, ["plan profile.json -o a.json --ranks 2"]),
        ("halopipe plan --help", PLAN, ["plan profile.json --help"]),
        ("halopipe plan PROFILE --ranks 2", RUN, ["plan profile.json --ranks 2", "run plan.json --check-numerics"]),
        ("plan with --schedule 1f1b alone", RUN,
         ["plan profile.json --global-batch 8 --schedule 1f1b", "run plan.json --check-numerics"]),
        ("halopipe devices", PLAN, ["devices"]),
        ("mend the function that is named", RUN, []),
    ],
)  # fmt: skip
def test_a_remedy_is_read_as_a_person_reads_it(remedy: str, row: Refusal, commands: list[str]) -> None:
    assert [" ".join(command) for command in commands_of(remedy, row)] == commands
