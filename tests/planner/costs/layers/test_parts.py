"""What parts of layers cost, which of them are worth measuring, and what plans make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.layers.interpolation import QUANTITIES
from planner.costs.layers.part_shapes import group_sizes, part_shapes
from planner.costs.layers.shards import MeasuredParts, part_of
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import FORWARD, LayoutPrices
from planner.ir.cluster import DATASHEET, INTERPOLATED, MEASURED
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, Profile
from planner.solvers import solver
from tests.oracles.plans import check
from tests.planner.costs.plain_prices import SECONDS, Modelled, cost_of_part
from tests.planner.networks import Named, Network, mesh_like, plain, priced, residual
from tests.planner.parts import with_parts
from tests.planner.solvers.laid_out_plans import MADE, with_random_parts

KIND = "kind-1"
LAYER = "conv0"
WHOLE = (8, 16, 16)
H2 = ShardingSpec((("height", (0, 1, 2)),))
W2 = ShardingSpec((("width", (0, 1, 2)),))
C2, S2, ALL = (ShardingSpec(((dim, (0, 1, 2)),)) for dim in ("channel", "sample", "replica"))
EVERYTHING = ("sample", "spatial", "channel")


def part(samples: int, extents: tuple[int, ...], forward_s: float, key: str = "") -> Measurement:
    return Measurement(LAYER, samples, forward_s, 2 * forward_s, forward_s, 0.0, 100, 0, 10, key=key, part=extents)


def measured(*parts: Measurement) -> Profile:
    return replace(priced(*plain(samples=4)), parts={KIND: parts})


def forward_s(profile: Profile, samples: int, extents: tuple[int, ...]) -> float | None:
    found = MeasuredParts(profile).cost(KIND, LAYER, samples, extents, WHOLE)
    plainly = cost_of_part(profile, KIND, LAYER, samples, extents, WHOLE, "forward_s")
    assert plainly == (pytest.approx(found[0].values[FORWARD]) if found else None)
    return found[0].values[FORWARD] if found else None


def evidence(profile: Profile, samples: int, extents: tuple[int, ...]) -> str:
    return MeasuredParts(profile).cost(KIND, LAYER, samples, extents, WHOLE)[0].evidence


def test_evidence_is_no_stronger_than_what_was_read() -> None:
    weak = replace(part(4, (8, 8, 16), 3.0), evidence=DATASHEET)
    assert evidence(measured(weak), 4, (8, 8, 16)) == DATASHEET
    assert evidence(measured(weak), 4, (8, 4, 16)) == DATASHEET


@pytest.mark.cases(12)
@pytest.mark.parametrize("seed", range(12))
def test_a_plain_look_up_reads_all_quantities_alike(seed: int) -> None:
    draw = random.Random(seed)
    extents = [(8, h, w) for h in (2, 4, 5, 8, 16) for w in (4, 8, 16) if (h, w) != (16, 16)]
    parts = tuple(
        replace(part(samples, each, draw.uniform(0, 3), draw.choice("aab")), saved_bytes=draw.randrange(3))
        for each in draw.sample(extents, 7)
        for samples in (1, 2, 4)
        if draw.random() < 0.7
    )
    profile = measured(*parts)
    cost_model = MeasuredParts(profile)
    for samples in (0, 1, 2, 3, 4, 8):
        for each in [*extents, (8, 3, 16), (8, 12, 16), (8, 6, 7), (4, 16, 16), (8, 0, 16), WHOLE]:
            found = cost_model.cost(KIND, LAYER, samples, each, WHOLE)
            for position, what in enumerate(QUANTITIES):
                plainly = cost_of_part(profile, KIND, LAYER, samples, each, WHOLE, what)
                expected = pytest.approx(found[0].values[position], rel=1e-12) if found else None
                assert plainly == expected


@pytest.mark.cases(12)
@pytest.mark.parametrize("seed", range(24))
def test_plain_loops_say_the_same_of_parts_that_families_know(seed: int) -> None:
    """Of all layers, under any of their layouts: measured, by the family, or the share that is given."""
    draw = random.Random(seed)
    profile = with_random_parts(draw, priced(*draw.choice(MADE), speeds=(1.0,) * 2))
    prices = LayoutPrices(CostModel(profile), (0, 1), draw.choice([2, 3]), EVERYTHING)
    plainly = Modelled(profile, KIND)
    for index, layer in enumerate(prices.layers):
        option = draw.choice(prices.options(index))
        shards = prices.shards(index, (option,))
        box = shards.done[0, 0]
        samples = int(shards.samples[0, 0])
        whole = part_of(shards.sized, shards.sized.work.shape)
        extents = part_of(shards.sized, (box[:, 1] - box[:, 0]).tolist())
        share = np.array([draw.uniform(1e-6, 1e-3) for _ in QUANTITIES])
        found = prices.parts.estimate(KIND, layer.name, (samples, extents), whole, share)
        of_share = dict(zip(SECONDS, share, strict=False))
        for what, by_product, given in zip(QUANTITIES, found, share, strict=True):
            said = cost_of_part(profile, KIND, layer.name, samples, extents, whole, what, plainly, of_share)
            assert by_product == pytest.approx(given if said is None else said, rel=1e-9), (layer.name, what)


def test_tables_hold_measured_parts_by_option_and_rank() -> None:
    profile = with_parts(
        priced(*plain(), speeds=(1.0, 1.0)), (2, 4), 2, lambda layer, samples, part: 1.5 if part[0] == 8 else 1.0
    )
    shared = measured_alone(replace(profile, parts={}))
    prices = measured_alone(profile)
    options = (H2, W2, C2, S2, ALL)
    share = shared.layer(0, options).seconds
    own = prices.layer(0, options).seconds
    assert own[:, :2] == pytest.approx(1.5 * share[:, :2])  # cut along space, with all 8 channels
    assert own[:, 2:] == pytest.approx(share[:, 2:])
    shards = prices.shards(0, options)
    known = [prices.parts.evidence(LAYER, KIND, shards, option, 0) for option in range(5)]
    assert known == [(MEASURED,)] * 3 + [()] * 2
    uneven = ShardingSpec((("height", (0, 3, 16)),))
    assert prices.parts.evidence(LAYER, KIND, prices.shards(0, (uneven,)), 0, 0) == (INTERPOLATED,)


def measured_alone(profile: Profile) -> LayoutPrices:
    """Prices without models of families."""
    cost_model = CostModel(profile)
    cost_model.tables.parts = MeasuredParts(cost_model.profile)
    return LayoutPrices(cost_model, (0, 1), 4, EVERYTHING)


def best(profile: Profile, allow: tuple[str, ...]) -> Plan:
    """The best plan of a single stage on all ranks."""
    problem = Problem(profile, 2, allow=allow, micro_batch_sizes=(2,), max_stages=1, confidence=0.0)
    found = solver("best-first")(problem)
    assert check(found, profile) == ()
    return found


def test_a_plan_avoids_parts_that_run_slower_than_their_share() -> None:
    """Halves of the height take five times their share: the plan cuts the width; if both do, samples or nothing."""
    profile = priced(*mesh_like(height=256), speeds=(1.0, 1.0))

    def cuts(plan: Plan) -> set[str]:
        return {dim for placed in plan.decision.layers.values() for dim in placed.cuts}

    def flat(layer: str, samples: int, part: tuple[int, ...]) -> float:
        return 5.0 if len(part) == 3 and part[1] < part[2] else 1.0

    def upright(layer: str, samples: int, part: tuple[int, ...]) -> float:
        return 5.0 if len(part) == 3 and part[1] > part[2] else 1.0

    def both(layer: str, samples: int, part: tuple[int, ...]) -> float:
        return max(flat(layer, samples, part), upright(layer, samples, part))

    allow = ("spatial",)
    sizes = (1, 2)
    free = best(with_parts(profile, sizes, 2, allow=allow), allow)
    assert "height" not in cuts(best(with_parts(profile, sizes, 2, flat, allow), allow))
    assert "width" not in cuts(best(with_parts(profile, sizes, 2, upright, allow), allow))
    slow = best(with_parts(profile, sizes, 2, both, allow), allow)
    assert cuts(free) & {"height", "width"}
    assert not cuts(slow) & {"height", "width"}
    assert slow.prediction.step_s > free.prediction.step_s


Parts = set[tuple[str, int, tuple[int, ...]]]


def in_candidates(profile: Profile, sizes: tuple[int, ...], allow: tuple[str, ...], num_ranks: int) -> Parts:
    """(layer, samples, extents) of every rank's box under every option that a search looks at."""
    found: Parts = set()
    cost_model = CostModel(profile)
    for size in sizes:
        for count in group_sizes(num_ranks):
            prices = LayoutPrices(cost_model, tuple(range(count)), size, allow)
            for index, layer in enumerate(prices.layers):
                shards = prices.shards(index, prices.options(index))
                whole = part_of(shards.sized, shards.sized.work.shape)
                for samples, boxes in zip(shards.samples, shards.done, strict=True):
                    for count_here, box in zip(samples.tolist(), boxes, strict=True):
                        part = part_of(shards.sized, [stop - start for start, stop in box.tolist()])
                        if part != whole and 0 not in part:
                            found.add((layer.name, count_here, part))
    return found


@pytest.mark.parametrize("make", [plain, residual, mesh_like])
@pytest.mark.parametrize("allow", [("sample", "spatial"), ("spatial",), ("channel",), ("sample", "spatial", "channel")])
def test_parts_are_those_of_all_candidate_layouts(
    make: Callable[[], tuple[Network, Named]], allow: tuple[str, ...]
) -> None:
    profile = priced(*make(), speeds=(1.0,) * 4)
    found = part_shapes(profile.graph, (1, 2, 4), allow, 4)
    said = [(layer, shape.samples, shape.part) for shape in found for layer in shape.layers]
    assert set(said) == in_candidates(profile, (1, 2, 4), allow, 4)
    assert len(set(said)) == len(said) > 0


def test_uneven_extents_give_both_parts() -> None:
    network = Network(1, 3, 7)
    profile = priced(network, network.conv(network.image, 5))
    shapes = part_shapes(profile.graph, (1,), ("spatial",), 2)
    found = {shape.part for shape in shapes if shape.layers == ("conv0",)}
    assert found == {(5, 4, 7), (5, 3, 7), (5, 7, 4), (5, 7, 3)}


def test_layers_that_are_alike_are_measured_once() -> None:
    profile = priced(*plain(filters=(8, 8, 8)))
    convs = {s.layers for s in part_shapes(profile.graph, (4,), ("spatial",), 2) if s.layers[0].startswith("conv")}
    assert convs == {("conv0",), ("conv2", "conv4")}


def test_a_layer_that_needs_no_gradient_of_its_input_is_not_like_one_that_does() -> None:
    network = Network(2, 8, 16)
    profile = priced(network, network.conv(network.conv(network.image, 8), 8))
    assert {s.layers for s in part_shapes(profile.graph, (2,), ("spatial",), 2)} >= {("conv0",), ("conv1",)}


def test_samples_alone_make_no_parts() -> None:
    profile = priced(*residual(), speeds=(1.0,) * 4)
    assert part_shapes(profile.graph, (1, 2, 4), ("sample",), 4) == ()
    assert part_shapes(profile.graph, (1, 2, 4), ("sample", "spatial", "channel"), 1) == ()


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(1, ()), (2, (2,)), (3, (2, 3)), (6, (2, 3, 4, 6)), (8, (2, 4, 8)), (9, (2, 3, 4, 8, 9))]
)
def test_groups_are_powers_and_divisors(num_ranks: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(num_ranks) == sizes
