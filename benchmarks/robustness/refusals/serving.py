"""Plans that answer requests."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np

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
    learning = (
        "serve",
        "plan.json",
        "--from",
        "folder",
        "--to",
        "answers",
        "--learn",
        "--reader",
        "model.py:read_both",
    )
    for name, options, prepare in (
        ("serve --learn", (), folders.asks_two_stages),
        ("serve --learn --mode eval", ("--mode", "eval"), folders.learns),
    ):
        yield Refusal(name, (*learning, *options), {}, prepare, folders.PLANNED, is_dear=True)
    line = b'{"inputs": [%s]}' % b",".join([b"[[%s]]" % b",".join([b"[0,0,0,0,0,0,0,0]"] * 8)] * 16)
    array = io.BytesIO()
    np.save(array, np.zeros((16, 1, 8, 8), np.float32))
    for words, asked in (
        ("serve plan.json --stdin npy --max-request 1KiB", array.getvalue()),
        ("serve plan.json --stdin json --max-request 1KiB", line),
        ("serve plan.json, with an input", b""),
    ):
        ways = {"--http": "it answers until it is ended"}
        arguments = tuple(words.partition(",")[0].split())
        fill = {"SIZE": "1MiB", "--to FOLDER": "--to answers", "FOLDER": "folder"}
        yield Refusal(words, arguments, fill, folders.asks, folders.PLANNED, ways, is_dear=True, asked=asked)
    clouds = {"FACTORY": "halopipe.data.demo_data:shapes"}
    for name, prepare, plan, fill in (
        ("token slices", folders.asks_of_tokens, folders.SLICED, {}),
        ("clouds", folders.asks_of_clouds, folders.PLANNED, clouds),
        ("of its process", folders.asks_of_its_process, folders.PLANNED, {}),
    ):
        arguments = ("serve", "plan.json", "--from", "folder", "--to", "answers")
        yield Refusal(f"serve plan.json ({name})", arguments, fill, prepare, plan, is_dear=True)
    fill = {"an empty folder": "other", "FACTORY": "model.py:read", "FOLDER": "answers"}
    for words, prepare in (
        ("serve plan.json --from folder --to answers --stdin npy", folders.asks),
        ("serve plan.json --from folder --stdin npy", folders.asks),
        ("serve plan.json --from folder --to answers", folders.asks_in_text),
        ("serve plan.json --from folder --to saved", folders.has_answered),
        ("serve plan.json --stdin xml", folders.asks),
    ):
        asked = b"" if "--stdin" in words else None
        yield Refusal(words, tuple(words.split()), fill, prepare, folders.PLANNED, is_dear=True, asked=asked)
