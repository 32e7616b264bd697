from __future__ import annotations

import pytest

from planner.ir.layout import Layout
from planner.ir.program import LEAST_POSTED, Program, receive_window
from planner.ir.schedule import Action
from planner.layers.boundary import Boundaries
from tests.planner.factories import chain_decision, chain_profile


@pytest.fixture(name="program")
def _program() -> Program:
    """Stage 0 on rank 0, stage 1 on ranks 1 and 2 (3 samples and 1), stage 2 on rank 3."""
    profile = chain_profile(3, num_devices=4)
    decision = chain_decision(profile, (1, 2), (4,), ((0,), (1, 2), (3,)), ((1,), (3, 1), (1,)))
    return Boundaries.of_decision(profile.graph, decision).program(decision)


def requirements(program: Program, rank: int, text: str) -> list[list[str]]:
    found = program.requirements(rank, Action.parse(text))
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
    assert requirements(program, 0, "1F0") == [["0:0F0", "0:1RECV_F0<0"]]


def test_a_receive_needs_every_sender(program: Program) -> None:
    assert requirements(program, 3, "2RECV_F0<1") == [["1:1SEND_F0>2"], ["2:1SEND_F0>2"]]
    assert requirements(program, 0, "0RECV_B0<1") == [["1:1SEND_B0>0"], ["2:1SEND_B0>0"]]


def test_compute_needs_its_own_rank(program: Program) -> None:
    assert requirements(program, 2, "1F0") == [["2:0F0", "2:1RECV_F0<0"]]
    assert requirements(program, 2, "1REDUCE_GRAD") == [["2:1B0", "2:1W0"]]


def test_small_messages_are_received_far_ahead_and_large_ones_not() -> None:
    assert receive_window([1024, 2**20]) == 16
    assert receive_window([2**30]) == LEAST_POSTED
    assert receive_window([]) >= LEAST_POSTED
