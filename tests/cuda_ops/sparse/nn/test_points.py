from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse.nn import (
    AvgPool3d,
    Conv3d,
    PointTensor,
    SparseInputError,
    SparseTensor,
    devoxelise,
    initial_voxelize,
    point_to_voxel,
    voxel_to_point,
    voxelise,
)
from cuda_ops.sparse.nn.points import (
    calc_ti_weights,
    spcount,
    spdevoxelize,
    spdownsample,
    sphash,
    sphashquery,
    spvoxelize,
)
from tests.cuda_ops.sparse.nn.clouds import cloud


def scattered(points: int = 80, samples: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    places = torch.rand(points, 3, generator=generator, dtype=torch.float64) * 4 - 2
    batch = torch.randint(samples, (points, 1), generator=generator).double()
    return torch.randn(points, 2, generator=generator, dtype=torch.float64), torch.cat((batch, places), 1)


@pytest.mark.parametrize("reduce", ["mean", "sum", "max"])
def test_a_voxel_holds_what_its_points_have(reduce: str) -> None:
    feats, points = scattered()
    x, rows = voxelise(feats, points, reduce=reduce, num_samples=3)  # type: ignore[arg-type]
    assert torch.equal(x.coords[rows].double(), points.floor())
    for row in range(len(x)):
        inside = feats[rows == row]
        wanted = {"mean": inside.mean(0), "sum": inside.sum(0), "max": inside.max(0).values}[reduce]
        torch.testing.assert_close(x.feats[row], wanted)
    assert x.num_samples == 3


def test_the_nearest_voxel_of_a_point_is_the_one_that_holds_it() -> None:
    feats, points = scattered()
    x, rows = voxelise(feats, points)
    torch.testing.assert_close(devoxelise(x, points, mode="nearest"), x.feats[rows])
    down = AvgPool3d(2)(x)
    wanted = torch.cat((points[:, :1], (points[:, 1:] / 2).floor()), 1)
    for found, place in zip(devoxelise(down, points, mode="nearest"), wanted, strict=True):
        row = (down.coords.double() == place).all(1).nonzero().item()
        torch.testing.assert_close(found, down.feats[row])


@pytest.mark.parametrize("level", [1, 2])
def test_between_voxels_those_around_a_point_share_its_weight(level: int) -> None:
    x = cloud() if level == 1 else AvgPool3d(2)(cloud())
    generator = torch.Generator().manual_seed(4)
    places = torch.rand(40, 3, generator=generator, dtype=torch.float64) * 8 + 7
    points = torch.cat((torch.randint(2, (40, 1), generator=generator).double(), places), 1)
    found = devoxelise(x, points)
    table = {tuple(place): feats for place, feats in zip(x.coords.tolist(), x.feats, strict=True)}
    for point, value in zip(points, found, strict=True):
        total = torch.zeros(3).double()
        weights = 0.0
        place = point[1:] / level
        for corner in ((a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)):
            voxel = place.floor() + torch.tensor(corner)
            weight = float((1 - (place - voxel).abs()).prod())
            site = (int(point[0]), *(int(each) for each in voxel))
            if site in table:
                total = total + weight * table[site]
                weights = weights + weight
        torch.testing.assert_close(value, total / weights if weights else total)


def test_features_at_points_have_gradients() -> None:
    feats, points = scattered(12)

    def there_and_back(values: torch.Tensor) -> torch.Tensor:
        x, _ = voxelise(values, points)
        return devoxelise(x, points)

    assert torch.autograd.gradcheck(there_and_back, feats.requires_grad_())


def test_points_far_away_and_empty_clouds_give_0() -> None:
    x = cloud()
    far = torch.tensor([[0.0, 1e9, 0.0, 0.0], [1.0, -500.0, 3.0, 3.0]])
    assert not devoxelise(x, far).any()
    nothing = SparseTensor(torch.zeros(0, 2), torch.zeros(0, 4, dtype=torch.int32), num_samples=1)
    assert devoxelise(nothing, far).shape == (2, 2)
    empty, rows = voxelise(torch.zeros(0, 2), torch.zeros(0, 4), num_samples=1)
    assert (len(empty), len(rows)) == (0, 0)


def test_points_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"shape of points: found \[3, 3\], expected \[3, 4\]"):
        voxelise(torch.zeros(3, 1), torch.zeros(3, 3))
    with pytest.raises(SparseInputError, match="NaN or infinite"):
        voxelise(torch.zeros(1, 1), torch.tensor([[0.0, torch.nan, 0.0, 0.0]]))
    with pytest.raises(SparseInputError, match="out of range"):
        voxelise(torch.zeros(1, 1), torch.tensor([[0.0, 1e12, 0.0, 0.0]]))


def test_hashes_find_sites_and_their_neighbours() -> None:
    x = cloud()
    offsets = torch.tensor([[0, 0, 0], [1, 0, 0], [0, -2, 3], [1 << 18, 0, 0]], dtype=torch.int32)
    hashes = sphash(x.coords)
    assert len(hashes.unique()) == len(x)
    shuffled = torch.randperm(len(x))
    rows = sphashquery(sphash(x.coords, offsets), hashes[shuffled])
    assert rows.shape == (4, len(x))
    place = {tuple(site): row for row, site in enumerate(x.coords[shuffled].tolist())}
    for number, (a, b, c) in enumerate(offsets.tolist()):
        wanted = [place.get((batch, p + a, q + b, r + c), -1) for batch, p, q, r in x.coords.tolist()]
        assert rows[number].tolist() == wanted
    assert sphashquery(hashes, hashes[:0]).tolist() == [-1] * len(x)
    assert torch.equal(spdownsample(x.coords, 2, 3), Conv3d(3, 1, 3, 2).double()(x).coords)


def test_torchsparses_functions_from_points_to_voxels_and_back() -> None:
    feats, points = scattered(40)
    whole = points.floor().int()
    voxels = torch.unique(sphash(whole))
    rows = sphashquery(sphash(whole), voxels)
    rows[::7] = -1
    counts = spcount(rows, len(voxels))
    found = spvoxelize(feats, rows, counts)
    for voxel in range(len(voxels)):
        inside = feats[rows == voxel]
        assert counts[voxel] == len(inside)
        torch.testing.assert_close(found[voxel], inside.sum(0) / max(1, len(inside)))
    corners = torch.tensor([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], dtype=torch.int32)
    around = sphashquery(sphash(whole, corners), voxels).t()
    weights = calc_ti_weights(points[:, 1:] * 2, around, scale=2)
    grid, _ = voxelise(feats, points)
    assert torch.equal(sphash(grid.coords), voxels)
    torch.testing.assert_close(spdevoxelize(grid.feats, around, weights), devoxelise(grid, points))
    assert torch.autograd.gradcheck(lambda f: spvoxelize(f, rows, counts), feats[:, :1].clone().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda f, w: spdevoxelize(f, around[:6], w),
        (grid.feats[:, :1].clone().requires_grad_(), weights[:6].requires_grad_()),
    )
    with pytest.raises(SparseInputError, match=r"found \[40\], up to \d+, expected \[40\], below 2"):
        spvoxelize(feats, rows, counts[:2])
    with pytest.raises(SparseInputError, match=r"\[8, 40\] for points \[40, 3\], expected \[points, 8\]"):
        calc_ti_weights(points[:, 1:], around.t())


def test_points_and_voxels_of_a_point_voxel_network() -> None:
    feats, points = scattered()
    z = PointTensor(feats, points.clone())
    x = initial_voxelize(z, init_res=0.5, after_res=0.25)
    torch.testing.assert_close(z.C, torch.cat((points[:, :1], points[:, 1:] * 2), 1))
    same, rows = voxelise(feats, z.C)
    torch.testing.assert_close(x.feats, same.feats)
    down = Conv3d(2, 2, 2, 2).double()(x)
    up = voxel_to_point(down, z)
    torch.testing.assert_close(up.F, devoxelise(down, z.C))
    nearest = voxel_to_point(x, z, nearest=True)
    torch.testing.assert_close(nearest.F, x.feats[rows])
    both = point_to_voxel(down, z + up)
    homes = torch.cat((z.C[:, :1], (z.C[:, 1:] / 2).floor()), 1)
    for site, value in zip(down.coords.double(), both.feats, strict=True):
        torch.testing.assert_close(value, (z.F + up.F)[(homes == site).all(1)].mean(0))
    part = SparseTensor(x.feats[:5], x.coords[:5], num_samples=2)
    torch.testing.assert_close(point_to_voxel(part, z).feats, x.feats[:5])  # other points count nowhere
    moved = (z + z).to(device="cpu").detach()
    assert (len(moved), moved.C is z.C) == (80, True)
    with pytest.raises(SparseInputError, match=r"shape of points: found \[80, 3\]"):
        PointTensor(feats, points[:, 1:])
