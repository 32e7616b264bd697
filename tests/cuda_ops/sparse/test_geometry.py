"""Site sets and maps: one object for all that ask for the same, whoever asks first."""

from __future__ import annotations

import pytest
import torch

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import BuiltGeometry, KernelMap, MapSpec, RouteStep, geometry_of, stride_of

torch.set_num_threads(1)
HALF = RouteStep("strided", (2, 2, 2), (2, 2, 2))
FLAT = RouteStep("strided", (3, 3, 3), (1, 2, 2))
MORE = RouteStep("generated", (2, 2, 2), (2, 2, 2))
COORDINATES = torch.tensor([[2, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [2, -1, 4, 2], [0, 0, 0, 3]], dtype=torch.int32)


@pytest.fixture
def geometry() -> BuiltGeometry:
    return geometry_of(COORDINATES, 4)[0]


def test_rows_are_sorted_and_the_order_says_where_they_came_from() -> None:
    geometry, order = geometry_of(COORDINATES)
    assert geometry.num_samples == 3
    assert torch.equal(geometry.coordinates(()), COORDINATES[order])
    assert order.tolist() == [2, 4, 1, 3, 0]


def test_samples_without_sites_have_empty_segments(geometry: BuiltGeometry) -> None:
    segments = geometry.segments(())
    assert segments.lengths.tolist() == [3, 0, 2, 0]
    assert segments.starts.tolist() == [0, 3, 3, 5]
    assert geometry.segments((HALF,)).lengths.tolist() == [2, 0, 2, 0]


def test_what_is_asked_for_twice_is_made_once(geometry: BuiltGeometry) -> None:
    down = MapSpec((), (HALF,), (2, 2, 2), (2, 2, 2))
    assert geometry.map(down) is geometry.map(
        MapSpec((), (RouteStep("strided", (2, 2, 2), (2, 2, 2)),), *[(2, 2, 2)] * 2)
    )
    assert geometry.keys((HALF,)) is geometry.keys((HALF,))
    assert geometry.segments((HALF,)) is geometry.segments((HALF,))
    assert geometry.map(MapSpec((), (), (3, 3, 3))) is not geometry.map(MapSpec((), (), (3, 3, 3), dilation=(2, 2, 2)))


def test_a_route_may_be_asked_for_before_those_that_lead_to_it(geometry: BuiltGeometry) -> None:
    other, _ = geometry_of(COORDINATES, 4)
    deep = (HALF, FLAT)
    assert geometry.num_sites(deep) == len(geometry.coordinates(deep))
    other.num_sites((HALF,))
    assert torch.equal(geometry.coordinates(deep), other.coordinates(deep))


def test_a_strided_map_joins_each_site_to_the_one_that_holds_it(geometry: BuiltGeometry) -> None:
    found = geometry.map(MapSpec((), (HALF,), (2, 2, 2), (2, 2, 2)))
    assert (found.num_inputs, found.num_outputs, found.num_pairs()) == (5, 4, 5)
    fine = geometry.coordinates(())
    coarse = geometry.coordinates((HALF,))
    for offsets in found.neighbours:
        for output, row in enumerate(offsets.tolist()):
            if row >= 0:
                assert fine[row, 1:].div(2, rounding_mode="floor").tolist() == coarse[output, 1:].tolist()
                assert fine[row, 0] == coarse[output, 0]


def test_both_halves_of_a_map_say_the_same(geometry: BuiltGeometry) -> None:
    for spec in (
        MapSpec((), (), (3, 3, 3)),
        MapSpec((), (), (2, 2, 2)),
        MapSpec((), (), (3, 3, 3), dilation=(2, 1, 3)),
        MapSpec((), (), (3, 3, 3), transposed=True),
        MapSpec((), (FLAT,), (3, 3, 3), (1, 2, 2)),
        MapSpec((), (MORE,), (2, 2, 2), (2, 2, 2), transposed=True),
    ):
        found = geometry.map(spec)
        assert found.num_pairs() == int((found.reverse >= 0).sum()) > 0
        for there, back in zip(found.neighbours.tolist(), found.reverse.tolist(), strict=True):
            assert all(back[row] == output for output, row in enumerate(there) if row >= 0)


def test_the_inverse_swaps_the_halves() -> None:
    found = KernelMap(torch.tensor([[0, -1]]), torch.tensor([[0, -1, -1]]))
    back = found.inverse()
    assert (back.num_inputs, back.num_outputs) == (2, 3)
    assert back.inverse() == found
    assert back.to("cpu").neighbours.tolist() == found.reverse.tolist()


@pytest.mark.parametrize(
    ("route", "stride"),
    [
        ((), (1, 1, 1)),
        ((HALF,), (2, 2, 2)),
        ((HALF, FLAT), (2, 4, 4)),
        ((HALF, MORE), (1, 1, 1)),
        ((MORE, HALF), (1, 1, 1)),
        ((HALF, HALF, MORE), (2, 2, 2)),
        ((MORE,), (1, 1, 1)),
        ((FLAT, MORE), (1, 1, 1)),
    ],
)
def test_the_stride_of_a_route_is_the_product_of_its_steps(
    route: tuple[RouteStep, ...], stride: tuple[int, ...]
) -> None:
    assert stride_of(route) == stride


def test_steps_say_what_they_are() -> None:
    assert str(HALF) == "strided 2/2"
    assert str(FLAT) == "strided 3/1x2x2"
    assert str(RouteStep("generated", (3, 1, 1), (1, 1, 1), (2, 2, 2))) == "generated 3x1x1/1 dilation 2"


def test_no_cloud_at_all_is_one_empty_sample() -> None:
    geometry, order = geometry_of(torch.zeros(0, 4, dtype=torch.int32))
    assert (geometry.num_samples, geometry.num_sites(()), geometry.num_sites((HALF,)), len(order)) == (1, 0, 0, 0)
    assert geometry.segments(()).lengths.tolist() == [0]
    assert geometry.map(MapSpec((), (HALF,), (2, 2, 2), (2, 2, 2))).neighbours.shape == (8, 0)


@pytest.mark.parametrize("num_samples", [0, 2, 513])
def test_a_number_of_samples_that_does_not_hold_the_clouds_is_refused(num_samples: int) -> None:
    with pytest.raises(SparseInputError, match="number of samples: found"):
        geometry_of(COORDINATES, num_samples)


def test_coordinates_that_occur_twice_are_refused() -> None:
    with pytest.raises(SparseInputError):
        geometry_of(torch.cat([COORDINATES, COORDINATES[:1]]))


def test_a_crop_keeps_what_lies_within_its_bounds_and_what_is_flattened_must(geometry: BuiltGeometry) -> None:
    bounds = (None, (0, 4), (0, 3))
    everything = geometry.coordinates(())
    inside = (everything[:, 2] >= 0) & (everything[:, 2] < 4) & (everything[:, 3] < 3)
    assert torch.equal(geometry.coordinates((RouteStep("cropped", bounds=bounds),)), everything[inside])
    with pytest.raises(SparseInputError, match="1 sites outside the column"):
        geometry.keys((RouteStep("flattened", bounds=(None, (0, 4), None)),))
