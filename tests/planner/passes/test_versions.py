"""Weights: which version each micro-batch runs on, how old it is, and what is refused."""

from __future__ import annotations

import pytest

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Program
from planner.passes import staleness, validate, versions_kept
from planner.passes.versions import updates_of
from tests.planner.passes.test_validation import program_of
from tests.planner.schedules.simulated import chain, lowered


def single(row: str, microbatches: int) -> Program:
    return program_of(row, edges=(), ranks=((0,),), microbatches=microbatches)


def refusal(program: Program, **limits: object) -> str:
    with pytest.raises(IllegalProgramError) as caught:
        validate(program, **limits)
    return str(caught.value)


LEGAL = "0F0 0F1 0B0 0UPDATE0 0F2@1 0B1 0UPDATE1 0B2@1 0UPDATE2"


def test_each_backward_uses_the_weights_of_its_forward() -> None:
    program = single(LEGAL, 3)
    validate(program)
    assert updates_of(program) == (0, 1, 2)
    assert staleness(program) == (1,)
    assert versions_kept(program.rows, program.stages.num_stages) == (2,)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (LEGAL.replace("0B2@1", "0B2"), "0B2 uses version 0 of the weights, 0F2@1 another"),
        (LEGAL.replace("2@1", "2@2"), "0F2@2 uses version 2 of the weights, 1 updates have been made"),
        (LEGAL.replace("0UPDATE2", "0UPDATE"), "has 0UPDATE, but every stage is updated after micro-batches 0, 1, 2"),
        (LEGAL.replace("0UPDATE1 ", ""), "rank 0 lacks 0UPDATE1"),
        ("0F0 0F1 0F2 0B0 0B1 0UPDATE0 0UPDATE1 0B2 0UPDATE2", "0B1 comes before 0UPDATE0, which would count it"),
        ("0F0 0F1 0F2 0UPDATE0 0B0 0B1 0UPDATE1 0B2 0UPDATE2", "rank 0 runs 0UPDATE0 before 0B0, which it needs"),
        ("0F0 0B0 0F1 0B1 0F2 0B2 0UPDATE2", "has 0UPDATE2, but every stage is updated once a step"),
        ("0F0@1 0B0@1 0F1 0B1 0F2 0B2 0UPDATE", "0F0@1 uses version 1 of the weights, 0 updates have been made"),
    ],
)
def test_wrong_weights_are_refused(row: str, why: str) -> None:
    assert why in refusal(single(row, 3))
    assert ">>" in refusal(single(row, 3))


def test_halves_of_a_backward_use_one_version() -> None:
    legal = "0F0 0I0 0W0 0UPDATE0 0F1@1 0I1@1 0W1@1 0UPDATE1"
    validate(single(legal, 2))
    assert "0W1 uses version 0 of the weights, 0F1@1 another" in refusal(single(legal.replace("W1@1", "W1"), 2))


def test_ranks_of_a_stage_use_one_version() -> None:
    rows = "0F0 0B0 0REDUCE_GRAD0 0UPDATE0 0F1@1 0B1@1 0REDUCE_GRAD1 0UPDATE1"
    both = {"edges": (), "ranks": ((0, 1),), "microbatches": 2}
    validate(program_of(rows, rows, **both))
    other = rows.replace("@1", "")
    assert "rank 1: 0F1 uses version 0 of the weights, 0F1@1 another" in refusal(program_of(rows, other, **both))


def test_weights_older_than_claimed_are_refused() -> None:
    program = lowered(chain("pipedream", 3, 6), "pipedream")
    validate(program, staleness=(2, 1, 0))
    text = refusal(program, staleness=(1, 1, 0))
    assert "rank 0: 0F2 runs on weights that lack 2 updates, at most 1 are claimed" in text
    assert "0F1 0SEND_F1>1 >>0F2<<" in text


def test_one_update_a_step_is_not_old_at_all() -> None:
    program = lowered(chain("1f1b", 3, 6), "1f1b")
    assert staleness(program) == (0, 0, 0)
    assert versions_kept(program.rows, program.stages.num_stages) == (1, 1, 1)
    assert updates_of(program) == (None,)
    validate(program, staleness=(0, 0, 0))
