"""What an interrupted profile leaves behind, and who may go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.ir.errors import MissingFileError
from planner.ir.profile import Measurement, ParameterCost, PartShape, PreparationCost, SiteHalo
from profiler.measure.partial_results import (
    Contents,
    FinishedMeasurements,
    PartCosts,
    ProcessResults,
    Rest,
    SizeCosts,
    Unfinished,
)

WHOLE = Measurement("conv", 4, 0.5, 1.0, 0.5, 0.25, 64, 8, 3, 0.01, "Mkldnn", raw_s=(1.5, 1.25, 2.0))
PART = Measurement("conv", 2, 0.5, 1.0, 0.5, 0.25, 64, 8, 3, part=(8, 4))
SIZE = SizeCosts(4, (WHOLE,), 2.5)
FAILED = SizeCosts(1, failure="1 samples: ValueError: one value")
PARTS = PartCosts((PartShape(("conv", "twin"), 2, (8, 4)),), (PART,))
REST = Rest(
    {"conv": ParameterCost(1.0, 2.0)},
    0.01,
    0.02,
    0.001,
    (PreparationCost("map_0", ("x",), ("collate",), 1.0, 4),),
    (SiteHalo("conv", 2, 4, 17),),
)


class Opened:
    """A file, opened anew each time, and what was said."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".profile.json.unfinished"
        self.said: list[str] = []

    def open(self, job: str = "job", resume: bool = True) -> Unfinished:
        self.said.clear()
        return Unfinished(self.path, job, resume, self.said.append)


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    found = Opened(tmp_path)
    first = found.open(resume=False)
    first.captured("sha256:graph")
    for piece in (SIZE, FAILED, PARTS, REST):
        first.add("0", piece)
    first.add("0 again", SIZE)
    return found


def test_the_same_job_gets_back_every_piece(opened: Opened) -> None:
    again = opened.open()
    assert again.contents == Contents(
        "job",
        "sha256:graph",
        {
            "0": ProcessResults(FinishedMeasurements((SIZE, FAILED), (PARTS,)), REST),
            "0 again": ProcessResults(FinishedMeasurements((SIZE,))),
        },
    )
    assert again.of("1") == ProcessResults()
    assert not opened.said
    again.add("1", SIZE)
    assert set(opened.open().contents.processes) == {"0", "0 again", "1"}
    assert [path.name for path in opened.path.parent.iterdir()] == [opened.path.name]


@pytest.mark.parametrize(
    ("job", "resume", "text", "said"),
    [
        ("other", True, "", "was another job"),
        ("job", False, "", "--resume goes on with it"),
        ("job", True, "{", "cannot be read"),
        ("job", True, '{"halopipe": "profile"}', "cannot be read"),
        ("job", True, '{"halopipe": "unfinished profile", "contents": {"jobs": 1}}', "cannot be read"),
        ("job", True, '{"halopipe": "unfinished profile", "contents": {"job": 1}}', "cannot be read"),
    ],
)
def test_what_is_of_no_use_stays_until_something_is_measured_and_goes_with_a_word(
    opened: Opened, job: str, resume: bool, text: str, said: str
) -> None:
    if text:
        opened.path.write_text(text)
    before = opened.path.read_text()
    found = opened.open(job, resume)
    assert found.contents == Contents(job)
    found.captured("sha256:graph")  # as far as a command with a mistake in it comes
    assert opened.path.read_text() == before
    assert len(opened.said) == 1
    assert said in opened.said[0]
    found.add("0", SIZE)
    assert opened.open(job).contents == Contents(
        job, "sha256:graph", {"0": ProcessResults(FinishedMeasurements((SIZE,)))}
    )


def test_with_nothing_to_go_on_with_it_says_so_and_begins(tmp_path: Path) -> None:
    opened = Opened(tmp_path)
    assert opened.open().contents == Contents("job")
    assert "nothing to go on with" in opened.said[0]
    opened.open(resume=False)
    assert not opened.said


def test_without_a_file_pieces_are_kept_in_memory_alone(tmp_path: Path) -> None:
    found = Unfinished(None, "job", False, lambda _: None)
    found.add("0", SIZE)
    assert found.of("0").done.sizes == (SIZE,)
    found.drop()
    assert found.of("0") == ProcessResults()


def test_a_folder_that_is_not_there_is_told_at_the_first_piece(tmp_path: Path) -> None:
    found = Unfinished(tmp_path / "no" / "file", "job", False, lambda _: None)
    with pytest.raises(MissingFileError, match="cannot write"):
        found.captured("graph")
