"""The tables of docs/planner.md say what the registries say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner import schedules
from planner.solvers import baselines

DOCUMENT = (Path(__file__).resolve().parent.parent / "docs" / "planner.md").read_text("utf-8")


def table(title: str) -> dict[str, list[str]]:
    """The rows of a section's table by the name in the first column."""
    section = DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = (line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `"))
    return {row[0].strip().strip("`"): [cell.strip() for cell in row[1:]] for row in rows}


def test_every_schedule_has_a_row_and_every_row_a_schedule() -> None:
    assert list(table("Schedules")) == list(schedules.names())


@pytest.mark.parametrize("name", schedules.names())
def test_a_schedule_has_the_traits_of_its_row(name: str) -> None:
    searched, backward, stages, special = table("Schedules")[name]
    traits = schedules.traits(name)
    when = dict.fromkeys(schedules.chunked_names(), "besides")
    assert searched == when.get(name, "yes" if traits.by_default else "if streamed" if traits.streams else "no")
    assert backward == ("none" if not traits.trains else "split" if traits.splits_backward else "whole")
    assert stages == ("any" if traits.stages_per_position == 0 else str(traits.stages_per_position))
    assert ("changes the optimisation" in special) == (not traits.synchronous)
    assert bool(re.search(r"\btimed\b", special)) == traits.timed
    assert bool(re.search(r"\bwindows\b", special)) == traits.windowed


def test_every_baseline_has_a_row_and_every_row_a_baseline() -> None:
    assert sorted(table("Baselines")) == list(baselines())
