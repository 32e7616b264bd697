from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.ir.schedule import COMPUTE, MESSAGE, PER_STEP, Action, Edge, Op, StageGraph, dependencies, format_grid

numbers = st.integers(0, 300)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    op = draw(st.sampled_from(Op))
    return Action(
        draw(numbers),
        op,
        None if op in PER_STEP and draw(st.booleans()) else draw(numbers),
        draw(numbers) if op in MESSAGE else None,
        draw(numbers) if op in COMPUTE else 0,
        draw(st.booleans()) if op in MESSAGE else False,
    )


@given(actions())
def test_an_action_is_read_as_it_was_written(action: Action) -> None:
    found = Action.parse(str(action))
    assert astuple(found) == astuple(action)
    assert str(found) == str(action)


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("0F5@2", {"version": 2}),
        ("1SEND_B3>0!", {"blocking": True}),
        ("1RECV_F3<0!", {"blocking": True}),
        ("1SEND_F3>2~", {"streams": "~"}),
        ("2RECV_B3<3~~", {"streams": "~~"}),
    ],
)
def test_how_an_action_is_done_is_written_and_does_not_make_it_another(text: str, how: dict[str, object]) -> None:
    action = Action.parse(text)
    plain = replace(action, version=0, blocking=False, streams="")
    assert (str(replace(plain, **how)), action) == (text, plain)
    assert hash(action) == hash(plain)
    assert str(plain) != text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Op.FORWARD, 0)),
        ("10I12", Action(10, Op.BACKWARD_INPUT, 12)),
        ("1SEND_F3>2", Action(1, Op.SEND_FORWARD, 3, 2)),
        ("1RECV_B3<2", Action(1, Op.RECV_BACKWARD, 3, 2)),
        ("0REDUCE_GRAD", Action(0, Op.REDUCE_GRAD)),
        ("0UPDATE", Action(0, Op.UPDATE)),
        ("0UPDATE3", Action(0, Op.UPDATE, 3)),
        ("0REDUCE_GRAD12", Action(0, Op.REDUCE_GRAD, 12)),
    ],
)
def test_actions_are_written_as_in_torch_pipelining(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.every_case
@pytest.mark.parametrize(
    "text",
    [
        *("", "0F", "F0", "2X0", "2F0 ", " 2F0", "02F0", "2F00", "-1F0", "2f0", "²F0", "٢F0", "2F0>1"),
        *("1SEND_F3", "1SEND_F3<2", "1RECV_F3>2", "1SEND_F>2", "0UPDATE>1", "0REDUCE_GRAD>1"),
        *("2F0@0", "2F0@01", "2F0@", "2F0@-1", "2F0!", "0UPDATE!", "1SEND_F3!>2", "1SEND_F3>2!!"),
        *("0UPDATE@1", "0REDUCE_GRAD2@1", "1SEND_F3>2@1", "1SEND_F3>2!@1", "1RECV_F3<2@4!"),
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action; write 2F0"):
        Action.parse(text)


#        0 ─── 1 ─── 3
#         ╲         ╱
#          ── 2 ───          and integers alone from 0 to 3
DIAMOND = StageGraph(
    4,
    2,
    (
        Edge(0, 1, ("a",)),
        Edge(0, 2, ("a",)),
        Edge(0, 3, ("mask",), gradient=False),
        Edge(1, 3, ("b",)),
        Edge(2, 3, ("c",)),
    ),
)


def needs(text: str, stages: StageGraph = DIAMOND) -> list[str]:
    return [" | ".join(sorted(map(str, each))) for each in dependencies(Action.parse(text), stages)]


@pytest.mark.parametrize(
    ("action", "needed"),
    [
        ("0F1", []),
        ("1F1", ["0F1 | 1RECV_F1<0"]),
        ("3F0", ["0F0 | 3RECV_F0<0", "1F0 | 3RECV_F0<1", "2F0 | 3RECV_F0<2"]),
        ("3B0", ["3F0"]),
        ("0B1", ["0F1", "0RECV_B1<1 | 1B1 | 1I1", "0RECV_B1<2 | 2B1 | 2I1"]),
        ("0I1", ["0F1", "0RECV_B1<1 | 1B1 | 1I1", "0RECV_B1<2 | 2B1 | 2I1"]),
        ("2W0", ["2I0"]),
        ("1SEND_F0>3", ["1F0"]),
        ("1SEND_B0>0", ["1B0 | 1I0"]),
        ("1RECV_F0<0", ["0SEND_F0>1"]),
        ("1RECV_B0<3", ["3SEND_B0>1"]),
        ("2REDUCE_GRAD", ["2B0 | 2W0", "2B1 | 2W1"]),
        ("2UPDATE", ["2B0 | 2REDUCE_GRAD | 2W0", "2B1 | 2REDUCE_GRAD | 2W1"]),
        ("2REDUCE_GRAD0", ["2B0 | 2W0"]),
        ("2UPDATE0", ["2B0 | 2REDUCE_GRAD0 | 2W0"]),
        ("2UPDATE1", ["2B0 | 2REDUCE_GRAD1 | 2W0", "2B1 | 2REDUCE_GRAD1 | 2W1"]),
    ],
)
def test_what_must_come_first(action: str, needed: list[str]) -> None:
    assert needs(action) == needed


@pytest.mark.parametrize("op", sorted(set(Op) - PER_STEP))
def test_what_must_come_first_is_the_same_for_every_micro_batch(op: Op) -> None:
    for stage in range(4):
        peers = range(4) if op in MESSAGE else (None,)
        for peer in peers:
            at_0, at_1 = (dependencies(Action(stage, op, m, peer), DIAMOND) for m in (0, 1))
            shifted = tuple(frozenset(replace(action, microbatch=1) for action in group) for group in at_0)
            assert shifted == at_1


def test_a_receive_without_its_stage_is_a_programmers_error() -> None:
    with pytest.raises(ValueError, match="RECV_F needs the other stage"):
        dependencies(Action(1, Op.RECV_FORWARD, 0), DIAMOND)


def test_the_stage_graph_finds_its_edges() -> None:
    assert [edge.dst for edge in DIAMOND.out_of(0)] == [1, 2, 3]
    assert [edge.src for edge in DIAMOND.into(3)] == [0, 1, 2]
    assert DIAMOND.edge(1, 3) == Edge(1, 3, ("b",))
    assert DIAMOND.edge(3, 1) is None
    assert [(edge.src, edge.dst) for edge in StageGraph.chain(3, 1).edges] == [(0, 1), (1, 2)]


ROWS = [[Action(s, Op.FORWARD, m) for m in range(9)] for s in range(2)]


def test_a_grid_has_a_line_a_rank() -> None:
    assert format_grid([row[:2] for row in ROWS]) == "rank 0: 0F0 0F1\nrank 1: 1F0 1F1"


def test_a_grid_marks_the_culprit_and_shows_what_is_around_it() -> None:
    text = format_grid(ROWS, mark=(1, ROWS[1][4]), width=2)
    assert text == "rank 0: 0F0 0F1 0F2 ...\nrank 1: ... 1F2 1F3 >>1F4<< 1F5 1F6 ..."
