"""Networks of other people end to end, and the document of the committed outcomes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.networks import __main__ as networks
from benchmarks.networks.document import document
from benchmarks.networks.runs import STRATEGIES, Outcome, Trial, outcome
from runtime.numerics.compare import TOLERANCES
from tests.zoo.entries import DATA, PIPELINE
from tests.zoo.packages import ORIGINS

NAMES = [name for networks in ORIGINS.values() for name in networks]
LEAST = 120
"""Networks that must have come out equal."""


LONG = pytest.mark.exhaustive("a profile and two runs of a network: half a minute each")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["bert", *(pytest.param(name, marks=LONG) for name in ("mixtral", "clip_contrast", "resnet18"))]
)
def test_a_network_goes_through_profile_plan_and_run(name: str) -> None:
    """Takes 6 s: in float64 and, since it rounds to float32 inside, once more in that; it loads transformers."""
    found = next(networks.outcomes([name]))
    assert found.failure == ""
    assert found.refusal == ""
    assert found.is_equal
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
    assert "no_such_network" in outcome("no_such_network").refusal
    assert not outcome("no_such_network").is_equal


def test_the_committed_outcomes_are_of_the_zoo_and_enough_are_equal() -> None:
    found = networks.read(networks.RESULTS)
    assert list(found) == [name for name in NAMES if name in found]
    assert sum(one.is_equal for one in found.values()) >= LEAST
    assert [name for name, one in found.items() if one.failure] == []
    failed = [name for name, one in found.items() for trial in one.trials.values() if trial.failure]
    assert failed == []
    refusals = [one.refusal for one in found.values()]
    refusals += [trial.refusal for one in found.values() for trial in one.trials.values()]
    assert [text for text in refusals if text and not text.startswith("H")] == []


def test_the_document_agrees_with_the_outcomes() -> None:
    assert networks.DOCUMENT.read_text("utf-8") == document(networks.read(networks.RESULTS))


def test_outcomes_are_kept_in_the_order_of_the_zoo(tmp_path: Path) -> None:
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
