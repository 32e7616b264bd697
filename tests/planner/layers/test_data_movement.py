"""Views back through which a gradient stays where it is, or has to be copied: as numpy has it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.ir.graph import Layer, TensorSpec
from planner.layers.data_movement import copied_at

Shape = tuple[int, ...]


def reshape(kept: Shape, made: Shape) -> Layer:
    spec = TensorSpec(tuple(f"dim{dim}" for dim in range(len(made))), made, "float32")
    return Layer("view", "reshape", ("x",), (spec,), attributes={"kept": kept})


def test_a_permutation_alone_is_a_view_and_what_it_splits_is_copied() -> None:
    """[tokens, features] -> [tokens, heads, size] -> [heads, tokens, size], as attention has its queries."""
    split, swapped = reshape((0, -1, -1), (6, 4, 8)), reshape((1, 0, 2), (4, 6, 8))
    assert copied_at([split], [(6, 32)]) is None
    assert copied_at([swapped], [(6, 4, 8)]) is None
    assert copied_at([split, swapped], [(6, 32), (6, 4, 8)]) == 0
    assert copied_at([], []) is None


@pytest.mark.parametrize("seed", range(40))
def test_what_numpy_copies_is_copied(seed: int) -> None:
    draw = random.Random(seed)
    shapes: list[Shape] = [tuple(draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(1, 4)))]
    chain = []
    for _ in range(draw.randint(1, 4)):
        data = shapes[-1]
        if draw.random() < 0.5:
            kept = tuple(draw.sample(range(len(data)), len(data)))
            made = tuple(data[dim] for dim in kept)
        else:
            made = random_split(draw, int(np.prod(data)))
            kept = (-1,) * len(made)
        chain.append(reshape(kept, made))
        shapes.append(made)
    whole = gradient = np.zeros(shapes[-1])
    expected = None
    for place in reversed(range(len(chain))):
        kept = tuple(chain[place].attributes["kept"])  # type: ignore[arg-type]
        if sorted(kept) == list(range(len(shapes[place]))):
            gradient = gradient.transpose(np.argsort(kept))
        else:
            gradient = gradient.reshape(shapes[place])
        if not np.shares_memory(whole, gradient):
            expected = place
            break
    assert copied_at(chain, shapes[:-1]) == expected


def random_split(draw: random.Random, total: int) -> Shape:
    found = []
    for _ in range(draw.randint(0, 3)):
        found.append(draw.choice([each for each in range(1, total + 1) if total % each == 0]))
        total //= found[-1]
    return (*found, total)
