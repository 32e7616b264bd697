from __future__ import annotations

from benchmarks.seeds import adjoints, predicted


def test_predicted_gains_are_the_closed_forms() -> None:
    rows = list(predicted())
    assert len(rows) == 16
    assert [row.name for row in rows if not row.holds] == []
    assert all(row.value > 1.1 for row in rows)


def test_the_adjoints_of_random_exchanges_are_exact() -> None:
    row = adjoints(4)
    assert row.holds
    assert row.value > 0  # something was compared
