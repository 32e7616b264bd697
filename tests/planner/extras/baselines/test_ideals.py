from __future__ import annotations

import random

import pytest

from planner.extras.baselines.common.ideals import Ideals, chain_of, contract, lattice_of, members
from planner.ir.graph import bits_of


def random_successors(seed: int, largest: int = 8) -> list[list[int]]:
    draw = random.Random(seed)
    count = draw.randint(1, largest)
    return [[b for b in range(a + 1, count) if draw.random() < 0.3] for a in range(count)]


def every_ideal(successors: list[list[int]]) -> set[int]:
    """By looking at all sets of nodes."""
    edges = [(a, b) for a, found in enumerate(successors) for b in found]
    return {bits for bits in range(1 << len(successors)) if all(bits >> a & 1 or not bits >> b & 1 for a, b in edges)}


@pytest.mark.parametrize("seed", range(30))
def test_a_lattice_has_every_ideal_once_and_every_step(seed: int) -> None:
    successors = random_successors(seed)
    expected = every_ideal(successors)
    found = lattice_of(Ideals.of(successors), 1000)
    assert found is not None
    assert sorted(found.bits) == sorted(expected)
    assert [bits.bit_count() for bits in found.bits] == sorted(bits.bit_count() for bits in expected)
    steps = {(found.bits[a], found.bits[b]) for a, b in zip(found.below.tolist(), found.above.tolist(), strict=True)}
    assert steps == {(a, b) for a in expected for b in expected if (a ^ b).bit_count() == 1 and a < b}
    assert len(steps) == len(found.below)


def test_a_chain_has_the_beginnings_of_an_order_and_too_many_ideals_are_not_listed() -> None:
    chain = chain_of((2, 0, 1))
    lattice = lattice_of(Ideals.of([[1], [], [0]]), 10)
    assert chain.bits == lattice.bits == (0, 0b100, 0b101, 0b111)
    assert (chain.below.tolist(), chain.above.tolist()) == (lattice.below.tolist(), lattice.above.tolist())
    assert chain.members(3).tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 1, 1]]
    found = [lattice_of(Ideals.of([[] for _ in range(10)]), most) for most in (1023, 1024)]
    assert [each is None for each in found] == [True, False]


@pytest.mark.parametrize("seed", range(30))
def test_a_window_has_the_ideals_above_within_the_weight(seed: int) -> None:
    successors = random_successors(seed)
    draw = random.Random(seed)
    weights = [(float(draw.randint(0, 4)), draw.random()) for _ in successors]
    ideals = Ideals.of(successors, weights)
    every = every_ideal(successors)
    for start in draw.sample(sorted(every), min(4, len(every))):
        most = draw.choice([0.0, 3.0, 100.0])
        found = list(ideals.between(start, most))
        expected = {
            above
            for above in every
            if above != start and not start & ~above and sum(weights[v][0] for v in bits_of(above & ~start)) <= most
        }
        assert {above for above, _ in found} == expected
        assert len(found) == len(expected)
        assert [above.bit_count() for above, _ in found] == sorted(above.bit_count() for above, _ in found)
        for above, sums in found:
            added = list(bits_of(above & ~start))
            assert sums == pytest.approx(tuple(sum(weights[v][q] for v in added) for q in range(2)))


def test_a_window_is_walked_lazily() -> None:
    wide = Ideals.of([[] for _ in range(60)])
    walk = wide.between(0, 60.0)
    assert [next(walk)[0] for _ in range(60)] == [1 << node for node in range(60)]


def test_members_of_more_nodes_than_a_word_has_bits() -> None:
    sets = [0, 1 << 130, (1 << 131) - 1]
    found = members(sets, 131)
    assert [sum(1 << k for k in range(131) if row[k]) for row in found] == sets
    assert members([0], 0).shape == (1, 0)


@pytest.mark.parametrize("seed", range(30))
def test_a_contraction_is_the_least_that_leaves_no_cycle(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    edges = [(a, b) for a in range(count) for b in range(count) if a != b and draw.random() < 0.12]
    together = [tuple(draw.sample(range(count), draw.randint(1, min(3, count)))) for _ in range(draw.randint(0, 2))]
    found = contract(count, edges, together)
    assert sorted(node for block in found.blocks for node in block) == list(range(count))
    assert all(found.block_of[node] == k for k, block in enumerate(found.blocks) for node in block)
    crossing = {(found.block_of[a], found.block_of[b]) for a, b in edges if found.block_of[a] != found.block_of[b]}
    assert crossing == {(a, b) for a, after in enumerate(found.successors) for b in after}
    assert all(a < b for a, b in crossing)
    assert all(len({found.block_of[node] for node in group}) == 1 for group in together)
    # Least: two nodes share a block only if each reaches the other through edges and classes.
    reach = {(a, b) for a, b in edges} | {(a, b) for group in together for a in group for b in group}
    for k in range(count):
        reach |= {(a, b) for a, m in reach for n, b in reach if m == n == k}
    for a in range(count):
        for b in range(a):
            assert (found.block_of[a] == found.block_of[b]) == ((a, b) in reach and (b, a) in reach)
