"""What outputs read: autograd finds gradients inside the box alone, and up to its ends; chains have closed forms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from planner.ir.box import Box, Interval
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.layers.receptive_field import read_back, receptive_field

DIMS = ("sample", "channel", "height", "width")
Run = Callable[..., Tensor]


@dataclass
class Net:
    """Layers as the planner sees them, each beside what runs it."""

    extents: tuple[int, int]
    layers: list[Layer] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shapes = {"x": (1, 2, *self.extents)}

    def add(self, kind: str, run: Run, inputs: tuple[str, ...], **attributes: object) -> str:
        made = run(*(torch.zeros(self.shapes[name], dtype=torch.float64) for name in inputs))
        name = f"{kind}{len(self.layers)}"
        self.shapes[name] = tuple(made.shape)
        self.layers.append(Layer(name, kind, inputs, (TensorSpec(DIMS, tuple(made.shape), "float64"),), (), attributes))
        self.runs.append(run)
        return name

    def conv(self, x: str, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> str:
        weight = torch.rand(2, 2, kernel, kernel, dtype=torch.float64) + 0.5
        run = lambda data: F.conv2d(data, weight, None, stride, padding, dilation)  # noqa: E731
        return self.add("conv", run, (x,), **_numbers(kernel, stride, padding, dilation), groups=1)

    def transposed(self, x: str, kernel: int, stride: int, padding: int = 0) -> str:
        weight = torch.rand(2, 2, kernel, kernel, dtype=torch.float64) + 0.5
        run = lambda data: F.conv_transpose2d(data, weight, None, stride, padding)  # noqa: E731
        return self.add(
            "transposed_conv", run, (x,), **_numbers(kernel, stride, padding, 1), groups=1, output_padding=(0, 0)
        )

    def pool(self, x: str, kernel: int, stride: int, padding: int = 0) -> str:
        run = lambda data: F.avg_pool2d(data, kernel, stride, padding)  # noqa: E731
        return self.add("pool", run, (x,), **_numbers(kernel, stride, padding, 1), ceil_mode=False)

    def graph(self) -> Graph:
        loss = Layer("loss", "loss", (self.layers[-1].name,), (TensorSpec((), (), "float64"),), (), {"op": "mean"})
        x = TensorSpec(DIMS, self.shapes["x"], "float64")
        return Graph(1, {"x": x}, (*self.layers, loss), {}, "loss")

    def output(self, x: Tensor) -> Tensor:
        values = {"x": x}
        for layer, run in zip(self.layers, self.runs, strict=True):
            values[layer.name] = run(*(values[name] for name in layer.inputs))
        return values[self.layers[-1].name]

    def reached(self, box: Box) -> Box | None:
        """The hull of the inputs that the outputs in ``box`` have a gradient of; all weights are above 0."""
        x = torch.rand(self.shapes["x"], dtype=torch.float64, requires_grad=True)
        part = self.output(x)[tuple(slice(each.start, each.stop) for each in box)]
        (gradient,) = torch.autograd.grad(part.sum(), x)
        found = gradient.nonzero()
        if not len(found):
            return None  # padding alone
        lows = found.amin(0).tolist()
        highs = found.amax(0).tolist()
        return tuple(Interval(low, high + 1) for low, high in zip(lows, highs, strict=True))


def _numbers(kernel: int, stride: int, padding: int, dilation: int) -> Mapping[str, tuple[int, int]]:
    numbers = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    return {name: (number, number) for name, number in numbers.items()}


def at_random(rng: random.Random, *, has_holes: bool) -> Net:
    """Convolutions, dilated and strided ones, pools, transposed convolutions, activations, sums of two ways.

    Args:
        has_holes: whether windows may skip rows between what they read, or read padding alone.
    """
    torch.manual_seed(rng.randrange(1000))
    net = Net((rng.randint(18, 30), rng.randint(18, 30)))
    x = "x"
    for _ in range(rng.randint(2, 6)):
        small = min(net.shapes[x][2:])
        choice = rng.choice(["conv", "conv", "pool", "transposed", "tanh", "both", *["dilated"] * has_holes])
        if small < 6:
            choice = "transposed"
        if choice == "conv":
            kernel = rng.choice([1, 2, 3, 5])
            stride, padding = (3, 2) if has_holes else (kernel, min(2, kernel - 1))
            x = net.conv(x, kernel, rng.randint(1, min(3, stride)), rng.randint(0, padding))
        elif choice == "dilated":
            x = net.conv(x, 3, rng.choice([1, 2]), rng.choice([0, 2]), 2)
        elif choice == "pool":
            x = net.pool(x, rng.choice([2, 3]), 2, rng.choice([0, 1]))
        elif choice == "transposed" and small < 40:
            kernel = rng.choice([2, 3, 4])
            x = net.transposed(x, kernel, rng.choice([1, 2]), rng.choice([0, 1]) if kernel > 2 else 0)
        elif choice == "tanh":
            x = net.add("pointwise", lambda data: data * 2 + 1, (x,), op="aten.tanh.default")
        else:
            a = net.conv(x, 3, 1, 1)
            b = net.conv(x, 5, 1, 2)
            x = net.add("pointwise", lambda one, other: one + other, (a, b), op="aten.add.Tensor")
    return net


@pytest.mark.parametrize("has_holes", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_gradients_lie_inside_the_box_and_reach_its_ends_unless_windows_skip_rows(seed: int, has_holes: bool) -> None:
    rng = random.Random(seed)
    net = at_random(rng, has_holes=has_holes)
    for box in random_boxes(net, rng):
        found = receptive_field(net.graph(), net.layers[-1].name, box).inputs
        reached = net.reached(box)
        if not has_holes:
            assert found == {"x": reached}
        elif reached is not None:
            assert all(a.start <= b.start and b.stop <= a.stop for a, b in zip(found["x"], reached, strict=True))


def random_boxes(net: Net, rng: random.Random) -> Iterator[Box]:
    """Of the output."""
    shape = net.shapes[net.layers[-1].name]
    for _ in range(4):
        starts = [rng.randrange(extent) for extent in shape]
        yield tuple(Interval(a, rng.randint(a + 1, n)) for a, n in zip(starts, shape, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_a_chain_has_the_closed_form(seed: int) -> None:
    """Araujo et al. 2019, equations 2 and 3."""
    rng = random.Random(seed)
    net = Net((200, 160))
    x = "x"
    size = 1
    stride = 1
    offset = 0
    for _ in range(rng.randint(1, 4)):
        kernel = rng.randint(1, 5)
        step = rng.randint(1, 3)
        padding = rng.randint(0, 2)
        dilation = rng.randint(1, 2)
        x = net.conv(x, kernel, step, padding, dilation)
        size += (kernel - 1) * dilation * stride
        offset -= padding * stride
        stride *= step
    for along in receptive_field(net.graph(), x).along["x"][2:]:
        assert (along.size, along.stride, along.offset) == (size, stride, offset)


def test_outputs_of_a_transposed_convolution_take_turns() -> None:
    net = Net((40, 40))
    x = net.transposed("x", 3, 2)  # even outputs read two inputs, odd ones one
    (along,) = {one for one in receptive_field(net.graph(), x).along["x"][2:] if one.dim == "height"}
    assert (along.size, along.stride, along.offset) == (2, Fraction(1, 2), -1)


def test_what_reads_all_of_an_input_has_no_stride() -> None:
    net = Net((12, 12))
    run = lambda data: data.softmax(2)  # noqa: E731
    x = net.add("softmax", run, (net.conv("x", 3, 1, 1),), dim=2)
    height, width = receptive_field(net.graph(), x).along["x"][2:]
    assert (height.size, height.stride) == (14, 0)
    assert (width.size, width.stride, width.offset) == (3, 1, -1)
    assert receptive_field(net.graph(), x, {"width": (0, 1)}).inputs["x"][2:] == (Interval(0, 12), Interval(0, 2))


def test_read_back_lets_layers_out_that_nobody_needs() -> None:
    net = Net((12, 12))
    first = net.conv("x", 3)
    second = net.conv("x", 5)
    joined = net.add("concat", lambda a, b: torch.cat((a[..., :8, :8], b), 1), (first, second), dim=1)
    specs = {name: TensorSpec(DIMS, shape, "float64") for name, shape in net.shapes.items()}
    specs[first] = TensorSpec(DIMS, (1, 2, 8, 8), "float64")
    wanted = (Interval(0, 1), Interval(2, 4), Interval(0, 2), Interval(0, 2))
    found = read_back(net.layers, specs, {joined: wanted})
    assert set(found.done) == {second, joined}
    assert prod(map(len, found.read["x"])) == 2 * 6 * 6


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("value", "box", "error"),
    [
        ("conv9", None, UnknownNameError),
        ("x", None, UnknownNameError),
        ("conv0", {"depth": (0, 1)}, UsageError),
        ("conv0", {"height": (3, 3)}, UsageError),
        ("conv0", {"height": (0, 99)}, UsageError),
        ("conv0", (Interval(0, 1),), UsageError),
    ],
)
def test_what_is_no_output_is_refused(value: str, box: object, error: type[Exception]) -> None:
    net = Net((12, 12))
    net.conv("x", 3)
    with pytest.raises(error):
        receptive_field(net.graph(), value, box)
