"""The cost model says of random plans what it said."""

from __future__ import annotations

import numpy as np
import pytest

from tests.frozen.candidates import CHUNK, IN_ALL, OF_HOSTS_ALONE, chunks, frozen, priced, same


@pytest.mark.parametrize("name", chunks())
def test_random_plans_take_the_time_and_the_memory_that_they_took(name: str) -> None:
    was = frozen()[name]
    now = priced(*chunks()[name])
    assert now.shape == was.shape
    wrong = np.flatnonzero(~same(now, was))
    lines = [f"plan {row} of {name}: step, peak, all peaks: {[*was[row]]} -> {[*now[row]]}" for row in wrong[:5]]
    assert not lines, "\n".join([*lines, "if this is right: python -m tests.frozen candidates --why TEXT"])


def test_there_are_ten_thousand() -> None:
    assert len(chunks()) * CHUNK == IN_ALL + CHUNK * len(OF_HOSTS_ALONE) == sum(len(rows) for rows in frozen().values())
