"""Programs that lowering makes of schedules: as written, and every message beside who makes it and who takes it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.ir import schedule as documented
from planner.ir.program import Program
from planner.ir.schedule import Action, Edge, Op, Pipeline, Schedule, StageGraph, dependencies
from planner.passes import in_flight, lower, validate
from planner.schedules import names, schedule, traits
from tests.planner.factories import chain_decision
from tests.planner.random_programs import random_program
from tests.planner.schedules.simulated import chain, lowered
from tests.planner.sparse_networks import classifier, sparse_profile

INTEGERS = StageGraph(2, 1, (Edge(0, 1, ("tokens",), gradient=False),))
HALVES = Schedule(
    tuple(tuple(Action(s, op, 0) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)) for s in (0, 1))
)


def prepared(num_microbatches: int, name: str = "1f1b", ahead: bool = True, num_stages: int = 1) -> Program:
    stages = replace(StageGraph.chain(num_stages, num_microbatches), prepares=tuple(range(num_stages)))
    ranks = tuple((stage,) for stage in range(num_stages))
    return lower(schedule(name)(Pipeline(stages)), stages, ranks, {}, num_stages, ahead=ahead)


def on_two_ranks(name: str, *size: int) -> Program:
    """All stages on the same two ranks, without messages."""
    pipeline = chain(name, *size)
    return lower(schedule(name)(pipeline), pipeline.stages, ((0, 1),) * pipeline.stages.num_stages, {}, 2)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("program", "rows"),
    [
        (  # the input half hands back
            lowered(Pipeline(StageGraph.chain(2, 1)), HALVES),
            ["0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0UPDATE", "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1UPDATE"],
        ),
        (  # no gradient of integers comes back
            lowered(Pipeline(INTEGERS), "1f1b"),
            ["0F0 0SEND_F0>1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1UPDATE"],
        ),
        (  # stages 0 and 2 on rank 0, 1 and 3 on rank 1
            lowered(chain("interleaved", 2, 1, 2), "interleaved"),
            [
                "0F0 0SEND_F0>1 2RECV_F0<1 2F0 2SEND_F0>3 2RECV_B0<3 2B0 2SEND_B0>1 0RECV_B0<1 0B0 0UPDATE 2UPDATE",
                "1RECV_F0<0 1F0 1SEND_F0>2 3RECV_F0<2 3F0 3B0 3SEND_B0>2 1RECV_B0<2 1B0 1SEND_B0>0 1UPDATE 3UPDATE",
            ],
        ),
        (  # neighbours of one rank hand over in memory
            lowered(Pipeline(StageGraph.chain(3, 1), (0, 0, 1)), "greedy"),
            ["0F0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 0B0 0UPDATE 1UPDATE", "2RECV_F0<1 2F0 2B0 2SEND_B0>1 2UPDATE"],
        ),
        (  # stages of a position reduce one by one
            on_two_ranks("interleaved", 1, 2, 2),
            ["0F0 1F0 1B0 0F1 0B0 1F1 1B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD 0UPDATE 1UPDATE"] * 2,
        ),
        (  # updates of the schedule stay where they are, and reduce first
            on_two_ranks("pipedream", 1, 2),
            ["0F0 0B0 0REDUCE_GRAD0 0UPDATE0 0F1@1 0B1@1 0REDUCE_GRAD1 0UPDATE1"] * 2,
        ),
        (  # forwards alone are neither reduced nor updated
            lowered(chain("forward", 2, 2), "forward"),
            ["0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1"],
        ),
        (  # messages that block say so
            lowered(chain("1f1b-sno", 2, 1), "1f1b-sno"),
            ["0F0 0SEND_F0>1! 0RECV_B0<1! 0B0 0UPDATE", "1RECV_F0<0! 1F0 1B0 1SEND_B0>0! 1UPDATE"],
        ),
        # what is prepared stands one micro-batch ahead, or just before its forward
        (prepared(3, "gpipe"), ["0PREP0 0PREP1 0F0 0PREP2 0F1 0F2 0B0 0B1 0B2 0UPDATE"]),
        (prepared(1), ["0PREP0 0F0 0B0 0UPDATE"]),
        (prepared(2, "gpipe", ahead=False), ["0PREP0 0F0 0PREP1 0F1 0B0 0B1 0UPDATE"]),
        (prepared(2, "forward"), ["0PREP0 0PREP1 0F0 0F1"]),
    ],
)
def test_a_schedule_is_lowered_to_these_rows(program: Program, rows: list[str]) -> None:
    assert [" ".join(map(str, row)) for row in program.rows] == rows


def test_the_pictures_in_the_schedule_module_are_what_lowering_makes() -> None:
    text = documented.__doc__ or ""
    program = chain_decision(chain_profile(2), cuts=(1,), micro_batches=(1, 1), schedule="1f1b").program
    drawn = [f"rank {rank}: {' '.join(row)}" for rank, row in enumerate(program)]
    assert drawn == [line.strip() for line in text.splitlines() if "rank 0:" in line or "rank 1:" in line]
    profile = sparse_profile(classifier())
    decision = chain_decision(profile, cuts=(3,), micro_batches=(1,) * 3, schedule="gpipe")
    picture = next(line for line in text.splitlines() if line.startswith("    0PREP0"))
    assert " ".join(decision.program[0]).startswith(picture.strip().removesuffix(" ..."))
    assert " ".join(decision.program[1]).startswith("1PREP0 1PREP1 1RECV_F0<0 1F0 "), "before what is received"


def test_a_stage_on_several_ranks_reduces_after_its_last_hand_back_and_waits_for_no_rows_that_it_has_not() -> None:
    decision = chain_decision(chain_profile(3, num_devices=4), (1, 2), (2, 2), ranks=((0,), (1, 2), (3,)))
    for rank in (1, 2):
        assert decision.program[rank][-3:] == ("1SEND_B1>0", "1REDUCE_GRAD", "1UPDATE")
    assert decision.program[0][-2:] == ("0B1", "0UPDATE")
    program = chain_decision(chain_profile(2, 3), (1,), (4,), ((0,), (1, 2)), ((1,), (1, 0))).program
    assert program[2] == ("1F0", "1B0", "1REDUCE_GRAD", "1UPDATE")
    assert program[1] == ("1RECV_F0<0", "1F0", "1B0", "1SEND_B0>0", "1REDUCE_GRAD", "1UPDATE")


@pytest.mark.parametrize(
    ("name", "pipeline", "ranks", "words"),
    [
        ("gpipe", chain("gpipe", 2, 1), ((0,), (0,)), "rank 0 runs 2 positions of the schedule"),
        (
            "interleaved",
            chain("interleaved", 1, 2, 2),
            ((0, 1), (1,)),
            "position 0 of the schedule is on several groups of ranks: stage 0 is on",
        ),
    ],
)
def test_ranks_that_no_position_can_have_are_refused(
    name: str, pipeline: Pipeline, ranks: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        lower(schedule(name)(pipeline), pipeline.stages, ranks, {}, 2)


@pytest.mark.cases(60)
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


@pytest.mark.parametrize("name", [name for name in names() if traits(name).stages_per_position == 1])
def test_every_schedule_prepares_legally_and_keeps_no_more_in_flight(name: str) -> None:
    stages = StageGraph.chain(2, 4)
    plain = lower(schedule(name)(Pipeline(stages)), stages, ((0,), (1,)), {}, 2)
    for ahead in (True, False):
        program = prepared(4, name, ahead, num_stages=2)
        without = tuple(tuple(a for a in row if a.op is not Op.PREPARE) for row in program.rows)
        assert without == plain.rows
        assert sum(action.op is Op.PREPARE for row in program.rows for action in row) == 8
        assert in_flight(program.rows, 2) == in_flight(plain.rows, 2)
        validate(prepared(4, name, ahead))


def test_an_action_that_prepares_is_read_back_and_its_forward_needs_it() -> None:
    assert str(Action.parse("1PREP3")) == "1PREP3"
    for wrong in ("1PREP", "1PREP3@1", "1PREP3>2"):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(wrong)
    stages = StageGraph(1, 2, (), (0,))
    assert dependencies(Action(0, Op.FORWARD, 1), stages) == (frozenset({Action(0, Op.PREPARE, 1)}),)
    assert dependencies(Action(0, Op.FORWARD, 1), replace(stages, prepares=())) == ()
    assert dependencies(Action(0, Op.PREPARE, 1), stages) == ()
