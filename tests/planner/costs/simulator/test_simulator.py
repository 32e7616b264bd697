"""The simulator by closed forms, by what was measured and by its own bounds; the oracle judges it on random plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from benchmarks.scale import scale_profile
from planner.costs.candidate import Candidate, candidate_of
from planner.costs.communication.links import NetworkPrices
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast, predict
from planner.costs.pricing import Pricing
from planner.costs.sentences import most_messages_s
from planner.costs.simulator.breakdown import Parts, breakdown, mean_parts
from planner.costs.simulator.contention import execute_shared
from planner.costs.simulator.events import execute, least_left_s, least_s, run, step_unless_longer
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.simulator.symmetry import Symmetry, slices
from planner.costs.simulator.traffic import FlowSpeeds, NetworkFlow, NetworkTraffic
from planner.costs.stages.action_costs import StageCosts
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.errors import IllegalProgramError
from planner.ir.layout import equal_shares
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import Profile, Slowdown
from planner.ir.program import BUCKET_BYTES, Program
from planner.ir.schedule import Action
from planner.ir.timeline import Span, Timeline
from planner.layers.boundary import Boundaries
from planner.schedules import names
from planner.solvers.candidates.candidate import decision_of, micro_batches
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.evaluation import evaluate
from tests.planner.factories import chain_decision, slot_prices
from tests.planner.shared_hosts import random_plan


def priced(profile: Profile, decision: Decision, other: Program | None = None) -> tuple[CompiledProgram, SlotPrices]:
    program = other or Boundaries.of_decision(profile.graph, decision).program(decision)
    cost_model = CostModel(profile)
    costs = StageCosts(
        cost_model, Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, decision)), decision.micro_batches
    )
    compiled = compile_program(program, decision.micro_batches, costs.tied_ranks)
    return compiled, slot_prices(program, compiled, costs)


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


def test_a_rank_keeps_a_tenth_of_its_speed() -> None:
    flows = tuple(NetworkFlow(1.0, losses=((0, 0.6), (1, 0.2))) for _ in range(2))
    assert NetworkTraffic(flows, ()).rates({0: 1.0, 1: 1.0}) == {0: 0.1, 1: pytest.approx(0.6)}
    assert NetworkTraffic(flows, ()).rates({0: 0.5}) == {0: pytest.approx(0.7), 1: pytest.approx(0.9)}


plans = pytest.mark.parametrize(("schedule", "seed"), [(name, seed) for name in names() for seed in range(12)])


@pytest.mark.cases(60)
@plans
def test_where_nothing_is_shared_both_engines_agree_to_the_bit(schedule: str, seed: int) -> None:
    compiled, prices = priced(*random_plan(random.Random(seed), schedule, alone=True))
    wide = NetworkTraffic(tuple(NetworkFlow(seconds) for seconds in prices.transfer_s) + (NetworkFlow(0.0),) * 8, ())
    assert execute_shared(compiled, prices, wide) == execute(compiled, prices)


@pytest.mark.cases(60)
@plans
def test_bounds_of_a_program_never_say_more_than_it_takes(schedule: str, seed: int) -> None:
    """All of it and what is left of it at an action; sharing takes time and never gives any; and runs cut short."""
    compiled, prices = priced(*random_plan(random.Random(seed), schedule))
    trace = run(compiled, prices)
    assert trace.step_s >= least_s(compiled, prices) * (1 - 1e-12)
    for starts, least in zip(trace.starts, least_left_s(compiled, prices), strict=True):
        assert all(start + left <= trace.step_s * (1 + 1e-12) for start, left in zip(starts, least, strict=True))
    if len(set(prices.wires)) == len(prices.wires):
        alone = execute(compiled, prices)
        for mine, theirs in zip((*trace.stops, trace.arrived), (*alone.stops, alone.arrived), strict=True):
            assert all(a >= b * (1 - 1e-12) for a, b in zip(mine, theirs, strict=True))
    for part in (0.5, 0.9, 0.999):
        assert part * trace.step_s < step_unless_longer(compiled, prices, part * trace.step_s)
        assert step_unless_longer(compiled, prices, part * trace.step_s) <= trace.step_s * (1 + 1e-12)
    for part in (1.001, 1.2):
        assert step_unless_longer(compiled, prices, part * trace.step_s) == trace.step_s


def slowed(profile: Profile, forward: float = 1.5, backward: float = 1.0, num_devices: int = 2) -> Profile:
    """Layers that take so many times as long beside those of the other devices of a host."""
    all_alike = tuple(Slowdown(layer.name, 1, num_devices, forward, backward) for layer in profile.graph.layers)
    return replace(profile, slowdowns={device.kind: all_alike for device in profile.cluster.devices})


def wide_chain(forward_s: Sequence[float], num_devices: int = 2, hosts: Sequence[str] | None = None) -> Profile:
    """A backward is two forwards; messages and sums take next to no time."""
    return chain_profile(
        len(forward_s), num_devices, forward_s=forward_s, hosts=hosts, bandwidth_bytes_per_s=1e18, sizes=(1, 2, 4)
    )


def pipelined(profile: Profile, micro_batches: tuple[int, ...]) -> Decision:
    """The first layer on the first device, the others on the second."""
    return chain_decision(profile, (1,), micro_batches, ((0,), (1,)), ((1,), (1,)))


def step_of(profile: Profile, decision: Decision) -> float:
    return predict(profile, decision)[0].step_s


def test_ranks_of_a_host_that_never_compute_at_once_are_not_slowed() -> None:
    profile = wide_chain((1.0, 2.0))
    decision = pipelined(profile, (1,))
    assert step_of(slowed(profile), decision) == pytest.approx(9.0, rel=1e-9)
    assert step_of(slowed(profile), decision) == step_of(profile, decision)


def test_an_action_is_slowed_for_as_long_as_the_other_rank_computes() -> None:
    """0F1 takes 1.5 s beside 1F0, which has done 1 s of its 2 by then; 0B0 is as long as ever, and slows 1F1.

    rank 0   0F0 | 0F1 |                 | 0B0 |                     | 0B1
    rank 1       | 1F0   1F0 |    1B0    | 1F1   1F1 |      1B1      |
    s        0   1    2.5   3.5         7.5   9.5   10 1/6         14 1/6   16 1/6
    """
    profile = wide_chain((1.0, 2.0))
    decision = pipelined(profile, (1, 1))
    assert step_of(profile, decision) == pytest.approx(15.0, rel=1e-9)
    timeline = predict(slowed(profile), decision)[1]
    stops = {(span.rank, span.action): span.stop_s for span in timeline.spans}
    assert stops[0, "0F1"] == pytest.approx(2.5, rel=1e-9)
    assert stops[1, "1F0"] == pytest.approx(3.5, rel=1e-9)
    assert stops[1, "1F1"] == pytest.approx(10 + 1 / 6, rel=1e-9)
    assert timeline.step_s == pytest.approx(16 + 1 / 6, rel=1e-9)


def test_ranks_that_share_all_layers_are_slowed_all_the_time() -> None:
    profile = wide_chain((1.0, 2.0))
    decision = chain_decision(profile, (), (2, 2), ((0, 1),), ((1, 1),))
    assert step_of(profile, decision) == pytest.approx(2 * (3.0 + 6.0), rel=1e-9)
    assert step_of(slowed(profile, 1.5, 1.25), decision) == pytest.approx(2 * (4.5 + 7.5), rel=1e-9)
    assert step_of(slowed(profile, 1.5, 1.25, num_devices=4), decision) == pytest.approx(2 * (3.5 + 6.5), rel=1e-9)
    apart = replace(profile, cluster=wide_chain((1.0, 2.0), hosts=("n0", "n1")).cluster)
    assert step_of(slowed(apart), decision) == step_of(apart, decision)


def test_a_rank_that_stands_for_others_is_slowed_by_them() -> None:
    hosts = ("n0", "n0", "n1", "n1")
    profile = slowed(wide_chain((1.0, 2.0), 4, hosts), 1.5, 1.25)
    decision = chain_decision(profile, (), (4, 4), ((0, 1, 2, 3),), ((1, 1, 1, 1),))
    candidate = candidate_of(profile.graph, decision)
    pricing = Pricing.of(profile)
    one, every = (pricing.priced(replace(candidate, rows=()), each_rank=each) for each in (False, True))
    assert one.symmetry is not None
    assert run(one.compiled, one.prices()).step_s == pytest.approx(run(every.compiled, every.prices()).step_s)
    assert run(one.compiled, one.prices()).step_s == pytest.approx(2 * (4.5 + 7.5), rel=1e-9)


@pytest.mark.cases(60)
@plans
def test_bounds_hold_where_ranks_slow_one_another(schedule: str, seed: int) -> None:
    draw = random.Random(seed)
    profile, decision = random_plan(draw, schedule)
    compiled, before = priced(profile, decision)
    _, prices = priced(slowed(profile, draw.uniform(1, 2), draw.uniform(1, 2), draw.randint(2, 3)), decision)
    assert prices.action_s == before.action_s
    trace = run(compiled, prices)
    assert trace.step_s >= least_s(compiled, prices) * (1 - 1e-12)
    for starts, least in zip(trace.starts, least_left_s(compiled, prices), strict=True):
        assert all(start + left <= trace.step_s * (1 + 1e-12) for start, left in zip(starts, least, strict=True))
    for part in (0.5, 0.9, 0.999):
        assert part * trace.step_s < step_unless_longer(compiled, prices, part * trace.step_s)
        assert step_unless_longer(compiled, prices, part * trace.step_s) <= trace.step_s * (1 + 1e-12)
    assert step_unless_longer(compiled, prices, 1.001 * trace.step_s) == trace.step_s


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
        speeds = FlowSpeeds(traffic)
        active = set[int]()
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


@pytest.mark.parametrize(
    ("step_s", "spans", "how", "expected"),
    [
        (  # a wait is bubble until the sender sends, and communication afterwards
            9.0,
            """0 0F0 0 2, 0 0SEND_F0>1 2 2.5, 0 0RECV_B0<1 2.5 7, 0 0B0 7 8,
            1 1RECV_F0<0 0 3, 1 1F0 3 4, 1 1B0 4 6, 1 1SEND_B0>0 6 6""",
            ((), ()),
            [(3.0, 1.5, 3.5, 1.0), (3.0, 1.0, 2.0, 3.0), (0.0, 0.0, 0.0, 9.0)],
        ),
        (  # a reduction is bubble until its last member is there
            6.0,
            "0 0REDUCE_GRAD 1 5, 1 0REDUCE_GRAD 3 5, 1 0UPDATE 5 6",
            ((), ()),
            [(0.0, 2.0, 3.0, 1.0), (1.0, 2.0, 3.0, 0.0)],
        ),
        (  # of several senders the last one that can have sent it counts: the third sends to somebody else
            8.0,
            "0 0SEND_F0>1 1 1, 1 0SEND_F0>1 3 3, 2 0SEND_F0>1 6 6, 3 1RECV_F0<0 0 4",
            ((), ()),
            [(0.0, 0.0, 1.0, 7.0), (0.0, 0.0, 3.0, 5.0), (0.0, 0.0, 6.0, 2.0), (0.0, 1.0, 3.0, 4.0)],
        ),
        (3.0, "0 0F0 0 3", ([0.5], ()), [(2.5, 0.5, 0.0, 0.0)]),  # ranks exchange for half a second in it
        (5.0, "0 0PREP0 0 3, 0 0F0 3 4, 0 0PREP1 3 5, 0 0F1 5 5", ((), [True]), [(1.0, 0.0, 4.0, 0.0)]),  # a host does
        (5.0, "0 0PREP0 0 3, 0 0F0 3 4, 0 0PREP1 3 5, 0 0F1 5 5", ((), ()), [(5.0, 0.0, 0.0, 0.0)]),
    ],
)
def test_a_timeline_is_taken_apart_by_rank(
    step_s: float, spans: str, how: tuple[Sequence[float], Sequence[bool]], expected: list[tuple[float, ...]]
) -> None:
    seen = [text.split() for text in spans.split(",")]
    found = tuple(Span(int(rank), action, float(start), float(stop)) for rank, action, start, stop in seen)
    parts = breakdown(Timeline("measured", step_s, found), len(expected), *how)
    assert parts == tuple(Parts(*each) for each in expected)
    assert mean_parts(parts) == pytest.approx(Parts(*np.mean(expected, axis=0)))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 5), (4, 2), (4, 8)])
def test_transfers_add_two_hops_a_boundary_to_gpipe_and_a_round_trip_a_window_to_1f1b(
    num_stages: int, num_microbatches: int
) -> None:
    """Equal stages, F = 1 ms and B = 2 ms a micro-batch."""
    p = num_stages
    m = num_microbatches
    c = 2e-4
    profile = chain_profile(p, p, activation_bytes=4, parameter_bytes=4, latency_s=c, bandwidth_bytes_per_s=1e15)
    for schedule, hops in (("gpipe", 2 * (p - 1)), ("1f1b", 2 * (p + m - 2 - -(-(m - 1) // p)) if p > 1 else 0)):
        found = predict(profile, chain_decision(profile, range(1, p), (1,) * m, schedule=schedule))[0]
        assert found.step_s == pytest.approx((m + p - 1) * 3e-3 + hops * c, rel=1e-6)


def test_sums_in_shared_memory_hide_behind_no_backward() -> None:
    profile = chain_profile(4, 2, parameter_bytes=BUCKET_BYTES, bandwidth_bytes_per_s=1e12, all_reduce_latency_s=1e-4)
    decision = chain_decision(profile, (), (2,), ranks=((0, 1),))
    link = replace(profile.cluster.links["within-host"], sending=((4, 3e-4),), transport=SHARED_MEMORY)
    beside = replace(profile, cluster=replace(profile.cluster, links={"within-host": link}))
    for each, number in ((profile, 1), (beside, 4)):  # of four buckets so many are waited for
        prediction, timeline = predict(each, decision)
        span = next(span for span in timeline.spans if "R" in span.action)
        sum_s = NetworkPrices(each.cluster).all_reduce_s((0, 1), BUCKET_BYTES)
        assert span.stop_s - span.start_s == pytest.approx(number * sum_s, rel=1e-6)
        assert evaluate(each, decision).step_s == pytest.approx(prediction.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        # rank 0 sends what rank 1 waits for only behind what it waits for itself
        (
            ("0F0 0RECV_B0<1 0B0 0SEND_F0>1 0UPDATE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE"),
            "rank 0 in 0RECV_B0<1, rank 1 in 1RECV_F0<0[^>]*>>0RECV_B0<1<<",
        ),
        (("0F0 0RECV_B0<1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE"), "is missing"),
        (("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0UPDATE", "1RECV_F0<0 1B0 1SEND_B0>0 1UPDATE"), "is missing"),
        (
            ("0UPDATE 0F0 0SEND_F0>1 0RECV_B0<1 0B0", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE"),
            "0UPDATE on rank 0 needs 0B0, which comes later",
        ),
        (
            ("0F2 0SEND_F0>1 0RECV_B0<1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE"),
            "0F2 on rank 0 needs micro-batch 2, which is missing",
        ),
    ],
)
def test_a_program_that_cannot_run_is_refused(rows: tuple[str, ...], words: str) -> None:
    profile = chain_profile(2)
    decision = chain_decision(profile, (1,), (1,))
    program = Boundaries.of_decision(profile.graph, decision).program(decision)
    spoilt = replace(program, rows=tuple(tuple(map(Action.parse, row.split())) for row in rows))
    with pytest.raises(IllegalProgramError, match=f"(?s){words}"):
        run(*priced(profile, decision, spoilt))


def _drawn(seed: int) -> tuple[Problem, Candidate]:
    """Stages of replicas, on hosts of their own or beside one another, on links that take a core's time or not."""
    draw = random.Random(seed)
    profile = scale_profile(12, 32, seed=seed)
    if seed % 3 == 0:
        cores = {"sender_core": ((1000, 1e-6), (10**6, 1e-4)), "receiver_core": ((1000, 1e-6), (10**6, 2e-4))}
        links = {name: replace(link, **cores) for name, link in profile.cluster.links.items()}
        devices = tuple(replace(device, core_share=1.0) for device in profile.cluster.devices)
        profile = replace(profile, cluster=replace(profile.cluster, links=links, devices=devices))
    problem = Problem(profile, 64)
    sizes = [draw.choice([2, 4, 8]) for _ in range(draw.choice([1, 2, 3, 4]))]
    ranks = list(range(32)) if seed % 2 else [8 * host + place for place in range(8) for host in range(4)]
    groups = [tuple(ranks[sum(sizes[:s]) :][:size]) for s, size in enumerate(sizes)]
    layers = len(profile.graph.layers)
    cuts = sorted(draw.sample(range(1, layers), len(sizes) - 1))
    stage_of = tuple(sum(cut <= layer for cut in cuts) for layer in range(layers))
    shares = tuple(equal_shares(16, size) for size in sizes)
    schedule = draw.choice(["1f1b", "gpipe", "1f1b-so"])
    return problem, Candidate(stage_of, tuple(groups), shares, micro_batches(problem, 16), schedule)


@pytest.mark.parametrize("seed", range(24))
def test_a_symmetric_plan_takes_as_long_as_if_all_its_ranks_were_simulated(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, candidate = _drawn(seed)
    found = Evaluator(problem, CostModel(problem.profile)).evaluate(candidate)
    decision = decision_of(problem, candidate)
    seen = forecast(Pricing.of(problem.profile), decision, 0.08)
    rows = Pricing.of(problem.profile).with_rows(candidate).rows
    monkeypatch.setattr("planner.costs.pricing.symmetry_of", lambda costs: None)
    whole = Evaluator(problem, CostModel(problem.profile)).evaluate(candidate)
    assert found.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert found.memories == whole.memories
    known = forecast(Pricing.of(problem.profile), decision, 0.08)
    assert Pricing.of(problem.profile).with_rows(candidate).rows == rows
    assert seen.memories == known.memories
    assert most_messages_s(seen) == pytest.approx(most_messages_s(known), rel=1e-9)
    assert [(span.rank, span.action) for span in seen.timeline.spans] == [
        (span.rank, span.action) for span in known.timeline.spans
    ]
    ends = [span.stop_s for span in known.timeline.spans]
    assert [span.stop_s for span in seen.timeline.spans] == pytest.approx(ends, rel=1e-9)


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2, 3), (3,)])
def test_rows_of_like_ranks_are_looked_at_though_one_stands_for_the_others(ranks: tuple[int, ...]) -> None:
    """Two actions are exchanged on one replica, or on all: what is sent comes before what makes it."""
    problem = Problem(scale_profile(4, 16), global_batch=16)
    cuts = (0, 2, len(problem.profile.graph.layers))
    chain = Candidate.chain(cuts, ((0, 1, 2, 3), (8, 9, 10, 11)), ((1,) * 4,) * 2, (4,) * 4, "1f1b")
    legal = Pricing.of(problem.profile).with_rows(chain)
    Pricing.of(problem.profile).priced(legal)
    rows = [list(row) for row in legal.rows]
    for rank in ranks:
        rows[rank][0], rows[rank][1] = rows[rank][1], rows[rank][0]
    with pytest.raises(IllegalProgramError, match="rank"):
        Pricing.of(problem.profile).priced(replace(legal, rows=tuple(map(tuple, rows))))


def _of(groups: Sequence[tuple[int, ...]], *samples: tuple[int, ...]) -> Symmetry | None:
    return slices(scale_profile(4, 32).cluster, groups, [[own] for own in samples])


def test_slices_are_as_many_as_hosts_and_samples_allow() -> None:
    """Hosts are 0-7, 8-15, ...; four replicas of two stages, on hosts of their own; one of them is enough."""
    whole = _of([(0, 1, 2, 3), (8, 9, 10, 11)], (4, 4, 4, 4), (4, 4, 4, 4))
    assert whole is not None
    assert (whole.kept, whole.copies) == ({0, 8}, 4)
    pairs = _of([(0, 1, 2, 3), (8, 9, 10, 11)], (5, 3, 5, 3), (4, 4, 4, 4))
    assert pairs is not None
    assert (pairs.kept, pairs.copies) == ({0, 1, 8, 9}, 2)
    apart = _of([(0, 8), (16, 24)], (4, 4), (4, 4))
    assert apart is not None
    assert (apart.kept, apart.copies) == ({0, 16}, 1)
    assert _of([(0, 1, 2, 8), (16, 17, 18, 24)], (4, 4, 4, 4), (4, 4, 4, 4)) is None  # three here, one there
    assert _of([(0, 1), (8, 16)], (4, 4), (4, 4)) is None  # a host of both slices, and one of each alone
