"""What a convolution needs in a tile: in which memory torch computes it is told by its own choice, and counted."""

from __future__ import annotations

from math import prod

import pytest
import torch

from cuda_ops._torch import conv_backend
from cuda_ops.dense.conv_kernels import NATIVE, kernel_for
from cuda_ops.memory import MemoryCounter, available, install
from planner.extras.tiles.workspace import spreads_windows, transient_bytes
from planner.ir.box import whole
from planner.ir.graph import Attribute
from planner.layers.sized import SizedLayer
from tests.planner.networks import Network

SHAPES = [
    (1, 4, 64, 80),  # as many elements as make a small input
    (1, 4, 64, 81),
    (2, 4, 16, 16),
    (1, 32, 20, 32),
    (1, 8, 2560),
    (1, 8, 2561),
    (1, 4, 8, 8, 8),
    (1, 16, 16, 80, 5),
    (1, 16, 8, 16, 64),
    (1, 16, 16, 81, 64),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kernel", "stride", "dilation", "groups"), [(3, 1, 1, 1), (3, 2, 1, 1), (3, 1, 2, 1)])
def test_windows_are_spread_out_where_torch_does_so(
    shape: tuple[int, ...], kernel: int, stride: int, dilation: int, groups: int
) -> None:
    assert_as_torch(shape, kernel, stride, dilation, groups)


@pytest.mark.parametrize(("kernel", "groups"), [(2, 1), (4, 1), (5, 1), (3, 2), (3, 4)])
def test_large_windows_and_groups_are_left_to_onednn(kernel: int, groups: int) -> None:
    for shape in ((1, 4, 12, 12), (1, 4, 6, 6, 6), (1, 4, 40)):
        assert_as_torch(shape, kernel, 1, 1, groups)


def assert_as_torch(shape: tuple[int, ...], kernel: int, stride: int, dilation: int, groups: int) -> None:
    torch.set_num_threads(1)
    filters = 8
    dims = len(shape) - 2
    x = torch.empty(shape)
    weight = torch.empty((filters, shape[1] // groups) + (kernel,) * dims)
    steps = (stride,) * dims
    none = (0,) * dims
    apart = (dilation,) * dims
    choice = conv_backend(x, weight, steps, none, apart, False, none, groups)
    options = steps, none, apart, False, none, groups
    expected = choice.startswith("Slow") and kernel_for(x, weight, options) is NATIVE
    attributes: dict[str, Attribute] = {"kernel": (kernel,) * dims, "stride": steps, "dilation": apart}
    assert spreads_windows(shape, filters, {**attributes, "groups": groups}) == expected, choice


@pytest.fixture(scope="module")
def counter() -> MemoryCounter:
    if available():
        pytest.skip(available())
    return install()


@pytest.mark.parametrize("height", [32, 64, 80])
@pytest.mark.parametrize(("channels", "filters"), [(2, 4), (4, 4), (4, 20)])
def test_what_is_counted_beside_input_and_output(
    counter: MemoryCounter, channels: int, filters: int, height: int
) -> None:
    """On both sides of the switch: an image of 4 channels is small up to a height of 64."""
    torch.set_num_threads(1)
    made = Network(1, channels, height, 80)
    made.conv(made.image, filters)
    (layer,) = made.layers
    graph = made.graph((layer.name, layer.outputs[0]))
    sized = SizedLayer.of(graph, layer, graph.values(), 1, False)
    x = torch.randn(1, channels, height, 80)
    weight = torch.randn(filters, channels, 3, 3)
    with torch.no_grad():
        torch.conv2d(x, weight, padding=1)
        before = counter.current_bytes
        counter.reset_peak()
        y = torch.conv2d(x, weight, padding=1)
    found = counter.peak_bytes - before - y.nbytes
    read = (whole(tuple(x.shape))[0], whole(tuple(x.shape))[1], *whole((height, 80)))
    needs = transient_bytes(sized, [read], whole(tuple(y.shape)), [read])
    assert needs == pytest.approx(found, rel=0.02)
    assert (needs == 9 * channels * height * 80 * 4) == (prod(x.shape) <= 20480)
