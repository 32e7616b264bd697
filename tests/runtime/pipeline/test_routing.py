from __future__ import annotations

import torch

from planner.ir.box import Box, Interval
from runtime.pipeline.routing import add_up, assemble, slices

F64 = torch.float64


def box(*bounds: tuple[int, int]) -> Box:
    return tuple(Interval(*each) for each in bounds)


def test_a_box_is_an_index_into_what_covers_it() -> None:
    assert slices(box((3, 5), (0, 2)), box((2, 6), (0, 2))) == (slice(1, 3), slice(0, 2))


def test_one_whole_piece_is_not_copied() -> None:
    tensor = torch.ones(2, 3)
    whole = box((4, 6), (0, 3))
    assert assemble([(whole, tensor)], whole, torch.float32) is tensor
    assert add_up([(whole, tensor)], whole, torch.float32) is tensor


def test_pieces_come_together_in_any_order() -> None:
    full = torch.arange(12.0, dtype=F64).view(6, 2)
    parts = [(box((5, 7), (0, 2)), full[3:5]), (box((2, 5), (0, 2)), full[:3]), (box((7, 8), (0, 2)), full[5:])]
    assert torch.equal(assemble(parts, box((2, 8), (0, 2)), F64), full)


def test_what_no_piece_covers_is_zero() -> None:
    found = assemble([(box((1, 2)), torch.ones(1, dtype=F64))], box((0, 3)), F64)
    assert found.tolist() == [0, 1, 0]
    assert assemble([], box((2, 2), (0, 3)), F64).shape == (0, 3)


def test_a_scalar_is_one_piece() -> None:
    assert assemble([((), torch.tensor(2.0))], (), torch.float32).item() == 2.0


def test_adding_up_is_the_adjoint_of_handing_out() -> None:
    whole = box((0, 6), (0, 2))
    boxes = [box((0, 4), (0, 2)), box((3, 6), (0, 2)), box((3, 4), (1, 2))]
    x = torch.randn(6, 2, dtype=F64)
    ys = [torch.randn(len(b[0]), len(b[1]), dtype=F64) for b in boxes]
    handed_out = sum((x[slices(b, whole)] * y).sum() for b, y in zip(boxes, ys, strict=True))
    returned = (x * add_up(list(zip(boxes, ys, strict=True)), whole, F64)).sum()
    torch.testing.assert_close(handed_out, returned, rtol=1e-14, atol=0)
