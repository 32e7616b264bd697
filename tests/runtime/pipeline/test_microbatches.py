"""The parts of a batch that ranks ask for."""

from __future__ import annotations

import pytest
import torch

from planner.ir.errors import UsageError
from planner.ir.graph import TensorSpec
from runtime.pipeline.microbatches import InputSpecs, WholeBatch

INPUTS = InputSpecs(
    {
        "x": TensorSpec(("sample", "width"), (4, 3), "float32"),
        "pairs": TensorSpec(("sample",), (8,), "int64"),
        "table": TensorSpec(("width",), (3,), "float32"),
    },
    4,
)


def test_every_part_of_a_batch_is_those_rows_of_it() -> None:
    x, pairs, table = torch.randn(7, 3), torch.arange(14), torch.randn(3)
    batch = WholeBatch(INPUTS, (x, pairs, table), (3, 3, 3))
    assert batch.rows == (3, 3, 1)
    for m, rows in enumerate(batch.rows):
        for start in range(rows):
            for count in range(rows - start + 1):
                first = 3 * m + start
                assert torch.equal(batch.part("x", m, start, count), x[first : first + count])
                assert torch.equal(batch.part("pairs", m, start, count), pairs[2 * first : 2 * (first + count)])
                assert batch.part("table", m, start, count) is table


def test_part_of_a_sample_is_refused() -> None:
    with pytest.raises(UsageError, match="pairs has 7 rows, a sample has 2 of them"):
        WholeBatch(INPUTS, (torch.randn(3, 3), torch.arange(7), torch.randn(3)), (3,))
