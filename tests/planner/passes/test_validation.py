"""What is legal and what is not, row by row; ``test_mutations`` breaks programs at random."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from planner.ir.box import Interval
from planner.ir.errors import IllegalProgramError
from planner.ir.program import Message, Part, Program
from planner.ir.schedule import Action, Edge, StageGraph
from planner.passes import staleness, validate, versions_kept
from planner.passes.versions import updates_of
from planner.schedules import names
from tests.planner.random_programs import random_program
from tests.planner.schedules.simulated import chain, lowered

Pairs = tuple[tuple[int, int], ...]
Ranks = tuple[tuple[int, ...], ...]


def program_of(
    *rows: str,
    edges: Pairs = ((0, 1),),
    ranks: Ranks = ((0,), (1,)),
    microbatches: int = 1,
    prepares: tuple[int, ...] = (),
) -> Program:
    """A program as written, with one message for every edge, micro-batch and pair of ranks."""
    stages = StageGraph(len(ranks), microbatches, tuple(Edge(src, dst, ("x",)) for src, dst in edges), prepares)
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


@pytest.mark.cases(60)
@pytest.mark.parametrize(("name", "seed"), [(name, seed) for name in names() for seed in range(30)])
def test_lowered_programs_are_legal(name: str, seed: int) -> None:
    validate(random_program(random.Random(seed), name))


How = Mapping[str, object]
PIPED: How = {}
ALONE: How = {"edges": (), "ranks": ((0,),)}
THREE: How = {**ALONE, "microbatches": 3}
MEMBERS: How = {"edges": (), "ranks": ((0, 1),), "microbatches": 2}
TWO_STAGES: How = {"edges": (), "ranks": ((0, 1), (0, 1))}
ONE_RANK: How = {"edges": ((0, 1),), "ranks": ((0,), (0,))}
PREPARES: How = {**ALONE, "prepares": (0,)}

TWO: How = {"microbatches": 2}
FIRST = "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0UPDATE"
SECOND = "1RECV_F0<0 1F0 1RECV_F1<0 1F1 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1UPDATE"
FORWARDS = ("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1")
BLOCKING = ("0F0 0SEND_F0>1! 0F1 0SEND_F1>1!", "1RECV_F0<0! 1F0 1RECV_F1<0! 1F1")
TOGETHER = "0F0 0F1 0B0 0B1 0REDUCE_GRAD 0UPDATE"
UPDATED = "0F0 0F1 0B0 0UPDATE0 0F2@1 0B1 0UPDATE1 0B2@1 0UPDATE2"
HALVES = "0F0 0I0 0W0 0UPDATE0 0F1@1 0I1@1 0W1@1 0UPDATE1"
EACH_UPDATED = "0F0 0B0 0REDUCE_GRAD0 0UPDATE0 0F1@1 0B1@1 0REDUCE_GRAD1 0UPDATE1"
BOTH = "0F0 1F0 0B0 1B0"


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "how"),
    [
        (("0F0 0SEND_F0>1 0RECV_B0<1 0I0 0W0 0UPDATE", "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0 1UPDATE"), PIPED),
        ((FIRST, SECOND), TWO),
        ((TOGETHER, TOGETHER), MEMBERS),
        ((f"{BOTH} 0REDUCE_GRAD 1REDUCE_GRAD 0UPDATE 1UPDATE",) * 2, TWO_STAGES),
        (  # stages 0 and 2 on one rank
            (
                "0F0 0SEND_F0>1 2RECV_F0<1 2F0 2B0 2SEND_B0>1 0RECV_B0<1 0B0 0UPDATE 2UPDATE",
                "1RECV_F0<0 1F0 1SEND_F0>2 1RECV_B0<2 1B0 1SEND_B0>0 1UPDATE",
            ),
            {"edges": ((0, 1), (1, 2)), "ranks": ((0,), (1,), (0,))},
        ),
        (("0F0 1F0 1B0 0B0 0UPDATE 1UPDATE",), ONE_RANK),  # which hand over in memory
        (FORWARDS, TWO),
        (BLOCKING, TWO),
        (("0F0 0B0 0UPDATE", ""), ALONE),  # an idle rank
        ((UPDATED,), THREE),
        ((HALVES,), {**ALONE, **TWO}),
        ((EACH_UPDATED, EACH_UPDATED), MEMBERS),
        (("0PREP0 0F0 0B0 0UPDATE",), PREPARES),
    ],
)
def test_what_is_legal_is_not_refused(rows: tuple[str, ...], how: How) -> None:
    validate(program_of(*rows, **how))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "how", "words"),
    [
        (("0F0 0I0 0B0 0W0 0UPDATE",), ALONE, ["backward is whole (B) and split (I, W) at once", "0F0 >>0I0<< 0B0"]),
        (("0F0 0W0 0I0 0UPDATE",), ALONE, ["rank 0 runs 0W0 before 0I0"]),
        (  # receives in another order than the sends
            (FIRST, "1RECV_F1<0 1F1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1B1 1SEND_B1>0 1UPDATE"),
            TWO,
            [
                "rank 1 waits in 1RECV_F1<0 (the next message from rank 0 is that of 0SEND_F0>1)",
                "rank 0 waits in 0RECV_B0<1 (nothing has come from rank 1)",
            ],
        ),
        (
            (
                "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B1<1 0B1 0RECV_B0<1 0B0 0UPDATE",
                "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1UPDATE",
            ),
            TWO,
            ["rank 0 waits in 0RECV_B1<1 (the next message from rank 1 is that of 1SEND_B0>0)"],
        ),
        (  # a circle: rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; rank 1 wants both first
            ("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0F1 0SEND_F1>1 0RECV_B1<1 0B1 0UPDATE", SECOND),
            TWO,
            [
                "never ends: rank 0 waits in 0RECV_B0<1 (nothing has come from rank 1); rank 1 waits in 1RECV_F1<0",
                "rank 0: 0F0 0SEND_F0>1 >>0RECV_B0<1<< 0B0",
            ],
        ),
        ((TOGETHER, "0F1 0F0 0B0 0B1 0REDUCE_GRAD 0UPDATE"), MEMBERS, ["rank 1 waits in 0F1"]),
        ((TOGETHER, "0F0 0F1 0B1 0B0 0REDUCE_GRAD 0UPDATE"), MEMBERS, ["rank 1 waits in 0B1"]),
        (
            tuple(f"{BOTH} {a}REDUCE_GRAD {1 - a}REDUCE_GRAD 0UPDATE 1UPDATE" for a in (0, 1)),
            TWO_STAGES,
            ["rank 0 waits in 0REDUCE_GRAD; rank 1 waits in 1REDUCE_GRAD"],
        ),
        (  # their ranks may divide the optimiser, whose update they then make together
            tuple(f"{BOTH} 0REDUCE_GRAD 1REDUCE_GRAD {a}UPDATE {1 - a}UPDATE" for a in (0, 1)),
            TWO_STAGES,
            ["rank 0 waits in 0UPDATE; rank 1 waits in 1UPDATE"],
        ),
        (("1F0 0F0 1B0 0B0 0UPDATE 1UPDATE",), ONE_RANK, ["rank 0 runs 1F0 before 0F0, which it needs"]),
        (("0F0 1F0 0B0 1B0 0UPDATE 1UPDATE",), ONE_RANK, ["rank 0 runs 0B0 before 1B0, which it needs"]),
        ((FORWARDS[0], f"{FORWARDS[1]} 1B0"), TWO, ["rank 0 lacks 0B0, 0RECV_B0<1, 0B1 and 2 more"]),  # it trains then
        ((FORWARDS[0], f"{FORWARDS[1]} 1SEND_F0>0"), TWO, ["rank 1 has 1SEND_F0>0, but no message"]),
        (
            (BLOCKING[0], FORWARDS[1]),
            TWO,
            ["rank 1: 1RECV_F0<0 does not block, 0SEND_F0>1! blocks: all messages do or none"],
        ),
        (("0F0 0B0 0REDUCE_GRAD 0UPDATE",), ALONE, ["stage 0 is on one rank: there is nothing to sum"]),
        (
            ("0F0 0B0 0REDUCE_GRAD 0UPDATE", ""),
            {"edges": (), "ranks": ((0, 1),)},
            ["rank 1 lacks 0F0, 0B0, 0REDUCE_GRAD and 1 more"],
        ),
        # versions of weights
        ((UPDATED.replace("0B2@1", "0B2"),), THREE, ["0B2 uses version 0 of the weights, 0F2@1 another"]),
        ((UPDATED.replace("2@1", "2@2"),), THREE, ["0F2@2 uses version 2 of the weights, 1 updates have been made"]),
        (
            (UPDATED.replace("0UPDATE2", "0UPDATE"),),
            THREE,
            ["has 0UPDATE, but every stage is updated after micro-batches 0, 1, 2"],
        ),
        ((UPDATED.replace("0UPDATE1 ", ""),), THREE, ["rank 0 lacks 0UPDATE1"]),
        (
            ("0F0 0F1 0F2 0B0 0B1 0UPDATE0 0UPDATE1 0B2 0UPDATE2",),
            THREE,
            ["0B1 comes before 0UPDATE0, which would count it"],
        ),
        (
            ("0F0 0F1 0F2 0UPDATE0 0B0 0B1 0UPDATE1 0B2 0UPDATE2",),
            THREE,
            ["rank 0 runs 0UPDATE0 before 0B0, which it needs"],
        ),
        (
            ("0F0 0B0 0F1 0B1 0F2 0B2 0UPDATE2",),
            THREE,
            ["has 0UPDATE2, but every stage is updated once a step"],
        ),
        (
            ("0F0@1 0B0@1 0F1 0B1 0F2 0B2 0UPDATE",),
            THREE,
            ["0F0@1 uses version 1 of the weights, 0 updates have been made"],
        ),
        (
            (HALVES.replace("W1@1", "W1"),),
            {**ALONE, **TWO},
            ["0W1 uses version 0 of the weights, 0F1@1 another"],
        ),
        (
            (EACH_UPDATED, EACH_UPDATED.replace("@1", "")),
            MEMBERS,
            ["rank 1: 0F1 uses version 0 of the weights, 0F1@1 another"],
        ),
        # inputs that are prepared
        (("0F0 0B0 0UPDATE",), PREPARES, ["lacks 0PREP0"]),
        (("0F0 0PREP0 0B0 0UPDATE",), PREPARES, ["runs 0F0 before 0PREP0"]),
        (("0PREP0 0PREP0 0F0 0B0 0UPDATE",), PREPARES, ["has 0PREP0 2 times"]),
        (("0PREP0 0PREP1 0F0 0B0 0UPDATE",), PREPARES, ["micro-batches are 0 to 0"]),
        (("0PREP0 0F0 0B0 0UPDATE",), ALONE, ["stage 0 reads nothing that is prepared"]),
    ],
)
def test_what_is_not_legal_is_refused_with_the_reason(rows: tuple[str, ...], how: How, words: list[str]) -> None:
    text = refusal(program_of(*rows, **how))
    for each in words:
        assert each in text
    assert (">>" in text) == all(rows), "the culprit is marked, where there is an action"


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, {"blocking": True}, "0F0 blocks, but is no message"),
        (1, {"version": 1}, "uses no weights, but names a version"),
    ],
)
def test_an_action_that_is_none_is_refused(place: int, change: dict[str, int], words: str) -> None:
    program = program_of(*FORWARDS, microbatches=2)
    first = list(program.rows[0])
    first[place] = replace(first[place], **change)
    assert words in refusal(replace(program, rows=(tuple(first), program.rows[1])))


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
def test_stages_and_ranks_that_do_not_exist_are_refused(change: Mapping[str, object], text: str) -> None:
    rows = ("0F0 0SEND_F0>1 0RECV_B0<1 0B0 0UPDATE", "1RECV_F0<0 1F0 1B0 1SEND_B0>0 1UPDATE")
    assert text in refusal(replace(program_of(*rows), **change))


def test_weights_older_than_claimed_are_refused() -> None:
    program = lowered(chain("pipedream", 3, 6), "pipedream")
    validate(program, staleness=(2, 1, 0))
    text = refusal(program, staleness=(1, 1, 0))
    assert "rank 0: 0F2 runs on weights that lack 2 updates, at most 1 are claimed" in text
    assert "0F1 0SEND_F1>1 >>0F2<<" in text


def test_versions_of_weights_are_counted() -> None:
    asynchronous = program_of(UPDATED, **THREE)
    once = lowered(chain("1f1b", 3, 6), "1f1b")
    found = [
        (updates_of(each), staleness(each), versions_kept(each.rows, each.stages.num_stages))
        for each in (asynchronous, once)
    ]
    assert found == [((0, 1, 2), (1,), (2,)), ((None,), (0, 0, 0), (1, 1, 1))]
