"""Parts of a batch are those of the tensors that it is made of."""

from __future__ import annotations

import random

import pytest
import torch

from planner.ir.box import Interval, whole
from planner.ir.graph import TensorSpec
from runtime.pipeline.messages import slices
from runtime.pipeline.microbatches import InputSpecs, MicroBatches, WholeBatch, part_in

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
