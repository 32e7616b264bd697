from __future__ import annotations

import inspect

import pytest

from planner.ir.errors import UnknownNameError
from planner.layers import Kind, kind, kinds

FUNCTIONS = ("work", "input_boxes", "weight_boxes", "forward_flops")
REDUCTIONS = {"", "sum", "statistics"}


def test_the_registry_is_the_folder() -> None:
    assert {"conv", "lstm", "loss", "opaque", "pointwise"} <= set(kinds())
    assert not {"boundary", "_rules", "_samples"} & set(kinds())
    assert list(kinds()) == sorted(kinds())


@pytest.mark.parametrize("name", kinds())
def test_a_kind_provides_what_the_protocol_asks(name: str) -> None:
    module = kind(name)
    assert module.REDUCTION in REDUCTIONS
    for function in FUNCTIONS:
        protocol = list(inspect.signature(getattr(Kind, function)).parameters)[1:]
        assert list(inspect.signature(getattr(module, function)).parameters) == protocol
        assert inspect.getdoc(getattr(module, function))


@pytest.mark.parametrize("name", kinds())
def test_a_kind_explains_itself(name: str) -> None:
    assert len((inspect.getdoc(kind(name)) or "").split()) > 4


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="no layer kind 'convolution'") as caught:
        kind("convolution")
    assert "conv" in caught.value.details[0]
