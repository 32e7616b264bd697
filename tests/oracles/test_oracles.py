"""The cost model beside the oracles, which take prices as given and work out all else with none of its code."""

from __future__ import annotations

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chains import chain_profile
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast, predict
from planner.costs.pricing import Pricing
from planner.ir.cluster import DATASHEET
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.layers.boundary import Boundaries
from planner.schedules import names
from planner.solvers import solver
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.evaluation import evaluate
from tests.oracles.plans import check, differences
from tests.planner.corrections import random_corrections
from tests.planner.factories import chain_decision, plan_of
from tests.planner.shared_hosts import random_plan
from tests.planner.solvers.instances import random_problem
from tests.planner.solvers.laid_out_plans import EVERYTHING, plan_of_candidate, random_candidate, random_network

HOME = Path(__file__).parent
ORACLES = sorted((*HOME.glob("[!_t]*.py"), *HOME.parent.glob("planner/extras/*/plain_*.py")))
GIVEN = (
    "planner.costs.cost_model",
    "planner.costs.layers",
    "planner.costs.communication",
    "planner.costs.shards",
    "planner.costs.stages.gradient_overlap",
    "planner.costs.stages.input_pipeline",
    "planner.extras.tiles.division",
    "planner.extras.tiles.workspace",
    "planner.extras.token_slices.prices",  # what a layer costs at a slice
)
"""What a layer, a part of one, a message or a sum costs."""


def imported(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module is not None]


@pytest.mark.every_case
@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_an_oracle_is_given_prices_and_nothing_else(path: Path) -> None:
    of_costs = [
        name for name in imported(path.read_text("utf-8")) if name.startswith(("planner.costs", "planner.extras"))
    ]
    assert [name for name in of_costs if not name.startswith(GIVEN)] == []


def require_agreement(profile: Profile, decision: Decision) -> None:
    """Step, times and peaks."""
    rounded_bytes = 2 * len(decision.sizes) + 2
    assert list(differences(predict(profile, decision)[0], evaluate(profile, decision), rounded_bytes)) == []


@pytest.mark.cases(120)
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("schedule", names())
def test_a_random_plan_on_shared_cards_and_cores_is_what_the_oracle_makes_of_it(schedule: str, seed: int) -> None:
    """Memory over time has the peak of every rank, and the parts of a rank's time add up to the step.

    Also where ranks of several stages take messages in another order than they were sent (``zb-v`` 9).
    """
    profile, decision = random_plan(random.Random(seed), schedule)
    found = forecast(Pricing.of(profile), decision, 0.08)
    assert list(differences(found.prediction, evaluate(profile, decision), 2 * len(decision.sizes) + 2)) == []
    assert found.timeline.step_s == found.prediction.step_s
    for rank, one in enumerate(found.prediction.ranks):
        parts = (one.compute_s, one.communication_s, one.bubble_s, one.idle_s)
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(found.prediction.step_s, rel=1e-12)
        assert found.timeline.peak_bytes(rank) == found.memories[rank].peak_bytes == one.peak_bytes


def test_any_other_figure_is_seen() -> None:
    profile, decision = random_plan(random.Random(7), "1f1b")
    prediction = predict(profile, decision)[0]
    plain = evaluate(profile, decision)
    rounded_bytes = 2 * len(decision.sizes) + 2
    rank = prediction.ranks[0]
    wrong = {
        "step_s": replace(prediction, step_s=prediction.step_s * (1 + 1e-6)),
        "bubble": replace(prediction, bubble_fraction=prediction.bubble_fraction + 1e-3),
        **{
            name: replace(prediction, ranks=(replace(rank, **{name: value}), *prediction.ranks[1:]))
            for name, value in (
                ("peak_bytes", rank.peak_bytes + rounded_bytes + 1),
                ("on_chip_bytes", rank.on_chip_bytes + 1),
                ("compute_s", rank.compute_s + 1e-3 * prediction.step_s),
            )
        },
    }
    for name, other in wrong.items():
        assert len(list(differences(other, plain, rounded_bytes))) == 1, name


@pytest.mark.parametrize("duplex", [True, False])
def test_equal_stages_whose_messages_meet_are_ordered_alike(duplex: bool) -> None:
    profile = chain_profile(
        4, 4, hosts=["n0", "n1", "n0", "n1"], activation_bytes=4000, bandwidth_bytes_per_s=4e6, duplex=duplex
    )
    link = replace(profile.cluster.links["across-hosts"], sending=((4000, 2e-4),), receiver_core=((4000, 3e-4),))
    profile = replace(profile, cluster=replace(profile.cluster, links={**profile.cluster.links, "across-hosts": link}))
    require_agreement(profile, chain_decision(profile, (1, 2, 3), (1,) * 6))


@pytest.mark.parametrize("seed", [5, 62, 81])
def test_rounding_does_not_decide_who_is_first_on_a_wire_of_both_directions(seed: int) -> None:
    """Of random chains of whole milliseconds those in which it would: two ranks would send at equal times."""
    draw = random.Random(seed)
    count = draw.choice((3, 4))
    profile = chain_profile(
        count,
        count,
        forward_s=[draw.choice((1e-3, 2e-3, 3e-3)) for _ in range(count)],
        hosts=[f"n{rank % 2}" for rank in range(count)],
        activation_bytes=[draw.choice((1000, 2000, 3000)) for _ in range(count)],
        bandwidth_bytes_per_s=1e6,
        duplex=False,
    )
    cuts = tuple(range(1, count))
    micro_batches = (1,) * draw.randint(3, 6)
    require_agreement(profile, chain_decision(profile, cuts, micro_batches, schedule=draw.choice(("1f1b", "gpipe"))))


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_messages_are_joined_alike(schedule: str) -> None:
    num_joined = 0
    for seed in range(8):
        profile, decision = random_plan(random.Random(seed), schedule, small=True)
        if joined := Boundaries.of_decision(profile.graph, decision).program(decision).joined():
            num_joined += len(joined)
            require_agreement(profile, decision)
    assert num_joined > 8, "hardly any message was joined"


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_with_any_layouts_and_corrections_is_reckoned_the_same(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_network(draw)
    profile = profile.corrected_by(random_corrections(draw, profile))
    evaluator = Evaluator(Problem(profile, 4, allow=EVERYTHING, confidence=0.0), CostModel(profile))
    plan = plan_of_candidate(evaluator, random_candidate(draw, evaluator))
    assert plan.inputs.corrections == profile.calibration.corrections
    assert check(plan, profile) == ()
    assert check(plan, profile.bare) == (), "the plan itself says under which corrections it was made"
    uncorrected = replace(plan, inputs=replace(plan.inputs, corrections=()))
    assert any("the predicted step is" in fault for fault in check(uncorrected, profile))


@pytest.mark.cases(12)
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("is_corrected", [False, True])
def test_a_found_plan_is_reckoned_the_same(seed: int, is_corrected: bool) -> None:
    """Plans of every shape, also on half-duplex links and of sizes nobody measured."""
    problem = random_problem(seed)
    if is_corrected:
        corrections = random_corrections(random.Random(seed), problem.profile)
        problem = replace(problem, profile=problem.profile.corrected_by(corrections))
    try:
        plan = solver("best-first")(problem)
    except InfeasibleError:
        assert problem.profile.cluster.devices[0].memory_bytes < 2**30
        return
    assert check(plan, problem.profile) == ()


def test_layers_that_a_datasheet_prices_are_reckoned_the_same() -> None:
    """A layer measured at one size alone, of which no family is known."""
    whole = chain_profile(3, 1)
    devices = tuple(
        replace(device, peak_flop_per_s={"float32": 1e12}, memory_bytes_per_s=1e11) for device in whole.cluster.devices
    )
    few = {kind: tuple(m for m in found if m.samples == 1) for kind, found in whole.measurements.items()}
    sheet = replace(whole, cluster=replace(whole.cluster, devices=devices), measurements=few)
    decision = chain_decision(sheet, micro_batches=(2,), schedule="gpipe")
    prediction, _ = predict(sheet, decision)
    assert prediction.evidence == DATASHEET
    plan = replace(plan_of(sheet, decision), prediction=prediction)
    assert check(replace(plan, search=replace(plan.search, bound_s=0.0, gap=0.0)), sheet) == ()
