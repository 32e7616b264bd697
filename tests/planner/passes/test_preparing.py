from __future__ import annotations

from dataclasses import replace

import pytest

from planner.ir import schedule as documented
from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.ir.schedule import Action, Op, Pipeline, StageGraph, dependencies
from planner.passes import in_flight, lower, validate
from planner.schedules import default_names, names, schedule, traits
from tests.planner.factories import chain_decision
from tests.planner.sparse_networks import classifier, sparse_profile


def prepared(num_microbatches: int, name: str = "1f1b", ahead: bool = True, num_stages: int = 1) -> Program:
    chain = StageGraph.chain(num_stages, num_microbatches)
    stages = replace(chain, prepares=tuple(range(num_stages)))
    ranks = tuple((stage,) for stage in range(num_stages))
    return lower(schedule(name)(Pipeline(stages)), stages, ranks, {}, num_stages, ahead=ahead)


def text(program: Program, rank: int = 0) -> str:
    return " ".join(map(str, program.rows[rank]))


def test_what_is_prepared_stands_one_micro_batch_ahead() -> None:
    assert text(prepared(3, "gpipe")) == "0PREP0 0PREP1 0F0 0PREP2 0F1 0F2 0B0 0B1 0B2 0UPDATE"
    assert text(prepared(1)) == "0PREP0 0F0 0B0 0UPDATE"


def test_it_may_stand_just_before_its_forward_after_what_is_received() -> None:
    profile = sparse_profile(classifier())
    decision = chain_decision(profile, cuts=(3,), micro_batches=(1, 1))
    ahead = " ".join(decision.program[1])
    assert ahead.startswith("1PREP0 1PREP1 1RECV_F0<0 1F0 ")
    assert text(prepared(2, "gpipe", ahead=False)) == "0PREP0 0F0 0PREP1 0F1 0B0 0B1 0UPDATE"


def test_the_picture_in_the_schedule_module_is_what_lowering_makes() -> None:
    profile = sparse_profile(classifier())
    decision = chain_decision(profile, cuts=(3,), micro_batches=(1,) * 3, schedule="gpipe")
    drawn = " ".join(decision.program[0])
    picture = next(line for line in (documented.__doc__ or "").splitlines() if line.startswith("    0PREP0"))
    assert drawn.startswith(picture.strip().removesuffix(" ..."))


def test_an_action_is_read_back() -> None:
    action = Action.parse("1PREP3")
    assert action == Action(1, Op.PREPARE, 3)
    assert str(action) == "1PREP3"
    for wrong in ("1PREP", "1PREP3@1", "1PREP3>2"):
        with pytest.raises(ValueError, match="not an action"):
            Action.parse(wrong)


def test_a_forward_needs_what_is_prepared_where_its_stage_prepares() -> None:
    stages = StageGraph(1, 2, (), (0,))
    assert dependencies(Action(0, Op.FORWARD, 1), stages) == (frozenset({Action(0, Op.PREPARE, 1)}),)
    assert dependencies(Action(0, Op.FORWARD, 1), replace(stages, prepares=())) == ()
    assert dependencies(Action(0, Op.PREPARE, 1), stages) == ()


@pytest.mark.parametrize("name", default_names())
def test_every_schedule_prepares_legally_and_keeps_no_more_in_flight(name: str) -> None:
    program, plain = prepared(4, name, num_stages=2), lower_plain(name)
    without = tuple(tuple(a for a in row if a.op is not Op.PREPARE) for row in program.rows)
    assert without == plain.rows
    assert sum(action.op is Op.PREPARE for row in program.rows for action in row) == 8
    assert in_flight(program.rows, 2) == in_flight(plain.rows, 2)


def lower_plain(name: str) -> Program:
    stages = StageGraph.chain(2, 4)
    return lower(schedule(name)(Pipeline(stages)), stages, ((0,), (1,)), {}, 2)


@pytest.mark.parametrize("name", [name for name in names() if traits(name).stages_per_position == 1])
def test_a_row_with_all_that_is_prepared_is_legal(name: str) -> None:
    for ahead in (True, False):
        validate(prepared(4, name, ahead))


def changed(program: Program, row: str) -> Program:
    return replace(program, rows=(tuple(map(Action.parse, row.split())),))


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("0F0 0B0 0UPDATE", "lacks 0PREP0"),
        ("0F0 0PREP0 0B0 0UPDATE", "runs 0F0 before 0PREP0"),
        ("0PREP0 0PREP0 0F0 0B0 0UPDATE", "has 0PREP0 2 times"),
        ("0PREP0 0PREP1 0F0 0B0 0UPDATE", "micro-batches are 0 to 0"),
    ],
)
def test_what_is_wrong_is_said(row: str, why: str) -> None:
    with pytest.raises(IllegalProgramError, match="illegal") as caught:
        validate(changed(prepared(1), row))
    assert why in str(caught.value)


def test_a_stage_that_reads_nothing_prepared_prepares_nothing() -> None:
    plain = lower(schedule("1f1b")(Pipeline(StageGraph(1, 1, ()))), StageGraph(1, 1, ()), ((0,),), {}, 1)
    with pytest.raises(IllegalProgramError) as caught:
        validate(changed(plain, "0PREP0 0F0 0B0 0UPDATE"))
    assert "stage 0 reads nothing that is prepared" in str(caught.value)


def test_forward_passes_alone_prepare_too() -> None:
    program = prepared(2, "forward")
    assert text(program) == "0PREP0 0PREP1 0F0 0F1"
    assert not program.trains
    validate(program)
