"""Journeys of users: what a row says of them, and a few of them whole."""

from __future__ import annotations

import ast
import inspect
import json

import pytest

from benchmarks.journey import __main__ as journeys
from benchmarks.journey.__main__ import HABITS, NETWORKS, PACKAGES, QUICK, Journey, row_of

PLACE = "\n  File 'x.py', line 3"
REFUSAL = f"planner.ir.errors.X: error[H204] the model cannot be captured{PLACE}\n  try: torch.where"


def test_there_are_twenty_networks_of_packages_and_ten_habits() -> None:
    assert (len(PACKAGES), len(HABITS)) == (20, 10)
    assert set(QUICK) <= NETWORKS.keys()


def test_a_script_is_the_source_of_its_network_and_three_calls() -> None:
    for name, network in NETWORKS.items():
        tree = ast.parse(journeys._SCRIPT.format(source=inspect.getsource(network.factory), name=name))
        imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in imported if str(module).startswith(("benchmarks", "tests"))], name


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (Journey("bert", is_equal=True, num_stages=2), True),
        (Journey("bert", is_equal=False, text=REFUSAL), False),
        (Journey("control_flow", is_equal=False, text=REFUSAL), True),
        (Journey("control_flow", is_equal=False, text=REFUSAL.replace(", line 3", "")), False),
        (Journey("control_flow", is_equal=False, text=REFUSAL.replace("try", "see")), False),
        (Journey("control_flow", is_equal=False, text=f"error[H601] other losses{PLACE}\n  try: again"), False),
        (Journey("control_flow", is_equal=False, text=f"AttributeError: no{PLACE}\n  try: again"), False),
    ],
)
def test_a_refusal_holds_where_it_says_what_to_do_and_the_zoo_expects_it(found: Journey, holds: bool) -> None:
    row = row_of(found)
    assert (row.holds, row.value) == (holds, float(found.is_equal))


@pytest.mark.exhaustive("three scripts, each of which profiles, plans and runs: a minute")
@pytest.mark.timeout(600)
def test_the_quick_journeys_hold(capsys: pytest.CaptureFixture[str]) -> None:
    assert journeys.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if not row["holds"]] == []
    assert [row["value"] for row in rows] == [1.0, 1.0, 0.0, 2.0]
