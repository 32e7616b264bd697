from __future__ import annotations

import random

import pytest

from planner.costs.simulator.program import compile_program
from planner.ir.schedule import Action
from planner.passes import in_flight
from planner.schedules import names
from tests.planner.passes.occupancy import peaks
from tests.planner.random_programs import random_program


def rows_of(*texts: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(map(Action.parse, text.split())) for text in texts)


def test_a_micro_batch_is_in_flight_until_its_weights_are_done() -> None:
    rows = rows_of("0F0 0I0 0F1 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1B0 1F1 1B1 1F2 1B2")
    assert in_flight(rows, 2) == (2, 1)


def test_stages_of_a_row_are_counted_apart_and_kept_together() -> None:
    rows = rows_of("0F0 2F0 0F1 2B0 0B0 2F1 2B1 0B1", "1F0 1F1 1B0 1B1")
    assert in_flight(rows, 3) == (2, 2, 1)
    assert peaks(rows, (1.0, 10.0, 100.0)) == (102.0, 20.0)


def test_forwards_alone_keep_nothing() -> None:
    rows = rows_of("0F0 0F1 0F2")
    assert in_flight(rows, 1) == (0,)
    assert peaks(rows, (5.0,)) == (0.0,)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", range(5))
def test_the_memory_models_list_says_the_same(name: str, seed: int) -> None:
    program = random_program(random.Random(seed), name)
    compiled = (
        compile_program(program, (1,) * program.stages.num_microbatches) if every_rank_has_rows(program) else None
    )
    for rank, holds in enumerate(compiled.holds if compiled else ()):
        held, most = 0, 0
        for _, _, sign in holds:
            held += sign
            most = max(most, held)
        assert held == 0
        kept = peaks([program.rows[rank]], [1.0] * program.stages.num_stages)[0]
        assert most == (kept if program.trains else 1)


def every_rank_has_rows(program: object) -> bool:
    """A rank without a share of a micro-batch waits for nothing, which the cost model is never asked about."""
    return all(
        any(rank in (message.src, message.dst) for message in messages)
        for (src, dst, _), messages in program.messages.items()
        for rank in (*program.ranks[src], *program.ranks[dst])
    )
