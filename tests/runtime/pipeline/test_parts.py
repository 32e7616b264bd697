"""Parts of a batch and of tensors on their way, and what the order of a row says of sums of gradients."""

from __future__ import annotations

import random

import pytest
import torch

from planner.ir.box import Box, Interval, whole
from planner.ir.errors import UsageError
from planner.ir.graph import TensorSpec
from planner.ir.schedule import Action, Op
from runtime.pipeline.microbatches import InputSpecs, MicroBatches, WholeBatch, part_in
from runtime.pipeline.routing import add_up, assemble, slices
from runtime.pipeline.specialize import last_gradients, last_updates

INPUTS = InputSpecs(
    {
        "x": TensorSpec(("sample", "width"), (4, 3), "float32"),
        "pairs": TensorSpec(("sample",), (8,), "int64"),
        "table": TensorSpec(("width",), (3,), "float32"),
    },
    4,
)


def test_every_part_of_a_batch_is_those_rows_of_it() -> None:
    x = torch.randn(7, 3)
    pairs = torch.arange(14)
    table = torch.randn(3)
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
    draw = random.Random(0)
    inputs = InputSpecs(SPECS, 4)
    given = tensors(sum(ROWS))
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


F64 = torch.float64


def box(*bounds: tuple[int, int]) -> Box:
    return tuple(Interval(*each) for each in bounds)


def test_one_whole_piece_is_not_copied() -> None:
    tensor = torch.ones(2, 3)
    whole = box((4, 6), (0, 3))
    assert assemble([(whole, tensor)], whole, torch.float32) is tensor
    assert add_up([(whole, tensor)], whole, torch.float32) is tensor


def test_adding_up_is_the_adjoint_of_handing_out() -> None:
    whole = box((0, 6), (0, 2))
    boxes = [box((0, 4), (0, 2)), box((3, 6), (0, 2)), box((3, 4), (1, 2))]
    x = torch.randn(6, 2, dtype=F64)
    ys = [torch.randn(len(b[0]), len(b[1]), dtype=F64) for b in boxes]
    handed_out = sum((x[slices(b, whole)] * y).sum() for b, y in zip(boxes, ys, strict=True))
    returned = (x * add_up(list(zip(boxes, ys, strict=True)), whole, F64)).sum()
    torch.testing.assert_close(handed_out, returned, rtol=1e-14, atol=0)


REDUCE_0 = Action(0, Op.REDUCE_GRAD)
REDUCE_1 = Action(1, Op.REDUCE_GRAD)
BACKWARDS = tuple(map(Action.parse, ("1B0", "0B0", "1B1", "0B1")))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (((0, 1), (0, 1)), {"1B1"}),  # that of stage 0 starts no sooner than the other's reduction
        (((0, 1), (0, 2)), {"1B1", "0B1"}),
        (((1, 0), (0, 1)), {"1B1"}),
    ],
)
def test_sums_over_the_same_ranks_start_in_the_order_of_their_reductions(
    ranks: tuple[tuple[int, ...], ...], expected: set[str]
) -> None:
    assert set(map(str, last_gradients((*BACKWARDS, REDUCE_1, REDUCE_0), ranks))) == expected


def test_the_last_half_of_a_backward_that_makes_weight_gradients_counts() -> None:
    row = tuple(map(Action.parse, ("0I0", "0W0", "0I1", "0W1", "0I2")))
    assert set(map(str, last_gradients((*row, REDUCE_0), ((0, 1),)))) == {"0W1"}


def test_of_several_updates_each_has_its_last_gradients_and_the_newest_is_the_last() -> None:
    updates = [Action(0, Op.UPDATE, microbatch) for microbatch in (0, None)]
    row = (Action.parse("0B0"), updates[0], Action.parse("0B1"), updates[1])
    assert set(map(str, last_gradients(row, ((0,),)))) == {"0B0", "0B1"}
    assert last_updates(row) == {updates[1]}
