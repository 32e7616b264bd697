from __future__ import annotations

import pytest

from planner.ir.box import Interval, subtract
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.backward_halo import BackwardHalo, backward_halo
from planner.layers.division import LayerDivision
from tests.oracles.boxes import parts, transfers

DIMS = ("sample", "channel", "height", "width")


def halo(
    *,
    channels: tuple[int, int] = (4, 16),
    height: int = 12,
    kernel: int = 3,
    stride: int = 1,
    cuts: dict[str, tuple[int, ...]] | None = None,
    held: dict[str, tuple[int, ...]] | None = None,
    margin: int = 0,
    ways: int = 1,
    groups: int = 1,
) -> BackwardHalo | None:
    """Of a convolution whose input is cut as its output unless ``held`` says otherwise."""
    padding = kernel // 2
    below = (height + 2 * padding - kernel) // stride + 1
    data = TensorSpec(DIMS, (2, channels[0], height, 5), "float32")
    output = TensorSpec(DIMS, (2, channels[1], below, 5), "float32")
    numbers = {"kernel": (kernel, 1), "stride": (stride, 1), "padding": (padding, 0), "dilation": (1, 1)}
    layer = Layer("conv", "conv", ("x",), (output,), ("w",), {**numbers, "groups": groups})
    weight = TensorSpec(("feature",) * 4, (channels[1], channels[0] // groups, kernel, 1), "float32")
    own = Placement(0, cuts or {"height": (0, 1, 2)}, ways=ways, margin=margin)
    division = LayerDivision.of(layer, (data,), (weight,), own, 2)
    boxes = parts(Placement(0, held or own.cuts).layout, data, 2)
    wanted = [tuple(a & Interval(0, n) for a, n in zip(box, data.shape, strict=True)) for box in division.needed[0]]
    moves = [
        move
        for move in transfers(dict(enumerate(boxes)), dict(enumerate(wanted)))
        if move.src != move.dst and subtract(move.box, boxes[move.dst])
    ]
    return backward_halo(division, boxes, moves)


def test_rows_are_as_many_and_channels_decide() -> None:
    found = halo(channels=(4, 16))
    assert (found.dx_elements, found.dy_elements, found.is_dy) == (2 * 2 * 4 * 5, 2 * 2 * 16 * 5, False)
    assert halo(channels=(16, 4)).is_dy
    assert not halo(channels=(8, 8)).is_dy  # of equal ones the adjoint


def test_a_strided_window_reads_a_row_of_one_neighbour_only() -> None:
    found = halo(stride=2, channels=(4, 4))  # output 3 reads rows 5, 6 and 7; rank 1 holds 6 and 7
    assert found.dx_elements == found.dy_elements == 2 * 4 * 5
    assert [(move.src, move.dst, move.box[2]) for move in found.moves] == [(1, 0, Interval(3, 4))]


def test_large_kernels_reach_over_a_neighbour() -> None:
    found = halo(kernel=7, height=8, cuts={"height": (0, 1, 2, 3, 4)})
    assert found.dx_elements * 4 == found.dy_elements
    assert [box[2] for box in found.reached] == [Interval(0, 5), Interval(0, 7), Interval(1, 8), Interval(3, 8)]


@pytest.mark.parametrize(
    "case",
    [
        {"margin": 1},  # rows of dy are partial sums
        {"cuts": {"replica": (0, 1, 2), "height": (0, 1, 2)}},  # likewise
        {"cuts": {"channel": (0, 1, 2)}},  # others' filters read what is held
        {"cuts": {"channel": (0, 1, 2)}, "ways": 2},
        {"held": {"sample": (0, 1, 2)}},  # other samples
        {"cuts": {"height": (0, 12, 12)}},  # nothing to make
        {"cuts": {"sample": (0, 1, 2)}},  # nothing moves
    ],
)
def test_only_dx_can_move(case: dict[str, object]) -> None:
    assert halo(**case) is None


def test_filters_of_whole_groups_do_not_matter_to_others() -> None:
    cuts = {"channel": (0, 1, 2), "height": (0, 1, 2)}
    found = halo(channels=(8, 4), groups=2, cuts=cuts)
    assert found is not None
    assert found.is_dy
