"""What may be in a block, and in tiles: layers that need more than an overlap are refused by name, with a remedy."""

from __future__ import annotations

import pytest

from planner.extras.tiles.refusals import block_faults, is_global_along
from planner.ir.graph import Attribute, Graph, Layer, TensorSpec

DIMS = ("sample", "channel", "height", "width")
IMAGE = TensorSpec(DIMS, (1, 4, 8, 8), "float32")


def graph(kind: str, spec: TensorSpec = IMAGE, buffer_bytes: int = 0, **attributes: Attribute) -> Graph:
    """A layer between two activations, and a loss of elements."""
    before = Layer("before", "pointwise", ("x",), (IMAGE,), (), {"op": "relu"})
    layer = Layer("layer", kind, ("before",), (spec,), (), {"op": kind, **attributes}, buffer_bytes)
    after = Layer("after", "pointwise", ("layer",), (spec,), (), {"op": "relu"})
    terms = {"op": "mse", "terms": "elements"}
    loss = Layer("loss", "loss", ("after", "y"), (TensorSpec((), (), "float32"),), (), terms)
    return Graph(1, {"x": IMAGE, "y": spec}, (before, layer, after, loss), {}, "loss")


def window(kernel: int, padding: int) -> dict[str, tuple[int, int]]:
    numbers = {"kernel": kernel, "stride": 1, "padding": padding, "dilation": 1}
    return {name: (number, number) for name, number in numbers.items()}


GLOBAL = {
    "softmax over rows": graph("softmax", dim=2),
    "group norm": graph("layer_norm", dims=(1, 2, 3), groups=2),
    "instance norm": graph("layer_norm", dims=(2, 3)),
    "one bin": graph("adaptive_pool", TensorSpec(DIMS, (1, 4, 1, 8), "float32")),
    "rows and columns in one": graph("reshape", TensorSpec(("sample", "channel", "dim2"), (1, 4, 64), "float32")),
    "mean over rows": graph("reduce", TensorSpec(DIMS, (1, 4, 1, 8), "float32"), dims=(2,), keeps=True),
    "no rule": graph("opaque"),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_what_reads_all_rows_is_refused_in_tiles_along_them(name: str) -> None:
    whole = GLOBAL[name]
    names = ("before", "layer", "after")
    ((layer, text),) = block_faults(whole, names, {"height": 2})
    assert layer == "layer"
    assert "reads all of height, of which a tile has a part; end the block before it" in text
    assert list(block_faults(whole, names, {})) == []
    assert list(block_faults(whole, ("before",), {"height": 2})) == []


@pytest.mark.parametrize("extent", [2, 3, 8])
def test_a_window_is_no_reading_of_all_however_small_the_image(extent: int) -> None:
    image = TensorSpec(DIMS, (1, 4, extent, extent), "float32")
    layer = Layer("layer", "conv", ("x",), (image,), (), {"op": "conv", "groups": 1, **window(5, 2)})
    assert not is_global_along(layer, (image,), "height")


POOLED = graph("global_pool", TensorSpec(DIMS, (1, 4, 1, 1), "float32"))
BY_ROWS = {"height": 2}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("whole", "names", "tiles", "words"),
    [
        (GLOBAL["softmax over rows"], "layer", {"width": 4}, ""),  # along columns it may be cut
        (graph("batch_norm"), "before layer", {}, "track_running_stats=True"),  # statistics of a micro-batch
        (graph("batch_norm"), "before layer", BY_ROWS, "track_running_stats=True"),
        (graph("batch_norm", buffer_bytes=40), "before layer", BY_ROWS, ""),
        (POOLED, "before layer", {"height": 2, "width": 2}, ""),  # a sum over space may end a block
        (POOLED, "before layer after", BY_ROWS, "known when all tiles are done"),
    ],
)
def test_what_may_be_in_a_block(whole: Graph, names: str, tiles: dict[str, int], words: str) -> None:
    found = list(block_faults(whole, names.split(), tiles))
    assert [layer for layer, _ in found] == ["layer"] * bool(words)
    assert all(words in text for _, text in found)


@pytest.mark.parametrize(("terms", "words"), [("places", "what all places weigh"), (None, "all of a sample at once")])
def test_a_loss_of_elements_alone_is_added_up_over_tiles(terms: str | None, words: str) -> None:
    whole = graph("pointwise")
    assert list(block_faults(whole, ("after", "loss"), {"height": 2})) == []
    attributes: dict[str, Attribute] = {"op": "cross_entropy"} if terms is None else {"op": "nll", "terms": terms}
    loss = Layer("loss", "loss", ("after", "y"), (TensorSpec((), (), "float32"),), (), attributes)
    other = Graph(1, whole.inputs, (*whole.layers[:-1], loss), {}, "loss")
    ((layer, text),) = block_faults(other, ("after", "loss"), {"height": 2})
    assert layer == "loss"
    assert words in text
    assert list(block_faults(other, ("after", "loss"), {})) == []
