"""Freedom from deadlock: one run agrees with every other order of advancing, and with a plain model of rendezvous."""

from __future__ import annotations

import random

import pytest

from planner.ir.box import Interval
from planner.ir.errors import IllegalProgramError
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import COMPUTE, RECEIVE, SEND, Action, Op, Pipeline, StageGraph, dependencies
from planner.passes import lower, validate
from planner.passes.ending import TOGETHER, stuck
from planner.passes.events import in_order
from planner.passes.numbering import Numbering
from planner.schedules import names, schedule, traits
from tests.planner.random_programs import random_pipeline, random_program
from tests.planner.schedules.simulated import chain, dag, lowered

LETTERS = {Op.SEND_FORWARD: "F", Op.RECV_FORWARD: "F", Op.SEND_BACKWARD: "B", Op.RECV_BACKWARD: "B"}


def plainly_ends(program: Program, window: int, held_sends: bool, rng: random.Random) -> bool:
    """Rendezvous as it is, in any order: messages move when sent and posted; all must have moved in the end."""
    rows = program.rows
    at = [0] * len(program.rows)
    sent: set[object] = set()

    def names_of(rank: int, action: Action) -> list[object]:
        ends = (action.stage, action.peer) if action.op in SEND else (action.peer, action.stage)
        others = [m.dst if m.src == rank else m.src for m in program.messages_of(rank, action)]
        pairs = [(rank, other) if action.op in SEND else (other, rank) for other in others]
        return [(LETTERS[action.op], ends, action.microbatch, pair) for pair in pairs]

    def posted(rank: int) -> set[object]:
        done = sum(action.op in RECEIVE for action in rows[rank][: at[rank]])
        receives = [action for action in rows[rank] if action.op in RECEIVE]
        waits = at[rank] < len(rows[rank]) and rows[rank][at[rank]].op in RECEIVE
        return {name for action in receives[: done + max(window, int(waits))] for name in names_of(rank, action)}

    def can_move(rank: int) -> bool:
        if at[rank] == len(rows[rank]):
            return False
        action = rows[rank][at[rank]]
        everywhere = {name for other in range(len(rows)) for name in posted(other)}
        if action.op in SEND:
            return not held_sends or all(name in everywhere for name in names_of(rank, action))
        if action.op in RECEIVE:
            return all(name in sent for name in names_of(rank, action))
        members = program.ranks[action.stage] if action.op in TOGETHER else (rank,)
        return all(at[m] < len(rows[m]) and rows[m][at[m]] == action for m in members)

    while movable := [rank for rank in range(len(rows)) if can_move(rank)]:
        rank = rng.choice(movable)
        action = rows[rank][at[rank]]
        sent.update(names_of(rank, action) if action.op in SEND else ())
        for member in program.ranks[action.stage] if action.op in TOGETHER else (rank,):
            at[member] += 1
    received = {name for rank in range(len(rows)) for name in posted(rank)}
    return all(at[rank] == len(row) for rank, row in enumerate(rows)) and sent <= received


@pytest.mark.parametrize("held_sends", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_one_run_says_what_any_order_of_advancing_says(seed: int, held_sends: bool) -> None:
    rng = random.Random(seed)
    program = random_program(rng, rng.choice(names()))
    rows = [list(row) for row in program.rows]
    if rng.random() < 0.6:  # exchange two neighbours that may, or may not, be exchanged
        row = rng.choice([row for row in rows if len(row) > 1] or [["", ""]])
        i = rng.randrange(len(row) - 1)
        row[i : i + 2] = row[i + 1], row[i]
    broken = Program(tuple(map(tuple, rows)), program.stages, program.ranks, program.messages)
    window = rng.randint(0, 3)
    ours = not stuck(Numbering(broken), held_sends, [window] * len(rows))
    if ours:
        assert plainly_ends(broken, window, held_sends, rng)
    elif plainly_ends(broken, window, held_sends, rng):  # the one thing that is stricter: order within an edge
        assert any("the next message from" in each.why for each in stuck(Numbering(broken), held_sends, [window] * 9))


def least_window(program: Program) -> int:
    """The fewest receives posted ahead with which the program ends even if every send holds its rank."""
    windows = ([window] * len(program.rows) for window in range(64))
    return next(each[0] for each in windows if not stuck(Numbering(program), True, each))


@pytest.mark.parametrize("name", [name for name in names() if traits(name).stages_per_position == 1])
@pytest.mark.parametrize("p", [2, 8])
def test_on_a_chain_one_receive_ahead_is_enough_for_held_sends(name: str, p: int) -> None:
    program = lowered(chain(name, p, 16), name)
    validate(program, held_sends=True)
    assert least_window(program) <= 1


@pytest.mark.parametrize(("name", "most"), [("interleaved", 2), ("forward", 1), ("zb-v", 6)])
def test_with_two_stages_a_position_a_few_are_needed(name: str, most: int) -> None:
    assert least_window(lowered(chain(name, 4, 8, 2), name)) <= most


def test_a_long_skip_holds_as_many_messages_as_the_warm_up() -> None:
    """The last stage takes none of the first's messages before those of the stages between have arrived."""
    skip = dag(8, 32, *((s, s + 1) for s in range(7)), (0, 7))
    program = lowered(Pipeline(skip), "1f1b")
    validate(program)
    assert least_window(program) == 8


def test_a_held_send_that_nobody_posted_a_receive_for_is_a_deadlock() -> None:
    stages = StageGraph.chain(2, 32)
    wide = Pipeline(stages, windows=(32, 1))
    program = lowered(wide, "1f1b-windowed")
    validate(program)
    (first, second) = stuck(Numbering(program), True, [4, 4])
    assert first.why == "0SEND_F9>1 (rank 1 has not posted its receive)"
    assert second.why == "1SEND_B4>0 (rank 0 has not posted its receive)"
    assert least_window(program) == 16


def test_a_message_that_blocks_is_held_to_the_runtimes_window() -> None:
    """Messages of 32 MiB: four receives are posted ahead, too few for a skip over seven stages."""
    part = (Part("x", (Interval(0, 1),), 2**25),)
    skip = dag(8, 16, *((s, s + 1) for s in range(7)), (0, 7))
    routes = {(e.src, e.dst, m): (Message(e.src, e.dst, part, part),) for e in skip.edges for m in range(16)}
    ranks = tuple((s,) for s in range(8))
    validate(lower(schedule("1f1b")(Pipeline(skip)), skip, ranks, routes, 8))
    with pytest.raises(IllegalProgramError, match=r"rank 0 waits in 0SEND_F5>7 \(rank 7 has not posted its receive\)"):
        validate(lower(schedule("1f1b-sno")(Pipeline(skip)), skip, ranks, routes, 8))


@pytest.mark.parametrize("name", [name for name in names() if traits(name).stages_per_position == 1])
def test_all_actions_come_after_what_they_depend_on(name: str) -> None:
    pipeline = random_pipeline(random.Random(name), name, StageGraph.chain(3, 5), ())
    rows = schedule(name)(pipeline).rows
    order = in_order([[action for action in row if action.op in COMPUTE] for row in rows], pipeline)
    assert order is not None
    place = {(action.stage, action.op, action.microbatch): number for number, action in enumerate(order)}
    assert len(place) == sum(action.op in COMPUTE for row in rows for action in row)
    for number, action in enumerate(order):
        for group in dependencies(action, pipeline.stages):
            before = [place[key] for a in group if (key := (a.stage, a.op, a.microbatch)) in place]
            assert not before or max(before) < number


def test_rows_that_wait_for_one_another_have_no_order() -> None:
    rows = [[Action(0, Op.FORWARD, 0), Action(0, Op.BACKWARD, 0), Action(0, Op.FORWARD, 1), Action(0, Op.BACKWARD, 1)]]
    rows += [[Action(1, Op.FORWARD, m) for m in range(2)] + [Action(1, Op.BACKWARD, m) for m in range(2)]]
    assert in_order(rows, Pipeline(StageGraph.chain(2, 2))) is None
