from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from planner.ir.errors import UnknownNameError
from planner.layers import Kind, kind, kinds

FUNCTIONS = ("work", "input_boxes", "weight_boxes", "forward_flops")
REDUCTIONS = {"", "sum", "statistics"}


def test_the_registry_is_the_list_of_classes() -> None:
    assert {"conv", "lstm", "loss", "opaque", "pointwise"} <= set(kinds())
    assert not {"boundary", "convolution", "elementwise"} & set(kinds())
    assert list(kinds()) == sorted(kinds())


@pytest.mark.parametrize("name", kinds())
def test_a_kind_provides_what_the_class_of_kinds_asks(name: str) -> None:
    relation = kind(name)
    assert relation.REDUCTION in REDUCTIONS
    for function in FUNCTIONS:
        asked = list(inspect.signature(getattr(Kind, function)).parameters)
        assert list(inspect.signature(getattr(relation, function)).parameters) == asked
        assert inspect.getdoc(getattr(relation, function))


@pytest.mark.parametrize("name", kinds())
def test_a_kind_explains_itself(name: str) -> None:
    assert len((inspect.getdoc(kind(name)) or "").split()) > 4


def test_an_unknown_kind_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="no layer kind 'convolution'") as caught:
        kind("convolution")
    assert "conv" in caught.value.details[0]


def test_every_family_is_read() -> None:
    home = Path(inspect.getfile(Kind)).parent
    named = {
        name for path in home.glob("*.py") for name in re.findall(r'\(Kind, name="(\w+)"\)', path.read_text("utf-8"))
    }
    assert named == set(kinds())


def test_two_kinds_have_no_name_in_common() -> None:
    with pytest.raises(ValueError, match="there are two layer kinds 'conv'"):
        type("Conv", (Kind,), {}, name="conv")
