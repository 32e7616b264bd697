from __future__ import annotations

import random

import pytest

from planner.ir.program import Program
from planner.ir.schedule import MESSAGE, PER_STEP, RECEIVE, Action, Op
from planner.passes.lowering import Numbering
from planner.schedules import names
from tests.planner.passes.requirements import requirements
from tests.planner.random_programs import random_program


@pytest.fixture(name="program", params=[(name, seed) for name in names() for seed in range(4)], ids=str)
def _program(request: pytest.FixtureRequest) -> Program:
    name, seed = request.param
    return random_program(random.Random(seed), name)


def test_numbers_are_actions_and_back(program: Program) -> None:
    numbering = Numbering(program)
    for row, numbers in zip(program.rows, numbering.rows, strict=True):
        assert tuple(map(numbering.action, numbers)) == row
        assert [numbering.number(action) for action in row] == numbers
    everything = {number for numbers in numbering.rows for number in numbers}
    assert len(everything) == len({action for row in program.rows for action in row})


def test_needs_and_peers_are_those_of_the_program(program: Program) -> None:
    numbering = Numbering(program)
    for rank, row in enumerate(program.rows):
        for action, number in zip(row, numbering.rows[rank], strict=True):
            if action.op in MESSAGE:
                ends = [(message.src, message.dst) for message in program.messages_of(rank, action)]
                assert [src + dst - rank for src, dst in ends] == list(numbering.peers(rank, number))
            if action.op not in RECEIVE:
                needs = {frozenset(map(numbering.action, group)) for group in numbering.needs(number)}
                expected = requirements(program, rank, action)
                assert needs == {frozenset(needed for _, needed in group) for group in expected}


def test_a_micro_batch_that_does_not_exist_has_a_number_of_its_own(program: Program) -> None:
    numbering = Numbering(program)
    count = program.stages.num_microbatches
    odd = [numbering.number(Action(0, Op.FORWARD, m)) for m in (count, count + 1, -1)]
    known = {numbering.number(Action(0, Op.FORWARD, m)) for m in range(count)}
    assert len(set(odd) | known) == count + 3
    assert numbering.strangers == set(odd)
    assert numbering.number(Action(0, Op.FORWARD, count)) == odd[0]


def test_the_first_need_that_is_not_met_is_found(program: Program) -> None:
    assert Numbering(program).unmet(missing=False) is None
    rank = max(range(len(program.rows)), key=lambda rank: len(program.rows[rank]))
    row = program.rows[rank]
    for index, action in enumerate(row):
        users = [
            later
            for later in row[index + 1 :]
            if later.op not in PER_STEP and any(action in {a for _, a in g} for g in requirements(program, rank, later))
        ]
        if not users:
            continue
        last = row.index(users[-1])
        late = (*row[:index], *row[index + 1 : last + 1], action, *row[last + 1 :])
        rows = (*program.rows[:rank], late, *program.rows[rank + 1 :])
        unmet = Numbering(Program(rows, program.stages, program.ranks, program.messages)).unmet(missing=False)
        assert unmet is not None
        assert (unmet.rank, unmet.needed, unmet.late) == (rank, (action,), True)
        assert late[unmet.index] in (*users, *(a for a in row if a.op in PER_STEP))
