"""Which parts are measured, of those that plans may use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.costs.layers.interpolation import layer_cost
from planner.ir.profile import Measurement, PartShape
from profiler.measure.sizes import Limits
from profiler.shards.measure import next_parts

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHAPES = tuple(PartShape(("conv", "twin"), n, (8, 4)) for n in SIZES)


def measured_of(shape: PartShape, seconds: float) -> list[Measurement]:
    return [
        Measurement(name, shape.samples, seconds / 3, 2 * seconds / 3, 0, 0, 0, 0, 10, part=shape.part)
        for name in shape.layers
    ]


def sampled(
    cost: Callable[[int], float], share: float = 0.5, shapes: tuple[PartShape, ...] = SHAPES
) -> list[list[int]]:
    """The numbers of samples that are asked for, turn by turn; a cost of 0: it cannot be run alone."""
    tried: list[PartShape] = []
    found: list[Measurement] = []
    turns = []
    while turn := next_parts(shapes, tried, found, {"conv": share}, Limits(), layer_cost):
        assert not set(turn) & set(tried)
        turns.append([shape.samples for shape in turn])
        tried += turn
        found += [one for shape in turn if cost(shape.samples) for one in measured_of(shape, cost(shape.samples))]
    return turns


def test_smooth_parts_need_the_ends_and_a_middle() -> None:
    assert sampled(lambda n: 0.01 * n) == [[1, 32], [6]]


def test_parts_of_small_layers_need_the_ends_alone() -> None:
    assert sampled(lambda n: 0.01 * n if n < 12 else 0.005 * n, share=0.01) == [[1, 32]]


@pytest.mark.parametrize(("below", "above"), [(3, 4), (12, 16), (24, 32)])
def test_a_cliff_is_bracketed(below: int, above: int) -> None:
    asked = {n for turn in sampled(lambda n: 0.01 * n * (1.0 if n <= below else 0.5)) for n in turn}
    assert {below, above} <= asked
    assert len(asked) < len(SIZES)


def test_what_cannot_be_run_alone_is_tried_at_the_ends_and_the_middle_and_left() -> None:
    assert sampled(lambda n: 0.0) == [[1, 32], [6]]


def test_lines_of_one_or_two_are_measured_whole() -> None:
    assert sampled(lambda n: 0.01 * n, shapes=SHAPES[:1]) == [[1]]
    assert sampled(lambda n: 0.01 * n, shapes=SHAPES[3:5]) == [[4, 6]]
    assert sampled(lambda n: 0.01 * n, shapes=()) == []


def test_parts_of_other_extents_and_layers_are_lines_of_their_own() -> None:
    other = tuple(PartShape(("pool",), n, (4, 4)) for n in SIZES[:3])
    assert sampled(lambda n: 0.01 * n, shapes=(*SHAPES, *other))[0] == [1, 32, 1, 3]
