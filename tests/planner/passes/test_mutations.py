"""Every way to break a program is refused, with the culprit marked and the reason given."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.passes import validate
from planner.schedules import names
from tests.planner.passes.mutations import MUTATIONS, Mutation
from tests.planner.random_programs import random_program

SEEDS = range(10)


@cache
def program_of(name: str, seed: int) -> Program:
    return random_program(random.Random(seed), name)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda function: function.__name__)
def test_a_broken_program_is_refused_and_the_culprit_shown(mutate: Mutation) -> None:
    found = 0
    for name in names():
        for seed in SEEDS:
            rng, program = random.Random(seed), program_of(name, seed)
            for rank, row in enumerate(program.rows):
                mutants = [broken for i in range(len(row)) if (broken := mutate(row, i, rng, program)) is not None]
                for broken in rng.sample(mutants, min(2, len(mutants))):
                    found += 1
                    rows = (*program.rows[:rank], broken, *program.rows[rank + 1 :])
                    with pytest.raises(IllegalProgramError) as caught:
                        validate(replace(program, rows=rows))
                    text = str(caught.value)
                    assert ">>" in text, (name, seed, mutate.__name__)
                    assert "rank" in caught.value.details[0]
    assert found > 50
