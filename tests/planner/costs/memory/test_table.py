"""The table of lifetimes is what bounds follow, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.costs.memory import table
from planner.costs.memory.memory_bound import kept_by
from planner.costs.memory.table import What, divided, held_in_turn, moments_of
from planner.ir.schedule import Op

MEMOS = kept_by, held_in_turn


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing stays saved behind its forward."""
    lines = tuple(line for line in table.TABLE["micro-batch"] if line.size != "saved")
    lines += tuple(line._replace(dies="F over") for line in table.TABLE["micro-batch"] if line.size == "saved")
    with monkeypatch.context() as patch:
        patch.setattr(table, "TABLE", {**table.TABLE, "micro-batch": lines})
        for memo in MEMOS:
            memo.cache_clear()
        yield
    for memo in MEMOS:
        memo.cache_clear()


def test_a_bound_holds_as_many_micro_batches_as_lines_are_alive() -> None:
    assert kept_by("1f1b", 3, 8) == (3, 2, 1)
    assert kept_by("gpipe", 2, 500) == (500, 500)


@pytest.mark.usefixtures("changed")
def test_a_change_of_the_table_is_followed_by_the_bound() -> None:
    assert kept_by("1f1b", 3, 8) == (1, 1, 1)
    assert kept_by("gpipe", 2, 500) == (1, 1)


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients", "state"), [(0, 1, 1, 1), (1, 1, 1, 4), (2, 1, 4, 4), (3, 4, 4, 4)]
)
def test_each_level_of_zero_divides_one_more_of_them(zero: int, parameters: int, gradients: int, state: int) -> None:
    of = What.PARAMETERS, What.GRADIENTS, What.OPTIMISER_STATE
    assert tuple(divided(what, zero, 4) for what in of) == (parameters, gradients, state)


def test_a_line_counts_where_both_of_its_moments_are() -> None:
    """F0 I0 W0: there is no B, so the lines of a backward in halves count."""
    passes = [(2 * k, op, (0, 0)) for k, op in enumerate((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))]
    alive = table.lifetimes_of("micro-batch", (7,), moments_of(passes)[0, 0])
    assert [(each.size, each.born, each.dies) for each in alive] == [
        (("inputs of I", 7), 1, 3),
        (("inputs of W", 7), 1, 5),
        (("saved", 7), 1, 2),
        (("deferred", 7), 3, 4),
    ]
