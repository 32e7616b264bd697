"""Every way to break a program is refused, with the culprit marked and the reason given; what stays legal is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.passes import validate
from planner.passes.ending import stuck
from planner.passes.lowering import Numbering
from planner.schedules import names
from tests.planner.passes.mutations import LEGAL, MUTATIONS, WHOLE_MUTATIONS, Mutation, WholeMutation
from tests.planner.random_programs import random_program

SEEDS = range(10)
A_ROW = 2
"""Mutants of each row that are tried."""

each_schedule = pytest.mark.parametrize("name", names())


def called(function: object) -> str | None:
    return getattr(function, "__name__", None)


@cache
def program_of(name: str, seed: int) -> Program:
    return random_program(random.Random(seed), name)


@cache
def broken_rows(mutate: Mutation, name: str) -> tuple[Program, ...]:
    found: list[Program] = []
    for seed in SEEDS:
        rng, program = random.Random(seed), program_of(name, seed)
        for rank, row in enumerate(program.rows):
            mutants = [broken for i in range(len(row)) if (broken := mutate(row, i, rng, program)) is not None]
            for broken in rng.sample(mutants, min(A_ROW, len(mutants))):
                found.append(replace(program, rows=(*program.rows[:rank], broken, *program.rows[rank + 1 :])))
    return tuple(found)


@cache
def changed(mutate: WholeMutation, name: str, a_row: int = A_ROW) -> tuple[Program, ...]:
    found: list[Program] = []
    for seed in SEEDS:
        rng, program = random.Random(seed), program_of(name, seed)
        for rank, row in enumerate(program.rows):
            mutants = [other for i in range(len(row)) if (other := mutate(program, rank, i)) is not None]
            found += rng.sample(mutants, min(a_row, len(mutants)))
    return tuple(found)


def require_refused(program: Program) -> None:
    with pytest.raises(IllegalProgramError) as caught:
        validate(program)
    assert ">>" in str(caught.value), "no culprit is marked"
    assert "rank" in caught.value.details[0]


@pytest.mark.cases(40)
@each_schedule
@pytest.mark.parametrize("mutate", MUTATIONS, ids=called)
def test_a_broken_row_is_refused_and_the_culprit_shown(mutate: Mutation, name: str) -> None:
    for program in broken_rows(mutate, name):
        require_refused(program)


@each_schedule
@pytest.mark.parametrize("mutate", WHOLE_MUTATIONS, ids=called)
def test_a_program_broken_on_several_ranks_is_refused_and_the_culprit_shown(mutate: WholeMutation, name: str) -> None:
    for program in changed(mutate, name):
        require_refused(program)


@each_schedule
@pytest.mark.parametrize("mutate", LEGAL, ids=called)
def test_what_stays_legal_is_not_refused(mutate: WholeMutation, name: str) -> None:
    for program in changed(mutate, name, 6):
        validate(program)


def test_every_way_is_tried() -> None:
    rare = {"reductions_in_another_order": 2, "older_weights": 20}

    def is_tried(mutate: Mutation | WholeMutation, find: Callable[..., tuple[Program, ...]]) -> bool:
        """Often enough; no more schedules are looked at than that takes."""
        counts = itertools.accumulate(len(find(mutate, name)) for name in names())
        return any(count >= rare.get(called(mutate), 50) for count in counts)

    assert [called(each) for each in MUTATIONS if not is_tried(each, broken_rows)] == []
    assert [called(each) for each in (*WHOLE_MUTATIONS, *LEGAL) if not is_tried(each, changed)] == []


@each_schedule
def test_held_sends_end_only_if_receives_are_posted_ahead(name: str) -> None:
    """Rendezvous: of the windows that are enough, the next smaller one is a deadlock, and says of which messages."""
    for seed in SEEDS:
        program = program_of(name, seed)
        enough = (w for w in range(64) if not stuck(Numbering(program), True, [w] * len(program.rows)))
        window = next(enough)
        if window:
            waiting = stuck(Numbering(program), True, [window - 1] * len(program.rows))
            assert any("has not posted its receive" in each.why or "nothing has come" in each.why for each in waiting)
