"""The comparison is a fair one: the divided network computes what one device does, and the half is half of that."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.devices.ranks import on_ranks
from benchmarks.spatial.__main__ import CASES, MODES, ONE, SETTINGS, Raced, overheads, race, race_small, shares
from benchmarks.spatial.sides import INTERIOR, Alone, Divided, captured_case, interior_form
from planner.ir.box import volume
from planner.ir.plan import Placement
from tests.runtime.spatial.convolution.cases import random_case
from tests.runtime.spatial.convolution.chains import Chain, check, images, random_chain, run
from tests.runtime.spatial.convolution.test_layer import LAYOUTS, NET
from tests.runtime.spatial.convolution.test_overlapped import check as check_case

SMALL = [replace(case, shape=(*case.shape[:2], 32, 16)) for case in CASES]


@pytest.mark.parametrize("case", SMALL[1:], ids=lambda case: case.name)
def test_the_network_is_computed_together(case):
    captured = captured_case(case)

    def work(transport):
        found = [
            Divided(case, captured, transport, replace(settings, most_extra=1.0)) for settings in SETTINGS.values()
        ]
        return [(each.y.detach(), each.stage.peers.sent_bytes) for each in found], Alone(case, 2).shape

    ranks = on_ranks(2, work)
    model = case.model()
    torch.manual_seed(1)
    whole = model(torch.randn(case.shape)).detach()
    for way in range(len(SETTINGS)):
        together = torch.cat([found[way][0] for found, _ in ranks], 2)
        assert torch.allclose(together, whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    sent = [[nbytes for _, nbytes in found] for found, _ in ranks]
    assert all(each == row[0] for row in sent for each in row)  # all ways move the same
    assert sum(row[0] for row in sent) > 0
    assert all(shape == (*whole.shape[:2], whole.shape[2] // 2, whole.shape[3]) for _, shape in ranks)


def test_a_race_times_every_side():
    def work(transport):
        return race(SMALL[3], captured, transport, 2), race_small(transport, 2)

    captured = captured_case(SMALL[3])
    found = on_ranks(2, work)
    assert all(set(large.wall_s) == {ONE, "half", *MODES} for large, _ in found)
    for raced in (each for pair in found for each in pair):
        assert set(raced.wall_s) == set(raced.cpu_s) >= {"half", *MODES}
        assert min(raced.wall_s.values()) > 0.0


def test_rows_are_of_the_slower_rank():
    clocks = [
        Raced(
            {"half": half, ONE: 3.0 * half, "linear": half + more, "interior": 4.0, "blocking": 5.0, "gloo": 6.0},
            dict.fromkeys(("half", ONE, *MODES), cpu),
        )
        for half, more, cpu in ((1.0, 1.0, 0.0), (0.5, 0.1, 1.0))
    ]
    rows = {row.name.rsplit(": ", 1)[1]: row for row in shares(CASES[0], clocks)}
    assert (rows["linear"].value, rows["linear"].holds) == (0.5, False)
    assert rows["blocking"].value == 0.2
    assert (rows["speed-up"].value, rows["speed-up"].holds) == (1.5, False)
    assert [row.value for row in overheads(clocks)] == [0.0] * 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_by_interior_and_boundary_a_chain_is_what_one_device_computes(name: str) -> None:
    check(Chain(NET, images()), [Placement(0, cuts) for cuts in LAYOUTS[name][:7]], INTERIOR)


@pytest.mark.parametrize("transposed", [False, True])
def test_by_interior_and_boundary_any_convolution_is_what_one_device_computes(transposed: bool) -> None:
    numbers = random.Random(f"interior {transposed}")
    for _ in range(100):
        check_case(random_case(numbers, transposed), INTERIOR)


@pytest.mark.parametrize("seed", range(5))
def test_by_interior_and_boundary_random_chains_are_what_one_device_computes(seed: int) -> None:
    numbers = random.Random(seed)
    chain, placements = random_chain(numbers)
    check(chain, placements, replace(INTERIOR, backward=numbers.choice(("fewest", "dx", "dy"))))


def test_by_interior_and_boundary_no_more_moves_than_must() -> None:
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
