from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chains import chain_profile
from planner.costs.candidate import candidate_of
from planner.costs.cost_model import CostModel
from planner.costs.pricing import Pricing
from planner.costs.simulator.contention import execute_shared
from planner.costs.simulator.events import execute, least_left_s, least_s, run, step_unless_longer
from planner.costs.simulator.prices import (
    FlowSpeeds,
    NetworkFlow,
    NetworkTraffic,
    SlotPrices,
    prices_of,
    transfer_bytes,
)
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.stages.action_costs import StageCosts
from planner.costs.timeline import Trace
from planner.ir.plan import Decision
from planner.ir.profile import Profile
from planner.layers.boundary import Boundaries
from planner.schedules import names
from tests.planner.factories import chain_decision
from tests.planner.shared_hosts import random_plan

BANDWIDTH = 1e6


def priced(profile: Profile, decision: Decision) -> tuple[CompiledProgram, SlotPrices]:
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    cost_model = CostModel(profile)
    costs = StageCosts(
        cost_model, Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, decision)), decision.micro_batches
    )
    compiled = compile_program(program, decision.micro_batches, costs.tied_ranks)
    return compiled, prices_of(compiled, costs, transfer_bytes(program, compiled))


def traced(profile: Profile, decision: Decision) -> tuple[CompiledProgram, Trace]:
    compiled, prices = priced(profile, decision)
    return compiled, run(compiled, prices)


def arrivals(compiled: CompiledProgram, trace: Trace, *, forward: bool = True) -> dict[tuple[int, int], list[float]]:
    """By (source, destination), when messages of one direction arrive."""
    found: dict[tuple[int, int], list[float]] = {}
    for (slot, _), at in zip(compiled.messages, trace.arrived, strict=True):
        transfer = compiled.transfers[slot]
        if transfer.forward is forward:
            found.setdefault((transfer.src, transfer.dst), []).append(at)
    return {pair: sorted(each) for pair, each in found.items()}


def gathered(senders: int, hosts: list[str]) -> tuple[CompiledProgram, Trace]:
    """``senders`` ranks, each 1 ms of forward and then a message of 4 ms to one rank that has the next stage."""
    profile = chain_profile(2, senders + 1, activation_bytes=4000, bandwidth_bytes_per_s=BANDWIDTH, hosts=hosts)
    ranks = [tuple(range(senders)), (senders,)]
    return traced(profile, chain_decision(profile, (1,), (senders,), ranks, [(1,) * senders, (1,)]))


@pytest.mark.parametrize("senders", [2, 3])
def test_senders_to_one_host_take_as_many_times_as_long(senders: int) -> None:
    compiled, trace = gathered(senders, [f"n{rank}" for rank in range(senders + 1)])
    found = arrivals(compiled, trace)
    assert [found[rank, senders] for rank in range(senders)] == [[pytest.approx(1e-3 + senders * 4e-3)]] * senders


def test_messages_within_a_host_share_no_card() -> None:
    compiled, trace = gathered(3, ["n0"] * 4)
    assert list(arrivals(compiled, trace).values()) == [[pytest.approx(5e-3)]] * 3


def test_two_messages_out_of_one_host_halve_its_card() -> None:
    """Gradients of 4 ms from rank 2 back to ranks 0 and 1, on hosts of their own."""
    compiled, trace = gathered(2, ["n0", "n1", "n2"])
    last = max(stop for stop, action in zip(trace.stops[2], compiled.grid[2], strict=True) if str(action) == "1B0")
    back = arrivals(compiled, trace, forward=False)
    assert back == {(2, 0): [pytest.approx(last + 8e-3)], (2, 1): [pytest.approx(last + 8e-3)]}


def test_who_is_alone_again_takes_the_whole_card() -> None:
    """A message of 4 ms starts at 1 ms, another on the same card at 3 ms: each has half of it until 7 ms, and so on."""
    profile = chain_profile(2, 3, activation_bytes=4000, bandwidth_bytes_per_s=BANDWIDTH, hosts=["n0", "n1", "n2"])
    slower = replace(profile.cluster.devices[1], kind="slow")
    slow = tuple(replace(m, forward_s=3 * m.forward_s) for m in profile.measurements["kind-1"])
    profile = replace(
        profile,
        cluster=replace(profile.cluster, devices=(profile.cluster.devices[0], slower, profile.cluster.devices[2])),
        measurements={**profile.measurements, "slow": slow},
        parameters={**profile.parameters, "slow": profile.parameters["kind-1"]},
        action_overhead_s={},
    )
    compiled, trace = traced(profile, chain_decision(profile, (1,), (2,), [(0, 1), (2,)], [(1, 1), (1,)]))
    assert arrivals(compiled, trace) == {(0, 2): [pytest.approx(7e-3)], (1, 2): [pytest.approx(9e-3)]}


def test_fair_shares_fill_what_slower_flows_leave() -> None:
    """Card 0 carries 10: flows of 2 and 20 leave 8 to the second; card 1 holds the third to 5 of its 12."""
    flows = (
        NetworkFlow(1.0, 2.0, (0,)),
        NetworkFlow(1.0, 20.0, (0,)),
        NetworkFlow(1.0, 12.0, (1,)),
        NetworkFlow(1.0, 7.0, (1,)),
    )
    speeds = NetworkTraffic(flows, (10.0, 10.0)).speeds((0, 1, 2, 3))
    assert speeds == {0: 1.0, 1: pytest.approx(18 / 20), 2: pytest.approx(6 / 12), 3: pytest.approx(6 / 7)}
    assert NetworkTraffic(flows[2:], (10.0, 10.0)).speeds((0,)) == {0: 1.0}  # alone it may exceed the card: a burst


def test_a_message_takes_from_the_computing_of_both_its_ranks() -> None:
    """Of 10 ms on the way it costs the sender's core 2 ms and the receiver's 5 ms, as far as these compute."""
    profile = chain_profile(2, 2, activation_bytes=4, latency_s=10e-3, bandwidth_bytes_per_s=1e12, forward_s=20e-3)
    link = replace(profile.cluster.links["within-host"], sender_core=((4, 2e-3),), receiver_core=((4, 5e-3),))
    cluster = replace(profile.cluster, links={"within-host": link})
    profile = replace(profile, cluster=cluster)
    decision = chain_decision(profile, (1,), (1, 1), schedule="gpipe")
    compiled, trace = traced(profile, decision)
    stops = [{str(a): s for a, s in zip(compiled.grid[r], trace.stops[r], strict=True)} for r in range(2)]
    assert stops[0]["0F0"] == pytest.approx(20e-3)  # nothing moves yet
    assert stops[0]["0F1"] == pytest.approx(40e-3 + 2e-3)  # the first activation moves while it runs
    assert stops[1]["1F0"] == pytest.approx(30e-3 + 20e-3 + 5e-3)  # all of the second one while it runs
    halved = tuple(replace(device, core_share=0.5) for device in cluster.devices)
    _, half = traced(replace(profile, cluster=replace(cluster, devices=halved)), decision)
    assert half.stops[0][2] == pytest.approx(40e-3 + 1e-3)


def test_a_rank_keeps_a_tenth_of_its_speed() -> None:
    flows = tuple(NetworkFlow(1.0, losses=((0, 0.6), (1, 0.2))) for _ in range(2))
    assert NetworkTraffic(flows, ()).rates({0: 1.0, 1: 1.0}) == {0: 0.1, 1: pytest.approx(0.6)}
    assert NetworkTraffic(flows, ()).rates({0: 0.5}) == {0: pytest.approx(0.7), 1: pytest.approx(0.9)}


def test_a_call_that_sends_keeps_its_rank_and_is_part_of_the_message() -> None:
    profile = chain_profile(2, 2, activation_bytes=4, latency_s=4e-3, bandwidth_bytes_per_s=1e12)
    link = replace(profile.cluster.links["within-host"], sending=((4, 3e-3),))
    profile = replace(profile, cluster=replace(profile.cluster, links={"within-host": link}))
    compiled, trace = traced(profile, chain_decision(profile, (1,), (1, 1), schedule="gpipe"))
    assert trace.stops[0][:4] == pytest.approx([1e-3, 4e-3, 5e-3, 8e-3])
    assert arrivals(compiled, trace) == {(0, 1): pytest.approx([5e-3, 9e-3])}


def test_a_sum_of_gradients_shares_cards_with_messages() -> None:
    """Two pairs of replicas that each span the same two hosts: their sums of 8 ms run at once, at half speed."""
    profile = chain_profile(
        2, 4, forward_s=(1e-3, 1e-3), parameter_bytes=8000, activation_bytes=4, hosts=["n0", "n1"] * 2
    )
    wide = replace(profile.cluster.links["across-hosts"], bandwidth_bytes_per_s=1e6, points=())
    cluster = replace(profile.cluster, links={**profile.cluster.links, "across-hosts": wide}, collectives=())
    profile = replace(profile, cluster=cluster)
    decision = chain_decision(profile, (1,), (2,), [(0, 1), (2, 3)], [(1, 1), (1, 1)])
    compiled, prices = priced(profile, decision)
    assert prices.traffic is not None
    apart = execute(compiled, prices)
    trace = run(compiled, prices)
    overlap = apart.released[0] - apart.released[1]
    assert 0 < overlap < 8e-3
    last = [max(t.stops[rank][-1] for rank in range(4)) for t in (apart, trace)]
    assert last[1] > last[0] + 4e-3


def test_only_programs_that_share_something_have_traffic() -> None:
    two = chain_profile(2, 2, hosts=["n0", "n1"], activation_bytes=40_000, bandwidth_bytes_per_s=1e6)
    assert priced(two, chain_decision(two, (1,), (1, 1)))[1].traffic is None
    three = chain_profile(3, 3, hosts=["n0", "n1", "n2"], activation_bytes=40_000, bandwidth_bytes_per_s=1e6)
    assert priced(three, chain_decision(three, (1, 2), (1, 1)))[1].traffic is not None
    links = {name: replace(link, bandwidth_bytes_per_s=4e6) for name, link in three.cluster.links.items()}
    wide = replace(three, cluster=replace(three.cluster, links=links))  # cards that carry all of them at once
    assert priced(wide, chain_decision(wide, (1, 2), (1, 1)))[1].traffic is None
    within = chain_profile(3, 3, activation_bytes=40_000, bandwidth_bytes_per_s=1e6)
    assert priced(within, chain_decision(within, (1, 2), (1, 1)))[1].traffic is None


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_where_nothing_is_shared_both_engines_agree_to_the_bit(seed: int, schedule: str) -> None:
    compiled, prices = priced(*random_plan(random.Random(seed), schedule, alone=True))
    wide = NetworkTraffic(tuple(NetworkFlow(seconds) for seconds in prices.transfer_s) + (NetworkFlow(0.0),) * 8, ())
    plain = execute(compiled, prices)
    assert execute_shared(compiled, prices, wide) == plain


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_sharing_takes_time_and_never_gives_any(seed: int, schedule: str) -> None:
    compiled, prices = priced(*random_plan(random.Random(seed), schedule))
    trace = run(compiled, prices)
    assert trace.step_s >= least_s(compiled, prices) * (1 - 1e-12)
    if len(set(prices.wires)) == len(prices.wires):
        alone = execute(compiled, prices)
        for mine, theirs in zip((*trace.stops, trace.arrived), (*alone.stops, alone.arrived), strict=True):
            assert all(a >= b * (1 - 1e-12) for a, b in zip(mine, theirs, strict=True))


@given(st.integers(0, 2**32), st.sampled_from(names()))
def test_what_is_left_of_a_program_at_a_step_is_never_said_to_take_longer(seed: int, schedule: str) -> None:
    compiled, prices = priced(*random_plan(random.Random(seed), schedule))
    trace = run(compiled, prices)
    for starts, least in zip(trace.starts, least_left_s(compiled, prices), strict=True):
        assert all(start + left <= trace.step_s * (1 + 1e-12) for start, left in zip(starts, least, strict=True))


@given(st.integers(0, 2**32), st.sampled_from(names()), st.floats(0.5, 1.5))
def test_a_program_is_run_until_it_is_surely_longer_than_what_is_known(seed: int, schedule: str, part: float) -> None:
    compiled, prices = priced(*random_plan(random.Random(seed), schedule))
    step_s = run(compiled, prices).step_s
    said_s = step_unless_longer(compiled, prices, part * step_s)
    if part >= 1:
        assert said_s == step_s
    else:
        assert part * step_s < said_s <= step_s * (1 + 1e-12)


FORWARD_S = (30e-3, 40e-3, 25e-3, 35e-3)
MEASURED_S = {  # steps of sleeping ranks on four hosts over gloo; (bytes of a message, its seconds alone): by schedule
    (524_288, 22.1e-3): {"gpipe": 1.3825, "1f1b": 1.4396},
    (2_097_152, 87.1e-3): {"gpipe": 2.2576, "1f1b": 2.9354},
    (524_288, 4.3e-3): {"gpipe": 1.3143, "1f1b": 1.2588},
}


@pytest.mark.parametrize("message", MEASURED_S)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_measured_steps_of_four_hosts_that_share_cards(message: tuple[int, float], schedule: str) -> None:
    num_bytes, alone_s = message
    profile = chain_profile(
        4,
        4,
        forward_s=FORWARD_S,
        activation_bytes=num_bytes,
        parameter_bytes=4,
        hosts=["n0", "n1", "n2", "n3"],
        latency_s=1.5e-4,
        bandwidth_bytes_per_s=num_bytes / alone_s,
    )
    compiled, prices = priced(profile, chain_decision(profile, (1, 2, 3), (1,) * 8, schedule=schedule))
    measured_s = MEASURED_S[message][schedule]
    step_s = run(compiled, prices).step_s
    assert step_s == pytest.approx(measured_s, rel=0.075)
    if alone_s > 80e-3 and schedule == "1f1b":  # both directions of the inner hosts leave at once: 15.6 % without
        assert least_s(compiled, prices) == pytest.approx(measured_s * (1 - 0.156), rel=1e-3)


def test_what_a_start_or_an_end_changes_is_what_is_new_among_all_flows() -> None:
    """Against the speeds of all flows under way, worked out at once; sets that come again change the same."""
    draw = random.Random(3)
    for _ in range(20):
        flows = tuple(
            NetworkFlow(
                1.0,
                draw.choice([2.0, 5.0, 8.0]),
                tuple(sorted(draw.sample(range(6), draw.choice([0, 2, 2, 4])))),
                ((draw.randrange(4), 0.3),) if draw.random() < 0.5 else (),
            )
            for _ in range(9)
        )
        traffic = NetworkTraffic(flows, (9.0,) * 6)
        speeds, active = FlowSpeeds(traffic), set[int]()
        of_flows: dict[int, float] = {}
        of_ranks: dict[int, float] = {}
        for _ in range(200):
            flow = draw.randrange(9)
            active ^= {flow}
            of_flows.pop(flow, None)
            changed, slowed = speeds.toggled(flow)
            of_flows.update(changed)
            of_ranks.update(slowed)
            expected = traffic.speeds(sorted(active))
            assert of_flows == pytest.approx(expected)
            rates = traffic.rates(expected)
            assert {rank: rate for rank, rate in of_ranks.items() if rate != 1.0} == pytest.approx(rates)
