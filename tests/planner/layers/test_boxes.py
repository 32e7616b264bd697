"""Boxes as arrays say what boxes as tuples say."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.box import Box, Interval, intersect, volume
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout, cut_points
from planner.layers.boxes import as_boxes, as_tuples, boxes_of, moved, transfers
from tests.oracles import boxes as plain

DIMS = ("sample", "channel", "height")

LAYOUTS = (
    {"sample": (0, 1, 2, 3, 4)},
    {"height": (0, 2, 3, 6, 8)},
    {"sample": (0, 3, 4), "channel": (0, 1, 2)},
    {"channel": (0, 1, 4, 5, 6)},
    {"height": (0, 1, 2), "replica": (0, 1, 2)},
    {"replica": (0, 1, 2), "sample": (0, 1, 2)},
    {"replica": (0, 1, 2, 3, 4)},
)


def parts(layout: Layout, spec: TensorSpec, samples: int) -> tuple[Box, ...]:
    return as_tuples(boxes_of(layout, spec, samples))


def random_layout(rng: random.Random) -> Layout:
    return Layout(rng.choice(LAYOUTS))


def random_boxes(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    return [tuple(Interval(a, rng.randint(a, n)) for n in shape for a in [rng.randint(0, n)]) for _ in range(4)]


@pytest.mark.parametrize("seed", range(30))
def test_the_boxes_of_a_layout(seed: int) -> None:
    rng = random.Random(seed)
    samples = rng.randint(1, 9)
    dims = rng.sample(DIMS, rng.randint(1, 3))
    shape = tuple(samples * 2 if dim == "sample" else rng.randint(1, 11) for dim in dims)
    layout = random_layout(rng)
    spec = TensorSpec(tuple(dims), shape, "float32")
    assert parts(layout, spec, samples) == plain.parts(layout, spec, samples)


def test_a_layout_without_cuts_and_a_scalar_have_one_box_a_rank() -> None:
    assert boxes_of(Layout(), TensorSpec(("height",), (3,), "float32"), 2).tolist() == [[[0, 3]]]
    assert boxes_of(Layout({"sample": (0, 1, 2)}), TensorSpec((), (), "float32"), 2).shape == (2, 0, 2)


@pytest.mark.parametrize("seed", range(100))
def test_what_moves_is_what_transfers_says(seed: int) -> None:
    rng = random.Random(seed)
    shape = (rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 9))
    spec = TensorSpec(DIMS, shape, "float32")
    layouts = [random_layout(rng) for _ in range(3)]
    needed = [random_boxes(rng, shape) for _ in range(2)]
    owned = np.array([boxes_of(layout, spec, shape[0]) for layout in layouts])
    found = moved(owned, owned, np.array([as_boxes(boxes) for boxes in needed]))
    for k, layout in enumerate(layouts):
        owners = dict(enumerate(parts(layout, spec, shape[0])))
        for l, wanted in enumerate(needed):
            expected = np.zeros((4, 4))
            moves = transfers(owners, dict(enumerate(wanted)))
            assert moves == plain.transfers(owners, dict(enumerate(wanted)))
            for move in moves:
                expected[move.src, move.dst] += volume(move.box) if move.src != move.dst else 0
            assert found[k, l].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_what_a_rank_holds_beyond_its_own_is_not_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    shape = (4, 3, 8)
    spec = TensorSpec(DIMS, shape, "float32")
    layout = Layout(rng.choice(LAYOUTS[:4]))
    owned = parts(layout, spec, 4)
    held = [
        tuple(Interval(max(0, i.start - 1), min(n, i.stop + 1)) for i, n in zip(b, shape, strict=True)) for b in owned
    ]
    needed = random_boxes(rng, shape)
    found = moved(as_boxes(owned)[None], as_boxes(held)[None], as_boxes(needed)[None])[0, 0]
    for dst, need in enumerate(needed):
        for src, box in enumerate(owned):
            piece = intersect(box, need)
            there = intersect(piece, held[dst]) if piece else None
            expected = (volume(piece) if piece else 0) - (volume(there) if there else 0)
            assert found[src, dst] == (expected if src != dst else 0)


shares = st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any).map(tuple)


@given(shares, shares, st.integers(0, 9), st.integers(1, 3), st.integers(1, 9))
def test_the_parts_are_a_partition(
    samples: tuple[int, ...], heights: tuple[int, ...], count: int, rows: int, height: int
) -> None:
    spec = TensorSpec(("sample", "height"), (count * rows, height), "float32")
    layout = Layout({"sample": cut_points(samples), "height": cut_points(heights)})
    boxes = parts(layout, spec, count)
    assert len(boxes) == layout.num_parts == len(samples) * len(heights)
    cells = [
        (i, j) for box in boxes for i in range(box[0].start, box[0].stop) for j in range(box[1].start, box[1].stop)
    ]
    copies = len(heights) if height == 1 else 1  # a dim of extent 1 is whole everywhere
    assert len(set(cells)) * copies == len(cells) == sum(map(volume, boxes)) == count * rows * height * copies
    assert all(interval.start % rows == interval.stop % rows == 0 for interval, _ in boxes)
    assert sum(layout.samples(count)) == count * len(heights)
