"""Plans that answer requests."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.following import Refusal


def rows() -> Iterator[Refusal]:
    """All that ``serve`` refuses."""
    fill = {"--to FOLDER": "--to answers", "FOLDER": "folder", "another folder": "answers"}
    elsewhere = {
        "--http": "it answers until it is ended",
        "--stdin json": "this process has no standard input to serve from",
        "leave --to": "the same",
    }
    for words in (
        "serve plan.json",
        "serve plan.json --from folder",
        "serve plan.json --from folder --to folder",
        "serve plan.json --stdin json --to answers",
    ):
        yield Refusal(words, tuple(words.split()), fill, folders.asks, folders.PLANNED, elsewhere, is_dear=True)
