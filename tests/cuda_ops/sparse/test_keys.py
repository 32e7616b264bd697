from __future__ import annotations

from itertools import product

import pytest
import torch

from cuda_ops.sparse import keys
from cuda_ops.sparse.errors import SparseInputError

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
