from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import candidate_of
from planner.costs.communication.links import NetworkPrices, transfer_s
from planner.costs.cost_model import CostModel
from planner.costs.memory.messages import CoalescedMessage
from planner.costs.predict import predict
from planner.costs.pricing import Pricing
from planner.costs.simulator import events
from planner.costs.simulator.events import timeline
from planner.costs.simulator.prices import prices_of, transfer_bytes, transfer_prices
from planner.costs.simulator.program import compile_program
from planner.costs.stages.action_costs import StageCosts
from planner.ir.cluster import SHARED_MEMORY
from planner.ir.errors import IllegalProgramError
from planner.ir.layout import Layout
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import Profile
from planner.ir.program import BUCKET_BYTES, Program
from planner.ir.schedule import Action, Pipeline, StageGraph
from planner.ir.timeline import Timeline
from planner.layers.boundary import Boundaries
from planner.passes import lower, validate
from planner.schedules import positions
from planner.schedules import schedule as schedule_named
from tests.oracles.evaluation import evaluate
from tests.planner.factories import batch_bytes, chain_decision

TINY = 4


def program_of(profile: Profile, decision: Decision) -> Program:
    return Boundaries.of_decision(profile.graph, decision).program(decision)


def run(profile: Profile, decision: Decision, program: Program | None = None) -> Timeline:
    cost_model = CostModel(profile)
    costs = StageCosts(
        cost_model, Pricing(cost_model).stages(candidate_of(cost_model.profile.graph, decision)), decision.micro_batches
    )
    program = program or program_of(profile, decision)
    compiled = compile_program(program, costs.micro_batches)
    sizes = transfer_bytes(program, compiled)
    trace = events.run(compiled, prices_of(compiled, costs, sizes))
    carried = [CoalescedMessage.of(slot.parts(program)) for slot in compiled.transfers]
    return timeline(compiled, trace, costs, sizes, carried)


def pipeline(num_stages: int, num_microbatches: int, schedule: str, **costs: object) -> tuple[Profile, Decision]:
    """Equal stages, F = 1 ms and B = 2 ms a micro-batch; the last stage also has the loss, which is free."""
    profile = chain_profile(num_stages, num_stages, activation_bytes=TINY, parameter_bytes=TINY, **costs)
    decision = chain_decision(profile, range(1, num_stages), (1,) * num_microbatches, schedule=schedule)
    return profile, decision


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 1), (2, 5), (4, 2), (4, 8)])
def test_equal_stages_take_m_plus_p_minus_1_times_a_micro_batch(
    schedule: str, num_stages: int, num_microbatches: int
) -> None:
    profile, decision = pipeline(num_stages, num_microbatches, schedule, bandwidth_bytes_per_s=1e15)
    expected = (num_microbatches + num_stages - 1) * 3e-3
    assert run(profile, decision).step_s == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(2, 5), (4, 8)])
def test_transfers_add_two_hops_a_boundary_to_gpipe_and_a_round_trip_a_window_to_1f1b(
    num_stages: int, num_microbatches: int
) -> None:
    p, m, c = num_stages, num_microbatches, 2e-4
    for schedule, extra in (("gpipe", 2 * (p - 1)), ("1f1b", 2 * (p + m - 2 - -(-(m - 1) // p)))):
        profile, decision = pipeline(p, m, schedule, latency_s=c, bandwidth_bytes_per_s=1e15)
        assert run(profile, decision).step_s == pytest.approx((m + p - 1) * 3e-3 + extra * c, rel=1e-6)


def test_messages_of_a_channel_travel_one_after_another() -> None:
    profile, decision = pipeline(2, 3, "gpipe", latency_s=10e-3, bandwidth_bytes_per_s=1e15)
    spans = {span.action: span for span in run(profile, decision).spans}
    assert [spans[f"1RECV_F{m}<0"].stop_s for m in range(3)] == pytest.approx([11e-3, 21e-3, 31e-3])
    assert spans["0SEND_F2>1"].stop_s == pytest.approx(3e-3)


def test_a_link_that_is_not_duplex_carries_one_direction_at_a_time() -> None:
    steps = []
    for duplex in (True, False):
        profile, decision = pipeline(2, 6, "1f1b", latency_s=8e-3, bandwidth_bytes_per_s=1e15, duplex=duplex)
        steps.append(run(profile, decision).step_s)
    assert steps[1] > steps[0] * 1.2


def test_a_reduction_waits_for_its_last_member() -> None:
    profile = chain_profile(1, 2, parameter_bytes=4096, bandwidth_bytes_per_s=1e6)
    decision = chain_decision(profile, (), (4,), [(0, 1)], [(3, 1)])
    spans = {(span.rank, span.action): span for span in run(profile, decision).spans}
    slow, fast = spans[0, "0REDUCE_GRAD"], spans[1, "0REDUCE_GRAD"]
    assert (slow.start_s, fast.start_s) == pytest.approx((9e-3, 3e-3))
    assert slow.stop_s == fast.stop_s == pytest.approx(9e-3 + 4096e-6)


def test_accumulation_and_update_are_paid_and_a_wait_where_there_is_one() -> None:
    profile = chain_profile(2, 2, accumulate_s=5e-4, update_s=2e-4, action_overhead_s=1e-4)
    alone_s = run(profile, chain_decision(profile, (), (1, 1, 1))).step_s
    assert alone_s == pytest.approx(2 * (3 * 3e-3 + 2 * 5e-4 + 2e-4))
    there_and_back_s = run(profile, chain_decision(profile, (1,), (1,))).step_s
    plain_s = run(replace(profile, action_overhead_s={}), chain_decision(profile, (1,), (1,))).step_s
    assert there_and_back_s == pytest.approx(plain_s + 2 * 1e-4)


def test_memory_peaks_with_the_micro_batches_in_flight() -> None:
    peaks = {}
    for schedule in ("gpipe", "1f1b"):
        profile = chain_profile(2, 2, parameter_bytes=400, activation_bytes=TINY, saved_bytes=(1000, 0))
        decision = chain_decision(profile, (1,), (1,) * 6, schedule=schedule)
        peaks[schedule] = run(profile, decision).peak_bytes(0)
    still_to_come = 5 * 2 * TINY  # in the first backward, which makes the gradients; buffers have as much to spare
    always = 2 * 400 + still_to_come + batch_bytes(profile, decision)
    assert peaks["gpipe"] == always + 6 * (1000 + TINY)
    assert peaks["1f1b"] == always + 2 * (1000 + TINY)


def test_a_split_backward_holds_its_activations_until_the_weights_are_done() -> None:
    profile = chain_profile(
        1, 1, parameter_bytes=4, saved_bytes=1000, backward_input_s=4e-3, backward_weight_s=5e-3, accumulate_s=1e-4
    )
    decision = chain_decision(profile, (), (1, 1))
    peaks, steps = [], []
    for text in ("0F0 0I0 0W0 0F1 0I1 0W1 0UPDATE", "0F0 0I0 0F1 0I1 0W0 0W1 0UPDATE"):
        timeline = run(profile, replace(decision, program=(tuple(text.split()),)))
        peaks.append(timeline.peak_bytes(0))
        steps.append(timeline.step_s)
    left = 2 * 4096  # the layer's input and the gradient of its output, more than the 1000 bytes it saved
    always = 2 * 4 + batch_bytes(profile, decision)
    assert peaks == [always + left, always + 2 * left]
    assert steps == pytest.approx([20e-3 + 1e-4] * 2)


def test_a_program_that_never_ends_is_refused_with_its_grid() -> None:
    profile, decision = pipeline(2, 2, "gpipe")
    program = program_of(profile, decision)
    rows = [list(row) for row in program.rows]
    late = rows[0].pop(rows[0].index(Action.parse("0SEND_F0>1")))
    rows[0].insert(rows[0].index(Action.parse("0B0")) + 1, late)
    broken = replace(program, rows=tuple(map(tuple, rows)))
    with pytest.raises(IllegalProgramError) as error:
        run(profile, decision, broken)
    assert "rank 0 in 0RECV_B0<1, rank 1 in 1RECV_F0<0" in str(error.value)
    assert ">>0RECV_B0<1<<" in str(error.value)


@pytest.mark.parametrize(("drop", "words"), [("0SEND_F1>1", "is missing"), ("1F0", "is missing")])
def test_a_program_without_what_an_action_needs_is_not_compiled(drop: str, words: str) -> None:
    profile, decision = pipeline(2, 2, "gpipe")
    program = program_of(profile, decision)
    rows = tuple(tuple(action for action in row if str(action) != drop) for row in program.rows)
    with pytest.raises(IllegalProgramError, match=words):
        compile_program(replace(program, rows=rows), decision.micro_batches)


def test_a_program_out_of_order_is_not_compiled() -> None:
    profile, decision = pipeline(1, 1, "gpipe")
    program = program_of(profile, decision)
    with pytest.raises(IllegalProgramError, match="0UPDATE on rank 0 needs 0B0, which comes later"):
        compile_program(replace(program, rows=(program.rows[0][::-1],)), decision.micro_batches)


def interleaved(profile: Profile, num_stages: int, num_ranks: int, name: str, micro_batches: int) -> Decision:
    """One layer a stage, stages at the positions that the schedule wants."""
    where = positions(name, num_ranks, num_stages // num_ranks)
    graph = profile.graph
    stage_of = {layer.name: min(index, num_stages - 1) for index, layer in enumerate(graph.layers)}
    ranks = tuple((position,) for position in where)
    boundaries = Boundaries.of(graph, stage_of, (Layout(),) * num_stages, ranks)
    edges = boundaries.edges()
    stages = StageGraph(num_stages, micro_batches, edges)
    routes = boundaries.routes(edges, (1,) * micro_batches)
    program = lower(schedule_named(name)(Pipeline(stages, where)), stages, ranks, routes, num_ranks)
    validate(program)
    return Decision(
        schedule=name,
        micro_batches=(1,) * micro_batches,
        stages=tuple(Stage(group, tuple(f"n0/cpu{rank}" for rank in group)) for group in ranks),
        layers={layer: Placement(stage) for layer, stage in stage_of.items()},
        program=tuple(tuple(map(str, row)) for row in program.rows),
    )


@pytest.mark.parametrize(("name", "bubble"), [("interleaved", 3 * 6e-3 / 2), ("zb-v", 3 * 2e-3 / 2)])
def test_stages_of_a_rank_share_its_time_and_memory(name: str, bubble: float) -> None:
    """Eight stages on four ranks; a rank's two have F = I = W = 2 ms together."""
    profile = chain_profile(8, 4, activation_bytes=TINY, parameter_bytes=400, bandwidth_bytes_per_s=1e15)
    decision = interleaved(profile, 8, 4, name, 8)
    timeline = run(profile, decision)
    assert timeline.step_s == pytest.approx(8 * 6e-3 + bubble, rel=1e-6)
    assert timeline.busy_s(0) == pytest.approx(8 * 6e-3)
    assert all(timeline.peak_bytes(rank) > 2 * 2 * 400 for rank in range(4))


def test_a_message_that_blocks_holds_its_sender_and_then_its_receiver() -> None:
    profile, decision = pipeline(2, 1, "1f1b-sno", latency_s=2e-3, bandwidth_bytes_per_s=1e15)
    spans = {span.action: span for span in run(profile, decision).spans}
    assert (spans["0SEND_F0>1!"].start_s, spans["0SEND_F0>1!"].stop_s) == pytest.approx((1e-3, 3e-3))
    assert (spans["1RECV_F0<0!"].start_s, spans["1RECV_F0<0!"].stop_s) == pytest.approx((0.0, 5e-3))
    assert spans["0UPDATE"].stop_s == pytest.approx(1e-3 + 4e-3 + 3e-3 + 4e-3 + 2e-3)


def test_forwards_alone_keep_nothing_behind() -> None:
    profile, decision = pipeline(2, 5, "forward", saved_bytes=1000, workspace_bytes=10, bandwidth_bytes_per_s=1e15)
    timeline = run(profile, decision)
    assert timeline.step_s == pytest.approx(6e-3, rel=1e-6)
    always = TINY + batch_bytes(profile, decision)  # no gradients
    assert timeline.peak_bytes(0) == always + 1000 + 10 + 5 * TINY  # frames on their way
    assert timeline.memory[-1].num_bytes == always


def test_an_update_starts_the_sum_of_gradients_anew() -> None:
    profile = chain_profile(1, 1, accumulate_s=5e-4, update_s=2e-4)
    steps = {
        name: run(profile, chain_decision(profile, (), (1,) * 4, schedule=name)).step_s
        for name in ("1f1b", "pipedream")
    }
    assert steps["1f1b"] == pytest.approx(4 * 3e-3 + 3 * 5e-4 + 2e-4)
    assert steps["pipedream"] == pytest.approx(4 * 3e-3 + 4 * 2e-4)


def test_reductions_in_the_middle_of_a_step_are_apart() -> None:
    profile = chain_profile(1, 2, parameter_bytes=4096, bandwidth_bytes_per_s=1e6)
    decision = chain_decision(profile, (), (4, 4), [(0, 1)], [(1, 1)], schedule="pipedream")
    spans = {(span.rank, span.action): span for span in run(profile, decision).spans}
    assert spans[0, "0REDUCE_GRAD0"].stop_s == pytest.approx(6e-3 + 4096e-6)
    assert spans[1, "0REDUCE_GRAD1"].stop_s == pytest.approx(2 * (6e-3 + 4096e-6))


def test_an_action_of_a_micro_batch_that_does_not_exist_is_not_compiled() -> None:
    profile, decision = pipeline(1, 2, "gpipe")
    program = program_of(profile, decision)
    rows = (tuple(replace(a, microbatch=2) if str(a) == "0F1" else a for a in program.rows[0]),)
    with pytest.raises(IllegalProgramError, match="0F2 on rank 0 needs micro-batch 2, which is missing"):
        compile_program(replace(program, rows=rows), decision.micro_batches)


def test_price_slots_are_few() -> None:
    profile, decision = pipeline(2, 8, "1f1b")
    compiled = compile_program(program_of(profile, decision), decision.micro_batches)
    assert len(compiled.transfers) == 2
    assert len(compiled.actions) == 2 * 6  # F, first B, other B, sends, receives, update


def in_shared_memory(profile: Profile) -> Profile:
    """Messages of 4 bytes are copied in 0.3 ms, and there 0.1 ms later; no core is disturbed."""
    link = replace(
        profile.cluster.links["within-host"], points=((4, 4e-4),), sending=((4, 3e-4),), transport=SHARED_MEMORY
    )
    return replace(profile, cluster=replace(profile.cluster, links={"within-host": link}))


def test_in_shared_memory_a_send_keeps_its_rank_for_the_copy_and_the_message_is_there() -> None:
    profile, decision = pipeline(2, 2, "gpipe")
    spans = {span.action: (span.start_s, span.stop_s) for span in run(in_shared_memory(profile), decision).spans}
    expected = {
        "0F0": (0.0, 1e-3),
        "0SEND_F0>1": (1e-3, 1.3e-3),
        "0F1": (1.3e-3, 2.3e-3),  # undisturbed while the other rank takes the message
        "0SEND_F1>1": (2.3e-3, 2.6e-3),
        "1F0": (1.4e-3, 2.4e-3),
        "1F1": (2.7e-3, 3.7e-3),  # it waits for the message alone: it is done before that comes
    }
    assert {action: spans[action] for action in expected} == {
        action: pytest.approx(at, abs=1e-9) for action, at in expected.items()
    }


def test_sums_in_shared_memory_hide_behind_no_backward() -> None:
    profile = chain_profile(4, 2, parameter_bytes=BUCKET_BYTES, bandwidth_bytes_per_s=1e12, all_reduce_latency_s=1e-4)
    decision = chain_decision(profile, (), (2,), ranks=((0, 1),))
    for each, number in ((profile, 1), (in_shared_memory(profile), 4)):  # of four buckets so many are waited for
        span = next(span for span in run(each, decision).spans if "R" in span.action)
        sum_s = NetworkPrices(each.cluster).all_reduce_s((0, 1), BUCKET_BYTES)
        assert span.stop_s - span.start_s == pytest.approx(number * sum_s, rel=1e-6)
        predicted = predict(each, decision)[0].step_s
        assert evaluate(each, decision).step_s == pytest.approx(predicted, rel=1e-9)


def test_two_sends_of_an_action_to_one_rank_cost_one_latency() -> None:
    """Layer 0 is read on rank 1 by stages 1 and 3, whose messages of 4 KB are one of 8 KB; of 80 KB each are two."""
    latency_s, bandwidth = 1e-3, 1e8
    found, alone_s, both_s = {}, {}, {}
    for size in (4_000, 80_000):
        profile = chain_profile(
            4, 2, activation_bytes=size, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, skips=[(0, 3)]
        )
        decision = interleaved(profile, 4, 2, "interleaved", 2)
        program = program_of(profile, decision)
        compiled = compile_program(program, decision.micro_batches)
        prices = transfer_prices(compiled, transfer_bytes(program, compiled), NetworkPrices(profile.cluster))
        (link,) = profile.cluster.links.values()
        found[size] = {slot.route[:2]: s for slot, s in zip(compiled.transfers, prices, strict=True) if slot.forward}
        alone_s[size], both_s[size] = (float(transfer_s(link, count * size)) for count in (1, 2))
    assert alone_s[4_000] == pytest.approx(latency_s, rel=0.05)
    others = dict.fromkeys(((0, 1), (1, 2), (2, 3)), alone_s[4_000])
    assert found[4_000] == pytest.approx({(0, 3): both_s[4_000] - alone_s[4_000], **others})
    assert found[80_000] == pytest.approx(dict.fromkeys(found[4_000], alone_s[80_000]))


def test_ranks_that_share_a_parameter_wait_for_one_another_before_they_update() -> None:
    """The last stage is done first; its long update begins when the first stage's gradients are there too."""
    profile = chain_profile(
        2,
        2,
        forward_s=(1e-3, 2e-3),
        activation_bytes=4,
        parameter_bytes=(4_000_000, 4),
        update_s=(2e-3, 7e-3),
        bandwidth_bytes_per_s=1e9,
    )
    last = replace(profile.graph.layers[1], parameters=("l0.weight", "l1.weight"))
    layers = (profile.graph.layers[0], last, *profile.graph.layers[2:])
    tied = replace(profile, graph=replace(profile.graph, layers=layers))
    decision = chain_decision(profile, (1,), (1,))
    (apart, apart_line), (together, line) = (predict(each, decision) for each in (profile, tied))
    first_ends_s, last_ends_s = (next(s.start_s for s in apart_line.spans if s.action == f"{n}UPDATE") for n in (0, 1))
    assert last_ends_s < first_ends_s
    assert apart.step_s == pytest.approx(max(first_ends_s + 2e-3, last_ends_s + 7e-3))
    sum_s = CostModel(profile).network.all_reduce_s((0, 1), 4_000_000)
    assert together.step_s == pytest.approx(first_ends_s + sum_s + 7e-3 + 2e-3)  # the last stage updates its copy too
    assert [s.start_s for s in line.spans if "UPDATE" in s.action] == pytest.approx([first_ends_s] * 2)
