"""The oracles take prices as given and work out all else: none of the cost model's code is called to judge it."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest

from planner.costs.predict import predict
from planner.schedules import names
from tests.oracles.evaluation import evaluate
from tests.oracles.memory import peaks
from tests.oracles.plans import differences
from tests.planner.shared_hosts import random_plan

HOME = Path(__file__).parent
ORACLES = sorted((*HOME.glob("[!_t]*.py"), *HOME.parent.glob("planner/extras/*/plain_*.py")))
GIVEN = (
    "planner.costs.cost_model",
    "planner.costs.layers",
    "planner.costs.communication",
    "planner.costs.shards",
    "planner.costs.stages.gradient_overlap",
    "planner.costs.stages.input_pipeline",
    "planner.extras.tiles.division",
    "planner.extras.tiles.workspace",
    "planner.extras.token_slices.prices",  # what a layer costs at a slice
)
"""What a layer, a part of one, a message or a sum costs."""


def imported(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]


@pytest.mark.every_case
@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_an_oracle_is_given_prices_and_nothing_else(path: Path) -> None:
    of_costs = [
        name for name in imported(path.read_text("utf-8")) if name.startswith(("planner.costs", "planner.extras"))
    ]
    assert [name for name in of_costs if not name.startswith(GIVEN)] == []


@pytest.mark.parametrize("schedule", names())
def test_a_random_plan_is_what_the_oracle_makes_of_it_and_any_other_figure_is_seen(schedule: str) -> None:
    profile, decision = random_plan(random.Random(7), schedule)
    prediction, plain = predict(profile, decision)[0], evaluate(profile, decision)
    rounded_bytes = 2 * len(decision.sizes) + 2
    assert list(differences(prediction, plain, rounded_bytes)) == []
    rank = prediction.ranks[0]
    wrong = {
        "step_s": replace(prediction, step_s=prediction.step_s * (1 + 1e-6)),
        "bubble": replace(prediction, bubble_fraction=prediction.bubble_fraction + 1e-3),
        **{
            name: replace(prediction, ranks=(replace(rank, **{name: value}), *prediction.ranks[1:]))
            for name, value in (
                ("peak_bytes", rank.peak_bytes + rounded_bytes + 1),
                ("on_chip_bytes", rank.on_chip_bytes + 1),
                ("compute_s", rank.compute_s + 1e-3 * prediction.step_s),
            )
        },
    }
    for name, other in wrong.items():
        assert len(list(differences(other, plain, rounded_bytes))) == 1, name


def test_the_oracle_of_memory_stands_by_itself() -> None:
    profile, decision = random_plan(random.Random(7), "1f1b")
    assert peaks(profile, decision) == evaluate(profile, decision).peak_bytes
