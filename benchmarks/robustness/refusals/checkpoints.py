"""What runs have saved: listed, exported, gone on from."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.following import Refusal

_SAVED = {"FOLDER": "saved", "another": "another-folder"}


def rows() -> Iterator[Refusal]:
    """All that are refused over a folder of checkpoints."""
    for words in (
        "checkpoint list", "checkpoint walk saved", "checkpoint export saved", "checkpoint saved --step 7",
    ):  # fmt: skip
        fill = {**_SAVED, "...": "weights.pt"}
        yield Refusal(words, tuple(words.split()), fill, folders.saved, is_dear=True)
    for words, prepare, fill in (
        ("--resume --accumulate 3 --steps 12", folders.saved, {"as it was": "1"}),
        ("--resume --steps 9", folders.of_another_model, {}),
        ("--resume --steps 8 --metrics bad.jsonl", folders.unreadable, {"another name": "good.jsonl"}),
    ):
        arguments = ("run", "plan.json", "--no-learn", "--checkpoint", "saved", *words.split())
        yield Refusal(f"run --checkpoint saved {words}", arguments, fill, prepare, is_dear=True)
