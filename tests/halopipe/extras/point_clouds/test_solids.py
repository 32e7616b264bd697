from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from halopipe import data
from halopipe.extras.point_clouds.solids import NUM_HELD_OUT, NUM_SHAPES, SOLIDS, SPREAD, Shapes
from planner.ir.errors import UsageError

torch.set_num_threads(1)


def test_samples_are_voxels_that_are_there_once_and_padding() -> None:
    (coordinates, features, count), target = Shapes(8, voxels=200, points=260)[5]
    rows = int(count)
    assert (coordinates.shape, coordinates.dtype) == ((260, 3), torch.int32)
    assert (features.shape, features.dtype) == ((260, 4), torch.float32)
    assert len(coordinates[:rows].unique(dim=0)) == rows
    assert coordinates[:rows].amin(0).tolist() == [0, 0, 0]
    assert not coordinates[rows:].any()
    assert not features[rows:].any()
    assert features[:rows, 0].eq(1).all()
    assert features[:rows, 1:].norm(dim=1).max() == pytest.approx(1, abs=0.2)
    assert int(target) == 5
    (coordinates, _, count), _ = Shapes(1, voxels=600)[0]
    voxels = coordinates[: int(count)]
    assert not (voxels == voxels.float().mean(0).round().int()).all(1).any(), "a sphere is a shell"


def test_a_sample_follows_from_the_seed_and_its_number() -> None:
    one = Shapes(4, voxels=100)
    again = Shapes(9, voxels=100)
    other = Shapes(4, voxels=100, seed=1)
    assert torch.equal(one[3][0][0], again[3][0][0])
    assert not torch.equal(one[3][0][0], other[3][0][0])
    later = Shapes(2, voxels=100, first=2)
    assert torch.equal(one[3][0][0], later[1][0][0])
    with pytest.raises(IndexError):
        later[2]


def test_numbers_of_voxels_are_as_asked_for_and_differ() -> None:
    found = torch.tensor([float(cloud[2]) for cloud, _ in Shapes(24, voxels=500)])
    assert found.mean().item() == pytest.approx(500, rel=0.1)
    assert found.min() >= 500 * (1 - SPREAD) * 0.9
    assert found.max() <= 500 * (1 + SPREAD)
    assert found.std() > 25


@pytest.mark.parametrize("name", SOLIDS)
def test_a_solid_is_a_closed_surface_of_about_unit_radius(name: str) -> None:
    points = SOLIDS[name](3000, torch.Generator().manual_seed(0))
    assert points.shape == (3000, 3)
    radius = points.norm(dim=1)
    assert 0.9 < radius.max() < 1.5
    assert points.mean(0).abs().max() < 0.6
    # Seen from inside there is surface all around; but a helix leaves gaps.
    octants = (points > 0).long() @ torch.tensor([1, 2, 4])
    assert octants.bincount(minlength=8).min() > 3000 / 8 / 4


def test_factories_give_disjoint_samples_in_the_shape_asked_for() -> None:
    train = data.shapes(4, (4, 100, 2), 0)
    rest = data.held_out_shapes(4, (4, 100, 2), 0)
    assert (len(train), len(rest)) == (NUM_SHAPES, NUM_HELD_OUT)
    (coordinates, features, counts), targets = default_collate([train[n] for n in range(3)])
    assert (coordinates.shape, features.shape, counts.shape) == ((3, 100, 3), (3, 100, 2), (3,))
    assert targets.tolist() == [0, 1, 2]
    assert not torch.equal(train[0][0][0], rest[0][0][0])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: data.shapes(4, (4, 5), 0), "has 2 dims"),
        (lambda: data.shapes(4, (4, 50, 7), 0), "1 to 4 features"),
        (lambda: Shapes(4, points=100, voxels=100), "do not fit 100 points"),
        (lambda: Shapes(4, num_classes=40), "40 kinds of shapes"),
    ],
)
def test_what_cannot_be_had_is_refused(make: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()
