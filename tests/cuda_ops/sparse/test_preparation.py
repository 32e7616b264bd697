"""Batches as users have them, samples first and padded, become rows of sites in order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import MapSpec, RouteStep
from cuda_ops.sparse.preparation import Preparation, padded
from cuda_ops.sparse.recipe import Recipe

torch.set_num_threads(1)
HALF = RouteStep("strided", (2, 2, 2), (2, 2, 2))
PREPARATION = Preparation(
    Recipe((MapSpec((), (), (3, 3, 3)), MapSpec((), (HALF,), (2, 2, 2), (2, 2, 2))), ((HALF,),)), (True, False)
)
POINTS = [
    torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0]]),
    torch.zeros(0, 3, dtype=torch.int64),
    torch.tensor([[2, 0, 0]]),
]
FEATURES = [torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]), torch.zeros(0, 2), torch.tensor([[4.0, 40.0]])]


def raw() -> list[Tensor]:
    """Three clouds of 3, 0 and 1 points, padded to 4; classes of points and of samples."""
    classes = torch.tensor([[5, 6, 7, -1], [-1, -1, -1, -1], [8, -1, -1, -1]])
    return [*padded(POINTS, FEATURES, 4), classes, torch.tensor([0, 1, 2])]


def test_clouds_are_padded_with_zeros() -> None:
    coordinates, features, counts = padded(POINTS, FEATURES)
    assert (coordinates.shape, coordinates.dtype) == ((3, 3, 3), torch.int32)
    assert (features.shape, features.dtype) == ((3, 3, 2), torch.float32)
    assert counts.tolist() == [3, 0, 1]
    assert coordinates[0].tolist() == POINTS[0].tolist()
    assert features[2].tolist() == [[4.0, 40.0], [0.0, 0.0], [0.0, 0.0]]
    assert padded(POINTS, FEATURES, 9)[0].shape == (3, 9, 3)


@pytest.mark.parametrize(
    ("clouds", "features", "points", "says"),
    [
        (POINTS, FEATURES, 2, "points of a cloud: found 3, expected 2 at most"),
        (POINTS, FEATURES[:2], 0, r"rows of its features: found \[3, 0\], expected \[3, 0, 1\]"),
        (POINTS, [*FEATURES[:2], torch.zeros(2, 2)], 0, r"found \[3, 0, 2\], expected \[3, 0, 1\]"),
        ([], [], 0, "expected at least one cloud"),
        ([POINTS[0].float()], FEATURES[:1], 0, "dtype of coordinates: found torch.float32"),
    ],
)
def test_clouds_that_cannot_be_padded_are_refused(
    clouds: list[Tensor], features: list[Tensor], points: int, says: str
) -> None:
    with pytest.raises(SparseInputError, match=says):
        padded(clouds, features, points)


def test_rows_features_and_targets_of_points_are_in_the_order_of_sites() -> None:
    clouds = PREPARATION.clouds(raw())
    assert clouds.num_samples == 3
    assert clouds.geometry.coordinates(()).tolist() == [[0, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [2, 2, 0, 0]]
    assert clouds.tensor("features")[:, 0].tolist() == [2.0, 1.0, 3.0, 4.0]
    assert clouds.tensor("target_0").tolist() == [6, 5, 7, 8]
    assert clouds.tensor("target_1").tolist() == [0, 1, 2]
    assert clouds.tensor("lengths").tolist() == [3, 0, 1]


def test_tensors_have_their_names_and_sizes() -> None:
    clouds = PREPARATION.clouds(raw())
    tensors = clouds.tensors()
    maps = [f"{half}_{index}" for index in (0, 1) for half in ("neighbours", "reverse")]
    assert (
        PREPARATION.names
        == tuple(tensors)
        == ("lengths", "features", *maps, "starts_0", "lengths_0", "target_0", "target_1")
    )
    assert PREPARATION.num_inputs == 8
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "lengths": (3,),
        "features": (4, 2),
        "neighbours_0": (27, 4),
        "reverse_0": (27, 4),
        "neighbours_1": (8, 2),
        "reverse_1": (8, 4),
        "starts_0": (3,),
        "lengths_0": (3,),
        "target_0": (4,),
        "target_1": (3,),
    }
    assert clouds.sizes == {"sites": 4, "sites_1": 2}
    assert tensors["lengths_0"].tolist() == [1, 0, 1]
    assert {tensors[name].dtype for name in maps} == {torch.int32}
    for word, places in PREPARATION.varying.items():
        assert {tensors[name].shape[dim] for name, dim in places} == {clouds.sizes[word]}
    named = {(name, dim) for places in PREPARATION.varying.values() for name, dim in places}
    assert named == {("features", 0), ("target_0", 0), *((f"{name}", 1) for name in maps)}


def test_padding_makes_no_difference() -> None:
    wide = [tensor if tensor.ndim == 1 else torch.cat([tensor, tensor + 1], 1) for tensor in raw()]
    for (name, here), there in zip(
        PREPARATION.clouds(raw()).tensors().items(), PREPARATION.clouds(wide).tensors().values(), strict=True
    ):
        assert torch.equal(here, there), name


def test_batches_without_a_point_have_no_rows() -> None:
    batch = raw()
    batch[2] = torch.zeros_like(batch[2])
    clouds = PREPARATION.clouds(batch)
    assert clouds.sizes == {"sites": 0, "sites_1": 0}
    assert clouds.tensor("features").shape == (0, 2)
    assert clouds.tensor("lengths").tolist() == [0, 0, 0]
    assert clouds.tensor("neighbours_1").shape == (8, 0)
    no_room = [each[:, :0] if each.ndim > 1 else each for each in batch]
    assert PREPARATION.clouds(no_room).sizes == {"sites": 0, "sites_1": 0}


def test_coordinates_may_be_of_any_whole_number() -> None:
    batch = raw()
    batch[0] = batch[0].long()
    assert torch.equal(PREPARATION.clouds(batch).tensor("features"), PREPARATION.clouds(raw()).tensor("features"))


def changed(index: int, value: Tensor) -> list[Tensor]:
    batch = raw()
    batch[index] = value
    return batch


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (raw()[:4], "number of tensors: found 4, expected 5"),
        (changed(0, torch.zeros(3, 5, 3, dtype=torch.int32)), "shapes of coordinates, features and counts"),
        (changed(0, torch.zeros(3, 4, 2, dtype=torch.int32)), "shapes of coordinates, features and counts"),
        (changed(1, torch.zeros(3, 4)), "shapes of coordinates, features and counts"),
        (changed(2, torch.tensor([3, 0])), "shapes of coordinates, features and counts"),
        (changed(2, torch.tensor([5, 0, 1])), "number of points of a cloud: found 0 to 5, expected 0 to 4"),
        (changed(2, torch.tensor([3, -1, 1])), "found -1 to 3"),
        (changed(2, torch.tensor([4, 0, 2])), "found"),  # padding that counts occurs twice
        (changed(0, torch.zeros(3, 4, 3)), "dtype of coordinates: found torch.float32, expected torch.int32"),
        (changed(0, torch.full((3, 4, 3), 2**32)), "range"),
        (changed(0, torch.full((3, 4, 3), 2**17, dtype=torch.int32)), "range"),
        (changed(3, torch.zeros(3, 3)), r"shape of target 0: found \(3, 3\), expected \(3, 4, ...\)"),
        (changed(4, torch.zeros(2)), r"shape of target 1: found \(2,\), expected \(3, ...\)"),
        (changed(1, torch.full((3, 4, 2), torch.nan)), "NaN or infinite, the first of sample 0, point 1"),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(batch: list[Tensor], says: str) -> None:
    with pytest.raises(SparseInputError, match=says):
        PREPARATION.clouds(batch).tensors()
