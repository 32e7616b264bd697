from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from planner.ir.box import whole
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout
from runtime.pipeline.messages import slices
from runtime.spatial.dtensor import as_dtensor, local_of
from runtime.spatial.placements import (
    Placements,
    axis_names,
    chunk_points,
    from_placements,
    pending_sums,
    to_placements,
)
from tests.runtime.transport.conftest import run_in_processes

IMAGE = TensorSpec(("sample", "channel", "height", "width"), (4, 3, 10, 7), "float64")
ONE_ROW = TensorSpec(("sample", "channel", "height", "width"), (4, 3, 1, 7), "float64")


def spec(*dims_and_extents):
    return TensorSpec(tuple(dims_and_extents[::2]), tuple(dims_and_extents[1::2]), "float64")


CONVERTIBLE = {
    "nothing": (Layout(), IMAGE, (1,), (Replicate(),)),
    "height": (Layout({"height": (0, 5, 10)}), IMAGE, (2,), (Shard(2),)),
    "a last chunk that is smaller": (Layout({"height": (0, 3, 6, 9, 10)}), IMAGE, (4,), (Shard(2),)),
    "a last chunk that is empty": (Layout({"channel": (0, 1, 2, 3, 3)}), IMAGE, (4,), (Shard(1),)),
    "scaled cut points": (Layout({"height": (0, 1, 2)}), IMAGE, (2,), (Shard(2),)),
    "samples and width": (Layout({"sample": (0, 2, 4), "width": (0, 4, 7)}), IMAGE, (2, 2), (Shard(0), Shard(3))),
    "width before height": (Layout({"width": (0, 4, 7), "height": (0, 5, 10)}), IMAGE, (2, 2), (Shard(3), Shard(2))),
    "copies": (Layout({"replica": (0, 1, 2), "height": (0, 5, 10)}), IMAGE, (2, 2), (Replicate(), Shard(2))),
    "a dim it lacks": (Layout({"height": (0, 5, 10), "time": (0, 1, 2)}), IMAGE, (2, 2), (Shard(2), Replicate())),
    "extent 1": (Layout({"height": (0, 5, 10), "width": (0, 4, 7)}), ONE_ROW, (2, 2), (Replicate(), Shard(3))),
    "one part": (Layout({"height": (0, 10), "width": (0, 2, 4, 6, 7)}), IMAGE, (1, 4), (Shard(2), Shard(3))),
    "samples in blocks": (Layout({"sample": (0, 1, 2)}), spec("sample", 8, "feature", 3), (2,), (Shard(0),)),
    "one sample": (Layout({"sample": (0, 1, 1)}), spec("sample", 1, "feature", 3), (2,), (Shard(0),)),
    "no samples": (Layout({"sample": (0, 1, 2)}), spec("sample", 0, "feature", 3), (2,), (Shard(0),)),
}


def samples_of(what):
    return {8: 2}.get(what.shape[0], what.shape[0])


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_layout_becomes_placements_and_comes_back(name):
    layout, tensor, shape, placements = CONVERTIBLE[name]
    placed = to_placements(layout, tensor, samples_of(tensor))
    assert (placed.mesh_shape, placed.placements) == (shape, placements)
    back = from_placements(placed, tensor, samples_of(tensor))
    assert back.boxes(tensor, samples_of(tensor)) == layout.boxes(tensor, samples_of(tensor))
    assert to_placements(back, tensor, samples_of(tensor)) == placed


def test_chunks_are_those_of_torch():
    for extent in range(12):
        for ways in range(1, 6):
            sizes = [len(chunk) for chunk in torch.arange(extent).chunk(ways)] if extent else []
            points = chunk_points(extent, [ways])
            assert [b - a for a, b in pairwise(points) if b > a] == sizes
            assert len(points) == ways + 1
    assert chunk_points(5, [2, 2]) == (0, 2, 3, 4, 5)


def test_refuses_cut_points_that_are_not_even_chunks():
    with pytest.raises(UnsupportedModelError) as caught:
        to_placements(Layout({"width": (0, 4, 7), "height": (0, 3, 10)}), IMAGE, 4)
    assert "height of extent 10" in caught.value.title
    assert caught.value.details == ("the layout cuts at 0, 3, 10", "DTensor would cut at 0, 5, 10")
    five = spec("sample", 1, "height", 5)
    assert to_placements(Layout({"height": (0, 2, 4, 5, 5)}), five, 1).placements == (Shard(1),)
    with pytest.raises(UnsupportedModelError, match="cannot cut height"):  # empty parts come last, there
        to_placements(Layout({"height": (0, 2, 2, 4, 5)}), five, 1)


def test_refuses_a_dim_that_the_tensor_has_twice():
    with pytest.raises(UnsupportedModelError, match="feature 2 times"):
        to_placements(Layout({"feature": (0, 2, 4)}), spec("sample", 2, "feature", 4, "feature", 4), 2)


def test_pending_sums_are_partial_and_come_back():
    layout = Layout({"ways": (0, 1, 2), "height": (0, 5, 10)})
    placed = to_placements(layout, IMAGE, 4, sums=["ways"])
    assert placed.placements == (Partial(), Shard(2))
    assert from_placements(placed, IMAGE, 4) == layout
    assert pending_sums(placed, IMAGE) == ("ways",)
    with pytest.raises(UsageError, match="height, which the tensor is cut along"):
        to_placements(layout, IMAGE, 4, sums=["height"])
    with pytest.raises(UsageError, match="depth, which the layout does not cut"):
        to_placements(layout, IMAGE, 4, sums=["depth"])
    with pytest.raises(UnsupportedModelError, match="awaits max"):
        pending_sums(Placements((2,), ("a",), (Partial("max"),)), IMAGE)


def test_axes_that_do_not_cut_what_they_are_named_by_get_another_name():
    placed = Placements((2, 2, 2), ("replica1", "height", "x"), (Replicate(), Replicate(), Shard(-1)))
    names = axis_names(placed, IMAGE)
    assert names[0] == "replica1"
    assert names[2] == "width"
    assert len(set(names)) == 3
    layout = from_placements(placed, IMAGE, 4)
    assert layout.num_parts == 8
    assert {box[2] for box in layout.boxes(IMAGE, 4)} == {whole(IMAGE.shape)[2]}


def test_neighbouring_axes_may_cut_one_dim_and_others_may_not():
    layout = from_placements(Placements((2, 2), ("a", "b"), (Shard(3), Shard(3))), IMAGE, 4)
    assert layout == Layout({"width": (0, 2, 4, 6, 7)})
    assert from_placements(Placements((2, 3), ("a", "b"), (Shard(3), Shard(3))), IMAGE, 4).cuts["width"] == (
        0, 2, 4, 4, 5, 6, 7,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="not neighbours"):
        from_placements(Placements((2, 2, 2), ("a", "b", "c"), (Shard(3), Shard(2), Shard(3))), IMAGE, 4)


def test_refuses_a_cut_within_a_sample():
    blocks = spec("sample", 6, "feature", 3)  # three rows a sample
    assert from_placements(Placements((2,), ("a",), (Shard(0),)), blocks, 2) == Layout({"sample": (0, 1, 2)})
    with pytest.raises(UnsupportedModelError, match="3 rows of dim sample are one"):
        from_placements(Placements((3,), ("a",), (Shard(0),)), blocks, 2)


def part(tensor, layout, what, position):
    return tensor[slices(layout.boxes(what, samples_of(what))[position], whole(what.shape))].contiguous()


def test_full_tensor_is_the_global_one_and_gradients_flow(tmp_path):
    four = {name: case for name, case in CONVERTIBLE.items() if case[0].num_parts == 4}

    def program(transport):
        torch.set_num_threads(1)
        for layout, what, *_ in four.values():
            samples = samples_of(what)
            mesh = to_placements(layout, what, samples).mesh(range(4))
            whole_tensor = torch.arange(what.num_bytes // 8, dtype=torch.float64).view(what.shape)
            local = part(whole_tensor, layout, what, transport.rank).requires_grad_()
            distributed = as_dtensor(local, layout, what, samples, mesh)
            assert tuple(distributed.shape) == what.shape
            assert torch.equal(distributed.full_tensor(), whole_tensor)
            assert torch.equal(local_of(distributed, layout, what, samples), local)
            assert from_placements(Placements.of(distributed), what, samples).boxes(what, samples) == layout.boxes(
                what, samples
            )
            local_of(distributed, layout, what, samples).square().sum().backward()
            assert torch.equal(local.grad, 2 * local)
        return True

    assert run_in_processes(4, program, (), tmp_path / "store") == [True] * 4
    assert len(four) >= 7


def test_redistributes_sums_and_refuses_what_does_not_fit(tmp_path):
    rows, columns = Layout({"height": (0, 3, 6, 9, 10)}), Layout({"width": (0, 2, 4, 6, 7)})
    terms = Layout({"ways": (0, 1, 2), "height": (0, 5, 10)})

    def program(transport):
        torch.set_num_threads(1)
        x = torch.randn(IMAGE.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        mesh = to_placements(rows, IMAGE, 4).mesh(range(4))
        distributed = as_dtensor(part(x, rows, IMAGE, transport.rank), rows, IMAGE, 4, mesh)
        assert torch.equal(local_of(distributed, columns, IMAGE, 4), part(x, columns, IMAGE, transport.rank))
        grid = to_placements(terms, IMAGE, 4).mesh(range(4))
        term = part(x, terms, IMAGE, transport.rank) * (transport.rank // 2 + 1)
        summed = as_dtensor(term, terms, IMAGE, 4, grid, sums=["ways"])
        assert torch.allclose(summed.full_tensor(), 3 * x, rtol=1e-15)
        with pytest.raises(UsageError, match="not the part") as caught:
            as_dtensor(x, rows, IMAGE, 4, mesh)
        assert "4 x 3 x 10 x 7, the part 4 x 3 x" in caught.value.details[0]
        with pytest.raises(UsageError, match="not the grid"):
            local_of(distributed, terms, IMAGE, 4)
        with pytest.raises(UsageError, match="not what is divided"):
            local_of(distributed, Layout({"height": (0, 1, 2, 3, 4)}), spec("height", 4), 4)
        with pytest.raises(UsageError, match="do not fill the grid"):
            to_placements(rows, IMAGE, 4).mesh(range(3))
        return True

    assert run_in_processes(4, program, (), tmp_path / "store") == [True] * 4
