from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.ir.box import Interval
from runtime.checkpoint import RankState, joined

W = torch.ones(6)


def at(rows: tuple[int, int], columns: tuple[int, int], depth: tuple[int, int] = (0, 2)) -> dict[str, object]:
    return {"x": ((Interval(*rows), Interval(*columns), Interval(*depth)), (6, 5, 2))}


CUBE = torch.zeros(6, 5, 2)
ALL = at((0, 6), (0, 5))
NOTHING: frozenset[str] = frozenset()
REFUSED = {
    "to write what is not there": (({"w": W}, {}, {}, frozenset({"v", "w"})), "to be written, but not there: v"),
    "a tensor and a number": (({"x": W}, {}, {"x": 1}, NOTHING), "both a tensor and a number: x"),
    "a number of numpy": (({}, {}, {"x": np.int64(3)}, NOTHING), "x is neither number"),
    **{
        f"slice {place}": (({"x": W}, {"x": place}, {}, NOTHING), r"x has shape \(6,\); it is said to be")
        for place in ((0, 5, (6,)), (2, 8, (7,)), (-1, 5, (8,)), (5, 3, (8,)))
    },
    "a slice of two dims": (({"x": W.view(2, 3)}, {"x": (0, 6, (6,))}, {}, NOTHING), r"x has shape \(2, 3\)"),
    "a slice that is not there": (({}, {"x": (0, 6, (6,))}, {}, NOTHING), "x is a slice, but not there"),
    **{
        f"box {number}": (({"x": CUBE}, {}, {}, NOTHING, box), r"x has shape \(6, 5, 2\); it is said to be")
        for number, box in enumerate((at((0, 7), (0, 5)), at((0, 2), (0, 5)), at((1, 7), (0, 5))))
    },
    "a box that is not there": (({}, {}, {}, NOTHING, ALL), "x is a box, but not there"),
}


@pytest.mark.every_case
@pytest.mark.parametrize("fault", REFUSED)
def test_a_state_that_contradicts_itself_is_refused(fault: str) -> None:
    arguments, message = REFUSED[fault]
    with pytest.raises(ValueError, match=message):
        RankState(*arguments)


def test_states_of_a_rank_are_joined() -> None:
    first = RankState({"a": W, "m": W[:3]}, {"m": (0, 3, (6,))}, {"lr": 0.1}, frozenset({"a", "m"}))
    second = RankState({"a": W.data, "b": W}, {}, {"lr": 0.1, "k": None}, frozenset({"b", "k"}))
    both = joined([first, second])
    assert set(both.tensors) == {"a", "b", "m"}
    assert (both.slices, both.numbers) == ({"m": (0, 3, (6,))}, {"lr": 0.1, "k": None})
    assert both.writes == {"a", "b", "k", "m"}


def test_states_with_different_things_under_one_key_are_not_joined() -> None:
    with pytest.raises(ValueError, match="another a each"):
        joined([RankState({"a": W}, {}, {}, frozenset()), RankState({"a": W.clone()}, {}, {}, frozenset())])
    with pytest.raises(ValueError, match=r"another lr each: 0\.1, 0\.2"):
        joined([RankState({}, {}, {"lr": 0.1}, frozenset()), RankState({}, {}, {"lr": 0.2}, frozenset())])
