"""What a plan uses and nobody measured: by layer sizes and parts, for plans of samples and of layouts."""

from __future__ import annotations

from dataclasses import replace

from planner.costs.cost_model import CostModel
from planner.costs.stages.coverage import Unmeasured, unmeasured
from planner.ir.cluster import GRADIENT_SUMS as SUMS
from planner.ir.cluster import NORMALISATION, PARTIAL_SUMS, PIECES, WITHIN_HOST, Collective
from planner.ir.constraints import parse_rule
from planner.ir.plan import Decision, Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers import solver
from tests.planner.networks import mesh_like, plain, priced, residual, with_running_statistics

KIND = "kind-1"


def made(profile: Profile, batch: int, **how: object) -> Plan:
    return solver("best-first")(Problem(profile, batch, max_stages=1, **{"confidence": 0.0, **how}))  # type: ignore[arg-type]


def test_a_size_between_is_missing_until_it_is_measured() -> None:
    profile = priced(*plain(samples=4), speeds=(1.0,))
    found = made(profile, 6, micro_batch_sizes=(3,))
    missing = unmeasured(CostModel(profile), [found.decision])
    assert missing[KIND].sizes == (3,)
    assert missing[KIND].shapes == ()
    more = tuple(replace(m, samples=3) for m in profile.measurements[KIND] if m.samples == 4)
    completed = replace(profile, measurements={KIND: (*profile.measurements[KIND], *more)})
    assert unmeasured(CostModel(completed), [found.decision]) == {}


def test_what_actions_take_longer_after_waits_is_missing_where_stages_wait() -> None:
    profile = knows(replace(priced(*plain(samples=4), speeds=(1.0, 1.0)), action_overhead_s={}), SUMS)
    alone = made(profile, 4, micro_batch_sizes=(4,))
    piped = solver("even-split")(Problem(profile, 4, micro_batch_sizes=(4,), confidence=0.0))
    assert len(piped.decision.stages) == 2
    assert unmeasured(CostModel(profile), [alone.decision]) == {}
    assert unmeasured(CostModel(profile), [piped.decision])[KIND].waits
    completed = replace(profile, action_overhead_s={KIND: 0.0})
    assert unmeasured(CostModel(completed), [piped.decision]) == {}


def test_calls_around_exchanges_are_missing_where_ranks_share_what_they_normalise() -> None:
    profile = priced(*residual(samples=4), speeds=(1.0, 1.0), sizes=(1, 2, 4))
    shared = solver("data-parallel")(Problem(profile, 4, micro_batch_sizes=(4,), confidence=0.0))
    assert unmeasured(CostModel(profile), [shared.decision]) == {KIND: Unmeasured(exchanges=(NORMALISATION, SUMS))}
    assert unmeasured(CostModel(knows(profile, NORMALISATION, PIECES)), [shared.decision])[KIND].exchanges == (SUMS,)
    assert unmeasured(CostModel(knows(profile, NORMALISATION, SUMS)), [shared.decision]) == {}
    normless = priced(*plain(samples=4), speeds=(1.0, 1.0), sizes=(1, 2, 4))
    summed = solver("data-parallel")(Problem(normless, 4, micro_batch_sizes=(4,), confidence=0.0))
    assert unmeasured(CostModel(normless), [summed.decision])[KIND].exchanges == (SUMS,)


def test_each_kind_of_exchange_is_asked_for_where_a_plan_has_it() -> None:
    images = priced(*mesh_like(height=256), speeds=(1.0, 1.0))
    divided = made(images, 1, micro_batch_sizes=(1,), allow=("spatial",)).decision
    assert set(asked(images, divided)) >= {PIECES, PARTIAL_SUMS, SUMS}
    kept = with_running_statistics(priced(*residual(samples=4), speeds=(1.0, 1.0)))
    for profile, is_asked in ((kept, False), (priced(*residual(samples=4), speeds=(1.0, 1.0)), True)):
        rule = parse_rule("*=replicas:2")
        plan = made(profile, 4, micro_batch_sizes=(4,), objective="latency", fix=(rule,))
        assert (NORMALISATION in asked(profile, plan.decision)) == is_asked
    forward = made(images, 1, micro_batch_sizes=(1,), allow=("spatial",), objective="latency").decision
    assert SUMS not in asked(images, forward)


def asked(profile: Profile, decision: Decision) -> tuple[str, ...]:
    """The kinds of exchanges that are missing, of whatever device."""
    found = unmeasured(CostModel(profile), [decision]).values()
    return next((each.exchanges for each in found if each.exchanges), ())


def knows(profile: Profile, *operations: str) -> Profile:
    calls = tuple(Collective(each, 1, WITHIN_HOST, ((1024, 1e-4),)) for each in operations)
    return replace(profile, cluster=replace(profile.cluster, collectives=(*profile.cluster.collectives, *calls)))


def test_parts_of_layers_that_are_cut_are_missing_until_they_are_measured() -> None:
    profile = priced(*mesh_like(height=256), speeds=(1.0, 1.0))
    found = made(profile, 1, micro_batch_sizes=(1,), allow=("spatial",))
    assert any("height" in placed.cuts or "width" in placed.cuts for placed in found.decision.layers.values())
    missing = unmeasured(CostModel(profile), [found.decision])[KIND]
    assert missing.shapes
    assert {shape.samples for shape in missing.shapes} == {1}
    whole = {(m.layer, m.samples): m for m in profile.measurements[KIND]}
    parts = tuple(
        replace(whole[name, shape.samples], part=shape.part) for shape in missing.shapes for name in shape.layers
    )
    completed = replace(profile, parts={KIND: parts})
    assert not unmeasured(CostModel(completed), [found.decision]).get(KIND, missing.__class__()).shapes
