from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.schedules import names
from tests.planner.shared_hosts import random_plan


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_memory_over_time_has_the_peak_of_every_rank(seed: int, schedule: str) -> None:
    profile, decision = random_plan(random.Random(seed), schedule)
    found = forecast(Pricing.of(profile), decision, 0.08)
    assert [found.timeline.peak_bytes(rank) for rank in range(decision.num_ranks)] == [
        memory.peak_bytes for memory in found.memories
    ]
    assert found.timeline.step_s == found.prediction.step_s
