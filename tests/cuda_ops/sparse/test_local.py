"""What one rank does of a map: rows of its own and of others, its interior and boundary, and who is lent what."""

from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse.geometry import KernelMap, MapSpec, RouteStep
from cuda_ops.sparse.local import Owned, local_map, local_segments
from tests.runtime.sparse.shared import OWNERSHIPS, Sharing, cloud, ownership

torch.set_num_threads(1)
_STRIDED = RouteStep("strided", (3, 3, 3), (2, 2, 2))
SPECS = [MapSpec((), (), (3, 3, 3)), MapSpec((), (_STRIDED,), (3, 3, 3), (2, 2, 2))]
OWNERS = torch.tensor([0, 0, 0, 0, 1, 1, 1])


def chain() -> KernelMap:
    """Seven sites in a row; each reads the one before, itself and the one behind."""
    row = torch.arange(7, dtype=torch.int32)
    before = row - 1
    behind = torch.where(row < 6, row + 1, -1)
    return KernelMap(torch.stack([before, row, behind]), torch.stack([behind, row, before]))


def test_the_rows_of_a_row_of_sites_that_two_ranks_share() -> None:
    """The picture in the module's docstring."""
    left, right = (local_map(chain(), Owned.by(OWNERS, rank), Owned.by(OWNERS, rank)) for rank in (0, 1))
    assert left.neighbours.tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, 4]]
    assert right.neighbours.tolist() == [[3, 0, 1], [0, 1, 2], [1, 2, -1]]
    assert (left.num_own, right.num_own) == (4, 3)
    assert {rank: rows.tolist() for rank, rows in left.halo.sends.items()} == {1: [3]}
    assert {rank: rows.tolist() for rank, rows in right.halo.sends.items()} == {0: [0]}
    assert (dict(left.halo.receives), dict(right.halo.receives)) == ({1: 1}, {0: 1})
    assert (left.boundary.tolist(), right.boundary.tolist()) == ([3], [0])
    assert left.of_own.neighbours.tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3], [1, 2, 3, -1]]
    assert left.of_boundary.tolist() == [[-1], [-1], [0]]
    assert left.reverse.tolist() == [[1, 2, 3, -1, -1], [0, 1, 2, 3, -1], [-1, 0, 1, 2, 3]]
    assert torch.equal(left.of_own.reverse, left.reverse[:, :4])
    assert torch.equal(left.of_halo, left.reverse[:, 4:])


@pytest.mark.parametrize("kind", OWNERSHIPS)
@pytest.mark.parametrize("spec", SPECS, ids=["submanifold", "strided"])
def test_what_a_rank_reads_is_what_the_whole_map_reads_there(spec: MapSpec, kind: str) -> None:
    geometry = cloud(5)
    num_ranks = 3
    sharing = Sharing(geometry, ownership(kind, geometry, num_ranks, 2), num_ranks)
    whole = geometry.map(spec)
    locals_ = [sharing.local(spec, rank) for rank in range(num_ranks)]
    sources = [sharing.owned(spec.source, rank) for rank in range(num_ranks)]
    for rank, local in enumerate(locals_):
        lenders = sorted(local.halo.receives)
        halo = [sources[lender].rows[locals_[lender].halo.sends[rank]] for lender in lenders]
        assert [len(rows) for rows in halo] == [local.halo.receives[lender] for lender in lenders]
        rows = torch.cat([sources[rank].rows, *halo, torch.tensor([-1])])
        target = sharing.owned(spec.target, rank)
        assert torch.equal(rows[local.neighbours.long()], whole.neighbours[:, target.rows].long())
        assert (local.of_own.neighbours < local.num_own).all()
        assert (local.of_boundary >= 0).any(0).all()
        of_halo = torch.full_like(local.neighbours, -1)
        of_halo[:, local.boundary] = local.of_boundary
        both = torch.where(of_halo >= 0, of_halo + local.num_own, local.of_own.neighbours)
        assert torch.equal(both, local.neighbours), "a pair is in neither part, or in both"
        assert local.halo.num_received == sum(map(len, halo)) == local.reverse.shape[1] - local.num_own
        assert (local.of_halo >= 0).any(0).all(), "a row that nobody reads has come"
    assert all(rank not in local.halo.sends for rank, local in enumerate(locals_))


def test_nothing_moves_where_one_rank_owns_all() -> None:
    owners = torch.ones(7, dtype=torch.int64)
    idle, busy = (local_map(chain(), Owned.by(owners, rank), Owned.by(owners, rank)) for rank in (0, 1))
    assert idle.neighbours.shape == (3, 0)
    assert idle.reverse.shape == (3, 0)
    assert torch.equal(busy.neighbours, chain().neighbours)
    assert torch.equal(busy.reverse, chain().reverse)
    assert not any((idle.halo.sends, idle.halo.receives, busy.halo.sends, busy.halo.receives))


def test_samples_without_rows_have_empty_segments() -> None:
    found = local_segments(torch.tensor([2, 2, 0, 4, 4, 4]), 6)
    assert found.lengths.tolist() == [1, 0, 2, 0, 3, 0]
    assert found.starts.tolist() == [2, 0, 0, 0, 3, 0]
    nothing = local_segments(torch.zeros(0, dtype=torch.int64), 2)
    assert (nothing.lengths.tolist(), nothing.starts.tolist()) == ([0, 0], [0, 0])


def test_a_local_map_on_a_device_is_the_same() -> None:
    local = local_map(chain(), Owned.by(OWNERS, 0), Owned.by(OWNERS, 0))
    moved = local.to(torch.device("cpu"))
    for name in ("neighbours", "reverse", "boundary", "of_boundary", "of_halo"):
        assert torch.equal(getattr(moved, name), getattr(local, name))
