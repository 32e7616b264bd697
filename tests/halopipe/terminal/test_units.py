from __future__ import annotations

import pytest

from halopipe.terminal import units
from planner.ir.errors import UsageError


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0, "0 s"),
        (412.4e-3, "412 ms"),
        (1.534, "1.53 s"),
        (8.1e-6, "8.10 µs"),
        (0.9999e-3, "1.00 ms"),
        (99.97, "100 s"),
        (75.0, "75.0 s"),
        (3600.0, "3600 s"),
        (5e-9, "5.00 ns"),
    ],
)
def test_seconds_have_three_digits_and_the_unit_that_fits(value_s: float, text: str) -> None:
    assert units.seconds(value_s) == text


@pytest.mark.parametrize(
    ("value_s", "low_s", "high_s", "text"),
    [
        (1.234, 1.2, 1.27, "1.23 s (1.20-1.27)"),
        (0.0925, 0.0911, 0.1004, "92.5 ms (91.1-100.4)"),
        (0.0925, 0.0925, 0.0925, "92.5 ms"),
        (0.0925, 0.0, 0.0, "92.5 ms"),
        (123.4, 120.2, 130.0, "123 s (120-130)"),
        (0.0, 0.0, 1.0, "0 s"),
    ],
)
def test_a_range_has_the_digits_and_the_unit_of_its_value(
    value_s: float, low_s: float, high_s: float, text: str
) -> None:
    assert units.seconds_within(value_s, low_s, high_s) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1.00 KiB"), (1023 * 1024, "1.00 MiB"), (3 * 2**29, "1.50 GiB")],
)
def test_sizes_are_binary(num_bytes: int, text: str) -> None:
    assert units.size(num_bytes) == text


def test_shares_are_percent() -> None:
    assert [units.percent(x) for x in (0.0, 0.034, 0.0996, 0.5, 1.25)] == ["0.0 %", "3.4 %", "10 %", "50 %", "125 %"]
    assert [units.signed_percent(x) for x in (0.12, -0.034)] == ["+12 %", "-3.4 %"]


def test_micro_batches_in_words() -> None:
    assert units.micro_batches((2, 2, 2, 2)) == "4 micro-batches of 2"
    assert units.micro_batches((8,)) == "1 micro-batch of 8"
    assert units.micro_batches((4, 3, 3)) == "3 micro-batches: 4 + 3 + 3"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * 2**30),
        ("512MB", 512_000_000),
        ("1.5 kib", 1536),
        ("4096", 4096),
        ("3GB", 3_000_000_000),
    ],
)
def test_a_size_is_read(text: str, num_bytes: int) -> None:
    assert units.parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "2 giga", "-1GiB", "0", "1e3MB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        units.parse_size(text)


def test_integers_are_read_between_commas() -> None:
    assert units.parse_integers("8,3, 64,64", "--input", "8,3") == (8, 3, 64, 64)
    assert units.parse_integers("", "--input", "8,3") == ()


@pytest.mark.parametrize("text", ["8,,3", "8x3", "0,3", "-1", "8,3.5"])
def test_what_is_no_list_of_integers_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--input .* is not a list of positive integers"):
        units.parse_integers(text, "--input", "8,3")


def test_pairs_are_read_by_name_and_their_values_by_whoever_asks() -> None:
    read = units.parse_pairs(" height = 8,width=4,", lambda name, value: name[0] + value, "is no size", "height=8")
    assert read == {"height": "h8", "width": "w4"}


@pytest.mark.parametrize("text", ["height", "height=", "=8", "height=x", "height=0", "width=4,height=²"])
def test_a_pair_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=f"{text.split(',')[-1]} is no size"):
        units.parse_pairs(text, lambda _, value: units.whole(value), "is no size", "height=8")


def test_a_name_is_given_once() -> None:
    with pytest.raises(UsageError, match="height is given twice"):
        units.parse_pairs("height=8,width=4,height=9", lambda _, value: units.whole(value), "is no size", "height=8")


def test_arguments_are_json_or_text() -> None:
    found = units.parse_arguments(["num_classes=10", "depths=[1,2]", "mode=fast", "x=NaN", "empty=", "eq=a=b"])
    assert found == {"num_classes": 10, "depths": [1, 2], "mode": "fast", "x": "NaN", "empty": "", "eq": "a=b"}


@pytest.mark.parametrize("pairs", [["width"], ["1a=2"], ["=2"], ["a=1", "a=2"]])
def test_what_is_no_argument_is_refused(pairs: list[str]) -> None:
    with pytest.raises(UsageError, match="--arg"):
        units.parse_arguments(pairs)


@pytest.mark.parametrize(
    ("text", "value_s"),
    [("30s", 30.0), ("10min", 600.0), ("6 h", 21600.0), ("1.5d", 129600.0), ("300", 300.0), ("250ms", 0.25)],
)
def test_a_time_is_read(text: str, value_s: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(value_s)
    assert units.parse_interval(text) == (300 if text == "300" else text)


@pytest.mark.parametrize("text", ["", "soon", "-1", "10 weeks", "nan", "inf", "1e3s", "0s", "0min"])
def test_what_does_not_say_how_often_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="does not say how often"):
        units.parse_interval(text)


def test_how_often_is_steps_a_time_or_whatever_is_best() -> None:
    assert [units.parse_interval(text) for text in ("0", "50", "auto")] == [0, 50, "auto"]
    with pytest.raises(UsageError, match="'soon' is no time"):
        units.parse_seconds("soon")


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.4, "400 ms"),
        (99.0, "99.0 s"),
        (100.0, "2 min"),
        (3600.0, "60 min"),
        (5.5 * 3600, "5.50 h"),
        (20 * 86400.0, "20 days"),
    ],
)
def test_what_lasts_long_has_units_of_its_own(value_s: float, text: str) -> None:
    assert units.duration(value_s) == text
