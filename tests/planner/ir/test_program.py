from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.ir.layout import Layout
from planner.ir.program import JOINED_BYTES, LEAST_POSTED, Message, Part, Program, num_joined, receive_window
from planner.ir.schedule import Action, Edge, Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower, validate
from planner.schedules import schedule
from tests.planner.factories import chain_decision
from tests.planner.passes.requirements import requirements


@pytest.fixture(name="program")
def _program() -> Program:
    """Stage 0 on rank 0, stage 1 on ranks 1 and 2 (3 samples and 1), stage 2 on rank 3."""
    profile = chain_profile(3, num_devices=4)
    decision = chain_decision(profile, (1, 2), (4,), ((0,), (1, 2), (3,)), ((1,), (3, 1), (1,)))
    return Boundaries.of_decision(profile.graph, decision).program(decision)


def required(program: Program, rank: int, text: str) -> list[list[str]]:
    found = requirements(program, rank, Action.parse(text))
    return [sorted(f"{where}:{action}" for where, action in alternatives) for alternatives in found]


def moved(program: Program, rank: int, text: str) -> list[tuple[int, int, int]]:
    messages = program.messages_of(rank, Action.parse(text))
    return [(m.src, m.dst, m.forward_bytes) for m in messages]


def test_messages_are_seen_from_both_ends_and_both_directions(program: Program) -> None:
    assert moved(program, 0, "0SEND_F0>1") == [(0, 1, 3 * 4096), (0, 2, 4096)]
    assert moved(program, 1, "1RECV_F0<0") == [(0, 1, 3 * 4096)]
    assert moved(program, 2, "1SEND_B0>0") == [(0, 2, 4096)]
    assert moved(program, 0, "0RECV_B0<1") == [(0, 1, 3 * 4096), (0, 2, 4096)]
    assert moved(program, 3, "2RECV_F0<1") == [(1, 3, 3 * 4096), (2, 3, 4096)]


def test_other_actions_and_ranks_move_nothing(program: Program) -> None:
    assert moved(program, 0, "0F0") == []
    assert moved(program, 0, "0UPDATE") == []
    assert moved(program, 3, "1RECV_F0<0") == []
    assert moved(program, 0, "0SEND_F7>1") == []


def test_a_hand_over_in_memory_is_not_a_message() -> None:
    profile = chain_profile(2)
    decision = chain_decision(profile, (1,), (4,))
    boundaries = Boundaries.of(profile.graph, {"l0": 0, "l1": 1, "loss": 1}, (Layout(), Layout()), ((0,), (0,)))
    program = boundaries.program(decision)
    assert [(m.src, m.dst) for m in program.messages[0, 1, 0]] == [(0, 0)]
    assert moved(program, 0, "0SEND_F0>1") == []
    assert required(program, 0, "1F0") == [["0:0F0", "0:1RECV_F0<0"]]


def test_a_receive_needs_every_sender(program: Program) -> None:
    assert required(program, 3, "2RECV_F0<1") == [["1:1SEND_F0>2"], ["2:1SEND_F0>2"]]
    assert required(program, 0, "0RECV_B0<1") == [["1:1SEND_B0>0"], ["2:1SEND_B0>0"]]


def test_compute_needs_its_own_rank(program: Program) -> None:
    assert required(program, 2, "1F0") == [["2:0F0", "2:1RECV_F0<0"]]
    assert required(program, 2, "1REDUCE_GRAD") == [["2:1B0", "2:1W0"]]


def test_small_messages_are_received_far_ahead_and_large_ones_not() -> None:
    assert receive_window([1024, 2**20]) == 16
    assert receive_window([2**30]) == LEAST_POSTED
    assert receive_window([]) >= LEAST_POSTED


def with_skip(skip_bytes: int, schedule_name: str = "interleaved", num_microbatches: int = 2) -> Program:
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1; stage 0 feeds 1 and 3, so that 3 answers 2 and 0."""
    edges = tuple(Edge(src, dst, (f"v{src}",)) for src, dst in ((0, 1), (0, 3), (1, 2), (2, 3)))
    stages = StageGraph(4, num_microbatches, edges)
    messages = {}
    for edge in edges:
        part = Part(f"v{edge.src}", (), skip_bytes if (edge.src, edge.dst) == (0, 3) else 100)
        for m in range(num_microbatches):
            messages[edge.src, edge.dst, m] = (Message(edge.src % 2, edge.dst % 2, (part,), (part,)),)
    positions = (0, 1, 0, 1)
    order = schedule(schedule_name)(Pipeline(stages, positions))
    return lower(order, stages, tuple((each,) for each in positions), messages, 2)


def spelled(program: Program) -> dict[str, list[str]]:
    return {f"{src}: {send} to {dst}": [*map(str, each)] for (src, send, dst), each in program.joined().items()}


def test_what_one_action_sends_to_one_rank_travels_as_one_message() -> None:
    program = with_skip(1000)
    validate(program)
    assert spelled(program) == {
        "0: 0SEND_F0>3 to 1": ["0SEND_F0>1"],
        "0: 0SEND_F1>3 to 1": ["0SEND_F1>1"],
        "1: 3SEND_B0>0 to 0": ["3SEND_B0>2"],
        "1: 3SEND_B1>0 to 0": ["3SEND_B1>2"],
    }


def test_large_ones_travel_on_their_own_so_that_the_first_is_not_late() -> None:
    assert not with_skip(JOINED_BYTES - 99).joined()
    assert with_skip(JOINED_BYTES - 100).joined()


def test_messages_that_block_or_stream_are_not_joined() -> None:
    program = with_skip(1000)
    blocking = tuple(tuple(replace(a, blocking=a.peer is not None) for a in row) for row in program.rows)
    assert not replace(program, rows=blocking).joined()


def test_what_is_received_in_another_order_is_not_joined() -> None:
    """The receive of the first brings the others, so it has to come first."""
    program = with_skip(1000)
    first = Action.parse("1RECV_F0<0")
    second = Action.parse("3RECV_F0<0")
    swapped = {first: second, second: first}
    rows = (program.rows[0], tuple(swapped.get(action, action) for action in program.rows[1]))
    assert "0: 0SEND_F0>3 to 1" not in spelled(replace(program, rows=rows))
    assert "0: 0SEND_F1>3 to 1" in spelled(replace(program, rows=rows))


def test_a_chain_joins_nothing(program: Program) -> None:
    assert not program.sent_before()


@pytest.mark.parametrize(
    ("sizes", "count"),
    [([5], 0), ([5, 5], 1), ([5, 5, 5], 2), ([5, JOINED_BYTES], 0), ([JOINED_BYTES, 5, 5], 1), ([0, 0], 1)],
)
def test_first_come_first_joined_up_to_a_limit(sizes: list[int], count: int) -> None:
    assert num_joined(sizes) == count
