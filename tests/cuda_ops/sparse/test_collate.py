from __future__ import annotations

import numpy as np
import pytest
import torch

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn.tensor import SparseTensor
from cuda_ops.sparse.quantize import sparse_collate, sparse_collate_fn

COORDS = [np.array([[1, -2, 3], [0, 0, 0]]), np.empty((0, 3), dtype=np.int32), np.array([[5, 5, 5]])]
FEATS = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.empty((0, 2)), np.array([[5.0, 6.0]])]


def _sample(rows: list[list[int]], first: float) -> SparseTensor:
    feats = first + torch.arange(len(rows), dtype=torch.float32).view(-1, 1)
    coords = torch.tensor(rows, dtype=torch.int32).view(-1, 3)
    return SparseTensor(feats, torch.nn.functional.pad(coords, (1, 0)), num_samples=1)


def test_the_number_of_a_sample_comes_first() -> None:
    coords, feats = sparse_collate(COORDS, FEATS)
    assert coords.dtype == torch.int32
    assert coords.tolist() == [[0, 1, -2, 3], [0, 0, 0, 0], [2, 5, 5, 5]]
    assert feats.tolist() == [[1, 2], [3, 4], [5, 6]]


def test_torch_collates_as_numpy_does() -> None:
    given = [[torch.from_numpy(each) for each in arrays] for arrays in (COORDS, FEATS)]
    for one, other in zip(sparse_collate(*given), sparse_collate(COORDS, FEATS), strict=True):
        assert torch.equal(one, other)


def test_tensors_become_one_and_remember_the_order_of_their_rows() -> None:
    batch = sparse_collate([_sample([[3, 0, 0], [1, 0, 0]], 0), _sample([], 0), _sample([[2, 0, 0], [0, 0, 9]], 10)])
    assert batch.num_samples == 3
    assert batch.coords.tolist() == [[0, 1, 0, 0], [0, 3, 0, 0], [2, 0, 0, 9], [2, 2, 0, 0]]
    assert batch.feats.flatten().tolist() == [1, 0, 11, 10]
    labels = torch.tensor([30, 31, 32, 33])  # of the points as they were given, sample after sample
    assert labels[batch.order].tolist() == [31, 30, 33, 32]


def test_mappings_are_collated_entry_by_entry() -> None:
    samples = [
        {
            "input": _sample([[number, 0, 0]], number),
            "label": np.array([number, 1]),
            "name": str(number),
            "more": {"w": torch.ones(2)},
        }
        for number in range(3)
    ]
    batch = sparse_collate_fn(samples)
    assert len(batch["input"]) == batch["input"].num_samples == 3
    assert batch["label"].tolist() == [[0, 1], [1, 1], [2, 1]]
    assert batch["name"] == ["0", "1", "2"]
    assert batch["more"]["w"].shape == (3, 2)
    assert sparse_collate_fn([1, 2]) == [1, 2]


def test_arrays_of_different_lengths_are_refused() -> None:
    with pytest.raises(SparseInputError, match=r"shapes of 'label' that differ: found \(3,\), expected \(2,\)"):
        sparse_collate_fn([{"label": np.zeros(2)}, {"label": np.zeros(3)}])


def test_features_that_are_not_finite_are_counted_and_the_first_named() -> None:
    feats = [FEATS[0], FEATS[1], np.array([[np.nan, 1.0]])]
    with pytest.raises(SparseInputError, match=r"sample 2: features that are NaN .* first in row 0.*found 1 of 1 rows"):
        sparse_collate(COORDS, feats)


@pytest.mark.parametrize(
    ("coords", "feats", "message"),
    [
        ([], [], r"number of samples: found 0, expected 1\.\.512"),
        (COORDS * 171, FEATS * 171, r"number of samples: found 513, expected 1\.\.512"),
        (COORDS, FEATS[:2], "lists of features: found 2, expected 3, one per cloud"),
        ([COORDS[0][:1]], FEATS[:1], r"sample 0: shape of features: found \[2, 2\], expected \[1, C\]"),
        ([np.zeros((2, 4), dtype=int)], FEATS[:1], r"shape of coordinates: found \[2, 4\]"),
        ([np.zeros((2, 3))], FEATS[:1], r"dtype of coordinates: found torch.float64"),
        ([np.array([[0, 0, 2**31], [0, 0, 0]])], FEATS[:1], "coordinate z out of range: found 2147483648"),
        ([COORDS[0], COORDS[2]], [FEATS[0], np.zeros((1, 3))], r"channels that differ: found \[2, 3\]"),
    ],
)
def test_samples_that_do_not_fit_are_refused(coords: list, feats: list, message: str) -> None:
    with pytest.raises(SparseInputError, match=message):
        sparse_collate(coords, feats)


def test_tensors_of_different_strides_are_refused() -> None:
    one = _sample([[0, 0, 0]], 0)
    other = SparseTensor(one.feats, one.coords, 2)
    with pytest.raises(SparseInputError, match=r"stride of sample 1: found \(2, 2, 2\), expected \(1, 1, 1\)"):
        sparse_collate([one, other])
