"""What a rank knows is worked out once, and outlives the model that it followed from."""

from __future__ import annotations

import gc
import weakref

import pytest

from planner.ir.errors import CorruptFileError
from runtime.rank import RankContext
from runtime.recent import Recent
from runtime.transport import Hub, InProcessTransport
from tests.runtime.cases import decision_of, network
from tests.runtime.plans import decide, sgd


def context_of(rank: int, **told: object) -> RankContext:
    decision = decision_of("normalised", cuts=[0.5], micro_batches=(4, 3), ranks=[(0,), (1, 2)], shares=[(1,), (2, 1)])
    return RankContext(decision, sgd, rank, **told)


def test_a_rank_is_that_of_its_transport() -> None:
    transport = InProcessTransport(Hub(3, [(1, 2)]), 2)
    context = context_of(0, transport=transport, model=network("normalised")[1])
    assert (context.rank, context.ranks, context.stages, context.position(1)) == (2, (0, 1, 2), (1,), 1)
    transport.close()


def test_what_follows_is_worked_out_once_and_stays_when_the_model_goes() -> None:
    context = context_of(1, model=network("normalised")[1])
    program = context.program
    inputs = context.inputs
    context.let_go()
    assert context.model is None
    assert context.program is program
    assert context.inputs is inputs
    assert context.row == program.rows[1]
    assert (context.loss_stage, context.loss_rank, context.takes_any, context.updates_after) == (1, 1, True, (1,))


def test_a_model_that_the_decision_is_not_of_is_refused_by_whoever_asks_first() -> None:
    other = network("mixed")[1]
    context = RankContext(decide(network("normalised")[1].graph, [], (4,)), sgd, model=other)
    with pytest.raises(CorruptFileError, match="the plan's layers are not those of the model"):
        _ = context.program


def test_of_recent_values_the_oldest_goes_and_nothing_holds_it() -> None:
    class Made:
        """What is kept for a size."""

    kept = Recent[int, Made](2)
    first = Made()
    alive = weakref.ref(first)
    kept[0] = first
    kept[1] = Made()
    kept[0] = first
    kept[2] = Made()
    del first
    gc.collect()
    assert list(kept) == [1, 2]
    assert alive() is None
