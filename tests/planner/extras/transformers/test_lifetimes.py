"""The table of lifetimes is what a transformer's memory follows, too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from planner.costs.memory import table
from planner.costs.memory.memory_bound import kept_by
from planner.costs.memory.table import held_in_turn
from planner.extras.transformers.memory import chain_in_flight, in_flight
from planner.extras.transformers.shape import ParallelDegrees

MEMOS = kept_by, held_in_turn, chain_in_flight


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing stays saved behind its forward."""
    lines = tuple(line._replace(dies="F over") if line.size == "saved" else line for line in table.TABLE["micro-batch"])
    with monkeypatch.context() as patch:
        patch.setattr(table, "TABLE", {**table.TABLE, "micro-batch": lines})
        for memo in MEMOS:
            memo.cache_clear()
        yield
    for memo in MEMOS:
        memo.cache_clear()


def test_a_transformer_holds_as_many_micro_batches_as_lines_are_alive() -> None:
    assert chain_in_flight("1f1b", 3, 8) == kept_by("1f1b", 3, 8)
    assert chain_in_flight("gpipe", 2, 500) == kept_by("gpipe", 2, 500)
    assert in_flight(ParallelDegrees(pipeline=2, interleave=2), 0, 8) == (2 + 2 + 1) / 2


@pytest.mark.usefixtures("changed")
def test_a_change_of_the_table_is_followed() -> None:
    assert chain_in_flight("1f1b", 3, 8) == (1, 1, 1)
    assert chain_in_flight("gpipe", 2, 500) == (1, 1)
    assert in_flight(ParallelDegrees(pipeline=2, interleave=2), 0, 8) == 1 / 2
