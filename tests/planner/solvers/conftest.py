from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.planner.solvers.clocks import by_work


@pytest.fixture(autouse=True)
def counted_work() -> Iterator[None]:
    """Searches end by counted work; a file about clocks has a fixture of this name that does nothing."""
    with by_work():
        yield
