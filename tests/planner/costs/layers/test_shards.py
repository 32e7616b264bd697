"""What parts cost: as measured, read between measured ones, or a share; and a plain look-up says the same."""

from __future__ import annotations

import random
from dataclasses import replace
from math import sqrt

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.layers.interpolation import QUANTITIES
from planner.costs.layers.shards import MeasuredParts
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import FORWARD, LayoutPrices
from planner.ir import codec
from planner.ir.cluster import DATASHEET, INTERPOLATED, MEASURED
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, Profile
from planner.solvers import solver
from tests.oracles.plans import check
from tests.planner.costs.plain_prices import cost_of_part
from tests.planner.networks import mesh_like, plain, priced, residual
from tests.planner.parts import with_parts

KIND, LAYER, WHOLE = "kind-1", "conv0", (8, 16, 16)
H2, W2 = ShardingSpec((("height", (0, 1, 2)),)), ShardingSpec((("width", (0, 1, 2)),))
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


def test_a_measured_part_costs_what_was_measured() -> None:
    profile = measured(part(4, (8, 8, 16), 3.0), part(4, (8, 16, 8), 7.0))
    assert forward_s(profile, 4, (8, 8, 16)) == 3.0
    assert forward_s(profile, 4, (8, 16, 8)) == 7.0
    assert evidence(profile, 4, (8, 8, 16)) == MEASURED


def test_the_whole_and_nothing_are_no_parts() -> None:
    profile = measured(part(4, (8, 8, 16), 3.0))
    assert forward_s(profile, 4, WHOLE) is None
    assert forward_s(profile, 0, (8, 8, 16)) is None
    assert forward_s(profile, 4, (8, 0, 16)) is None


def test_other_samples_are_read_between_those_measured() -> None:
    profile = measured(part(1, (8, 8, 16), 1.0), part(4, (8, 8, 16), 9.0))
    assert forward_s(profile, 2, (8, 8, 16)) == pytest.approx(3.0)
    assert evidence(profile, 2, (8, 8, 16)) == INTERPOLATED


def test_other_extents_are_read_by_elements_between_parts_of_one_back_end() -> None:
    profile = measured(part(4, (8, 4, 16), 2.0, "a"), part(4, (8, 8, 16), 8.0, "a"))
    assert forward_s(profile, 4, (8, 6, 16)) == pytest.approx(2 * 4 ** (np.log(6 / 4) / np.log(2)))
    assert forward_s(profile, 4, (8, 2, 16)) == pytest.approx(1.0)  # of the nearest, in proportion
    assert evidence(profile, 4, (8, 6, 16)) == INTERPOLATED


def test_across_a_change_of_back_end_the_nearer_part_counts_in_proportion() -> None:
    profile = measured(part(4, (8, 4, 16), 2.0, "a"), part(4, (8, 8, 16), 40.0, "b"))
    assert forward_s(profile, 4, (8, 5, 16)) == pytest.approx(2.0 * 5 / 4)
    assert forward_s(profile, 4, (8, 6, 16)) == pytest.approx(40.0 * 6 / 8)


def test_the_whole_layer_is_one_of_the_points() -> None:
    profile = measured(part(4, (8, 8, 16), 1.0))
    whole = next(m for m in profile.measurements[KIND] if (m.layer, m.samples) == (LAYER, 4)).forward_s
    assert forward_s(profile, 4, (8, 12, 16)) == pytest.approx(whole ** (np.log(1.5) / np.log(2)))
    apart = measured(part(4, (8, 8, 16), 1.0, "other"))
    assert forward_s(apart, 4, (8, 15, 16)) == pytest.approx(whole * 15 / 16)
    assert forward_s(apart, 4, (8, 9, 16)) == pytest.approx(9 / 8)


def test_parts_cut_along_other_dims_say_nothing() -> None:
    profile = measured(part(4, (8, 8, 16), 3.0))
    assert forward_s(profile, 4, (8, 16, 8)) is None
    assert forward_s(profile, 4, (8, 8, 8)) is None
    assert forward_s(profile, 2, (8, 4, 16)) is None


def test_evidence_is_no_stronger_than_what_was_read() -> None:
    weak = replace(part(4, (8, 8, 16), 3.0), evidence=DATASHEET)
    assert evidence(measured(weak), 4, (8, 8, 16)) == DATASHEET
    assert evidence(measured(weak), 4, (8, 4, 16)) == DATASHEET


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
    for samples in (1, 2, 3, 4, 8):
        for each in [*extents, (8, 3, 16), (8, 12, 16), (8, 6, 7), (4, 16, 16)]:
            found = cost_model.cost(KIND, LAYER, samples, each, WHOLE)
            for position, what in enumerate(QUANTITIES):
                plainly = cost_of_part(profile, KIND, LAYER, samples, each, WHOLE, what)
                expected = pytest.approx(found[0].values[position], rel=1e-12) if found else None
                assert plainly == expected


def test_tables_hold_measured_parts_by_option_and_rank() -> None:
    profile = with_parts(
        priced(*plain(), speeds=(1.0, 1.0)), (2, 4), 2, lambda layer, samples, part: 1.5 if part[0] == 8 else 1.0
    )
    shared, prices = measured_alone(replace(profile, parts={})), measured_alone(profile)
    options = (H2, W2, C2, S2, ALL)
    share, own = shared.layer(0, options).seconds, prices.layer(0, options).seconds
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


def test_without_parts_nothing_changes() -> None:
    profile = priced(*residual(), speeds=(1.0, 1.0))
    problem = Problem(profile, 4, allow=EVERYTHING, micro_batch_sizes=(4,))
    made = solver("best-first")(problem)
    again = solver("best-first")(replace(problem, profile=replace(profile, parts={KIND: ()})))
    assert codec.canonical(made.decision) == codec.canonical(again.decision)
    assert made.prediction == again.prediction
    assert '"parts"' not in codec.dumps(profile)
    assert '"part"' not in codec.dumps(profile)


def test_parts_survive_their_file() -> None:
    profile = with_parts(priced(*residual(), speeds=(1.0, 1.0)), (1, 2, 4), 2, lambda *_: sqrt(2))
    again = codec.loads(codec.dumps(profile), Profile)
    assert again == profile
    assert again.parts[KIND]


def best(profile: Profile, allow: tuple[str, ...]) -> Plan:
    """The best plan of a single stage on all ranks."""
    problem = Problem(profile, 2, allow=allow, micro_batch_sizes=(2,), max_stages=1)
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

    allow, sizes = ("spatial",), (1, 2)
    free = best(with_parts(profile, sizes, 2, allow=allow), allow)
    assert "height" not in cuts(best(with_parts(profile, sizes, 2, flat, allow), allow))
    assert "width" not in cuts(best(with_parts(profile, sizes, 2, upright, allow), allow))
    slow = best(with_parts(profile, sizes, 2, both, allow), allow)
    assert cuts(free) & {"height", "width"}
    assert not cuts(slow) & {"height", "width"}
    assert slow.prediction.step_s > free.prediction.step_s
