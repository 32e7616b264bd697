"""Convolution by interior and boundary computes what one device does, for any window and any division."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.spatial.interior import INTERIOR, interior_form
from planner.ir.box import volume
from planner.ir.plan import Placement
from tests.runtime.spatial.convolution.cases import random_case
from tests.runtime.spatial.convolution.chains import Chain, check, images, random_chain, run
from tests.runtime.spatial.convolution.test_layer import LAYOUTS, NET
from tests.runtime.spatial.convolution.test_overlapped import check as check_case


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_chain_of_convolutions_is_what_one_device_computes(name: str) -> None:
    check(Chain(NET, images()), [Placement(0, cuts) for cuts in LAYOUTS[name][:7]], INTERIOR)


@pytest.mark.parametrize("transposed", [False, True])
def test_any_convolution_is_what_one_device_computes(transposed: bool) -> None:
    numbers = random.Random(f"interior {transposed}")
    for _ in range(200):
        check_case(random_case(numbers, transposed), INTERIOR)


@pytest.mark.parametrize("seed", range(5))
def test_random_chains_are_what_one_device_computes(seed: int) -> None:
    numbers = random.Random(seed)
    while True:
        try:
            chain, placements = random_chain(numbers)
            break
        except RuntimeError:  # nothing is left of the image
            continue
    check(chain, placements, replace(INTERIOR, backward=numbers.choice(("fewest", "dx", "dy"))))


def test_no_more_moves_than_must() -> None:
    chain = Chain(NET, images())
    division = chain.division([Placement(0, cuts) for cuts in LAYOUTS["grid"]])
    forms = []

    def form(*of):
        forms.append(interior_form(*of))
        return forms[-1]

    found = run(chain, division, replace(INTERIOR, instead=form))
    moved = sum(volume(move.box) for name in division.layers for move in division.moves(name, 0))
    assert sum(each.sent_bytes for each in found) == 2 * 8 * moved  # forward and its adjoint, float64
    assert any(each is not None for each in forms)
