"""What the order of a row says of sums of gradients."""

from __future__ import annotations

import pytest

from planner.ir.schedule import Action, Op
from runtime.pipeline.specialize import last_gradients, last_updates

REDUCE_0, REDUCE_1 = Action(0, Op.REDUCE_GRAD), Action(1, Op.REDUCE_GRAD)
BACKWARDS = tuple(map(Action.parse, ("1B0", "0B0", "1B1", "0B1")))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (((0, 1), (0, 1)), {"1B1"}),  # that of stage 0 starts no sooner than the other's reduction
        (((0, 1), (0, 2)), {"1B1", "0B1"}),
        (((1, 0), (0, 1)), {"1B1"}),
    ],
)
def test_sums_over_the_same_ranks_start_in_the_order_of_their_reductions(
    ranks: tuple[tuple[int, ...], ...], expected: set[str]
) -> None:
    assert set(map(str, last_gradients((*BACKWARDS, REDUCE_1, REDUCE_0), ranks))) == expected


def test_the_last_half_of_a_backward_that_makes_weight_gradients_counts() -> None:
    row = tuple(map(Action.parse, ("0I0", "0W0", "0I1", "0W1", "0I2")))
    assert set(map(str, last_gradients((*row, REDUCE_0), ((0, 1),)))) == {"0W1"}


def test_of_several_updates_each_has_its_last_gradients_and_the_newest_is_the_last() -> None:
    updates = [Action(0, Op.UPDATE, microbatch) for microbatch in (0, None)]
    row = (Action.parse("0B0"), updates[0], Action.parse("0B1"), updates[1])
    assert set(map(str, last_gradients(row, ((0,),)))) == {"0B0", "0B1"}
    assert last_updates(row) == {updates[1]}
