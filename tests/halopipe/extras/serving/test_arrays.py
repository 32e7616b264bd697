"""JSON and numpy's arrays are read as json and numpy do, in bounded memory; what would be lost is refused."""

from __future__ import annotations

import io
import json
import tracemalloc

import numpy as np
import pytest
import torch

from halopipe.extras.serving import arrays
from planner.ir.errors import FormatError
from tests.halopipe.extras.serving.stand_in import npy

MOST = 2**24


def read(data: bytes, wanted: torch.dtype, most: int = MOST) -> torch.Tensor:
    found = arrays.read_npy(io.BytesIO(data), "x", wanted, most)
    assert found is not None
    return found


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (7, 5, 3), (400, 100)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("indent", [None, 1])
def test_numbers_of_json_are_those_that_json_reads(
    shape: tuple[int, ...], dtype: torch.dtype, indent: int | None
) -> None:
    numbers = np.random.default_rng(0).normal(size=shape) * 100
    expected = torch.from_numpy(np.array(numbers > 0 if dtype == torch.bool else numbers)).to(dtype)
    text = json.dumps({"x": expected.tolist(), "y": [1]}, indent=indent).encode()
    found = arrays.tensors_of_json(text, {"x": dtype, "y": torch.int64}, MOST)
    assert found["x"].dtype == dtype
    assert torch.equal(found["x"], expected)
    assert found["y"].tolist() == [1]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("came", "wanted"),
    [
        (np.ones(2, np.complex64), torch.float32),
        (np.ones(2), torch.int64),
        (np.ones(2, bool), torch.float32),
        (np.ones(2, np.int64), torch.bool),
        (np.array([2**63], np.uint64), torch.int64),
        (np.array([300]), torch.uint8),
        (np.array([-1]), torch.uint64),
        (np.array([2**24 + 1]), torch.float32),
        (np.array([1e300]), torch.float32),
        (np.array([1e300 + 0j]), torch.complex64),
        (np.array(["a"]), torch.float32),
        (np.zeros(1, [("a", "f4")]), torch.float32),
        (np.zeros(1, "M8[s]"), torch.int64),
        (np.zeros(1, np.longdouble), torch.float64),
    ],
)
def test_what_cannot_be_kept_is_refused_with_both_dtypes(came: np.ndarray, wanted: torch.dtype) -> None:
    with pytest.raises(FormatError, match=r"^.*x is ") as told:
        read(npy(came), wanted)
    assert str(came.dtype) in str(told.value)


@pytest.mark.parametrize(
    ("came", "wanted"),
    [
        (np.array([1.1, np.inf, np.nan]), torch.float32),
        (np.array([1, 2], np.uint8), torch.float32),
        (np.array([5], np.uint64), torch.int64),
        (np.array([1.5], np.float32), torch.complex64),
        (np.array([1.5], ">f4"), torch.float64),
    ],
)
def test_what_can_be_kept_is(came: np.ndarray, wanted: torch.dtype) -> None:
    found = read(npy(came), wanted)
    expected = torch.from_numpy(came.astype(came.dtype.newbyteorder("="))).to(wanted)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


@pytest.mark.every_case
@pytest.mark.parametrize(
    "data",
    [
        b"PK\3\4" + bytes(100),
        b"\x93NUMPY",
        b"\x93NUMPY\3\0" + bytes(100),
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,)}\n"),
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000000, 0)}\n")[:-5],
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}\n"),
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2.5)}\n"),
        header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"),
        header(b"{'descr': ('<f8', (1000000,)), 'fortran_order': False, 'shape': (1,)}\n"),
        header(b"{'descr': '|S1000000000', 'fortran_order': False, 'shape': (1,)}\n"),
        header(b"(" * 5000),
        header(b"-" * 9000 + b"1"),
        header(b"\xff" * 100),
        header(b"{'shape"),
        header(b"  x\n y"),
        npy(np.ones(9))[:-1],
        npy(np.array([{}], dtype=object), allow_pickle=True),
    ],
)
def test_arrays_that_lie_about_themselves_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read(data, torch.float64)


BYTES = 2**20


@pytest.mark.every_case
@pytest.mark.parametrize(
    "value",
    [
        b"[" + b'"a",' * (BYTES // 4) + b'"' + b"a" * 1000 + b'"]',
        b"[" + b"[]," * (BYTES // 3) + b"[]]",
        b"[" * BYTES,
        b"[" + b"0," * (BYTES // 2) + b"0]",
        b"[" + b"1" * BYTES + b"]",
        b"[" + b"[0]," * (BYTES // 4) + b"[0,0]]",
        b"[" + b"1e999," * (BYTES // 6) + b"0]",
        b"[" + b"12345678901234567890," * (BYTES // 21) + b"0]",
        b" " * BYTES,
        b"[" + b"true," * (BYTES // 5) + b"true]",
        b"[" + b"null," * (BYTES // 5) + b"null]",
        b'{"a":' * (BYTES // 5),
    ],
)
def test_a_body_that_is_refused_takes_no_more_than_three_times_its_bytes(value: bytes) -> None:
    text = b'{"x": ' + value + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            arrays.tensors_of_json(text, {"x": torch.int32}, BYTES)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)  # beside the text itself
    finally:
        tracemalloc.stop()
