"""The parts of a batch that ranks ask for."""

from __future__ import annotations

import random

import pytest
import torch

from planner.ir.box import Interval, whole
from planner.ir.errors import UsageError
from planner.ir.graph import TensorSpec
from runtime.pipeline.microbatches import InputSpecs, MicroBatches, WholeBatch, part_in
from runtime.pipeline.routing import slices

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


ROWS = (4, 4, 3)
SPECS = {
    "x": TensorSpec(("sample", "feature"), (12, 5), "float32"),  # three rows a sample
    "y": TensorSpec(("feature", "sample"), (2, 4), "float32"),
    "weight": TensorSpec(("feature",), (5,), "float32"),
}


def tensors(rows: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(3 * rows, 5),
        "y": torch.randn(2, rows),
        "weight": torch.randn(5),
    }


@pytest.mark.parametrize("one_by_one", [False, True])
def test_any_box_of_an_input_is_that_of_its_micro_batch(one_by_one: bool) -> None:
    """Also where it begins or ends inside a sample that has several rows."""
    draw, inputs, given = random.Random(0), InputSpecs(SPECS, 4), tensors(sum(ROWS))
    first = [sum(ROWS[:m]) for m in range(len(ROWS))]
    parts = [
        {
            "x": given["x"][3 * at : 3 * (at + rows)],
            "y": given["y"][:, at : at + rows],
            "weight": given["weight"],
        }
        for at, rows in zip(first, ROWS, strict=True)
    ]
    batch = (
        MicroBatches(inputs, [list(part.values()) for part in parts], len(ROWS))
        if one_by_one
        else WholeBatch(inputs, list(given.values()), (4, 4, 4))
    )
    assert batch.rows == ROWS
    for m, part in enumerate(parts):
        assert batch.shapes(m) == {name: tuple(tensor.shape) for name, tensor in part.items()}
        for name, tensor in part.items():
            spec = TensorSpec(SPECS[name].dims, tuple(tensor.shape), "float32")
            for _ in range(20):
                bounds = [sorted((draw.randint(0, size), draw.randint(0, size))) for size in tensor.shape]
                box = tuple(Interval(*each) for each in bounds)
                expected = tensor[slices(box, whole(tensor.shape))]
                assert torch.equal(part_in(batch, name, m, box, spec), expected), (name, m, box)
