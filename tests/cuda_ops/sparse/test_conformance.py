"""Operators in C++, and those in Triton as its interpreter runs them, beside those of plain torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cuda_ops.sparse import reference
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import HIGHEST, LOWEST, pack
from cuda_ops.sparse.native.functions import NativeOperators
from tests.cuda_ops.sparse.clouds import ONES, Triple, cloud, random
from tests.cuda_ops.sparse.conformance import Case, cases, cases_of_channels, errors

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[tuple[str, float]]]:
    """Operators and their errors by case, from one process: the interpreter is chosen before kernels are imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_ops.sparse.conformance"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = defaultdict(list)
    for line in done.stdout.splitlines():
        case, operator, error = line.split("\t")
        found[case].append((operator, float(error)))
    return found


@needs_triton
def test_interpreted_kernels_agree_with_the_plain_operators(interpreted: dict[str, list[tuple[str, float]]]) -> None:
    """All cases in one test: the process has run them all, so none is left out."""
    for case in cases(torch.float16):
        assert interpreted[case.name], case.name
        wrong = [(operator, error) for operator, error in interpreted[case.name] if not error <= case.tolerance]
        assert wrong == [], case.name


STEPS: list[tuple[Triple, Triple, Triple]] = [
    (kernel, stride, dilation)
    for kernel in ((1, 1, 1), (2, 2, 2), (3, 3, 3), (5, 3, 1), (2, 3, 4), (1, 1, 5))
    for stride in (ONES, (2, 2, 2), (1, 2, 3))
    for dilation in (ONES, (2, 1, 3))
]


@pytest.mark.every_case
@pytest.mark.parametrize("case", [*cases(torch.bfloat16), *cases_of_channels()], ids=lambda case: case.name)
def test_compiled_operators_agree_with_the_plain_ones(native_operators: NativeOperators, case: Case) -> None:
    found = errors(native_operators, case.calls(), "cpu")
    assert found or case.name == "boxes"
    assert [(operator, error) for operator, error in found if not error <= case.tolerance] == []


def keys_of(sites: int, seed: int = 0, extent: int = 6) -> Tensor:
    return reference.sorted_sites(cloud(sites, seed, extent))[0]


def edge_keys() -> Tensor:
    """Sites in the corners of the range and beside them, of two samples."""
    near = [LOWEST, LOWEST + 1, -1, 0, HIGHEST - 1, HIGHEST]
    grid = torch.cartesian_prod(torch.tensor([0, 511]), *(torch.tensor(near),) * 3)
    return pack(grid).sort().values


def level(sites: int = 900, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of more than one block of a kernel, and their map with its reverse."""
    keys = keys_of(sites, seed, extent=9)
    neighbours = reference.kernel_map(keys, keys, (3, 3, 3), ONES, ONES, False)
    return keys, neighbours, reference.reversed_map(neighbours, len(keys))


def assert_same(one: object, other: object) -> None:
    if isinstance(one, tuple):
        assert isinstance(other, tuple)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert isinstance(one, Tensor)
        assert isinstance(other, Tensor)
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


def test_sites_are_sorted_as_by_the_reference(native_operators: NativeOperators) -> None:
    for coordinates in (cloud(2000, extent=40), cloud(1), cloud(0), torch.tensor([[511, HIGHEST, LOWEST, 0]]).int()):
        assert_same(native_operators.sorted_sites(coordinates), reference.sorted_sites(coordinates))
    assert_same(native_operators.sorted_sites(cloud(50).long()), reference.sorted_sites(cloud(50).long()))


@pytest.mark.parametrize(
    "row", [[0, 1, 2, 3], [-1, 0, 0, 0], [512, 0, 0, 0], [0, HIGHEST + 1, 0, 0], [0, 0, LOWEST - 1, 0]]
)
def test_what_is_no_site_is_named(native_operators: NativeOperators, row: list[int]) -> None:
    coordinates = torch.tensor([[0, 1, 2, 3], row], dtype=torch.int32)
    with pytest.raises(SparseInputError):
        native_operators.sorted_sites(coordinates)


@pytest.mark.parametrize(("kernel", "stride", "dilation"), STEPS)
def test_sites_and_maps_of_every_step_are_those_of_the_reference(
    native_operators: NativeOperators, kernel: Triple, stride: Triple, dilation: Triple
) -> None:
    for keys in (keys_of(300), keys_of(1), keys_of(0), edge_keys()):
        strided = native_operators.strided_sites(keys, kernel, stride, dilation)
        assert_same(strided, reference.strided_sites(keys, kernel, stride, dilation))
        generated = native_operators.generated_sites(keys, kernel, stride, dilation)
        assert_same(generated, reference.generated_sites(keys, kernel, stride, dilation))
        for sources, targets, transposed in (
            (keys, strided, False),
            (strided, keys, True),
            (keys, generated, True),
            (keys, keys, False),
            (keys, keys_of(200, seed=1), False),
            (keys, keys[:0], False),
        ):
            arguments = (sources, targets, kernel, stride, dilation, transposed)
            neighbours = native_operators.kernel_map(*arguments)
            assert_same(neighbours, reference.kernel_map(*arguments))
            assert_same(
                native_operators.reversed_map(neighbours, len(sources)),
                reference.reversed_map(neighbours, len(sources)),
            )


def test_a_kernel_of_few_offsets_divides_its_gradient_by_channels(native_operators: NativeOperators) -> None:
    x = random(700, 53)
    dy = random(700, 9, seed=1)
    neighbours = torch.arange(700, dtype=torch.int32)[None].contiguous()
    torch.testing.assert_close(
        native_operators.sparse_conv_weight(x, dy, neighbours)[0], x.T @ dy, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("outputs", [0, 5])
def test_nothing_in_gives_zeros_of_the_right_shape(native_operators: NativeOperators, outputs: int) -> None:
    neighbours = torch.full((8, outputs), -1, dtype=torch.int32)
    reverse = torch.empty((8, 0), dtype=torch.int32)
    x = random(0, 3)
    none = torch.zeros(0, dtype=torch.int64)
    assert_same(native_operators.sparse_conv(x, random(8, 3, 4), neighbours, reverse), x.new_zeros(outputs, 4))
    assert_same(native_operators.sparse_conv_weight(x, x.new_ones(outputs, 4), neighbours), x.new_zeros(8, 3, 4))
    assert_same(
        native_operators.sparse_max_pool(x, neighbours, reverse), reference.sparse_max_pool(x, neighbours, reverse)
    )
    assert_same(native_operators.sparse_sum_pool(x, neighbours, reverse), x.new_zeros(outputs, 3))
    assert_same(native_operators.segment_sum(x, none, none), x.new_zeros(0, 3))
    assert_same(native_operators.segment_expand(x, none, none, outputs), x.new_zeros(outputs, 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_thread_and_several_give_the_same_bits(native_operators: NativeOperators, dtype: torch.dtype) -> None:
    keys, neighbours, reverse = level(2500)
    x = random(len(keys), 19, dtype=dtype)
    dy = random(len(keys), 33, seed=1, dtype=dtype)
    weight = random(27, 19, 33, seed=2, dtype=dtype)
    rows = reference.sparse_max_pool(x, neighbours, reverse)[1]
    starts = torch.tensor([0, 100, 800])
    lengths = torch.tensor([100, 700, len(keys) - 800])

    def everything() -> tuple[object, ...]:
        return (
            native_operators.kernel_map(keys, keys, (3, 3, 3), ONES, ONES, False),
            native_operators.reversed_map(neighbours, len(keys)),
            native_operators.sparse_conv(x, weight, neighbours, reverse),
            native_operators.sparse_conv_weight(x, dy, neighbours),
            native_operators.sparse_conv_weight(x, dy, neighbours[:1].contiguous()),
            native_operators.sparse_max_pool(x, neighbours, reverse),
            native_operators.sparse_max_pool_backward(x, rows, reverse),
            native_operators.sparse_sum_pool(x, neighbours, reverse),
            native_operators.segment_sum(x, starts, lengths),
        )

    alone = everything()
    torch.set_num_threads(3)
    assert torch.get_num_threads() == 3
    for _ in range(3):
        assert_same(everything(), alone)
