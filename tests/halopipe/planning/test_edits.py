"""Changes of a problem in words (``--why-not``, ``--what-if``, prices): what they make of machines, and the answers."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile, cluster
from halopipe.planning import edits, shadow_prices, solve, what_if
from halopipe.planning.edits import changed
from halopipe.planning.problem import make_problem
from planner.ir.cluster import ACROSS_HOSTS, DATASHEET, HOST, MEASURED, WITHIN_HOST, Cluster, Link, PairLink, Tier
from planner.ir.errors import HalopipeError, RankCountError, UnknownNameError, UsageError
from planner.ir.plan import Alternative, Plan, Rejected
from planner.ir.problem import Problem, Rule
from planner.ir.profile import Profile
from tests.planner.factories import chain_decision, plan_of
from tests.planner.networks import Network, priced

PROFILE = chain_profile(4, num_devices=2)
PROBLEM = Problem(PROFILE, 8, confidence=0.0)


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
    rules = changed(PROBLEM, "dp=2,l1=recompute:yes,l*=together").problem.fix
    assert rules == (Rule("*", "replicas", "2"), Rule("l1", "recompute", "yes"), Rule("l*", "together", "yes"))
    assert changed(PROBLEM, "solver=one-device").solver == "one-device"


def test_machines_grow_slow_down_and_go() -> None:
    def memories(text: str) -> list[int]:
        return [device.memory_bytes for device in changed(PROBLEM, text).problem.profile.cluster.devices]

    assert memories("n0/cpu1.memory=2GiB") == [2**30, 2**31]
    assert memories("kind-1.memory=2GiB") == memories("n0/*.memory=2GiB") == [2**31, 2**31]
    found = changed(PROBLEM, "devices=3,link within-host.bandwidth=4GB/s,link within-host.latency=5us,global-batch=64")
    assert len(found.problem.profile.cluster.devices) == 3
    link = found.problem.profile.cluster.links[WITHIN_HOST]
    assert (link.bandwidth_bytes_per_s, link.latency_s, found.assumed) == (4e9, 5e-6, True)
    assert found.problem.global_batch == 64
    found = changed(PROBLEM, "without=n0/cpu0,n0/cpu1.speed=0.5")
    assert found.problem.speeds == {"n0/cpu0": 0.0, "n0/cpu1": 0.5}
    assert [(each.name, each.kind) for each in found.problem.profile.cluster.devices] == [("n0/cpu1", "kind-1 x0.5")]
    assert found.assumed
    assert not changed(PROBLEM, "without=n0/cpu*0").assumed


@pytest.mark.every_case
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


FLAT = cluster((1.0, 1.0), latency_s=1e-3, bandwidth_bytes_per_s=1e6)
TWO_HOSTS = cluster((1.0, 2.0, 1.0, 2.0), ("n0", "n0", "n1", "n1"))
TIERED = replace(
    TWO_HOSTS,
    devices=tuple(
        replace(device, kind="kind-1", groups={"island": f"{device.host}/i", "rack": "r"})
        for device in TWO_HOSTS.devices
    ),
    links={"nvlink": Link(0.0, 1e9), "pcie": Link(0.0, 1e8), "leaf": Link(0.0, 1e7), "spine": Link(0.0, 1e6)},
    collectives=(),
    tiers=(Tier("nvlink", "island"), Tier("pcie", HOST), Tier("leaf", "rack"), Tier("spine")),
)


def names(found: Cluster) -> list[str]:
    return [device.name for device in found.devices]


def test_further_devices_and_hosts_are_like_the_last() -> None:
    assert names(edits.with_devices(FLAT, 4)) == ["n0/cpu0", "n0/cpu1", "n0/cpu2", "n0/cpu3"]
    assert names(edits.with_devices(TWO_HOSTS, 6))[4:] == ["n1/cpu4", "n1/cpu5"]
    assert names(edits.with_devices(TWO_HOSTS, 1)) == ["n0/cpu0"]
    found = edits.with_hosts(TWO_HOSTS, 3)
    assert names(found)[4:] == ["n2/cpu2", "n2/cpu3"]
    assert [device.kind for device in found.devices[4:]] == ["kind-1", "kind-2"]
    assert names(edits.with_hosts(TWO_HOSTS, 1)) == ["n0/cpu0", "n0/cpu1"]
    more = edits.with_one_more(TWO_HOSTS, "kind-1").devices[-1]
    assert (more.kind, more.host, more.name) == ("kind-1", "n1", "n1/cpu4")
    with pytest.raises(UsageError, match="nothing is known of the link within-host"):
        edits.with_devices(Cluster(FLAT.devices[:1], {}), 2)


def test_a_link_twice_as_fast_halves_every_time() -> None:
    link = edits.with_faster_link(FLAT, WITHIN_HOST, 2.0).links[WITHIN_HOST]
    assert (link.latency_s, link.bandwidth_bytes_per_s, link.evidence) == (5e-4, 2e6, DATASHEET)
    assert [s for _, s in link.points] == [s / 2 for _, s in FLAT.links[WITHIN_HOST].points]
    collective = edits.with_faster_link(FLAT, WITHIN_HOST, 2.0).collectives[0]
    assert [s for _, s in collective.points] == [s / 2 for _, s in FLAT.collectives[0].points]


def test_bandwidth_and_latency_change_their_own_part_of_a_measured_time() -> None:
    wide = edits.with_link(FLAT, WITHIN_HOST, bandwidth_bytes_per_s=4e6).links[WITHIN_HOST]
    assert [s for _, s in wide.points] == pytest.approx([1e-3 + n / 4e6 for n, _ in wide.points])
    quick = edits.with_link(FLAT, WITHIN_HOST, latency_s=0.0).links[WITHIN_HOST]
    assert [s for _, s in quick.points] == pytest.approx([n / 1e6 for n, _ in quick.points])
    other = edits.with_link(TWO_HOSTS, WITHIN_HOST, latency_s=1.0)
    assert other.links[ACROSS_HOSTS] == TWO_HOSTS.links[ACROSS_HOSTS]
    assert [c for c in other.collectives if c.link == ACROSS_HOSTS] == [
        c for c in TWO_HOSTS.collectives if c.link == ACROSS_HOSTS
    ]


def test_links_of_pairs_change_with_their_class_and_cores_stay_as_they_are() -> None:
    link = Link(1e-3, 1e6, ((1000, 2e-3),), True, MEASURED, 64_000, ((1000, 1e-4),), ((1000, 2e-4),), ((1000, 3e-4),))
    apart = PairLink("n0", "n1", replace(link, bandwidth_bytes_per_s=5e5, points=((1000, 3e-3),)))
    known = replace(TWO_HOSTS, links={**TWO_HOSTS.links, ACROSS_HOSTS: link}, pairs=(apart,))
    for found in (
        edits.with_link(known, ACROSS_HOSTS, bandwidth_bytes_per_s=2e6),
        edits.with_faster_link(known, ACROSS_HOSTS, 2.0),
    ):
        both = (found.links[ACROSS_HOSTS], found.pairs[0].link)
        assert [each.bandwidth_bytes_per_s for each in both] == [2e6, 1e6]
        assert {(x.burst_bytes, x.sending, x.sender_core, x.receiver_core) for x in both} == {
            (64_000, link.sending, link.sender_core, link.receiver_core)
        }
        assert both[1].points[0][1] < 3e-3
    assert edits.with_faster_link(known, WITHIN_HOST, 2.0).pairs == known.pairs


def test_further_hosts_are_in_the_rack_of_the_last_with_islands_of_their_own() -> None:
    found = edits.with_hosts(TIERED, 3)
    assert names(found)[4:] == ["n2/cpu2", "n2/cpu3"]
    assert [device.groups for device in found.devices[4:]] == [{"island": "n2/i", "rack": "r"}] * 2
    assert found.link_class(4, 5) == "nvlink"
    assert found.link_class(2, 4) == "leaf"
    assert edits.with_devices(TIERED, 5).devices[-1].groups == TIERED.devices[-1].groups


def test_a_link_of_any_tier_is_changed_alone() -> None:
    problem = make_problem(replace(chain_profile(2, 2), cluster=TIERED), num_ranks=2)
    found = edits.changed(problem, "link leaf.speed=2, link nvlink.latency=1us").problem.profile.cluster
    before = {name: link.bandwidth_bytes_per_s for name, link in TIERED.links.items()}
    after = {name: link.bandwidth_bytes_per_s for name, link in found.links.items()}
    assert after == {**before, "leaf": 2 * before["leaf"]}
    assert found.links["nvlink"].latency_s == 1e-6
    with pytest.raises(UnknownNameError, match="no link 'across-hosts'"):
        edits.changed(problem, "link across-hosts.speed=2")


ASKED = chain_profile(6, latency_s=1e-4, parameter_bytes=2**20, activation_bytes=2**14, update_s=5e-4)


@functools.cache
def planned() -> Plan:
    return solve.solve(make_problem(ASKED))


def by_hand() -> Plan:
    made = plan_of(ASKED, chain_decision(ASKED, cuts=(3,)), step_s=0.0925)
    listed = (Alternative("one-device", 0.15, 2**24, "62 % slower: no parallelism"),)
    rejected = (Rejected("8 micro-batches of 1", "bound 95 ms"),)
    return replace(made, alternatives=listed, search=replace(made.search, rejected=rejected))


def test_an_alternative_is_found_by_part_of_its_name() -> None:
    assert str(what_if.why_not(by_hand(), None, "One-Dev")) == "one-device: 62 % slower: no parallelism"
    assert what_if.why_not(by_hand(), None, "micro-batches of 1").reasons == ("8 micro-batches of 1: bound 95 ms",)


def test_a_condition_is_searched_for_again_and_the_difference_shown() -> None:
    answer = what_if.why_not(planned(), ASKED, "schedule=gpipe,micro-batch=8,ranks=1")
    assert answer.other is not None
    assert (answer.other.decision.schedule, answer.other.decision.micro_batches) == ("gpipe", (8,))
    assert (answer.slower or 0.0) > 0
    shown = answer.render()
    assert shown.startswith("schedule=gpipe,micro-batch=8,ranks=1: ")
    for text in (" slower (", "\n  memory   ", "\n  decides  schedule: gpipe instead of "):
        assert text in shown
    assert "proven the best under this condition, of: samples, one stage a device; costs: measured" in shown
    assert json.loads(json.dumps(answer.data()))["other"]["evidence"] == MEASURED


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("question", "is_so"),
    [
        ("dp=2", lambda plan: {len(stage.ranks) for stage in plan.decision.stages} == {2}),
        ("stages=2", lambda plan: len(plan.decision.stages) == 2),
        ("l1=stage:1", lambda plan: plan.decision.layers["l1"].stage == 1),
        ("even-split", lambda plan: plan.search.solver == "even-split"),
    ],
)
def test_what_is_asked_for_exactly_is_had_exactly(question: str, is_so: Callable[[Plan], bool]) -> None:
    answer = what_if.why_not(planned(), ASKED, question)
    assert answer.other is not None
    assert is_so(answer.other)
    assert answer.reasons == ()


def test_where_nothing_fits_the_reason_is_the_answer() -> None:
    answer = what_if.what_if(planned(), ASKED, "memory=1MiB")
    assert (answer.other, answer.slower) == (None, None)
    assert answer.render().startswith("memory=1MiB: no plan fits\n")
    assert answer.data()["other"] is None
    answer = what_if.why_not(planned(), ASKED, "solver=one-device,l*=replicas:2")
    assert answer.other is None
    assert "side constraints" in answer.reasons[0]
    assert answer.reasons[1].startswith("  fix l*=replicas:2: l0 is in stage 0")


def test_machines_may_be_otherwise() -> None:
    more = what_if.what_if(planned(), ASKED, "devices=4,global-batch=16")
    assert more.other is not None
    assert more.other.decision.global_batch == 16
    assert (more.slower or 0.0) < 0
    assert "global batch: 16 instead of 8" in more.render()
    assert what_if.what_if(planned(), ASKED, "link within-host.speed=4").evidence == DATASHEET
    same = what_if.what_if(planned(), ASKED, "n0/*.memory=8GiB").render()
    assert same.startswith("n0/*.memory=8GiB: as fast (")
    assert "  decides  the same" in same


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("question", "has_profile", "said"),
    [
        *((text, False, "one-device") for text in ("", "tensor parallelism", "dp=4", "schedule=gpipe")),
        *((text, True, "--why-not data-parallel .did you mean that?") for text in ("data_parallel", "data-paralel")),
        ("magic", True, "nothing is known of 'magic'"),
    ],
)
def test_what_is_not_known_is_answered_with_what_may_be_asked(question: str, has_profile: bool, said: str) -> None:
    with pytest.raises(UsageError, match="nothing is known of") as caught:
        what_if.why_not(by_hand(), ASKED if has_profile else None, question)
    assert re.search(said, "\n".join((caught.value.title, caught.value.details[0], *caught.value.remedies)))
    assert has_profile or "(needs --profile): schedule=..." in caught.value.details[1]


def pictures() -> Profile:
    network = Network(4, 3, 16)
    return priced(network, network.relu(network.conv(network.image, 4)), speeds=(1.0,) * 2)


def test_what_plans_are_said_to_be_cut_along_is_what_one_may_ask_for() -> None:
    profile = pictures()
    by_samples = solve.solve(make_problem(profile, global_batch=4, allow=["sample"]))
    tall = what_if.why_not(by_samples, profile, "conv*=height:2").other
    assert tall is not None
    assert next(iter(tall.decision.layers.values())).cuts.keys() == {"height"}
    assert re.fullmatch("the plan cuts . layers? along height", str(what_if.why_not(tall, profile, "space")))
    assert "mse cannot be cut along height" in str(what_if.why_not(by_samples, profile, "height"))
    allowed = what_if.why_not(by_samples, profile, "spatial").other
    assert allowed is not None
    assert allowed.inputs.request.allow == ("sample", "spatial")
    assert "PATTERN=spatial:2" in what_if._SEARCHED


def test_steps_of_unlike_batches_are_held_against_one_another_by_the_sample() -> None:
    shown = what_if.what_if(planned(), ASKED, "global-batch=16").render().splitlines()[0]
    assert re.search(r"\(.* against .* a sample; .* a step of 16, .* of 8\)", shown)


def solved(profile: Profile) -> Plan:
    return solve.solve(make_problem(profile))


def test_every_kind_and_link_has_a_price_and_the_largest_saving_comes_first() -> None:
    profile = chain_profile(5, latency_s=1e-3, speeds=(1.0, 2.0))
    shown: list[str] = []
    found = shadow_prices.prices(solved(profile), profile, show=lambda done, total, what: shown.append(what))
    assert shown == [
        "1 GiB on each kind-1",
        "1 GiB on each kind-2",
        "1 kind-1",
        "1 kind-2",
        "link within-host twice as fast",
    ]
    assert {price.what for price in found.prices} == set(shown)
    assert [price.saves_s for price in found.prices] == sorted((p.saves_s for p in found.prices), reverse=True)
    by_name = {price.what: price for price in found.prices}
    assert by_name["1 kind-2"].saves_s > 0
    assert by_name["link within-host twice as fast"].evidence == DATASHEET
    assert by_name["1 GiB on each kind-1"].saves_s == 0.0
    assert found.render().startswith("Prices, of a step of ")
    assert "  nothing" in found.render()
    assert found.data()["step_s"] == found.plan.prediction.step_s


def test_memory_that_binds_has_a_price() -> None:
    profile = chain_profile(4, parameter_bytes=2**26, memory_bytes=600 * 2**20, bandwidth_bytes_per_s=1e8)
    plan = solve.solve(make_problem(profile, schedules=["1f1b-windowed"]))
    assert len(plan.decision.stages) == 2
    roomy = chain_profile(4, parameter_bytes=2**26, memory_bytes=600 * 2**20 + 2**30, bandwidth_bytes_per_s=1e8)
    with_room = solve.solve(make_problem(roomy, schedules=["1f1b-windowed"]))
    expected = plan.prediction.step_s - with_room.prediction.step_s
    prices = {price.what: price for price in shadow_prices.prices(plan, profile).prices}
    assert prices["1 GiB on each kind-1"].saves_s == max(0.0, expected)


def test_a_single_device_has_no_price_for_another() -> None:
    profile = chain_profile(3, num_devices=1)
    alone = replace(profile, cluster=Cluster(profile.cluster.devices, {}))
    found = shadow_prices.prices(solved(alone), alone)
    assert [price.what for price in found.prices] == ["1 GiB on each kind-1"]


def test_a_search_that_was_not_proven_says_what_could_be_saved_at_most() -> None:
    profile = chain_profile(3)
    plan = solved(profile)
    open_ended = replace(plan, search=replace(plan.search, status="time limit", bound_s=plan.prediction.step_s / 2))
    price = shadow_prices._price("x", plan, open_ended, assumed=False)
    assert (price.saves_s, price.at_most_s) == (0.0, plan.prediction.step_s / 2)
    slower = replace(plan, prediction=replace(plan.prediction, step_s=2 * plan.prediction.step_s))
    assert shadow_prices._price("x", plan, slower, assumed=False).saves_s == 0.0
