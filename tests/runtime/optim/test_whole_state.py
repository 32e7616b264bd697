"""What ranks keep in parts is one whole, and is read in other parts."""

from __future__ import annotations

import pytest
import torch

from planner.ir.box import Interval
from planner.ir.errors import UsageError
from runtime.checkpoint.state import RankState
from runtime.optim.whole_state import WholeState, pieces_of, united, whole_of
from tests.runtime.ranks import on_ranks

WHOLE = torch.arange(12.0).view(3, 4)
BOXED = torch.arange(8).view(4, 2)


def rank_state(rank: int) -> RankState:
    """Half of the elements of one, half of the columns of another; what there is once, rank 0 writes."""
    flat = WHOLE.flatten()[6 * rank : 6 * rank + 6]
    column = Interval(rank, rank + 1)
    tensors = {"optimizer/a/exp_avg": flat, "optimizer/b/exp_avg": BOXED[:, rank : rank + 1], "model/a": torch.ones(2)}
    numbers = {"group/a/lr": 0.1, "group/a/betas/0": 0.9, "group/a/betas/1": 0.99, "group/b/lr": 0.1, "run/step": 3}
    numbers |= {"group/b/betas/0": 0.9, "group/b/betas/1": 0.99, "scheduler/a/last_epoch": 3, "optimizer/a/seen": 7}
    writes = {"optimizer/a/exp_avg", "optimizer/b/exp_avg", *(("model/a", *numbers) if rank == 0 else ())}
    slices = {"optimizer/a/exp_avg": (6 * rank, 6 * rank + 6, (3, 4))}
    return RankState(
        tensors, slices, numbers, frozenset(writes), {"optimizer/b/exp_avg": ((Interval(0, 4), column), (4, 2))}
    )


def test_parts_of_ranks_are_one_whole_and_are_read_in_other_parts() -> None:
    pieces = {label: each for rank in range(2) for label, each in pieces_of(rank_state(rank), rank).items()}
    found = whole_of(pieces, 3)
    assert torch.equal(found["state"]["a"]["exp_avg"], WHOLE)
    assert torch.equal(found["state"]["b"]["exp_avg"], BOXED)
    assert found["state"]["a"]["seen"] == 7
    assert found["param_groups"] == [{"params": ["a", "b"], "lr": 0.1, "betas": (0.9, 0.99)}]
    assert (found["scheduler"], found["num_steps"]) == ({"a/last_epoch": 3}, 3)
    given = WholeState(found)
    assert given.read_slice("optimizer/a/exp_avg", 4, 8).tolist() == [4, 5, 6, 7]
    assert torch.equal(given.read_box("optimizer/b/exp_avg", (Interval(1, 3), Interval(0, 2))), BOXED[1:3])
    assert [given.number(f"group/b/{key}") for key in ("lr", "betas/1")] == [0.1, 0.99]
    assert (given.number("scheduler/a/last_epoch"), given.number("optimizer/a/seen"), given.num_steps) == (3, 7, 3)
    with pytest.raises(UsageError, match="has no group/c/lr"):
        given.number("group/c/lr")


@pytest.mark.parametrize("state", [{}, {"state": 3, "param_groups": [], "num_steps": 0}, {"state": {}}])
def test_another_mapping_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="not the state of an optimiser"):
        WholeState(state)


def test_what_any_rank_has_all_get_to_the_bit_and_of_what_several_have_the_first() -> None:
    own: list[dict[str, torch.Tensor]] = [
        {"a": torch.tensor([0.1, torch.nan]), "both": torch.ones(2, 3), "none": torch.empty(0, 4)},
        {},
        {
            "both": torch.zeros(2, 3),
            "b": torch.arange(6).view(2, 3).t(),
            "c": torch.tensor(True),
            "d": torch.tensor(2.5),
        },
    ]
    expected = {**own[2], **own[0]}
    for found in on_ranks(3, lambda end: united(own[end.rank], end)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, equal_nan=True)
