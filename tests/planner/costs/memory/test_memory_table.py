"""What ranks hold, from when to when; and bounds follow the table of lifetimes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.memory import memory_bound, table
from planner.costs.memory.lifetimes import Usage, usages
from planner.costs.memory.memory_bound import kept_by
from planner.costs.memory.table import What, divided, held_in_turn
from planner.costs.pricing import Pricing

MICRO_BATCHES = 6


def used(schedule: str, num_stages: int = 3) -> list[Usage]:
    """Of a chain of so many stages, a layer each but the last, which has the loss too."""
    profile = chain_profile(num_stages, num_stages, activation_bytes=2**20, saved_bytes=2**20)
    ranks = tuple((rank,) for rank in range(num_stages))
    bounds = (*range(num_stages), num_stages + 1)
    candidate = Candidate.chain(bounds, ranks, ((1,),) * num_stages, (1,) * MICRO_BATCHES, schedule)
    priced = Pricing.of(profile).priced(candidate)
    return [
        each
        for each in usages(priced.costs, priced.compiled, priced.transfer_bytes, priced.carried)
        if each is not None
    ]


def alive(usage: Usage, name: str) -> list[int]:
    """How many of these there are, moment by moment."""
    columns = [column for column, size in enumerate(usage.row.sizes) if size[0] == name]
    return usage.row.counts[:, columns].sum(axis=1).astype(int).tolist()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "1f1b-as", "naive", "gpipe-2bp", "zb-h1", "zb-h2"])
def test_saved_activations_live_while_their_micro_batch_is_in_flight(schedule: str) -> None:
    most = [max(alive(usage, "saved")) for usage in used(schedule)]
    assert most == list(kept_by(schedule, 3, MICRO_BATCHES))


MEMOS = memory_bound._kept_of, held_in_turn


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
