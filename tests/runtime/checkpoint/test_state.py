from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.checkpoint import RankState, joined

W = torch.ones(6)


def test_a_key_that_is_written_must_be_there() -> None:
    with pytest.raises(ValueError, match="to be written, but not there: model/v"):
        RankState({"model/w": W}, {}, {}, frozenset({"model/v", "model/w"}))


def test_a_key_is_a_tensor_or_a_number() -> None:
    with pytest.raises(ValueError, match="both a tensor and a number: x"):
        RankState({"x": W}, {}, {"x": 1}, frozenset())


def test_a_number_is_one_of_python() -> None:
    with pytest.raises(ValueError, match="x is neither number"):
        RankState({}, {}, {"x": np.int64(3)}, frozenset())


@pytest.mark.parametrize("place", [(0, 5, (6,)), (2, 8, (7,)), (-1, 5, (8,)), (5, 3, (8,))])
def test_a_slice_has_the_elements_that_it_says(place: tuple[int, int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"x has shape \(6,\); it is said to be"):
        RankState({"x": W}, {"x": place}, {}, frozenset())


def test_a_slice_has_one_dim_and_is_there() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\)"):
        RankState({"x": W.reshape(2, 3)}, {"x": (0, 6, (6,))}, {}, frozenset())
    with pytest.raises(ValueError, match="x is a slice, but not there"):
        RankState({}, {"x": (0, 6, (6,))}, {}, frozenset())


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
