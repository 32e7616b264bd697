"""Networks of other people end to end, journeys of users, and the document of the committed outcomes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch

from benchmarks import journey
from benchmarks.journey import NETWORKS, Journey, row_of
from benchmarks.networks import __main__ as networks
from benchmarks.networks.runs import STRATEGIES, Outcome, Trial, document, outcome
from runtime.numerics.compare import TOLERANCES
from tests.zoo.entries import DATA, PIPELINE
from tests.zoo.packages import ORIGINS

NAMES = [name for networks in ORIGINS.values() for name in networks]
LEAST = 120
"""Networks that must have come out equal."""
LONG = pytest.mark.exhaustive("a profile and two runs of a network: half a minute each")
PLACE = "\n  File 'x.py', line 3"
REFUSAL = f"planner.ir.errors.X: error[H204] the model cannot be captured{PLACE}\n  try: torch.where"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=LONG) for name in ("mixtral", "clip_contrast", "resnet18"))]
)
def test_a_network_goes_through_profile_plan_and_run(name: str) -> None:
    """Takes 6 s: in float64 and, since it rounds to float32 inside, once more in that; it loads transformers."""
    found = next(networks.outcomes([name]))
    assert (found.failure, found.refusal, found.is_equal) == ("", "", True)
    assert list(found.trials) == list(STRATEGIES)
    if name == "clip_contrast":  # each picture is compared with those of the whole batch
        refused = found.trials.pop(DATA)
        assert (refused.failure, refused.losses) == ("", ())
        assert refused.refusal.startswith("H401")
        assert refused.refusal.endswith("samples do not stay apart in loss, model.matmul, model.mul, model.t_2")
    for trial in found.trials.values():
        assert (trial.failure, trial.refusal, len(trial.losses)) == ("", "", 3)
        assert trial.loss_error <= TOLERANCES[getattr(torch, found.dtype)].loss
    assert [trial.num_microbatches for trial in found.trials.values()] == ([1] if name == "clip_contrast" else [2, 1])
    assert found.trials[PIPELINE].second_stage


def test_what_no_process_can_do_is_told_with_its_error() -> None:
    found = outcome("no_such_network")
    assert "no_such_network" in found.refusal
    assert not found.is_equal


def test_the_committed_outcomes_are_of_the_zoo_and_of_the_document_and_enough_are_equal() -> None:
    found = networks.read(networks.RESULTS)
    assert list(found) == [name for name in NAMES if name in found]
    assert sum(one.is_equal for one in found.values()) >= LEAST
    ways = [way for one in found.values() for way in (one, *one.trials.values())]
    assert [way for way in ways if way.failure] == []
    assert [way.refusal for way in ways if way.refusal and not way.refusal.startswith("H")] == []
    text = networks.DOCUMENT.read_text("utf-8")
    assert document(found, text) == text


def test_outcomes_are_kept_in_the_order_of_the_zoo_and_a_refusal_holds_where_the_zoo_expects_it(tmp_path: Path) -> None:
    path = tmp_path / "networks.json"
    trial = Trial("b", 2, (1.0, 0.5), 1e-7, 2e-7, 3e-7)
    found = {
        "ibert": Outcome("ibert", refusal="H204: no; GuardOnDataDependentSymNode"),
        "bert": Outcome("bert", "float64", 3, 1, 10, 0.5, {PIPELINE: trial}),
    }
    networks.write(path, found, NAMES)
    assert networks.read(path) == found
    assert [record["name"] for record in json.loads(path.read_text())] == ["bert", "ibert"]
    assert [row.holds for one in found.values() for row in networks.rows_of(one)] == [True, True]
    other = [Outcome("ibert", refusal="H204: no"), Outcome("bert", refusal="H204: no; GuardOnDataDependentSymNode")]
    assert [row.holds for one in other for row in networks.rows_of(one)] == [False, False]  # the zoo says otherwise
    broken = dataclasses.replace(found["bert"], trials={PIPELINE: Trial(failure="H601: other losses")})
    assert not broken.is_equal
    assert [row.holds for row in networks.rows_of(broken)] == [False]
    assert networks.main(["--only", "bert,ibert", "--rest", "--output", str(path), "--json"]) == 0  # nothing is left


def test_a_script_is_the_source_of_its_network_and_three_calls() -> None:
    assert len(NETWORKS) == 30
    assert set(journey.QUICK) <= NETWORKS.keys()
    for name, network in NETWORKS.items():
        tree = ast.parse(journey._SCRIPT.format(source=inspect.getsource(network.factory), name=name))
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
    assert journey.main(["--quick", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows if not row["holds"]] == []
    assert [row["value"] for row in rows] == [1.0, 1.0, 0.0, 2.0]
