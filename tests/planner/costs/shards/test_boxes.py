"""Boxes as arrays say what boxes as tuples say."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.costs.shards.boxes import as_box, as_boxes, boxes_of, moved, sources, volumes
from planner.ir.box import Box, Interval, intersect, transfers, volume
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout

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
    layout, spec = random_layout(rng), TensorSpec(tuple(dims), shape, "float32")
    found = boxes_of(layout, spec, samples)
    assert tuple(as_box(box) for box in found) == layout.boxes(spec, samples)


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
        owners = dict(enumerate(layout.boxes(spec, shape[0])))
        for l, boxes in enumerate(needed):
            expected = np.zeros((4, 4))
            for move in transfers(owners, dict(enumerate(boxes))):
                expected[move.src, move.dst] += volume(move.box) if move.src != move.dst else 0
            assert found[k, l].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(60))
def test_what_a_rank_holds_beyond_its_own_is_not_asked_for(seed: int) -> None:
    rng = random.Random(seed)
    shape = (4, 3, 8)
    spec = TensorSpec(DIMS, shape, "float32")
    layout = Layout(rng.choice(LAYOUTS[:4]))
    owned = layout.boxes(spec, 4)
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


def test_of_identical_owners_each_rank_takes_from_itself_or_in_turn() -> None:
    owned = as_boxes([(Interval(0, 2),), (Interval(0, 2),), (Interval(2, 4),), (Interval(2, 4),)])
    assert sources(owned).astype(int).tolist() == [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]


def test_volumes_of_empty_boxes_and_scalars() -> None:
    assert volumes(as_boxes([(Interval(3, 1), Interval(0, 2))])).tolist() == [0.0]
    assert volumes(np.zeros((2, 0, 2), dtype=np.int64)).tolist() == [1.0, 1.0]
