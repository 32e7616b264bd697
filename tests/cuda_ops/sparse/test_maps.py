from __future__ import annotations

from itertools import product

import pytest
import torch

from cuda_ops.sparse import operators
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import HIGHEST, LOWEST, kernel_offsets, pack, unpack
from tests.cuda_ops.sparse.clouds import KERNELS, ONES, Triple, cloud, maps, sites

pytestmark = pytest.mark.usefixtures("implementation")
STRIDES = [(1, 1, 1), (2, 2, 2), (3, 1, 2)]


def _neighbour(site: tuple[int, ...], offset: Triple, stride: Triple, transposed: bool) -> tuple[int, ...] | None:
    batch, *place = site
    if not transposed:
        return batch, *(p * s + o for p, s, o in zip(place, stride, offset, strict=True))
    moved = [p - o for p, o in zip(place, offset, strict=True)]
    if any(m % s for m, s in zip(moved, stride, strict=True)):
        return None
    return batch, *(m // s for m, s in zip(moved, stride, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("stride", "dilation"), [(s, d) for s, d in product(STRIDES, [(1, 1, 1), (2, 1, 3)])])
@pytest.mark.parametrize("kernel", KERNELS)
def test_neighbours_are_those_of_the_definition(
    kernel: Triple, stride: Triple, dilation: Triple, transposed: bool
) -> None:
    source = sites(50, extent=4)
    target = sites(40, seed=1, extent=4)
    rows = {tuple(site): row for row, site in enumerate(unpack(source).tolist())}
    expected = [
        [rows.get(_neighbour(tuple(site), offset, stride, transposed), -1) for site in unpack(target).tolist()]
        for offset in kernel_offsets(kernel, dilation)
    ]
    assert operators.kernel_map(source, target, kernel, stride, dilation, transposed).tolist() == expected


@pytest.mark.parametrize("dilation", [(1, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_map_of_a_set_to_itself_is_that_to_an_equal_set_with_one_site_more(kernel: Triple, dilation: Triple) -> None:
    keys = sites()
    more = torch.cat([keys, pack(torch.tensor([[7, 0, 0, 0]]))])  # not equal, so that no symmetry can be used
    with_more = operators.kernel_map(keys, more, kernel, ONES, dilation)
    assert torch.equal(operators.kernel_map(keys, keys, kernel, ONES, dilation), with_more[:, :-1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_reverse_holds_the_same_pairs_and_reverses_back(kernel: Triple) -> None:
    source = sites()
    target = operators.strided_sites(source, kernel, (2, 2, 2), ONES)
    neighbours, reverse = maps(source, target, kernel, (2, 2, 2))
    pairs = {(k, o, i) for k, row in enumerate(neighbours.tolist()) for o, i in enumerate(row) if i >= 0}
    assert pairs == {(k, o, i) for k, row in enumerate(reverse.tolist()) for i, o in enumerate(row) if o >= 0}
    assert torch.equal(operators.reversed_map(reverse, len(target)), neighbours)
    assert torch.equal(operators.kernel_map(target, source, kernel, (2, 2, 2), ONES, True), reverse)


@pytest.mark.parametrize("edge", [2, 3, 4])
def test_sites_of_a_kernel_as_long_as_its_stride_are_those_divided(edge: int) -> None:
    keys = sites()
    triple = (edge,) * 3
    coordinates = unpack(keys)
    shift = edge // 2 if edge % 2 else 0  # an odd kernel is centred
    coordinates[:, 1:] = torch.div(coordinates[:, 1:] + shift, edge, rounding_mode="floor")
    assert torch.equal(operators.strided_sites(keys, triple, triple, ONES), pack(coordinates).unique())


def test_sites_are_sorted_and_the_order_sorts_them(implementation: str) -> None:
    coordinates = cloud()
    keys, order = operators.sorted_sites(coordinates)
    assert torch.equal(unpack(keys), coordinates[order])
    assert (keys[1:] > keys[:-1]).all()
    assert order.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_sites_take_other_whole_numbers(dtype: torch.dtype) -> None:
    assert torch.equal(operators.sorted_sites(cloud().to(dtype))[0], operators.sorted_sites(cloud())[0])


def test_duplicates_are_refused_with_their_number_and_the_first() -> None:
    coordinates = torch.tensor([[0, 5, 0, 0], [1, -1, 2, 3], [0, 5, 0, 0], [1, -1, 2, 3], [1, -1, 2, 3]])
    with pytest.raises(
        SparseInputError, match=r"3 duplicate coordinates, the first \[0, 5, 0, 0\].*found 2 .*expected 5"
    ):
        operators.sorted_sites(coordinates)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("site", "message"),
    [
        ([0, HIGHEST + 1, 0, 0], r"coordinate x out of range: found 131072, expected -131072\.\.131071"),
        ([0, 0, LOWEST - 1, 0], "coordinate y out of range: found -131073"),
        ([0, 0, 0, 2**31 - 1], "coordinate z out of range: found 2147483647"),
        ([512, 0, 0, 0], r"batch index out of range: found 512, expected 0\.\.511"),
        ([-1, 0, 0, 0], "batch index out of range: found -1"),
    ],
)
def test_coordinates_out_of_range_are_refused(site: list[int], message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        operators.sorted_sites(torch.tensor([[0, 0, 0, 0], site], dtype=torch.int32))


def test_points_and_rows_of_another_length_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"dtype of coordinates: found torch.float32, .*sparse_quantize"):
        operators.sorted_sites(torch.zeros(3, 4))
    with pytest.raises(SparseInputError, match=r"shape of coordinates: found \[3, 3\], expected \[N, 4\]"):
        operators.sorted_sites(torch.zeros(3, 3, dtype=torch.int32))


def test_negative_coordinates_divide_downwards() -> None:
    keys = pack(torch.tensor([[0, -1, -2, -3]]))
    assert unpack(operators.strided_sites(keys, (2, 2, 2), (2, 2, 2), ONES)).tolist() == [[0, -1, -1, -2]]


CORNERS = [[0, *corner] for corner in product((LOWEST, HIGHEST), repeat=3)]
LIMITS = [*CORNERS, *[[1, *corner[1:]] for corner in CORNERS], *[[511, *corner[1:]] for corner in CORNERS]]


@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3, 3), ONES), ((3, 3, 3), (2, 2, 2)), ((2, 3, 4), ONES)])
def test_neighbours_at_the_limits_do_not_wrap(kernel: Triple, dilation: Triple) -> None:
    keys, _ = operators.sorted_sites(torch.tensor(LIMITS))
    neighbours = operators.kernel_map(keys, keys, kernel, ONES, dilation)
    centre = kernel_offsets(kernel).index((0, 0, 0))
    assert neighbours[centre].tolist() == list(range(len(keys)))
    assert (neighbours >= 0).sum() == len(keys)  # each is alone but for itself
    other = torch.cat([keys, keys[-1:] - 5])
    found = operators.kernel_map(keys, other.sort()[0], kernel, ONES, dilation)
    assert (found >= 0).sum() == len(keys)


def test_sites_at_the_limits_are_made_within_them() -> None:
    keys, _ = operators.sorted_sites(torch.tensor(LIMITS))
    for made in (
        operators.generated_sites(keys, (3, 3, 3), ONES, ONES),
        operators.strided_sites(keys, (3, 3, 3), ONES, ONES),
    ):
        places = unpack(made)
        assert len(made) == 8 * len(keys)  # two of three remain along each axis
        assert torch.equal(pack(places), made)
        assert ((places[:, 1:] <= LOWEST + 1) | (places[:, 1:] >= HIGHEST - 1)).all()
        assert places[:, 0].unique().tolist() == [0, 1, 511]
    assert len(operators.generated_sites(keys, (2, 2, 2), (2, 2, 2), ONES)) == 0


def test_transposed_neighbours_at_the_limits_do_not_wrap() -> None:
    fine, _ = operators.sorted_sites(torch.tensor(LIMITS))
    coarse = operators.strided_sites(fine, (3, 3, 3), (2, 2, 2), ONES)
    neighbours, reverse = maps(fine, coarse, (3, 3, 3), (2, 2, 2))
    assert torch.equal(operators.kernel_map(coarse, fine, (3, 3, 3), (2, 2, 2), ONES, True), reverse)
    assert (neighbours >= 0).sum(1).tolist() == (reverse >= 0).sum(1).tolist()


def test_empty_sets_make_empty_sets_and_maps() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    some = sites()
    assert len(operators.sorted_sites(torch.empty(0, 4, dtype=torch.int32))[0]) == 0
    for make in (operators.strided_sites, operators.generated_sites):
        assert make(empty, (3, 3, 3), (2, 2, 2), ONES).shape == (0,)
    for transposed in (False, True):
        assert operators.kernel_map(empty, some, (3, 3, 3), (2, 2, 2), ONES, transposed).unique().tolist() == [-1]
        assert operators.kernel_map(some, empty, (3, 3, 3), (2, 2, 2), ONES, transposed).shape == (27, 0)
    assert operators.reversed_map(torch.empty(27, 0, dtype=torch.int32), 5).unique().tolist() == [-1]
    assert operators.reversed_map(torch.full((27, 4), -1, dtype=torch.int32), 0).shape == (27, 0)


@pytest.mark.parametrize("name", ["kernel", "stride", "dilation"])
def test_numbers_below_one_are_refused(name: str) -> None:
    numbers = {"kernel": ONES, "stride": ONES, "dilation": ONES, name: (1, 0, 1)}
    with pytest.raises(SparseInputError, match=rf"{name}: found \[1, 0, 1\]"):
        operators.strided_sites(sites(), **numbers)


def test_more_rows_or_entries_than_int32_counts_are_refused() -> None:
    def many(count: int) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64).expand(count)  # one number in memory

    with pytest.raises(SparseInputError, match="too many rows: found 2147483648, expected at most 2147483647"):
        operators.strided_sites(many(2**31), ONES, ONES, ONES)
    with pytest.raises(SparseInputError, match="too many rows: found 2147483648"):
        operators.sorted_sites(torch.zeros(1, dtype=torch.int32).expand(2**31, 4))
    with pytest.raises(SparseInputError, match=r"too many entries of a map \(offsets times rows\): found 2147483664"):
        operators.kernel_map(sites(), many(79536432), (3, 3, 3), ONES, ONES)
    with pytest.raises(SparseInputError, match="too many entries of a map"):
        operators.reversed_map(torch.full((2, 1), -1, dtype=torch.int32), 2**30)
