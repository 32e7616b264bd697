"""A field of a list of options is typed as text, and shown as text that gives it again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from halopipe.run_spec.schema import (
    DURATION,
    INTEGERS,
    INTERVAL,
    NAMES,
    SIZE,
    SUM,
    WRITTEN,
    asked_in,
    default_text,
    flag,
    from_text,
    option,
)
from planner.ir.errors import UsageError


@dataclass(frozen=True)
class Options:
    size: int = option(0, "Of memory.", kind=SIZE, flag="--memory")
    wait_s: float = option(30.0, "How long.", kind=DURATION)
    every: int | str = option(0, "How often.", kind=INTERVAL)
    dims: tuple[str, ...] = option(("sample",), "Of layers.", kind=NAMES)
    sizes: tuple[int, ...] = option((), "Of micro-batches.", kind=INTEGERS)
    slices: tuple[int, ...] = option((), "Of sequences.", kind=SUM)
    inner: int = option(-1)


FIELDS = {field.name: field for field in dataclasses.fields(Options)}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("size", "2KiB", 2048),
        ("wait_s", "2min", 120.0),
        ("every", "50", 50),
        ("every", "10min", "10min"),
        ("dims", "sample, spatial", ("sample", "spatial")),
        ("sizes", "1,2,4", (1, 2, 4)),
        ("slices", "3+2", (3, 2)),
        ("size", "", 0),
        ("slices", "", ()),
    ],
)
def test_text_becomes_the_value_of_its_field(name: str, text: str, value: Any) -> None:
    assert from_text(FIELDS[name], text) == value


@pytest.mark.parametrize("name", asked_in(Options))
def test_a_default_is_shown_as_text_that_gives_it_again(name: str) -> None:
    assert from_text(FIELDS[name], default_text(FIELDS[name])) == FIELDS[name].default


@pytest.mark.parametrize(("name", "text"), [("size", "2 giga"), ("every", "often"), ("sizes", "1,x"), ("slices", "3+")])
def test_text_of_another_kind_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError):
        from_text(FIELDS[name], text)


def test_fields_without_help_are_no_options_and_every_kind_that_is_written_is_tried_here() -> None:
    assert "inner" not in asked_in(Options)
    assert {field.metadata["option"].kind for field in asked_in(Options).values()} == WRITTEN.keys()
    assert [flag(FIELDS[name]) for name in ("size", "wait_s")] == ["--memory", "--wait-s"]
