"""Rules as text, and what they mean."""

from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from planner.ir.constraints import (
    CutDegrees,
    StageFacts,
    allowed,
    allowed_together,
    broken,
    check_names,
    format_rule,
    matching,
    parse_rule,
)
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.problem import Rule
from tests.planner.factories import chain_decision

SPELLED = (
    ("enc.*=spatial:2", Rule("enc.*", "spatial", "2")),
    ("enc.*=stage:0", Rule("enc.*", "stage", "0")),
    ("head=device:n0/gpu1", Rule("head", "device", "n0/gpu1")),
    ("layer3.*=kind:V100", Rule("layer3.*", "kind", "V100")),
    ("*=replicas:1", Rule("*", "replicas", "1")),
    ("conv*=sample:4", Rule("conv*", "sample", "4")),
    ("fc=channel:8", Rule("fc", "channel", "8")),
    ("enc.*=recompute:yes", Rule("enc.*", "recompute", "yes")),
    ("dec.*=together", Rule("dec.*", "together", "yes")),
    ("head=device:pci:0:1", Rule("head", "device", "pci:0:1")),
)


@pytest.mark.parametrize(("text", "rule"), SPELLED)
def test_a_rule_is_read_and_written_the_same(text: str, rule: Rule) -> None:
    assert parse_rule(text) == rule
    assert format_rule(rule) == text


def test_spaces_and_leading_zeros_are_dropped() -> None:
    assert format_rule(parse_rule(" enc.* = stage : 02 ")) == "enc.*=stage:2"
    assert parse_rule("a=together:yes") == parse_rule("a=together")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("enc.*", "not a rule"),
        ("=stage:0", "not a rule"),
        ("enc=", "not a rule"),
        ("enc=stages:0", "stage?"),
        ("enc=colour:red", "known: stage, device"),
        ("enc=stage", "which stage"),
        ("enc=stage:-1", "from 0"),
        ("enc=replicas:0", "from 1"),
        ("enc=sample:two", "'two'"),
        ("enc=device:", "which device"),
        ("enc=recompute:maybe", "yes or no"),
        ("enc=together:no", "takes no value"),
    ],
)
def test_what_is_no_rule_says_why(text: str, found: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_rule(text)
    assert found in caught.value.render()


def test_a_rule_that_matches_no_layer_names_the_nearest() -> None:
    names = ("encoder.conv1", "encoder.conv2", "decoder.fc")
    assert matching(parse_rule("*.conv?=stage:0"), names) == (0, 1)
    with pytest.raises(UnknownNameError, match=r"encoder\.conv1"):
        matching(parse_rule("encoder.conf*=stage:0"), names)


def test_a_rule_about_a_device_that_is_not_there_names_those_that_are() -> None:
    cluster = chain_profile(2, num_devices=2).cluster
    check_names(parse_rule("*=device:n0/cpu1"), cluster)
    check_names(parse_rule("*=kind:kind-*"), cluster)
    with pytest.raises(UnknownNameError, match="n0/cpu1"):
        check_names(parse_rule("*=device:n0/gpu1"), cluster)
    with pytest.raises(UnknownNameError, match="kind-1"):
        check_names(parse_rule("*=kind:V100"), cluster)


FACTS = StageFacts(("n0/gpu0", "n0/gpu1"), ("V100", "V100"), 1, False, CutDegrees(2, 1, 1))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a=stage:1", True),
        ("a=stage:0", False),
        ("a=device:n0/*", True),
        ("a=kind:V100", True),
        ("a=kind:T4", False),
        ("a=replicas:2", True),
        ("a=replicas:1", False),
        ("a=sample:2", True),
        ("a=spatial:1", True),
        ("a=spatial:2", False),
        ("a=channel:2", False),
        ("a=recompute:no", True),
        ("a=recompute:yes", False),
    ],
)
def test_a_stage_is_judged_by_what_is_decided_of_it(text: str, holds: bool) -> None:
    rule = parse_rule(text)
    assert allowed(rule, FACTS, True) == holds
    assert allowed(rule, FACTS, False) == (not holds)
    assert allowed(rule, StageFacts(), True)
    assert allowed(rule, StageFacts(), False)


def test_a_device_that_only_part_of_the_stage_has_is_neither_fixed_nor_forbidden() -> None:
    rule = parse_rule("a=device:n0/gpu1")
    assert not allowed(rule, FACTS, True)
    assert not allowed(rule, FACTS, False)


def test_together_is_all_or_none_and_forbidden_is_not_all() -> None:
    assert [allowed_together(n, 3, True) for n in range(4)] == [True, False, False, True]
    assert [allowed_together(n, 3, False) for n in range(4)] == [True, True, True, False]


def test_ways_are_those_of_a_layout() -> None:
    ways = CutDegrees.of({"sample": (0, 1, 2), "height": (0, 4, 8), "width": (0, 8, 16, 24)})
    assert ways == CutDegrees(2, 6, 1, height=2, width=3)
    assert [ways.along(name) for name in ("sample", "spatial", "height", "depth")] == [2, 6, 2, 1]
    assert CutDegrees.of({"channel": (0, 8, 16)}) == CutDegrees(1, 1, 2)
    assert CutDegrees.of({}) == CutDegrees()


@pytest.mark.parametrize(
    ("printed", "rule"),
    [("samples:2", "sample:2"), ("space:2", "spatial:2"), ("height:2", "height:2"), ("feature:2", "channel:2")],
)
def test_what_a_plan_is_said_to_be_cut_along_may_be_asked_for(printed: str, rule: str) -> None:
    assert format_rule(parse_rule(f"conv*={printed}")) == f"conv*={rule}"


def test_a_decision_is_held_against_the_rules() -> None:
    profile = chain_profile(3, num_devices=3)
    decision = chain_decision(profile, cuts=(2,), ranks=((0,), (1, 2)))  # l0 l1 | l2 loss
    kept = [parse_rule(text) for text in ("l[01]=stage:0", "l2=sample:2", "l0=together", "l0=device:n0/cpu0")]
    assert broken(kept, [parse_rule("l0=replicas:2"), parse_rule("l*=together")], decision, profile.cluster) == ()
    lines = broken(
        [parse_rule("l*=stage:0"), parse_rule("l*=together")], [parse_rule("l2=kind:*")], decision, profile.cluster
    )
    assert lines == (
        "fix l*=stage:0: l2 is in stage 1 on n0/cpu1, n0/cpu2",
        "fix l*=together: stage 0 has 2 of 4 layers",
        "forbid l2=kind:*: l2 is in stage 1 on n0/cpu1, n0/cpu2",
    )
