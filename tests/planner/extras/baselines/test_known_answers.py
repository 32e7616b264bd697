"""Published planners' own answers, found again: every row of the reference table, and SparsePipe's profiles."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from planner.extras.baselines.common.answer import INFEASIBLE, OPTIMAL, RivalAnswer
from planner.extras.baselines.pipedream import format as pipedream_format
from planner.extras.baselines.pipedream import planner as pipedream
from planner.extras.baselines.piper import format as piper_format
from planner.extras.baselines.piper import planner as piper
from planner.extras.baselines.sparsepipe import DeviceType, best_pipeline
from planner.extras.baselines.tarnawski import format as tarnawski_format
from planner.extras.baselines.tarnawski import planner as tarnawski

DATA = Path(__file__).parents[3] / "data"
PROFILES = DATA / "profiles"
Row = dict[str, str]
GIB = 2**30
VARIANTS = {
    "Tarnawski DP (dp.exe)": "contiguous",
    "exact ideal-lattice DP with window pruning (prototype)": "contiguous",
    "dp.exe -linearize (DPL)": "linearized",
    "dp.exe -oneFpga (single device)": "single",
    "dp.exe -pipeDream baseline": "pipedream",
}
"""Of others, integer programs that were stopped within 1 %, our answer may be better."""


def pipedream_answer(row: Row) -> RivalAnswer | float:
    graph = pipedream_format.read(PROFILES / f"{row['instance']}.graph.txt")
    machines, bandwidths = map(json.loads, re.findall(r"\[.*?\]", row["devices"]))
    if "data-parallel" in row["objective"]:
        return pipedream.data_parallel_s(graph, machines, bandwidths)
    memory = inf if row["memory_limit"] == "none" else 1e9 * float(row["memory_limit"].removesuffix("GB"))
    options = pipedream.PipeDreamOptions("ignored" not in row["objective"], "straight" in row["objective"], memory)
    return pipedream.solve(graph, machines, bandwidths, options)


def tarnawski_answer(row: Row) -> RivalAnswer:
    name = row["instance"].removeprefix("dnn-partitioning/").replace("/", "_")
    words = row["devices"].split()
    accelerators = int(words[0])
    cpus = int(words[3]) if len(words) > 3 else 0
    instance = tarnawski_format.read(PROFILES / "dnn-partitioning" / f"{name}.json")
    free = "free" if "noncontig" in row["objective"] else "contiguous"
    variant = VARIANTS.get(row["solver"], free)
    return tarnawski.solve(replace(instance, accelerators=accelerators, cpus=cpus), variant=variant)


def piper_answer(row: Row) -> RivalAnswer:
    instance = piper_format.read(PROFILES / "piper" / "resnet.json")
    devices = int(row["devices"].split()[0])
    memory = float(row["memory_limit"].split()[0]) * GIB
    variant = "piper" if row["solver"].startswith("Piper DP") else "equal"
    asked = replace(instance, devices=devices, memory_bytes=memory, bandwidth_bytes_per_s=25 * GIB)
    return piper.solve(asked, variant=variant)


PLANNERS = {"pipedream": pipedream_answer, "dnn-partitioning": tarnawski_answer, "piper": piper_answer}


def reference() -> list[Row]:
    with (DATA / "reference" / "planner.csv").open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["instance"].partition("/")[0] in PLANNERS]
    return [row for row in rows if "machines bw" in row["devices"] or not row["instance"].startswith("pipedream")]


def test_the_reference_has_as_many_rows_as_it_had() -> None:
    counts = {"pipedream": 83, "dnn-partitioning": 42, "piper": 46}
    assert Counter(row["instance"].partition("/")[0] for row in reference()) == counts


@pytest.mark.cases(24)
@pytest.mark.parametrize("row", reference(), ids=lambda row: f"{row['instance']} {row['devices']} {row['solver']}")
def test_a_published_answer_is_found_again(row: Row) -> None:
    peer = row["instance"].partition("/")[0]
    answer = PLANNERS[peer](row)
    if isinstance(answer, float):
        assert answer == pytest.approx(float(row["value"]), abs=1e-6)
        return
    if row["value"] == "OOM":
        assert (answer.status, answer.value, answer.plan) == (INFEASIBLE, inf, {})
        return
    expected = float(row["value"])
    digits = len(row["value"].partition(".")[2])
    rounding = 0.5 * 10.0**-digits + 1e-6 * max(1.0, expected)
    assert answer.value <= expected + rounding
    assert answer.value >= expected - rounding or (peer == "dnn-partitioning" and row["solver"] not in VARIANTS)
    assert (answer.status, answer.bound) == (OPTIMAL, pytest.approx(answer.value))


@pytest.mark.parametrize(
    ("counts", "own", "best"),
    [
        ({"txp": 3, "tv": 4}, 0.2016, 0.1595),
        ({"tv": 4}, 0.2555, 0.2555),
        ({"txp": 4, "RTX": 4}, 0.1250, 0.1250),
    ],
)
def test_sparsepipes_published_profiles_take_what_its_planner_says(
    counts: dict[str, int], own: float, best: float
) -> None:
    folder = PROFILES / "sparsepipe"
    types = [DeviceType(k, pipedream_format.read(folder / f"b64_{k}.graph.txt"), n) for k, n in counts.items()]
    assert best_pipeline(types, fixed_order=True).value == pytest.approx(own, abs=5e-5)
    answer = best_pipeline(types)
    assert answer.value == answer.bound == pytest.approx(best, abs=5e-5)
