from __future__ import annotations

import pytest

from planner.ir.quantities import BYTES, BYTES_PER_S, FLOP_PER_S, SECONDS, parse_quantity


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("16GiB", BYTES, 16 * 2**30),
        ("512 mb", BYTES, 512e6),
        ("1048576", BYTES, 2**20),
        ("1.555TB/s", BYTES_PER_S, 1.555e12),
        ("2GiB/s", BYTES_PER_S, 2 * 2**30),
        ("25Gbit/s", BYTES_PER_S, 3.125e9),
        ("15.7TFLOP/s", FLOP_PER_S, 15.7e12),
        ("112GFLOP/s", FLOP_PER_S, 112e9),
        ("30us", SECONDS, 30e-6),
        ("30 µs", SECONDS, 30e-6),
        ("1.5ms", SECONDS, 1.5e-3),
    ],
)
def test_a_quantity_is_read_with_its_unit(text: str, dimension: str, value: float) -> None:
    assert parse_quantity(text, dimension) == value


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("", BYTES),
        ("-1GiB", BYTES),
        ("1e3MB", BYTES),
        ("16GiB", BYTES_PER_S),
        ("900", BYTES_PER_S),
        ("5TB", FLOP_PER_S),
        ("fast", SECONDS),
    ],
)
def test_what_is_no_quantity_of_that_kind_says_how_to_write_one(text: str, dimension: str) -> None:
    with pytest.raises(ValueError, match=f"no number of {dimension}; write "):
        parse_quantity(text, dimension)
