"""Every row of the reference: the simulator's step, bubbles and peaks are those of an independent event simulation."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from planner.ir.schedule import Pipeline, Schedule, StageTimes
from planner.schedules import schedule, traits
from tests.planner.passes.occupancy import peaks
from tests.planner.schedules.simulated import Simulated, chain, lowered, uniform

REFERENCE = Path(__file__).parents[2] / "data" / "reference" / "schedules.csv"
# Name in the reference: (ours, stages on a position, messages block).
OURS = {
    "naive": ("naive", 1, False),
    "gpipe": ("gpipe", 1, False),
    "gpipe_block": ("gpipe", 1, True),
    "gpipe_2bp": ("gpipe-2bp", 1, False),
    "1f1b": ("1f1b", 1, False),
    "1f1b_block": ("1f1b-sno", 1, True),
    "1f1b_so": ("1f1b-so", 1, False),
    "1f1b_2bp": ("1f1b-2bp", 1, False),
    "1f1b_2bp_fill": ("1f1b-2bp-fill", 1, False),
    "interleaved_v2": ("interleaved", 2, False),
    "interleaved_v4": ("interleaved", 4, False),
    "zbh1": ("zb-h1", 1, False),
    "zbh2": ("zb-h2", 1, False),
    "zbv_v2": ("zb-v", 2, False),
}


@cache
def reference() -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {name: [] for name in OURS}
    with REFERENCE.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            found[row["schedule"]].append(row)
    return found


def number(text: str) -> float:
    above, _, below = text.partition("/")
    return float(above) / float(below or 1)


def ordered(name: str, pipeline: Pipeline, blocking: bool) -> Schedule:
    order = schedule(name)(pipeline)
    assert blocking or not order.blocking
    return replace(order, blocking=blocking)


def test_the_reference_has_2280_rows_of_these_schedules() -> None:
    assert sum(map(len, reference().values())) == 2280


@pytest.mark.parametrize("published", OURS)
def test_steps_bubbles_and_peaks_are_the_references(published: str) -> None:
    name, per_position, blocking = OURS[published]
    known: dict[tuple[int, int], tuple[Simulated, list[float]]] = {}
    for row in reference()[published]:
        parts = [number(row[part]) / per_position for part in "FIW"]
        size, transfer = (int(row["stages"]), int(row["microbatches"])), number(row["c"])
        if size not in known or traits(name).timed:
            pipeline = chain(name, *size, per_position)
            times = (StageTimes(*parts),) * pipeline.stages.num_stages
            pipeline = replace(pipeline, times=times, transfer=transfer)
            order = ordered(name, pipeline, blocking)
            kept = peaks(order.rows, [1 / per_position] * pipeline.stages.num_stages)
            known[size] = Simulated.of(lowered(pipeline, order)), list(kept)
        simulated, kept_by_rank = known[size]
        found = simulated.run(uniform(*parts), transfer)
        assert found.step == float(row["iter_time"]), row
        assert [found.step - busy for busy in extremes(found.busy)] == [
            pytest.approx(float(row[which]), abs=1e-9) for which in ("max_rank_bubble", "min_rank_bubble")
        ]
        assert kept_by_rank == [float(peak) for peak in row["peak_act_per_rank"].split()], row
        assert max(kept_by_rank) == float(row["peak_act_max"])


def extremes(values: Iterable[float]) -> tuple[float, float]:
    found = tuple(values)
    return min(found), max(found)
