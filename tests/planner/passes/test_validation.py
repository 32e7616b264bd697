"""What is legal and what is not, case by case; ``test_mutations`` breaks programs at random."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from planner.ir.box import Interval
from planner.ir.errors import IllegalProgramError
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import Action, Edge, StageGraph
from planner.passes import validate
from planner.schedules import names
from tests.planner.random_programs import random_program

PROGRAMS = [(name, seed) for name in names() for seed in range(30)]
Pairs = tuple[tuple[int, int], ...]
Ranks = tuple[tuple[int, ...], ...]


def program_of(*rows: str, edges: Pairs = ((0, 1),), ranks: Ranks = ((0,), (1,)), microbatches: int = 1) -> Program:
    """A program as written, with one message for every edge, micro-batch and pair of ranks."""
    stages = StageGraph(len(ranks), microbatches, tuple(Edge(src, dst, ("x",)) for src, dst in edges))
    part = (Part("x", (Interval(0, 1),), 4),)
    routes = {
        (src, dst, m): tuple(Message(a, b, part, part) for a in ranks[src] for b in ranks[dst])
        for src, dst in edges
        for m in range(microbatches)
    }
    return Program(tuple(tuple(map(Action.parse, row.split())) for row in rows), stages, ranks, routes)


def refusal(program: Program, **limits: object) -> str:
    with pytest.raises(IllegalProgramError) as caught:
        validate(program, **limits)
    return str(caught.value)


@pytest.mark.parametrize(("name", "seed"), PROGRAMS)
def test_lowered_programs_are_legal(name: str, seed: int) -> None:
    validate(random_program(random.Random(seed), name))


def test_a_whole_backward_may_be_replaced_by_its_halves() -> None:
    validate(
        program_of(
            "0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0UPDATE",
            "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1UPDATE",
        )
    )


def test_whole_and_split_at_once_are_refused() -> None:
    text = refusal(program_of("0F0 0I0 0B0 0W0 0UPDATE", edges=(), ranks=((0,),)))
    assert "its backward is whole (B) and split (I, W) at once" in text
    assert "0F0 >>0I0<< 0B0" in text


def test_the_weight_half_needs_the_input_half() -> None:
    assert "rank 0 runs 0W0 before 0I0" in refusal(program_of("0F0 0W0 0I0 0UPDATE", edges=(), ranks=((0,),)))


def test_receives_in_another_order_than_the_sends_are_a_deadlock() -> None:
    legal = (
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0UPDATE",
        "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1UPDATE",
    )
    validate(program_of(*legal, microbatches=2))
    swapped = "1RECV_F1<0 1F1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1UPDATE"
    text = refusal(program_of(legal[0], swapped, microbatches=2))
    assert "rank 1 waits in 1RECV_F1<0 (the next message from rank 0 is that of 0SEND_F0>1)" in text
    assert "rank 0 waits in 0RECV_B0<1 (nothing has come from rank 1)" in text


def test_backward_messages_in_another_order_are_a_deadlock() -> None:
    text = refusal(
        program_of(
            "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B1<1 0B1 0RECV_B0<1 0B0 0UPDATE",
            "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1UPDATE",
            microbatches=2,
        )
    )
    assert "rank 0 waits in 0RECV_B1<1 (the next message from rank 1 is that of 1SEND_B0>0)" in text


def test_a_wait_in_a_circle_is_a_deadlock() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; rank 1 wants both first."""
    text = refusal(
        program_of(
            "0F0 0SEND_F0>1 0RECV_B0<1 0B0 0F1 0SEND_F1>1 0RECV_B1<1 0B1 0UPDATE",
            "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1UPDATE",
            microbatches=2,
        )
    )
    assert "never ends: rank 0 waits in 0RECV_B0<1 (nothing has come from rank 1); rank 1 waits in 1RECV_F1<0" in text
    assert "rank 0: 0F0 0SEND_F0>1 >>0RECV_B0<1<< 0B0" in text


def test_members_of_a_stage_run_it_in_one_order() -> None:
    legal = "0F0 0F1 0B0 0B1 0REDUCE_GRAD 0UPDATE"
    two = {"edges": (), "ranks": ((0, 1),), "microbatches": 2}
    validate(program_of(legal, legal, **two))
    assert "rank 1 waits in 0F1" in refusal(program_of(legal, "0F1 0F0 0B0 0B1 0REDUCE_GRAD 0UPDATE", **two))
    assert "rank 1 waits in 0B1" in refusal(program_of(legal, "0F0 0F1 0B1 0B0 0REDUCE_GRAD 0UPDATE", **two))


def test_reductions_of_two_stages_come_in_one_order_on_all_members() -> None:
    start = "0F0 1F0 0B0 1B0"
    both = {"edges": (), "ranks": ((0, 1), (0, 1))}
    rows = [f"{start} {a}REDUCE_GRAD {b}REDUCE_GRAD 0UPDATE 1UPDATE" for a, b in ((0, 1), (1, 0))]
    validate(program_of(rows[0], rows[0], **both))
    text = refusal(program_of(*rows, **both))
    assert "rank 0 waits in 0REDUCE_GRAD; rank 1 waits in 1REDUCE_GRAD" in text


def test_updates_of_two_stages_come_in_one_order_on_all_members() -> None:
    """Their ranks may divide the optimiser, whose update they then make together."""
    start = "0F0 1F0 0B0 1B0 0REDUCE_GRAD 1REDUCE_GRAD"
    both = {"edges": (), "ranks": ((0, 1), (0, 1))}
    text = refusal(program_of(f"{start} 0UPDATE 1UPDATE", f"{start} 1UPDATE 0UPDATE", **both))
    assert "rank 0 waits in 0UPDATE; rank 1 waits in 1UPDATE" in text


def test_two_stages_on_one_rank_hand_over_in_memory() -> None:
    one = {"edges": ((0, 1), (1, 2)), "ranks": ((0,), (1,), (0,))}
    rows = (
        "0F0 0SEND_F0>1 2RECV_F0<1 2F0 2B0 2SEND_B0>1 0RECV_B0<1 0B0 0UPDATE 2UPDATE",
        "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1UPDATE",
    )
    validate(program_of(*rows, **one))
    same = {"edges": ((0, 1),), "ranks": ((0,), (0,))}
    validate(program_of("0F0 1F0 1B0 0B0 0UPDATE 1UPDATE", **same))
    assert "rank 0 runs 1F0 before 0F0, which it needs" in refusal(
        program_of("1F0 0F0 1B0 0B0 0UPDATE 1UPDATE", **same)
    )
    assert "rank 0 runs 0B0 before 1B0, which it needs" in refusal(
        program_of("0F0 1F0 0B0 1B0 0UPDATE 1UPDATE", **same)
    )


FORWARDS = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1")


def test_forwards_alone_are_a_program_and_a_stray_backward_makes_it_one_that_trains() -> None:
    validate(program_of(*FORWARDS, microbatches=2))
    text = refusal(program_of(FORWARDS[0], f"{FORWARDS[1]} 1B0", microbatches=2))
    assert "rank 0 lacks 0B0, 0RECV_B0<1, 0B1 and 2 more" in text
    assert "rank 1 has 1SEND_F0>0, but no message" in refusal(
        program_of(FORWARDS[0], f"{FORWARDS[1]} 1SEND_F0>0", microbatches=2)
    )


def test_all_messages_block_or_none() -> None:
    held = [row.replace(">1", ">1!").replace("<0", "<0!") for row in FORWARDS]
    validate(program_of(*held, microbatches=2))
    text = refusal(program_of(held[0], FORWARDS[1], microbatches=2))
    assert "rank 1: 1RECV_F0<0 does not block, 0SEND_F0>1! blocks: all messages do or none" in text
    stray = replace(Action.parse("0F0"), blocking=True)
    program = program_of(*FORWARDS, microbatches=2)
    rows = ((stray, *program.rows[0][1:]), program.rows[1])
    assert "0F0 blocks, but is no message" in refusal(replace(program, rows=rows))


def test_weights_are_named_by_what_uses_them_alone() -> None:
    program = program_of(*FORWARDS, microbatches=2)
    rows = ((program.rows[0][0], replace(program.rows[0][1], version=1), *program.rows[0][2:]), program.rows[1])
    assert "uses no weights, but names a version" in refusal(replace(program, rows=rows))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": ((0,),)}, "ranks are given for 1 stages, there are 2"),
        ({"ranks": ((0,), ())}, "stage 1 is on ranks []"),
        ({"ranks": ((0,), (1, 1))}, "stage 1 is on ranks [1, 1]"),
        ({"ranks": ((0,), (2,))}, "stage 1 is on rank 2, the program has ranks 0 to 1"),
        ({"ranks": ((-1,), (1,))}, "stage 0 is on rank -1"),
        ({"stages": StageGraph(2, 1, (Edge(1, 0, ()),))}, "an edge goes from stage 1 to 0"),
        ({"stages": StageGraph(2, 1, (Edge(0, 2, ()),))}, "an edge goes from stage 0 to 2"),
        ({"messages": {(0, 1, 0): (Message(1, 0, (), ()),)}}, "goes from rank 1 to 0, which do not run these stages"),
        ({"messages": {}}, "edge 0 to 1 has none for this rank and micro-batch"),
    ],
)
def test_stages_and_ranks_that_do_not_exist_are_refused(change, text: str) -> None:
    rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE")
    validate(program_of(*rows))
    assert text in refusal(replace(program_of(*rows), **change))


def test_a_reduction_of_one_rank_is_refused() -> None:
    text = refusal(program_of("0F0 0B0 0REDUCE_GRAD 0UPDATE", edges=(), ranks=((0,),)))
    assert "stage 0 is on one rank: there is nothing to sum" in text


def test_an_empty_row_of_a_busy_rank_is_refused_and_of_an_idle_one_is_not() -> None:
    row = "0F0 0B0 0UPDATE"
    validate(program_of(row, "", edges=(), ranks=((0,),)))
    assert "rank 1 lacks 0F0, 0B0, 0REDUCE_GRAD and 1 more" in refusal(
        program_of("0F0 0B0 0REDUCE_GRAD 0UPDATE", "", edges=(), ranks=((0, 1),))
    )
