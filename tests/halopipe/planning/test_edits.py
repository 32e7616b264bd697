from __future__ import annotations

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning.edits import changed
from planner.ir.cluster import WITHIN_HOST
from planner.ir.errors import HalopipeError, RankCountError, UnknownNameError, UsageError
from planner.ir.problem import Problem, Rule

PROFILE = chain_profile(4, num_devices=2)
PROBLEM = Problem(PROFILE, 8)


def test_conditions_on_the_plan_go_into_the_problem() -> None:
    found = changed(
        PROBLEM,
        "stages=2, schedule=gpipe,micro-batch=4,ranks=2,recompute=auto,allow=sample+channel,memory=1MiB,gap=0.1",
    ).problem
    assert (found.schedules, found.micro_batch_sizes, found.num_ranks) == (("gpipe",), (4,), 2)
    assert (found.recompute, found.allow, found.memory_bytes, found.gap) == ("auto", ("sample", "channel"), 2**20, 0.1)
    assert (found.max_stages, found.fix) == (2, (Rule("loss", "stage", "1"),))
    sliced = [changed(PROBLEM, text).problem for text in ("zero=3", "shard=auto,zero=2")]
    assert [(each.shard, each.zero) for each in sliced] == [("always", 3), ("auto", 2)]


def test_replicas_and_rules_are_side_constraints() -> None:
    found = changed(PROBLEM, "dp=2,l1=recompute:yes,l*=together").problem
    assert found.fix == (Rule("*", "replicas", "2"), Rule("l1", "recompute", "yes"), Rule("l*", "together", "yes"))


def test_a_solver_is_named_beside_the_problem() -> None:
    assert changed(PROBLEM, "solver=one-device").solver == "one-device"


def test_memory_is_that_of_a_device_a_kind_or_a_pattern() -> None:
    def memories(text: str) -> list[int]:
        return [device.memory_bytes for device in changed(PROBLEM, text).problem.profile.cluster.devices]

    assert memories("n0/cpu1.memory=2GiB") == [2**30, 2**31]
    assert memories("kind-1.memory=2GiB") == memories("n0/*.memory=2GiB") == [2**31, 2**31]


def test_machines_grow_and_links_change() -> None:
    found = changed(PROBLEM, "devices=3,link within-host.bandwidth=4GB/s,link within-host.latency=5us,global-batch=64")
    assert len(found.problem.profile.cluster.devices) == 3
    link = found.problem.profile.cluster.links[WITHIN_HOST]
    assert (link.bandwidth_bytes_per_s, link.latency_s, found.assumed) == (4e9, 5e-6, True)
    assert found.problem.global_batch == 64
    assert changed(PROBLEM, "link within-host.speed=2").problem.profile.cluster.links[
        WITHIN_HOST
    ].bandwidth_bytes_per_s == (2e9)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("", UsageError, "no change is named"),
        ("faster", UsageError, "is not a change"),
        ("stages=", UsageError, "is not a change"),
        ("stages=two", UsageError, "stages=two is not a positive integer"),
        ("micro-batch=16", UsageError, "larger than the global batch 8"),
        ("schedule=gpip", UnknownNameError, "no schedule 'gpip'"),
        ("solver=suffix", UnknownNameError, "no solver 'suffix'"),
        ("objective=speed", UnknownNameError, "no objective 'speed'"),
        ("ranks=3", RankCountError, "3 ranks are asked for, the profile has 2"),
        ("n0/cpu7.memory=2GiB", UnknownNameError, "no device 'n0/cpu7'"),
        ("n0/cpu0.memory=2GB/s", UsageError, "is no number of bytes"),
        ("n0/cpu0.colour=2", UnknownNameError, "nothing is known of 'n0/cpu0.colour'"),
        ("n0/cpu9.speed=2", UnknownNameError, "no device 'n0/cpu9'"),
        ("without=n0/cpu0+n1/*", UnknownNameError, "no device 'n1/\\*'"),
        ("n0/cpu0.speed=0", UsageError, "is not a positive number"),
        ("link across-hosts.bandwidth=1GB/s", UnknownNameError, "no link 'across-hosts'"),
        ("link within-host.colour=1", UnknownNameError, "a link has no 'colour'"),
        ("link within-host.speed=0", UsageError, "is not a positive number"),
        ("enc.*=replicas:2", UnknownNameError, "matches no layer"),
        ("hosts=2", UsageError, "nothing is known of the link across-hosts"),
    ],
)
def test_what_is_not_understood_says_so(text: str, kind: type[HalopipeError], says: str) -> None:
    with pytest.raises(kind, match=says):
        changed(PROBLEM, text)


def test_devices_go_and_slow_down() -> None:
    found = changed(PROBLEM, "without=n0/cpu0,n0/cpu1.speed=0.5")
    assert found.problem.speeds == {"n0/cpu0": 0.0, "n0/cpu1": 0.5}
    assert [(each.name, each.kind) for each in found.problem.profile.cluster.devices] == [("n0/cpu1", "kind-1 x0.5")]
    assert found.assumed
    assert not changed(PROBLEM, "without=n0/cpu*0").assumed
