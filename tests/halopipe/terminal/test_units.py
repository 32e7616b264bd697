"""Numbers as text, and text as numbers: one table of what is shown, one of what is read, one of what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from halopipe.terminal import units
from planner.ir.errors import UsageError

INTEGERS = partial(units.parse_integers, what="--input", example="8,3")


def pairs(text: str) -> dict[str, Any]:
    return units.parse_pairs(text, lambda name, value: f"{name[0]}{units.whole(value)}", "is no size", "height=8")


def arguments(text: str) -> dict[str, Any]:
    return units.parse_arguments(text.split())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("show", "values", "text"),
    [
        (units.seconds, [0.0], "0 s"),
        (units.seconds, [412.4e-3], "412 ms"),
        (units.seconds, [1.534], "1.53 s"),
        (units.seconds, [8.1e-6], "8.10 µs"),
        (units.seconds, [0.9999e-3], "1.00 ms"),
        (units.seconds, [99.97], "100 s"),
        (units.seconds, [3600.0], "3600 s"),
        (units.seconds, [5e-9], "5.00 ns"),
        (units.seconds_within, [1.234, 1.2, 1.27], "1.23 s (1.20-1.27)"),
        (units.seconds_within, [0.0925, 0.0911, 0.1004], "92.5 ms (91.1-100.4)"),
        (units.seconds_within, [0.0925, 0.0925, 0.0925], "92.5 ms"),
        (units.seconds_within, [0.0925, 0.0, 0.0], "92.5 ms"),
        (units.seconds_within, [123.4, 120.2, 130.0], "123 s (120-130)"),
        (units.seconds_within, [0.0, 0.0, 1.0], "0 s"),
        (units.duration, [0.4], "400 ms"),
        (units.duration, [99.0], "99.0 s"),
        (units.duration, [100.0], "2 min"),
        (units.duration, [3600.0], "60 min"),
        (units.duration, [5.5 * 3600], "5.50 h"),
        (units.duration, [20 * 86400.0], "20 days"),
        (units.size, [0], "0 B"),
        (units.size, [999], "999 B"),
        (units.size, [1024], "1.00 KiB"),
        (units.size, [1023 * 1024], "1.00 MiB"),
        (units.size, [3 * 2**29], "1.50 GiB"),
        (units.percent, [0.0], "0.0 %"),
        (units.percent, [0.034], "3.4 %"),
        (units.percent, [0.0996], "10 %"),
        (units.percent, [1.25], "125 %"),
        (units.signed_percent, [0.12], "+12 %"),
        (units.signed_percent, [-0.034], "-3.4 %"),
        (units.micro_batches, [(2, 2, 2, 2)], "4 micro-batches of 2"),
        (units.micro_batches, [(8,)], "1 micro-batch of 8"),
        (units.micro_batches, [(4, 3, 3)], "3 micro-batches: 4 + 3 + 3"),
    ],
)
def test_a_quantity_has_three_digits_and_the_unit_that_fits(
    show: Callable[..., str], values: list[Any], text: str
) -> None:
    assert show(*values) == text


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (units.parse_size, "2GiB", 2 * 2**30),
        (units.parse_size, "512MB", 512_000_000),
        (units.parse_size, "1.5 kib", 1536),
        (units.parse_size, "4096", 4096),
        (INTEGERS, "8,3, 64,64", (8, 3, 64, 64)),
        (INTEGERS, "", ()),
        (pairs, " height = 8,width=4,", {"height": "h8", "width": "w4"}),
        (arguments, "a=10 b=[1,2] c=fast", {"a": 10, "b": [1, 2], "c": "fast"}),
        (arguments, "d=NaN e= f=x=y", {"d": "NaN", "e": "", "f": "x=y"}),
        (units.parse_seconds, "30s", 30.0),
        (units.parse_seconds, "10min", 600.0),
        (units.parse_seconds, "6 h", 21600.0),
        (units.parse_seconds, "1.5d", 129600.0),
        (units.parse_seconds, "300", 300.0),
        (units.parse_seconds, "250ms", 0.25),
        (units.parse_interval, "10min", "10min"),
        (units.parse_interval, "300", 300),
        (units.parse_interval, "0", 0),
        (units.parse_interval, "auto", "auto"),
    ],
)  # fmt: skip
def test_a_quantity_is_read(read: Callable[[str], Any], text: str, value: Any) -> None:
    assert read(text) == (pytest.approx(value) if isinstance(value, float) else value)


REFUSED = [
    (units.parse_size, "is not a size", ["", "GiB", "2 giga", "-1GiB", "0", "1e3MB"]),
    (INTEGERS, "--input .* is not a list of positive integers", ["8,,3", "8x3", "0,3", "-1", "8,3.5"]),
    (pairs, "height(=.?)? is no size", ["height", "height=", "height=x", "height=0", "width=4,height=²"]),
    (pairs, "=8 is no size", ["=8"]),
    (pairs, "height is given twice", ["height=8,width=4,height=9"]),
    (arguments, "--arg", ["width", "1a=2", "=2", "a=1 a=2"]),
    (
        units.parse_interval,
        "does not say how often",
        ["", "soon", "-1", "10 weeks", "nan", "inf", "1e3s", "0min"],
    ),
    (units.parse_seconds, "'soon' is no time", ["soon"]),
]


@pytest.mark.every_case
@pytest.mark.parametrize(("read", "said", "text"), [(*each, text) for *each, texts in REFUSED for text in texts])
def test_what_is_no_such_quantity_is_refused_by_name(read: Callable[[str], Any], said: str, text: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(text)
