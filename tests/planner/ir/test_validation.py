from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.ir import codec
from planner.ir.codec import loads
from planner.ir.validation import faults
from tests.planner.factories import chain_decision, plan_of

HOME = Path(__file__).resolve().parents[3]
PROFILE = chain_profile(3)
WRITTEN = [
    path
    for path in (*HOME.glob("notebooks/data/**/*.json"), *HOME.glob("tests/data/golden/*.json"))
    if '"halopipe"' in path.read_text("utf-8")[:40]
]


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_files_of_earlier_releases_make_sense(path: Path) -> None:
    text = path.read_text("utf-8")
    cls, _ = codec.FORMATS[json.loads(text)["halopipe"]]
    loads(text, cls)


def test_what_tests_are_made_of_makes_sense() -> None:
    assert faults(PROFILE) == ()
    assert faults(plan_of(PROFILE, chain_decision(PROFILE, cuts=(2,), micro_batches=(2, 2)))) == ()


def test_all_faults_are_told_in_the_order_of_the_file() -> None:
    first, second, *rest = PROFILE.graph.layers
    graph = replace(PROFILE.graph, layers=(replace(first, inputs=(second.name,)), replace(second, name=""), *rest))
    found = faults(replace(PROFILE, graph=graph))
    places = [fault.partition(":")[0] for fault in found]
    assert places[:3] == ["graph.layers[0].inputs[0]", "graph.layers[1].name", "graph.layers[2].inputs[0]"]
