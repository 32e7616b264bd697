"""What a factory says about sizes that vary."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from planner.ir.errors import FactoryError
from profiler.source.model import parse_varying

EXAMPLE = {"inputs": torch.zeros(4, 6, 3), "inputs_2": torch.zeros(4, 1), "targets": torch.zeros(4, 6)}


def test_places_are_kept_by_name_in_order() -> None:
    value = {"time": [("inputs", 1), ["targets", 1]], "width": (("inputs", 2),)}
    assert parse_varying("f", value, EXAMPLE) == {
        "time": (("inputs", 1), ("targets", 1)),
        "width": (("inputs", 2),),
    }
    assert parse_varying("f", {}, EXAMPLE) == {}


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (["time"], ["in another way", "a list", '{"time": [("inputs", 1)']),
        ({"time": 1}, ["in another way", "time: 1"]),
        ({"time": [("inputs", "x")]}, ["in another way"]),
        ({"time": []}, ["no place of time"]),
        ({"time": [("x", 1)]}, ["time is said to be in 'x'", "inputs, inputs_2, targets"]),
        ({"time": [("inputs", 3)]}, ["dim 3 of inputs", "(4, 6, 3)"]),
        ({"time": [("inputs", -1)]}, ["dim -1 of inputs"]),
        ({"time": [("inputs", 0)]}, ["dim 0 of inputs", "dim 0 holds the samples"]),
        ({"time": [("inputs", 1), ("inputs", 2)]}, ["several extents", "dim 1 of inputs: 6", "dim 2 of inputs: 3"]),
        ({"time": [("inputs", 1)], "other": [("inputs", 1)]}, ["two names", "time and other"]),
        ({"time": [("inputs_2", 1)]}, ["time is 1 in the example", "at least 2"]),
        ({"num_samples": [("inputs", 1)]}, ["'num_samples' cannot be the name"]),
        ({"inputs": [("inputs", 1)]}, ["'inputs' cannot be the name"]),
        ({"a b": [("inputs", 1)]}, ["'a b' cannot be the name"]),
        ({"class": [("inputs", 1)]}, ["'class' cannot be the name"]),
        ({3: [("inputs", 1)]}, ["3 cannot be the name"]),
    ],
)
def test_what_does_not_fit_is_refused_with_its_numbers(value: Any, parts: list[str]) -> None:
    with pytest.raises(FactoryError) as caught:
        parse_varying("pkg:factory", value, EXAMPLE)
    assert "pkg:factory" in caught.value.title
    for part in parts:
        assert part in caught.value.render()
