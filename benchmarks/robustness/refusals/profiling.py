"""Modules that are profiled."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.following import Refusal


def rows() -> Iterator[Refusal]:
    """All that ``profile`` refuses."""
    for words in ("--workers 1 --quick --device cuda", "--workers 1 --quick --dtype bfloat16 --autocast bfloat16",
                  "--on a100-dgx --workers 9", "--on cluster.yaml --workers 9"):  # fmt: skip
        profile = ("profile", "model.py:model", *words.split())
        yield Refusal(f"profile {words}", profile, {}, folders.modelled, is_dear=True)
