from __future__ import annotations

import random

import pytest

from benchmarks.chains import chain_profile
from planner.ir.box import Interval
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import Action, Edge, Op, Pipeline, Schedule, StageGraph, dependencies
from planner.passes import lower
from planner.schedules import names, schedule
from tests.planner.factories import chain_decision
from tests.planner.random_programs import random_program
from tests.planner.schedules.simulated import chain, lowered


def lines(program: Program) -> list[str]:
    return [" ".join(map(str, row)) for row in program.rows]


def test_the_picture_in_the_schedule_module_is_what_lowering_makes() -> None:
    from planner.ir import schedule as documented

    program = chain_decision(chain_profile(2), cuts=(1,), micro_batches=(1, 1), schedule="1f1b").program
    drawn = [f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(program)]
    assert drawn == [
        line.strip() for line in (documented.__doc__ or "").splitlines() if "rank 0:" in line or "rank 1:" in line
    ]


def test_a_stage_on_several_ranks_reduces_after_its_last_hand_back() -> None:
    profile = chain_profile(3, num_devices=4)
    decision = chain_decision(profile, (1, 2), (2, 2), ranks=((0,), (1, 2), (3,)))
    for rank in (1, 2):
        assert decision.program[rank][-3:] == ("1SEND_B1>0", "1REDUCE_GRAD", "1UPDATE")
    assert decision.program[0][-2:] == ("0B1", "0UPDATE")


def test_a_rank_without_a_share_of_the_rows_waits_for_none() -> None:
    program = chain_decision(chain_profile(2, 3), (1,), (4,), ((0,), (1, 2)), ((1,), (1, 0))).program
    assert program[2] == ("1F0", "1B0", "1REDUCE_GRAD", "1UPDATE")
    assert program[1] == ("1RECV_F0<0", "1F0", "1B0", "1SEND_B0>0", "1REDUCE_GRAD", "1UPDATE")


def test_split_backwards_hand_back_after_the_input_half() -> None:
    stages = StageGraph(2, 1, (Edge(0, 1, ("l0",)),))
    part = Part("l0", (Interval(0, 1),), 4)
    routes = {(0, 1, 0): (Message(0, 1, (part,), (part,)),)}
    split = tuple(tuple(Action(s, op, 0) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)) for s in (0, 1))
    program = lower(Schedule(split), stages, ((0,), (1,)), routes, 2)
    assert lines(program) == [
        "0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0UPDATE",
        "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1UPDATE",
    ]


def test_integers_are_sent_and_no_gradient_comes_back() -> None:
    stages = StageGraph(2, 1, (Edge(0, 1, ("tokens",), gradient=False),))
    routes = {(0, 1, 0): (Message(0, 1, (Part("tokens", (Interval(0, 1),), 8),), ()),)}
    program = lower(schedule("1f1b")(Pipeline(stages)), stages, ((0,), (1,)), routes, 2)
    assert lines(program) == ["0F0 0SEND_F0>1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1UPDATE"]


def test_a_rank_on_two_positions_is_refused() -> None:
    stages = StageGraph(2, 1, (Edge(0, 1, ("l0",)),))
    with pytest.raises(ValueError, match="rank 0 runs 2 positions of the schedule"):
        lower(schedule("gpipe")(Pipeline(stages)), stages, ((0,), (0,)), {}, 1)


def test_stages_of_one_rank_hand_over_in_memory() -> None:
    """Stages 0 and 2 on rank 0, 1 and 3 on rank 1; and 0 and 1 next to each other."""
    program = lowered(chain("interleaved", 2, 1, 2), "interleaved")
    assert lines(program) == [
        "0F0 0SEND_F0>1 2RECV_F0<1 2F0 2SEND_F0>3 2RECV_B0<3 2B0 2SEND_B0>1 0RECV_B0<1 0B0 0UPDATE 2UPDATE",
        "1RECV_F0<0 1F0 1SEND_F0>2 3RECV_F0<2 3F0 3B0 3SEND_B0>2 1RECV_B0<2 1B0 1SEND_B0>0 1UPDATE 3UPDATE",
    ]
    together = Pipeline(StageGraph.chain(3, 1), (0, 0, 1))
    assert lines(lowered(together, "greedy"))[0] == "0F0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 0B0 0UPDATE 1UPDATE"


def test_stages_of_a_position_reduce_one_by_one() -> None:
    pipeline = chain("interleaved", 1, 2, 2)
    program = lower(schedule("interleaved")(pipeline), pipeline.stages, ((0, 1), (0, 1)), {}, 2)
    assert lines(program)[0].endswith("1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD 0UPDATE 1UPDATE")
    with pytest.raises(ValueError, match=r"position 0 of the schedule is on several groups of ranks: stage 0 is on"):
        lower(schedule("interleaved")(pipeline), pipeline.stages, ((0, 1), (1,)), {}, 2)


def test_forwards_alone_are_neither_reduced_nor_updated() -> None:
    assert lines(lowered(chain("forward", 2, 2), "forward")) == [
        "0F0 0SEND_F0>1 0F1 0SEND_F1>1",
        "1RECV_F0<0 1F0 1RECV_F1<0 1F1",
    ]


def test_messages_that_block_say_so() -> None:
    assert lines(lowered(chain("1f1b-sno", 2, 1), "1f1b-sno")) == [
        "0F0 0SEND_F0>1! 0RECV_B0<1! 0B0 0UPDATE",
        "1RECV_F0<0! 1F0 1B0 1SEND_B0>0! 1UPDATE",
    ]


def test_updates_of_the_schedule_stay_where_they_are_and_reduce_first() -> None:
    pipeline = chain("pipedream", 1, 2)
    program = lower(schedule("pipedream")(pipeline), pipeline.stages, ((0, 1),), {}, 2)
    assert lines(program)[1] == "0F0 0B0 0REDUCE_GRAD0 0UPDATE0 0F1@1 0B1@1 0REDUCE_GRAD1 0UPDATE1"


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", range(25))
def test_receives_stand_before_their_consumer_and_sends_behind_their_producer(name: str, seed: int) -> None:
    program = random_program(random.Random(seed), name)
    for rank, row in enumerate(program.rows):
        computes = [action for action in row if action.microbatch is not None and action.peer is None]
        for index, action in enumerate(row):
            if action.peer is None:
                continue
            assert program.messages_of(rank, action)
            receive = action.op in (Op.RECV_FORWARD, Op.RECV_BACKWARD)
            around = row[index + 1 :] if receive else row[index - 1 :: -1]
            compute = next(a for a in around if a in computes)
            user, needed = (compute, action) if receive else (action, compute)
            assert any(needed in alternatives for alternatives in dependencies(user, program.stages))
