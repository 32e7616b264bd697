"""Rows that ranks tell each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from planner.ir.errors import DeadlineError, TransportError
from runtime.transport import InProcessTransport
from runtime.transport.small_allgather import RowGather
from tests.runtime.ranks import on_ranks


def row(rank: int, number: int) -> list[Tensor]:
    return [torch.tensor([float(rank)]), torch.full((3,), 10.0 * number + rank)]


@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2), (1, 3), (0, 1, 2, 3), (2,)])
def test_all_ranks_of_a_group_get_the_rows_of_all_in_order(group: tuple[int, ...]) -> None:
    def run(transport: InProcessTransport) -> list[Tensor]:
        if transport.rank not in group:
            return []
        rows = RowGather(transport, group)
        tables = [rows(row(transport.rank, number), torch.float64) for number in range(3)]
        return [table.wait() for table in tables]

    expected = [torch.stack([torch.cat(row(rank, number)) for rank in group]).double() for number in range(3)]
    for rank, tables in enumerate(on_ranks(4, run)):
        assert [bool(torch.equal(*pair)) for pair in zip(tables, expected, strict=False)] == [True] * len(tables)
        assert len(tables) == (3 if rank in group else 0)


def test_groups_that_share_ranks_do_not_meet() -> None:
    def run(transport: InProcessTransport) -> tuple[Tensor, Tensor]:
        every = RowGather(transport, (0, 1, 2, 3))
        half = (0, 1) if transport.rank < 2 else (2, 3)
        first = RowGather(transport, half)(row(transport.rank, 0), torch.float32)
        second = every(row(transport.rank, 1), torch.float32)
        return first.wait(), second.wait()

    for rank, (first, second) in enumerate(on_ranks(4, run)):
        assert first[:, 0].tolist() == ([0, 1] if rank < 2 else [2, 3])
        assert second[:, 1].tolist() == [10, 11, 12, 13]


def test_one_rank_needs_nobody() -> None:
    found = on_ranks(1, lambda transport: RowGather(transport, (0,))(row(2, 1), torch.float64).wait())
    assert torch.equal(found[0], torch.cat(row(2, 1)).double().unsqueeze(0))


def test_a_rank_that_says_nothing_is_waited_for_in_vain() -> None:
    def run(transport: InProcessTransport) -> None:
        if transport.rank == 0:
            transport.deadline_s = 0.2
            RowGather(transport, (0, 1))(row(0, 0), torch.float32).wait()

    with pytest.raises((DeadlineError, TransportError), match="exchange"):
        on_ranks(2, run)
