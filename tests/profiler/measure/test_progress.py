"""Progress over recorded profiles, whose clocks are read from the record."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from profiler.measure.progress import Overall, ProfileProgress, ProgressCounter

RECORDS = Path(__file__).resolve().parents[2] / "data" / "profiling"


def never_falls(seen: Sequence[ProfileProgress]) -> bool:
    """But for rounding."""
    return all(b.done / b.total >= a.done / a.total - 1e-12 for a, b in pairwise(at for at in seen if at.total))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def replayed(record: dict[str, Any]) -> list[tuple[float, ProfileProgress]]:
    """What a profile would have shown, and when."""
    clock, seen = Clock(), list[tuple[float, ProfileProgress]]()
    overall = Overall(1, lambda at: seen.append((clock.now_s, at)), record["links"], record["link_s"], clock)
    overall.show(ProfileProgress("capture", 0.0, 0.0, 0.0, 0.0, None))
    counter: ProgressCounter | None = None
    for at_s, what, *arguments in record["events"]:
        clock.now_s = at_s
        if what in ("ended", "link"):
            getattr(overall, what)(*arguments)
            continue
        if counter is None:
            overall.captured()
            counter = ProgressCounter(overall.show, record["passes"], record["passes"], record["parts"], clock)
        getattr(counter, what)(*arguments)
    return seen


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_left_is_known_within_a_factor_of_two(path: Path) -> None:
    record = json.loads(path.read_text("utf-8"))
    seen, end_s = replayed(record), record["events"][-1][0]
    assert never_falls([at for _, at in seen])
    assert seen[-1][1].done == seen[-1][1].total
    captured_s = record["events"][0][0]
    guessed = [(at_s, at.eta_s) for at_s, at in seen if at_s > captured_s and at.eta_s is not None]
    assert guessed[0][0] < 10.0 + captured_s
    for at_s, eta_s in guessed:
        left_s = end_s - at_s
        if at_s >= 10.0 and left_s > 0.1 * end_s:
            assert 0.5 <= eta_s / left_s <= 2.0, (at_s, eta_s, left_s)


def test_sizes_that_nobody_expected_lower_no_share() -> None:
    clock, seen = Clock(), list[ProfileProgress]()
    overall = Overall(2, seen.append, now=clock)
    for process in range(2):
        counter = ProgressCounter(overall.show, 3, 2, has_parts=True, now=clock)
        counter.expect((1, 4))
        for samples in (1, 2, 4):
            counter.start_size(samples)
            for _ in range(4):  # one more than planned
                clock.now_s += 0.1 * samples
                counter.passed(samples, "layer", 1.0, 0.0)
            counter.end_size(samples)
            counter.expect((4,) if samples == 2 else (), [0.5])
        counter.end_size(3)  # it did not run
        counter.start_parts([0.1, 0.1], 4)
        for _ in range(3):  # one more than planned
            clock.now_s += 1.0
            counter.passed_part("layer", 1.0, 0.0)
            counter.end_round(2)
        overall.ended()
        assert seen[-1].eta_s == pytest.approx(5.8 * (1 - process), abs=0.1)
    assert never_falls(seen)
    assert seen[-1].done == pytest.approx(seen[-1].total, rel=0.02)


def test_a_process_that_is_not_run_counts_for_nothing() -> None:
    clock, seen = Clock(), list[ProfileProgress]()
    overall = Overall(3, seen.append, now=clock)
    overall.ended(measured=False)
    overall.show(ProfileProgress("capture", 0.0, 0.0, 0.0, 0.0, None))
    assert (seen[-1].done, seen[-1].total, seen[-1].eta_s) == (0.0, 0.0, None)
    clock.now_s = 10.0
    overall.show(ProfileProgress("layer", 1.0, 0.0, 5.0, 10.0, 5.0, 1))
    assert seen[-1].eta_s == 5.0 + 15.0
