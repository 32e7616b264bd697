"""Proofs: what they claim lies below every plan of their space, and nothing in them can be changed unnoticed."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest

import planner.proof
from benchmarks.chains import chain_profile
from benchmarks.house.measures import num_tokens
from planner.costs.candidate import Candidate, Recomputes
from planner.costs.cost_model import CostModel
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.proof import Proof
from planner.proof.prices import SpacePrices
from planner.proof.prove import prove, require_provable
from planner.proof.space import PlanSpace
from planner.proof.verify import ProofAccount, ProofPrefix, verify
from planner.schedules import traits
from planner.solvers.best_first.solver import solve
from planner.solvers.candidates.candidate import split_batch
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.networks import priced, residual
from tests.planner.solvers.instances import (
    attention_problem,
    best_by_exhaustion,
    branching_problem,
    heavy_problem,
    random_problem,
    tied_problem,
    with_memory,
)

AGAIN = {"nothing": Recomputes.NOTHING, "all": Recomputes.ALL, "cores": Recomputes.CORES}
MOST_TOKENS = 5350
MOST_TOKENS_OF_PRICES = 7000


def normalised_problem(seed: int) -> Problem:
    """Blocks with batch norms, whose ranks exchange statistics, on two or three devices."""
    draw = random.Random(seed)
    network, end = residual(height=8)
    speeds = draw.choice([(1.0, 1.0), (1.0, 0.5), (1.0, 1.0, 1.0)])
    profile = priced(network, end, speeds, latency_s=draw.choice([0.0, 1e-5]), sizes=(1, 2, 4))
    return Problem(
        profile, 4, schedules=draw.choice([("1f1b",), ("gpipe", "zb-h1")]), micro_batch_sizes=(2,), confidence=0.0
    )


MAKERS: dict[str, Callable[[int], Problem]] = {
    "chains": random_problem,
    "branches": branching_problem,
    "heavy": heavy_problem,
    "ties": tied_problem,
    "branches with ties": partial(tied_problem, make=branching_problem),
    "attention": attention_problem,
    "batch norms": normalised_problem,
}


def certified(problem: Problem) -> tuple[Plan, Proof]:
    plan = solve(problem)
    return plan, prove(plan, problem.profile)


def account_of(problem: Problem) -> ProofAccount:
    """Of everything: with no claim, no pipeline is passed over."""
    prices = SpacePrices(PlanSpace(problem))
    prices.of_layers.update({key: prices.derived(*key) for key in prices.space.sized()})
    account = ProofAccount(prices, inf)
    for size in prices.space.sizes:
        account.potentials.update((key, account.allowed(key)) for key in account.keys(size))
    return account


def pipelines(
    account: ProofAccount, size: int, prefix: ProofPrefix, bounds: tuple[float, ...]
) -> Iterator[tuple[ProofPrefix, float]]:
    """Complete ones, each with the largest bound of its beginnings."""
    for bound_s, child in account.children(prefix, size):
        if child.cuts[-1] == account.space.last:
            yield child, max((*bounds, bound_s))
        else:
            yield from pipelines(account, size, child, (*bounds, bound_s))


def candidates(account: ProofAccount, size: int, prefix: ProofPrefix) -> Iterator[Candidate]:
    """The pipeline under every schedule, in every window."""
    space = account.space
    used = [0] * len(account.space.pools)
    groups = list[tuple[int, ...]]()
    order = sorted(range(len(space.pools)), key=lambda n: space.kinds.index(space.kinds[n]))
    for group in prefix.groups:
        ranks = [space.pools[n][used[n] + k] for n in order for k in range(group.devices[n])]
        used = [a + b for a, b in zip(used, group.devices, strict=True)]
        groups.append(tuple(ranks))
    num = len(groups)
    stage_of = tuple((num - space.members[list(prefix.cuts[1:])].sum(axis=0)).astype(int).tolist())
    batches = split_batch(space.problem.global_batch, size)
    again = tuple(AGAIN[group.recompute] for group in prefix.groups)
    for name in space.schedules:
        for windows in product(range(1, len(batches) + 1), repeat=num) if traits(name).windowed else [()]:
            shares = tuple(group.shares for group in prefix.groups)
            yield Candidate(stage_of, tuple(groups), shares, batches, name, windows, again if any(again) else ())


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("seed", range(300, 306))
def test_the_account_never_says_more_than_the_simulator(seed: int, make: str) -> None:
    problem = replace(MAKERS[make](seed), recompute="auto")
    account = account_of(problem)
    draw = random.Random(seed)
    num_compared = 0
    evaluator = Evaluator(problem, CostModel(problem.profile))
    for size in account.space.sizes:
        complete = list(pipelines(account, size, ProofPrefix(), ()))
        for prefix, bound_s in draw.sample(complete, min(len(complete), 12)):
            least_s, _ = account.step_s(prefix, size)
            evaluated = (evaluator.evaluate(each) for each in candidates(account, size, prefix))
            step_s = min((each.step_s for each in evaluated if each.fits), default=inf)
            assert max(bound_s, least_s) <= step_s * (1 + 1e-9), prefix.text(size)
            num_compared += step_s < inf
    assert num_compared or problem.profile.cluster.devices[0].memory_bytes < 2**30


def tight_problem(seed: int) -> Problem:
    """Devices hold what the best plan needs, and no byte more."""
    problem = with_memory(random_problem(seed), 2**30)
    return with_memory(problem, max(rank.peak_bytes for rank in solve(problem).prediction.ranks))


@pytest.mark.parametrize("make", [tight_problem, heavy_problem], ids=["tight memory", "sums in buckets"])
@pytest.mark.parametrize("seed", range(320, 332, 2))
def test_the_least_of_all_pipelines_is_no_more_than_the_best_plan_takes(
    seed: int, make: Callable[[int], Problem]
) -> None:
    problem = make(seed)
    account = account_of(problem)
    complete = [(size, *each) for size in account.space.sizes for each in pipelines(account, size, ProofPrefix(), ())]
    least_s = min(max(bound_s, account.step_s(prefix, size)[0]) for size, prefix, bound_s in complete)
    assert least_s <= solve(problem).prediction.step_s * (1 + 1e-9)


@pytest.mark.parametrize("make", [name for name in MAKERS if name != "batch norms"])  # too many to try all of them
@pytest.mark.parametrize("seed", range(310, 316))
def test_proofs_of_random_problems_hold_and_no_plan_lies_below(seed: int, make: str) -> None:
    problem = MAKERS[make](seed)
    best, _ = best_by_exhaustion(problem)
    if best is None:
        with pytest.raises(InfeasibleError):
            certified(problem)
        return
    plan, proof = certified(problem)
    assert verify(proof, plan, problem.profile) == ()
    assert 0 < proof.bound_s <= best.step_s


def six_layers(speeds: float | tuple[float, ...], hosts: tuple[str, ...], **more: Any) -> Profile:
    return chain_profile(
        6,
        len(hosts),
        forward_s=(1e-3, 3e-3, 2e-3, 2e-3, 1e-3, 4e-3),
        parameter_bytes=400_000,
        activation_bytes=40_000,
        update_s=1e-5,
        speeds=speeds,
        hosts=hosts,
        **{"bandwidth_bytes_per_s": 2e7, "latency_s": 3e-4, **more},
    )


@pytest.mark.parametrize(
    "profile",
    [
        six_layers(1.0, ("n0", "n0", "n0")),
        six_layers((1.0, 1.0, 2.0), ("n0", "n0", "n0")),
        six_layers(1.0, ("n0", "n0", "n1", "n1"), bandwidth_bytes_per_s=1e8),
        six_layers((1.0, 0.5), ("n0", "n1"), skips=((1, 3),)),
    ],
    ids=["alike", "two kinds", "two hosts", "a skip"],
)
@pytest.mark.parametrize("recompute", ["never", "auto"])
def test_where_memory_leaves_room_a_proof_is_as_good_as_the_search(profile: Profile, recompute: str) -> None:
    plan, proof = certified(Problem(profile, 8, schedules=("1f1b",), recompute=recompute, confidence=0.0))
    assert plan.search.status == "proven"
    assert proof.bound_s == pytest.approx(plan.prediction.step_s, rel=1e-8)
    assert verify(proof, plan, profile) == ()


PROFILE = six_layers((1.0, 1.0, 2.0), ("n0", "n0", "n0"))
PROBLEM = Problem(PROFILE, 8, schedules=("1f1b",), confidence=0.0)


@pytest.fixture(scope="module")
def whole() -> tuple[Plan, Proof]:
    return certified(PROBLEM)


def first(values: tuple[float, ...], times: float) -> tuple[float, ...]:
    return (values[0] * times, *values[1:])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda p: replace(p, bound_s=p.bound_s * 1.01), r"bound_s: .* is more than the .* itself"),
        (lambda p: replace(p, step_s=p.step_s * 1.01), r"step_s: .*, of what is in hand .*"),
        (lambda p: replace(p, plan_fingerprint="sha256:0"), "plan_fingerprint: sha256:0, of what is in hand sha256:"),
        (
            lambda p: replace(p, profile_fingerprint="sha256:0"),
            "profile_fingerprint: sha256:0, of what is in hand sha256:",
        ),
        (lambda p: replace(p, space=replace(p.space, micro_batches=(4, 8))), r"space.micro_batches: \[4, 8\], by the"),
        (lambda p: replace(p, space=replace(p.space, schedules=("gpipe",))), r"space.schedules: \['gpipe'\], by the"),
        (lambda p: replace(p, space=replace(p.space, num_cuts=3)), r"space.num_cuts: 3, by the profile .* it is 8"),
        (
            lambda p: replace(
                p, prices=(replace(p.prices[0], forward_s=first(p.prices[0].forward_s, 1.01)), *p.prices[1:])
            ),
            r"prices\[0\].forward_s\[0\]: 0.00\S+ for l0 on kind-\d at \d samples, the profile says 0.00\S+",
        ),
        (lambda p: replace(p, prices=p.prices[1:]), "prices: those of kind-. at . samples are left out"),
        (
            lambda p: replace(p, prices=(replace(p.prices[0], forward_s=()), *p.prices[1:])),
            r"prices\[0\]: 7 layers on kind-1, kind-2 are needed",
        ),
        (lambda p: replace(p, potentials=p.potentials[1:]), r"potentials, .*: of cut \d left out, .* allow 0\.\d+ s"),
        (
            lambda p: replace(p, potentials=(replace(p.potentials[0], cuts=()), *p.potentials[1:])),
            r"potentials\[0\]: its lists differ in length",
        ),
        (lambda p: replace(p, opened=p.opened[1:]), r"opened: \d: .* is left out: it takes .* at least, the claim is"),
    ],
)
def test_a_proof_that_was_changed_is_refused_by_name(
    change: Callable[[Proof], Proof], fault: str, whole: tuple[Plan, Proof]
) -> None:
    plan, proof = whole
    assert verify(proof, plan, PROFILE) == ()
    faults = verify(change(proof), plan, PROFILE)
    assert any(re.search(fault, each) for each in faults), faults


@pytest.mark.parametrize("label", ["trip_s", "end_s", "total_s", "free_s"])
def test_no_potential_can_be_raised(label: str, whole: tuple[Plan, Proof]) -> None:
    plan, proof = whole
    for number in range(0, len(proof.potentials), 24):
        row = proof.potentials[number]
        raised = replace(row, **{label: first(getattr(row, label), 1.001)})  # type: ignore[arg-type]  # one of four alike
        rows = (*proof.potentials[:number], raised, *proof.potentials[number + 1 :])
        faults = verify(replace(proof, potentials=rows), plan, PROFILE)
        assert faults[0].startswith(f"potentials[{number}].{label}: of cut {row.cuts[0]} ")


def test_no_claim_can_be_raised_where_the_plan_is_not_the_best() -> None:
    """The claim lies below the plan's own step: no entry but what it rests on says so."""
    best = solve(PROBLEM)
    slower = solve(replace(PROBLEM, max_stages=1, micro_batch_sizes=(1,), num_ranks=1))
    asked = replace(slower, inputs=replace(slower.inputs, request=PROBLEM.request))
    proof = prove(asked, PROFILE)
    assert verify(proof, asked, PROFILE) == ()
    assert proof.bound_s == pytest.approx(best.prediction.step_s, rel=1e-8)
    assert verify(replace(proof, bound_s=proof.bound_s * 1.001), asked, PROFILE)


def test_the_proof_of_another_profile_or_request_is_refused(whole: tuple[Plan, Proof]) -> None:
    plan, proof = whole
    assert prove(plan, PROFILE) == proof
    slower = chain_profile(6, 3, forward_s=1e-2)
    assert any(fault.startswith("profile_fingerprint: ") for fault in verify(proof, plan, slower))
    wider = replace(plan, inputs=replace(plan.inputs, request=replace(plan.inputs.request, recompute="auto")))
    assert any(fault.startswith("space.recompute: ") for fault in verify(proof, wider, PROFILE))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        ({"allow": ("sample", "channel")}, "layers cut along sample, channel", "leave out --allow"),
        ({"shard": "always"}, "a divided optimiser state", "leave out --shard"),
        ({"objective": "memory"}, "the objective memory", "leave out --objective"),
        ({"schedules": ("1f1b", "interleaved")}, "the schedule interleaved", "--schedule 1f1b"),
        ({"batch_statistics": "whole"}, "statistics of the whole batch", "leave out --batch-statistics"),
    ],
)
def test_what_no_proof_covers_is_refused_with_what_to_leave_out(
    change: dict[str, object], what: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as refused:
        require_provable(replace(Problem(PROFILE, 8, confidence=0.0), **change))  # type: ignore[arg-type]  # fields of many types
    assert list(refused.value.details) == [f"it has {what}"]
    assert remedy in str(refused.value)


def test_too_many_devices_are_refused() -> None:
    many = chain_profile(3, 64, hosts=[f"n{rank // 4}" for rank in range(64)])
    with pytest.raises(UsageError, match="64 devices, of too many groups"):
        require_provable(Problem(many, 64, confidence=0.0))


def test_the_verifier_stays_small() -> None:
    folder = Path(planner.proof.__file__).parent
    texts = {path.stem: path.read_text("utf-8") for path in folder.glob("*.py")}
    tokens = {name: num_tokens(text, ast.parse(text)) for name, text in texts.items()}
    assert tokens["verify"] + tokens["step"] <= MOST_TOKENS, tokens
    assert tokens["space"] + tokens["prices"] <= MOST_TOKENS_OF_PRICES, tokens
