"""Coordinates to keys, clouds to batches, batches to rows of sites in order."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cuda_ops.sparse import keys
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import MapSpec, RouteStep
from cuda_ops.sparse.nn.tensor import SparseTensor
from cuda_ops.sparse.preparation import Preparation, padded
from cuda_ops.sparse.quantize import sparse_collate, sparse_collate_fn, sparse_quantize
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


LIMITS = [[b, x, y, z] for b, x, y, z in product((0, 1, 511), *[(keys.LOWEST, -1, 0, keys.HIGHEST)] * 3)]


def test_coordinates_come_back_from_their_keys() -> None:
    coordinates = torch.tensor(LIMITS, dtype=torch.int32)
    packed = keys.pack(coordinates)
    assert packed.dtype == torch.int64
    assert torch.equal(keys.unpack(packed), coordinates)
    assert keys.unpack(packed).dtype == torch.int32


def test_keys_sort_as_coordinates_do_and_are_not_negative() -> None:
    packed = keys.pack(torch.tensor(LIMITS)).tolist()
    assert packed == sorted(packed)
    assert packed[0] == 0
    assert packed[-1] == 2**63 - 1


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_coordinate_is_read_and_replaced_alone(axis: int) -> None:
    coordinates = torch.tensor(LIMITS)
    packed = keys.pack(coordinates)
    assert torch.equal(keys.coordinate(packed, axis), coordinates[:, axis + 1])
    for value in (keys.LOWEST, 5, keys.HIGHEST):
        coordinates[:, axis + 1] = value
        assert torch.equal(keys.with_coordinate(packed, axis, coordinates[:, axis + 1]), keys.pack(coordinates))


def test_range_holds_both_limits() -> None:
    values = torch.tensor([keys.LOWEST - 1, keys.LOWEST, keys.HIGHEST, keys.HIGHEST + 1])
    assert keys.in_range(values).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("size", "dilation", "expected"),
    [(1, 3, [0]), (3, 1, [-1, 0, 1]), (5, 2, [-4, -2, 0, 2, 4]), (2, 1, [0, 1]), (4, 3, [0, 3, 6, 9])],
)
def test_odd_kernels_are_centred_and_even_ones_start_at_the_site(size: int, dilation: int, expected: list[int]) -> None:
    assert list(keys.axis_offsets(size, dilation)) == expected


def test_offsets_run_along_z_first() -> None:
    assert keys.kernel_offsets((1, 2, 3), (1, 2, 1)) == [
        (0, 0, -1), (0, 0, 0), (0, 0, 1), (0, 2, -1), (0, 2, 0), (0, 2, 1),
    ]  # fmt: skip


def test_an_error_says_what_where_both_numbers_and_the_remedy() -> None:
    with pytest.raises(SparseInputError) as found:
        keys.check_coordinates(torch.tensor([[0, 0, 1 << 20, 0]]), "here")
    assert str(found.value) == (
        "here: coordinate y out of range: found 1048576, expected -131072..131071; "
        "move the cloud towards the origin or take larger voxels"
    )
    assert (found.value.where, found.value.found) == ("here", 1 << 20)
    assert isinstance(found.value, ValueError)


def test_whole_numbers_in_range_pass_and_so_do_none() -> None:
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        keys.check_coordinates(torch.ones(3, 4, dtype=dtype), "here")
    keys.check_coordinates(torch.empty(0, 4, dtype=torch.int32), "here")


@pytest.mark.parametrize("column", range(4))
def test_the_limits_pass_and_the_next_number_is_refused(column: int) -> None:
    lowest, highest = (0, keys.MAX_BATCHES - 1) if column == 0 else (keys.LOWEST, keys.HIGHEST)
    for value in (lowest - 1, lowest, highest, highest + 1):
        coordinates = torch.zeros(2, 4, dtype=torch.int32)
        coordinates[1, column] = value
        if lowest <= value <= highest:
            keys.check_coordinates(coordinates, "here")
        else:
            with pytest.raises(SparseInputError, match="out of range"):
                keys.check_coordinates(coordinates, "here")


def _as_torchsparse(points: np.ndarray, size: float | tuple[float, ...]) -> tuple[np.ndarray, ...]:
    """Unique rows of the floor, in the order of x, then y, then z, with the first point of each."""
    return np.unique(np.floor(points / np.array(size)).astype(np.int32), axis=0, return_index=True, return_inverse=True)


@pytest.mark.parametrize("size", [1, 0.25, (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_voxels_indices_and_inverses_are_those_of_unique_rows(dtype: type, size: float) -> None:
    points = (np.random.default_rng(0).normal(size=(300, 3)) * 3).astype(dtype)
    voxels, index, inverse = sparse_quantize(points, size, return_index=True, return_inverse=True)
    expected = _as_torchsparse(points, size)
    assert (voxels.dtype, index.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(voxels, expected[0])
    np.testing.assert_array_equal(index, expected[1])
    np.testing.assert_array_equal(inverse, expected[2].ravel())


def test_torch_gives_torch_and_the_same() -> None:
    points = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    found = sparse_quantize(torch.from_numpy(points), 0.5, return_index=True, return_inverse=True)
    for one, other in zip(found, sparse_quantize(points, 0.5, return_index=True, return_inverse=True), strict=True):
        assert isinstance(one, torch.Tensor)
        np.testing.assert_array_equal(one.numpy(), other)


def test_only_what_is_asked_for_is_returned() -> None:
    points = np.zeros((4, 3))
    assert isinstance(sparse_quantize(points), np.ndarray)
    assert [len(each) for each in sparse_quantize(points, return_index=True)] == [1, 1]
    assert [len(each) for each in sparse_quantize(points, return_inverse=True)] == [1, 4]


def test_negative_points_go_down() -> None:
    assert sparse_quantize(np.array([[-0.1, -1.0, -1.1]])).tolist() == [[-1, -1, -2]]


@given(st.lists(st.tuples(*[st.integers(-3, 3)] * 3), max_size=30))
def test_voxels_of_the_first_points_are_the_voxels_and_the_inverse_leads_back(rows: list[tuple[int, ...]]) -> None:
    points = np.array(rows, dtype=np.int32).reshape(-1, 3)
    voxels, index, inverse = sparse_quantize(points, return_index=True, return_inverse=True)
    np.testing.assert_array_equal(points[index], voxels)
    np.testing.assert_array_equal(voxels[inverse], points)
    assert len(voxels) == len(set(rows))


def test_an_empty_cloud_has_no_voxels() -> None:
    voxels, index = sparse_quantize(np.empty((0, 3)), return_index=True)
    assert voxels.shape == (0, 3)
    assert index.shape == (0,)


def test_points_given_are_not_changed_and_need_not_be_contiguous() -> None:
    points = np.random.default_rng(0).normal(size=(3, 20)).T
    before = points.copy()
    np.testing.assert_array_equal(sparse_quantize(points), sparse_quantize(before))
    np.testing.assert_array_equal(points, before)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_points_that_are_not_finite_are_counted_and_the_first_named(bad: float) -> None:
    points = np.zeros((6, 3))
    points[2, 1] = points[5, 0] = bad
    with pytest.raises(SparseInputError, match=r"NaN or infinite, the first in row 2: .*found 2 of 6 rows, expected 0"):
        sparse_quantize(points)


@pytest.mark.parametrize("far", [131072.0, -131072.5, 3e9, 1e300])
def test_points_out_of_range_are_counted_and_the_first_named(far: float) -> None:
    points = np.zeros((6, 3))
    points[4, 2] = far
    with pytest.raises(SparseInputError, match=r"1 points out of range, the first in row 4: .*-131072\.\.131071"):
        sparse_quantize(points)


def test_points_at_the_limits_stay() -> None:
    points = np.array([[-131072.0, 131071.9, 0.0]])
    assert sparse_quantize(points).tolist() == [[-131072, 131071, 0]]


@pytest.mark.parametrize("size", [0, -1.0, np.nan, np.inf, (1, 2), (1, 2, 0)])
def test_voxel_sizes_that_are_none_are_refused(size: object) -> None:
    with pytest.raises(SparseInputError, match="voxel size"):
        sparse_quantize(np.zeros((2, 3)), size)


def test_points_of_another_shape_or_kind_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"shape of points: found \[2, 4\], expected \[N, 3\]"):
        sparse_quantize(np.zeros((2, 4)))
    with pytest.raises(SparseInputError, match="dtype of points"):
        sparse_quantize(torch.zeros(2, 3, dtype=torch.complex64))


COORDS = [np.array([[1, -2, 3], [0, 0, 0]]), np.empty((0, 3), dtype=np.int32), np.array([[5, 5, 5]])]
FEATS = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.empty((0, 2)), np.array([[5.0, 6.0]])]


def _sample(rows: list[list[int]], first: float) -> SparseTensor:
    feats = first + torch.arange(len(rows), dtype=torch.float32).view(-1, 1)
    coords = torch.tensor(rows, dtype=torch.int32).view(-1, 3)
    return SparseTensor(feats, torch.nn.functional.pad(coords, (1, 0)), num_samples=1)


def test_the_number_of_a_sample_comes_first() -> None:
    coords, feats = sparse_collate(COORDS, FEATS)
    assert coords.dtype == torch.int32
    assert coords.tolist() == [[0, 1, -2, 3], [0, 0, 0, 0], [2, 5, 5, 5]]
    assert feats.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_torch_collates_as_numpy_does() -> None:
    given = [[torch.from_numpy(each) for each in arrays] for arrays in (COORDS, FEATS)]
    for one, other in zip(sparse_collate(*given), sparse_collate(COORDS, FEATS), strict=True):
        assert torch.equal(one, other)


def test_tensors_become_one_and_remember_the_order_of_their_rows() -> None:
    batch = sparse_collate([_sample([[3, 0, 0], [1, 0, 0]], 0), _sample([], 0), _sample([[2, 0, 0], [0, 0, 9]], 10)])
    assert batch.num_samples == 3
    assert batch.coords.tolist() == [[0, 1, 0, 0], [0, 3, 0, 0], [2, 0, 0, 9], [2, 2, 0, 0]]
    assert batch.feats.flatten().tolist() == [1, 0, 11, 10]
    labels = torch.tensor([30, 31, 32, 33])  # of the points as they were given, sample after sample
    assert labels[batch.order].tolist() == [31, 30, 33, 32]


def test_mappings_are_collated_entry_by_entry() -> None:
    samples = [
        {
            "input": _sample([[number, 0, 0]], number),
            "label": np.array([number, 1]),
            "name": str(number),
            "more": {"w": torch.ones(2)},
        }
        for number in range(3)
    ]
    batch = sparse_collate_fn(samples)
    assert len(batch["input"]) == batch["input"].num_samples == 3
    assert batch["label"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert batch["name"] == ["0", "1", "2"]
    assert batch["more"]["w"].shape == (3, 2)
    assert sparse_collate_fn([1, 2]) == [1, 2]


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"shapes of 'label' that differ: found \(3,\), expected \(2,\)"):
        sparse_collate_fn([{"label": np.zeros(2)}, {"label": np.zeros(3)}])


def test_features_that_are_not_finite_are_counted_and_the_first_named() -> None:
    feats = [FEATS[0], FEATS[1], np.array([[np.nan, 1.0]])]
    with pytest.raises(SparseInputError, match=r"sample 2: features that are NaN .* first in row 0.*found 1 of 1 rows"):
        sparse_collate(COORDS, feats)


@pytest.mark.parametrize(
    ("coords", "feats", "message"),
    [
        ([], [], r"number of samples: found 0, expected 1\.\.512"),
        (COORDS * 171, FEATS * 171, r"number of samples: found 513, expected 1\.\.512"),
        (COORDS, FEATS[:2], "lists of features: found 2, expected 3, one per cloud"),
        ([COORDS[0][:1]], FEATS[:1], r"sample 0: shape of features: found \[2, 2\], expected \[1, C\]"),
        ([np.zeros((2, 4), dtype=int)], FEATS[:1], r"shape of coordinates: found \[2, 4\]"),
        ([np.zeros((2, 3))], FEATS[:1], r"dtype of coordinates: found torch.float64"),
        ([np.array([[0, 0, 2**31], [0, 0, 0]])], FEATS[:1], "coordinate z out of range: found 2147483648"),
        ([COORDS[0], COORDS[2]], [FEATS[0], np.zeros((1, 3))], r"channels that differ: found \[2, 3\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused(coords: list, feats: list, message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        sparse_collate(coords, feats)


def test_tensors_of_different_strides_are_refused() -> None:
    one = _sample([[0, 0, 0]], 0)
    other = SparseTensor(one.feats, one.coords, 2)
    with pytest.raises(SparseInputError, match=r"stride of sample 1: found \(2, 2, 2\), expected \(1, 1, 1\)"):
        sparse_collate([one, other])
