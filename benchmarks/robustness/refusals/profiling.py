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
    for words, fill in (
        ("of_one_size --sizes 1,2", {}),
        ("reading --on a100-dgx", {}),
        ("model --local-loss 5", {}),
        ("without_values", {}),
        ("rotated --dtype bfloat16", {}),
        ("alone", {"8,3,64,64": "16,1,8,8"}),
        ("spoilt", {}),
    ):
        factory, *options = words.split()
        quick = [] if factory in ("reading", "without_values") else ["--workers", "1", "--quick"]
        arguments = ("profile", f"model.py:{factory}", *options, *quick)
        yield Refusal(f"profile model.py:{words}", arguments, fill, folders.after(), is_dear=True)
    clouds = ("profile", "model.py:cloudy", "--on", "a100-dgx")
    yield Refusal("profile model.py:cloudy --on a100-dgx", clouds, {}, folders.after(), is_dear=True)
    of_one_size = folders.after(("profile", "model.py:wide", "--quick", "--workers", "2", "--sizes", "4"))
    arguments = ("plan", "profile.json", "--global-batch", "4", "--ranks", "2", "--solver", "data-parallel")
    fill = {"...": "model.py:wide --quick --workers 2"}
    yield Refusal("plan --solver data-parallel, of one size", arguments, fill, of_one_size, is_dear=True)
    fill = {"MODEL": "model.py:model --quick"}
    arguments = ("plan", "profile.json", "--global-batch", "8", "--cluster", "alike.yaml")
    yield Refusal("plan --cluster alike.yaml, unmeasured", arguments, fill, folders.unmeasured, is_dear=True)
    one = folders.after(("profile", "model.py:model", "--quick", "--workers", "1"))
    fill = {"...": "model.py:model --quick"}
    for words in ("--ranks 2", "--ways data=2"):
        elsewhere = {"cluster": "it is of no such cluster", "--ranks": "another row follows it"}
        arguments = ("plan", "profile.json", "--global-batch", "16", *words.split())
        yield Refusal(f"plan {words}, profiled by 1", arguments, fill, one, elsewhere=elsewhere, is_dear=True)
