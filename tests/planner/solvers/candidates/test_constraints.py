"""Compiled rules against their meaning layer by layer, and contradictions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from benchmarks.chains import chain_profile
from planner.ir.constraints import CutDegrees, broken, parse_rule
from planner.ir.errors import InfeasibleError, UnknownNameError
from planner.ir.plan import Stage
from planner.ir.problem import Problem, Rule
from planner.solvers.candidates.constraints import Constraints
from tests.planner.factories import chain_decision
from tests.planner.networks import Network, priced

PROFILE = chain_profile(4, num_devices=4, speeds=[1.0, 1.0, 2.0, 2.0])  # l0 l1 l2 l3 loss
RULES = (
    "l0=stage:0",
    "l[23]=stage:1",
    "l1=stage:0",
    "l1=device:n0/cpu1",
    "l[12]=kind:kind-2",
    "*=replicas:1",
    "l1=sample:2",
    "l2=spatial:1",
    "l3=recompute:yes",
    "l[12]=together",
    "loss=replicas:2",
    "l0=kind:*",
)


def problem(fix: tuple[str, ...] = (), forbid: tuple[str, ...] = (), **more: object) -> Problem:
    base = Problem(PROFILE, 4, recompute="auto", allow=("sample", "spatial", "channel"))
    rules = {"fix": tuple(map(parse_rule, fix)), "forbid": tuple(map(parse_rule, forbid))}
    return replace(base, **rules, **more)  # type: ignore[arg-type]


def chains(groups: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    last = len(PROFILE.graph.layers)
    return [(0, *inner, last) for inner in combinations(range(1, last), len(groups) - 1)]


GROUPS = (((0,),), ((0, 1),), ((0,), (1,)), ((1,), (2, 3)), ((2,), (0, 1), (3,)), ((0,), (1,), (2,), (3,)))


@pytest.mark.parametrize("seed", range(40))
def test_the_mask_allows_what_the_meaning_of_the_rules_allows(seed: int) -> None:
    draw = random.Random(seed)
    texts = draw.sample(RULES, 3)
    fix = tuple(texts[:2])
    forbid = tuple(texts[2:])
    try:
        constraints = Constraints.of(problem(fix, forbid))
    except InfeasibleError:
        constraints = Constraints.of(problem(fix[:1]))
        fix = fix[:1]
        forbid = ()
    fixes = tuple(map(parse_rule, fix))
    forbids = tuple(map(parse_rule, forbid))
    cuts = tuple(range(len(PROFILE.graph.layers) + 1))
    for groups in GROUPS:
        recompute = [draw.random() < 0.5 for _ in groups]
        ways = [CutDegrees(len(group)) for group in groups]
        masks = [
            constraints.mask(cuts, *about) for about in zip(groups, recompute, ways, range(len(groups)), strict=True)
        ]
        unnumbered = [constraints.mask(cuts, *about) for about in zip(groups, recompute, ways, strict=True)]
        for bounds in chains(groups):
            decision = chain_decision(PROFILE, bounds[1:-1], (2, 2), groups)
            stages = tuple(
                Stage(stage.ranks, stage.devices, again)
                for stage, again in zip(decision.stages, recompute, strict=True)
            )
            wanted = not broken(fixes, forbids, replace(decision, stages=stages), PROFILE.cluster)
            spans = list(pairwise(bounds))
            stage_of = [stage for stage, (a, b) in enumerate(spans) for _ in range(a, b)]
            stages = enumerate(zip(groups, recompute, ways, strict=True))
            layers_of = [[layer for layer, of in enumerate(stage_of) if of == number] for number in range(len(groups))]
            assert all(constraints.allows_stage(layers_of[n], *stage, n) for n, stage in stages) == wanted
            assert all(mask[span] for mask, span in zip(masks, spans, strict=True)) == wanted
            assert all(mask[span] for mask, span in zip(unnumbered, spans, strict=True)) >= wanted


def test_without_a_number_the_stage_that_starts_first_is_number_0() -> None:
    constraints = Constraints.of(problem(("l1=stage:0",), ("l2=stage:0",)))
    mask = constraints.mask((0, 1, 2, 3, 5))
    assert [(a, b) for a in range(5) for b in range(5) if mask[a, b]] == [(0, 2), (2, 3), (2, 4), (3, 4)]


def test_layers_of_two_numbers_are_not_in_one_stage() -> None:
    mask = Constraints.of(problem(("l1=stage:1", "l2=stage:2"))).mask((0, 1, 2, 3, 5))
    assert [(a, b) for a in range(5) for b in range(5) if mask[a, b]] == [(0, 1), (1, 2), (2, 3), (2, 4), (3, 4)]


def test_ideals_are_cuts_too() -> None:
    constraints = Constraints.of(problem(("l1=stage:1", "l[23]=together"), ("l0=replicas:2",)))
    ideals = ((), (0,), (2,), (0, 1), (0, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4))
    mask = constraints.mask([[layer in ideal for layer in range(5)] for ideal in ideals], (0, 1))
    for a, first in enumerate(ideals):
        for b, last in enumerate(ideals):
            inside = set(last) - set(first)
            number = None if first else 0
            wanted = set(first) < set(last) and constraints.allows_stage(inside, (0, 1), number=number)
            assert mask[a, b] == wanted, (first, last)
    assert mask.sum() == 6


def test_what_is_not_decided_is_allowed() -> None:
    constraints = Constraints.of(problem(("l*=replicas:2", "l0=recompute:yes"), ("l1=kind:kind-1",)))
    assert constraints.allows_stage((0, 1))
    assert constraints.allows_stage((0, 1), (2, 3), True)
    assert not constraints.allows_stage((0, 1), (2, 3), False)
    assert not constraints.allows_stage((0, 1), (0, 1), True)
    assert not constraints.allows_stage((0,), (2,))


def test_layers_are_judged_alone_by_how_they_are_cut() -> None:
    constraints = Constraints.of(problem(("l[01]=sample:2",), ("l2=channel:2",)))
    assert [constraints.allows_layer(k, CutDegrees(2, 1, 2)) for k in range(5)] == [True, True, False, True, True]
    assert [constraints.allows_layer(k, CutDegrees(1, 2)) for k in range(5)] == [False, False, True, True, True]


def test_devices_that_no_rule_tells_apart_are_of_one_class() -> None:
    constraints = Constraints.of(problem(("l1=device:n0/cpu1", "l2=stage:1"), ("l0=kind:kind-2",)))
    assert [constraints.device_class(rank) for rank in range(4)] == [
        (False, True),
        (True, True),
        (False, False),
        (False, False),
    ]


@pytest.mark.parametrize(
    ("fix", "forbid", "more", "named"),
    [
        (("l1=stage:0", "l*=stage:1"), (), {}, ("l1=stage:0", "l*=stage:1")),
        (("l1=replicas:2",), ("l[12]=replicas:2",), {}, ("--fix l1=replicas:2", "--forbid l[12]=replicas:2")),
        (("l1=device:n0/cpu0", "l1=kind:kind-2"), (), {}, ("device:n0/cpu0", "kind:kind-2")),
        (("l1=kind:kind-2",), ("*=device:n0/cpu[23]",), {}, ("l1=kind:kind-2", "*=device:n0/cpu[23]")),
        (("l1=replicas:3", "l1=kind:kind-2"), (), {}, ("l1=replicas:3", "l1=kind:kind-2")),
        (("l1=sample:2", "*=replicas:1"), (), {}, ("l1=sample:2", "*=replicas:1")),
        (("l0=stage:1", "l3=stage:0"), (), {}, ("l0=stage:1", "l3=stage:0")),
        (("l[01]=together", "l0=replicas:1", "l1=replicas:2"), (), {}, ("l0=replicas:1", "l1=replicas:2")),
        (("l*=together",), ("l[12]=together",), {}, ("--fix l*=together", "--forbid l[12]=together")),
        (("l1=replicas:5",), (), {}, ("l1=replicas:5", "4 devices")),
        (("l1=spatial:2",), (), {"allow": ("sample",)}, ("l1=spatial:2", "--allow sample")),
        (("l1=height:2",), (), {"allow": ("sample",)}, ("l1=height:2", "--allow sample")),
        (("l1=recompute:yes",), (), {"recompute": "never"}, ("l1=recompute:yes", "--recompute never")),
        ((), ("l1=recompute:yes",), {"recompute": "always"}, ("l1=recompute:yes", "--recompute always")),
        (("l1=stage:2",), (), {"max_stages": 2}, ("l1=stage:2", "at most 2 stages")),
    ],
)
def test_a_contradiction_names_the_two(
    fix: tuple[str, ...], forbid: tuple[str, ...], more: dict[str, object], named: tuple[str, str]
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        Constraints.of(problem(fix, forbid, **more))
    for text in named:
        assert text in " | ".join(caught.value.details)


def test_rules_that_go_together_are_no_contradiction() -> None:
    Constraints.of(problem(("l0=stage:0", "l3=stage:1", "l1=kind:kind-*", "l1=replicas:2"), ("l1=replicas:1",)))
    Constraints.of(problem(("l0,l1=together",), ("l0,l2=together",)))  # l0 is in both, with another layer


def test_a_rule_without_a_layer_or_device_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="matches no layer"):
        Constraints.of(replace(problem(), forbid=(Rule("conv*", "stage", "0"),)))
    with pytest.raises(UnknownNameError, match="matches no kind"):
        Constraints.of(problem(("l0=kind:V100",)))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("reshape*=spatial:2", "layer reshape6 (reshape) cannot be cut in 2 parts along spatial"),
        ("linear*=spatial:2", "layer linear7 (linear) cannot be cut in 2 parts along spatial"),
        ("linear*=height:2", "layer linear7 (linear) cannot be cut in 2 parts along height"),
        ("conv0=spatial:4", ""),
        ("conv0=height:4", ""),
        ("conv0=depth:2", "cannot be cut along depth"),
        ("conv0=channel:3", ""),
        ("conv0=channel:4", "it has 3 parts at most"),
        ("batch_norm*=channel:2", ""),
    ],
)
def test_a_rule_to_cut_what_cannot_be_cut_names_layer_operator_and_remedies(rule: str, words: str) -> None:
    network = Network(4, 3, 8)
    x = network.relu(network.norm(network.conv(network.image, 3)))
    profile = priced(network, network.head(network.pool(network.conv(x, 4)), 6), speeds=(1.0,) * 4)
    asked = Problem(profile, 4, allow=("sample", "spatial", "channel"), fix=(parse_rule(rule),))
    if not words:
        Constraints.of(asked)
        return
    with pytest.raises(InfeasibleError) as caught:
        Constraints.of(asked)
    text = str(caught.value.render() if hasattr(caught.value, "render") else caught.value)
    for part in (words, rule, "gather: leave", "register a rule", "elementwise"):
        assert part in text
