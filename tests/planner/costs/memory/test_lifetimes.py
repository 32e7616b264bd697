"""What ranks hold, from when to when."""

from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.memory.lifetimes import Usage, usages
from planner.costs.memory.memory_bound import kept_by
from planner.costs.memory.table import What
from planner.costs.pricing import Pricing

MICRO_BATCHES = 6


def used(schedule: str, num_stages: int = 3) -> list[Usage]:
    """Of a chain of so many stages, a layer each but the last, which has the loss too."""
    profile = chain_profile(num_stages, num_stages, activation_bytes=2**20, saved_bytes=2**20)
    ranks = tuple((rank,) for rank in range(num_stages))
    bounds = (*range(num_stages), num_stages + 1)
    candidate = Candidate.chain(bounds, ranks, ((1,),) * num_stages, (1,) * MICRO_BATCHES, schedule)
    priced = Pricing.of(profile).priced(candidate)
    return [each for each in usages(priced.costs, priced.compiled, priced.sizes, priced.carried) if each is not None]


def alive(usage: Usage, name: str) -> list[int]:
    """How many of these there are, moment by moment."""
    columns = [column for column, size in enumerate(usage.row.sizes) if size[0] == name]
    return usage.row.counts[:, columns].sum(axis=1).astype(int).tolist()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-as", "naive", "gpipe-2bp", "zb-h1", "zb-h2"])
def test_saved_activations_live_while_their_micro_batch_is_in_flight(schedule: str) -> None:
    most = [max(alive(usage, "saved")) for usage in used(schedule)]
    assert most == list(kept_by(schedule, 3, MICRO_BATCHES))


def test_a_gradient_that_was_received_is_part_of_its_backwards_peak() -> None:
    """GPipe's first stage receives gradients alone; the level of B has them, so in no moment do they count apart."""
    first = used("gpipe", 2)[0]
    assert len(first.row.positions) == len(first.total) / 2
    assert set(alive(first, "buffer")) == {0}, "nothing but B takes it, and B runs next"


def test_the_peak_is_the_largest_cumulative_sum() -> None:
    for usage in used("zb-h1"):
        assert sum(usage.at_peak) == max(usage.total)
        assert usage.at_peak[What.PARAMETERS] + usage.at_peak[What.BATCH] <= usage.always
        most = max(during for _, during, _ in usage.samples())
        assert most == max(usage.total)


def test_deferred_weight_gradients_live_from_one_half_of_the_backward_to_the_other() -> None:
    split, whole = used("zb-h1")[0], used("1f1b")[0]
    assert max(alive(split, "deferred")) > 0
    assert all(size[0] != "deferred" for size in whole.row.sizes)
