"""Numbers as text, text as numbers, tables and drawings of steps: what is shown, read and refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from halopipe.terminal import tables, units
from planner.ir.errors import UsageError
from planner.ir.timeline import Span, Timeline

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


def one_f_one_b() -> Timeline:
    """Two stages, two micro-batches, forward 3 ms, backward 6 ms, an update of 2 ms."""
    spans = (
        Span(0, "0F0", 0.000, 0.003),
        Span(0, "0SEND_F0>1", 0.003, 0.003),
        Span(0, "0F1", 0.003, 0.006),
        Span(0, "0RECV_B0<1", 0.006, 0.012),
        Span(0, "0B0", 0.012, 0.018),
        Span(0, "0B1", 0.021, 0.027),
        Span(0, "0UPDATE", 0.027, 0.029),
        Span(1, "1F0", 0.003, 0.006),
        Span(1, "1B0", 0.006, 0.012),
        Span(1, "1F1", 0.012, 0.015),
        Span(1, "1B1", 0.015, 0.021),
        Span(1, "1UPDATE", 0.021, 0.023),
    )
    return Timeline("predicted", 0.030, spans)


def test_a_step_is_drawn_to_scale() -> None:
    assert tables.gantt(one_f_one_b(), ["n0/cpu0", "n0/cpu1"], width=17 + 30) == (
        "rank 0  n0/cpu0  F0░F1░······B0▓▓▓▓···B1▓▓▓▓U#·\n"
        "rank 1  n0/cpu1  ···F0░B0▓▓▓▓F1░B1▓▓▓▓U#·······\n"
        "                 0                      30.0 ms\n"
        "                 F forward   B backward   U update   · idle or waiting"
    )


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("spans", "width", "row", "legend"),
    [
        (one_f_one_b().spans, 10, "░░··B0·B1U", ""),
        ((Span(0, "0F0", 0.0, 0.015), Span(0, "2F0", 0.015, 0.030)), 10, "0F0░░2F0░░", ""),
        (
            (Span(0, "0I0", 0.0, 0.012), Span(0, "0W0", 0.012, 0.024), Span(0, "0REDUCE_GRAD", 0.024, 0.030)),
            10,
            "I0▓▓W0▒▒R=",
            "W backward for weights   R gradient all-reduce",
        ),
        (
            (Span(0, "0PREP0", 0.0, 0.0075), Span(0, "0F0", 0.0075, 0.0225), Span(0, "0PREP1", 0.0075, 0.030)),
            20,
            "P0:::F0░░░░░░░░:::::",
            "P preparing on the host",
        ),
    ],
    ids=["no room for a label", "several stages", "a divided backward", "what is prepared"],
)
def test_each_action_has_its_mark_and_as_much_of_a_label_as_fits(
    spans: tuple[Span, ...], width: int, row: str, legend: str
) -> None:
    lines = tables.gantt(Timeline("predicted", 0.030, spans), width=8 + width).splitlines()
    assert lines[0] == f"rank 0  {row}"
    assert legend in lines[-1]


def test_columns_are_as_wide_as_their_cells_and_numbers_flush_right() -> None:
    assert tables.table(["plan", "step"], [["a", "9.10 ms"], ["longer", "12 s"]]) == (
        "  plan       step\n  a       9.10 ms\n  longer     12 s"
    )


def test_a_bar_shows_too_much() -> None:
    assert tables.bar(0.5, 4) == "[##..]"
    assert tables.bar(1.2, 4) == "[###!]"
    assert tables.bar(0.0, 4) == "[....]"


def test_a_table_wider_than_the_screen_stands_as_blocks_and_is_whole() -> None:
    rows = [["plan.json", "412 ms", "[red]1f1b"], ["a-name-of-twenty-and-more-letters.json", "12 s", ""]]
    assert tables.table(["plan", "step", "schedule"], rows, width=30) == (
        "  plan plan.json\n    step      412 ms\n    schedule  [red]1f1b\n"
        "  plan\n  a-name-of-twenty-and-more-le\n  tters.json\n    step  12 s"
    )
    assert tables.table(["plan", "step", "schedule"], rows, width=80).splitlines()[1].endswith("412 ms  [red]1f1b")


def test_a_picture_is_no_wider_than_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, tables.gantt(one_f_one_b()).splitlines()[:-1])) == columns


def test_in_a_notebook_a_table_is_text_as_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [["plan", "step"], [["a", "1 ms"]]]
    elsewhere = tables.table(*asked)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert tables.table(*asked) == elsewhere != ""
