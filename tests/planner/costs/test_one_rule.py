"""What a stage costs is said in one place: who else reads the parts of that rule is named here."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

import pytest

from tests.test_architecture import HOME, read_sources

PRICES = ("planner.costs", "planner.solvers", "planner.check")
STAGE = "planner.costs.stages"
_INPUT = re.compile(r"(?i)\b(backward_)?input(_s)?\b")
_WEIGHT = re.compile(r"(?i)\b(backward_)?weight(_s)?\b")


_SEARCHES = (
    "planner.solvers.ilp.solver planner.solvers.ilp.spans planner.solvers.best_first.layout_bound "
    "planner.extras.token_slices.search"
)


def pricing_places(sources: Mapping[str, str]) -> list[str]:
    """The modules that put the time of a stage together: where the two halves of a backward are added up."""
    return sorted(
        name
        for name, text in sources.items()
        if name.startswith(PRICES) and any(_adds_halves(node) for node in ast.walk(ast.parse(text)))
    )


def _adds_halves(node: ast.AST) -> bool:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return False
    left = ast.unparse(node.left)
    right = ast.unparse(node.right)
    return bool(_INPUT.search(left) and _WEIGHT.search(right))


def test_the_halves_of_a_backward_are_added_up_by_one_rule() -> None:
    assert pricing_places(read_sources(HOME)) == [f"{STAGE}.stage_sums"]


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        # what an action costs the executor: exactly, at least, and where a profile is read
        (r"\boverhead_s\(", f"{STAGE}.action_costs {STAGE}.stage_bound planner.costs.layers.cost_table {_SEARCHES}"),
        # what corrections add to stages
        (r"\bExcess\b", "planner.costs.cost_model planner.costs.calibration.apply_corrections"),
        # what is left of a sum of gradients
        (
            r"\bleast_(exposed|reduction)_s\b",
            f"{STAGE}.gradient_overlap {STAGE}.stage_bound planner.solvers.best_first.layout_bound",
        ),
        # figures between measured sizes
        (r"\bread_line\b", "planner.costs.layers.interpolation"),
        # who holds what between two cuts, at least
        (r"\bHolders\b", f"planner.costs.memory.memory_bound {STAGE}.stage_bound"),
        # schedules are asked what they keep and whether they split, not tried
        (r"Op\.BACKWARD_INPUT for\b", ""),
        (r"Op\.BACKWARD(_WEIGHT)?: -1", ""),
    ],
)
def test_a_part_of_the_price_is_read_where_it_is_named(pattern: str, places: str) -> None:
    known = {name for name, text in read_sources(HOME).items() if name.startswith(PRICES) and re.search(pattern, text)}
    assert known <= set(places.split())


def test_another_place_is_seen() -> None:
    text = "def f(table):\n    return min(table.backward_s, table.backward_input_s + table.backward_weight_s)\n"
    assert pricing_places({"planner.solvers.new": text, "planner.ir.new": text}) == ["planner.solvers.new"]
