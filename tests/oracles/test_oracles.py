"""The oracles take prices as given and work out all else: none of the cost model's code is called to judge it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HOME = Path(__file__).parent
GIVEN = (
    "planner.costs.cost_model",
    "planner.costs.layers",
    "planner.costs.communication",
    "planner.costs.shards",
    "planner.costs.stages.gradient_overlap",
    "planner.costs.stages.input_pipeline",
)
"""What a layer, a part of one, a message or a sum costs."""


def imported(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]


@pytest.mark.every_case
@pytest.mark.parametrize("path", sorted(HOME.glob("[!_t]*.py")), ids=lambda path: path.stem)
def test_an_oracle_is_given_prices_and_nothing_else(path: Path) -> None:
    of_costs = [name for name in imported(path.read_text("utf-8")) if name.startswith("planner.costs")]
    assert [name for name in of_costs if not name.startswith(GIVEN)] == []
