"""Networks whose rows are divided between two ranks, beside half of the network, and all of it, with nobody to talk to.

Two processes on this machine, each on a core of its own with one thread, that share memory as in a run.  Both run, in
turns and in changing order after a barrier that is not counted, the *ideal half* (the plain module on half of the rows:
no messages, the same load on the machine's memory), *one device* (the plain module on all rows, on one rank while the
other waits) and the divided network, with convolutions computed in two ways, one of them over two transports:

    linear      what is held while messages travel, then what came is added (``convolution.overlapped``)
    blocking    everything is fetched, then one convolution
    gloo        linear, with messages over gloo

A row is the ideal half's seconds over those of the slower rank; the *speed-up* is one device's over ``linear``'s.
*Overhead*: main-thread CPU time of the forward and backward of one small convolution above that of torch's own.
Gradients of all ways are compared first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from benchmarks.devices.ranks import hide_gpus, on_ranks
from benchmarks.report import Row, at_least, at_most, run
from benchmarks.turns import medians, require_equal
from cuda_ops._torch import schema_of
from planner.ir.box import whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision, layer_division
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.pipeline.routing import slices
from runtime.spatial.convolution.layer import LINEAR, HaloSettings, convolve, local_form
from runtime.spatial.convolution.overlapped import ConvPart
from runtime.spatial.convolution.terms import ConvWindow
from runtime.spatial.decompose import DividedStage
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import Exchange, PeerGroup
from runtime.stage.functions import StageCut
from runtime.stage.modes import MicrobatchShard
from runtime.transport import GlooTransport, Transport, open_shared

CUTS = {"height": (0, 1, 2)}


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al. 2016, figure 5) without normalisation."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.third = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.short = nn.Identity() if inputs == 4 * width else nn.Conv2d(inputs, 4 * width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.relu(self.third(y) + self.short(x))


def mesh_like() -> nn.Module:
    """Two groups of convolutions as in the mesh-tangling networks of Dryden et al. (IPDPS 2019), fewer channels."""
    layers: list[nn.Module] = []
    first, second = [(18, 16, 5, 2), *[(16, 16, 3, 1)] * 3], [(16, 32, 3, 2), *[(32, 32, 3, 1)] * 3]
    for inputs, channels, kernel, stride in first + second:
        layers += [nn.Conv2d(inputs, channels, kernel, stride, kernel // 2, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def residual_stage() -> nn.Module:
    """The first stage of ResNet-50."""
    return nn.Sequential(Bottleneck(64, 64), Bottleneck(256, 64), Bottleneck(256, 64))


def one_convolution() -> nn.Module:
    """64 to 64 channels.  Behind a layer, as halos move between layers only: what a stage is given it has with them."""
    return nn.Sequential(nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))


def stem() -> nn.Module:
    """What ResNets begin with."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A network and its input.

    Attributes:
        shape: of the input: samples, channels, height, width.
        goal: share of the ideal half.
        speed_up: goal for that over one device.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, int, int, int]
    goal: float
    speed_up: float | None = None

    def model(self) -> nn.Module:
        """The same weights on every rank."""
        torch.manual_seed(0)
        return self.make()


class Side(Protocol):
    """What is timed."""

    def step(self) -> None:
        """A forward and a backward."""


class Alone:
    """All of the rows, or half of them with zeros where the other half would be: nobody is talked to."""

    def __init__(self, case: Case, parts: int) -> None:
        samples, channels, height, width = case.shape
        self._model = case.model()
        self._x = torch.randn(samples, channels, height // parts, width).requires_grad_()
        self._dy = torch.randn_like(self._model(self._x))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its result."""
        return tuple(self._dy.shape)

    def step(self) -> None:
        """See :class:`Side`."""
        self._x.grad = None
        self._model.zero_grad()
        self._model(self._x).backward(self._dy)


class Idle:
    """What the other rank does while one computes everything."""

    def step(self) -> None:
        """See :class:`Side`."""


class Divided:
    """The whole network, of which this rank does half of the rows."""

    def __init__(self, case: Case, captured: CapturedModule, transport: Transport, settings: HaloSettings) -> None:
        self._samples, rank = case.shape[0], transport.rank
        graph = captured.graph
        names = [layer.name for layer in graph.layers if not layer.name.startswith(graph.loss)]
        placement, by_name, values = Placement(0, CUTS), graph.by_name(), graph.values()
        layers = {name: layer_division(graph, by_name[name], values, placement, self._samples) for name in names}
        self._division = Division(layers, 2, self._samples).in_use({}, 0)
        self.stage = DividedStage(captured, names, PeerGroup(transport, (0, 1)), DeferredGradients())
        rule = self.stage.rule(lambda node: None)
        if settings != LINEAR:
            rule = _with(settings, rule, self.stage, captured)
        cut = StageCut(captured, frozenset(names), (names[-1],))
        self._function = cut.function(rule)
        (name,) = self._function.inputs
        torch.manual_seed(1)
        x = torch.randn(case.shape)
        self.x = x[slices(self._division.held(name)[rank], whole(case.shape))].clone().requires_grad_()
        self._state = tuple(self._function.attributes.values())
        self.y = self._forward()
        self._dy = torch.randn(self.y.shape, generator=torch.Generator().manual_seed(rank))

    @property
    def results(self) -> dict[str, Tensor | None]:
        """Of the last step."""
        gradients = {name: parameter.grad for name, parameter in self.parameters.items()}
        return {"y": self.y.detach(), "dx": self.x.grad, **gradients}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """By name; their gradients are this rank's part of the sum."""
        return self._function.parameters

    def step(self) -> None:
        """See :class:`Side`."""
        self.x.grad = None
        for parameter in self.parameters.values():
            parameter.grad = None
        self.y = self._forward()
        self.y.backward(self._dy)
        self.stage.later.run()

    def _forward(self) -> Tensor:
        self.stage.at(MicrobatchShard(0, self._samples, 0, self._samples, (), self._division))
        return self._function.function(self._samples, self.x, *self._state)[0]


def captured_case(case: Case) -> CapturedModule:
    """The network as the runtime takes it."""
    model = case.model()
    x = torch.randn(case.shape)
    with torch.no_grad():
        target = torch.zeros_like(model(x))
    loaded = LoadedModel(model, (x,), (target,), lambda out, targets: nn.functional.mse_loss(out, *targets))
    return capture(loaded)


def _with(
    settings: HaloSettings,
    rule: Callable[[fx.Node], Callable[..., Any] | None],
    stage: DividedStage,
    captured: CapturedModule,
) -> Callable[[fx.Node], Callable[..., Any] | None]:
    """``rule``, with convolutions by ``settings``."""
    kinds = {layer.name: layer.kind for layer in captured.graph.layers}

    def found(node: fx.Node) -> Callable[..., Any] | None:
        layer, function = captured.layer_of_node.get(node.name), rule(node)
        if function is None or layer is None or kinds[layer] != "conv":
            return function
        operator: Any = node.target
        names = [argument.name for argument in schema_of(operator).arguments]

        def by_name(**arguments: Any) -> Any:
            return operator(*arguments.values())  # they are in the operator's order

        def run(*args: Any) -> Tensor:
            given = {"bias": None, **dict(zip(names, args, strict=False))}
            return convolve(stage.shard(layer, True), by_name, given, False, settings)

        return run

    return found


class Convolution:
    """A convolution alone, of 8 channels and 32 x 32: so small that what is around it counts.

    Args:
        settings: of the convolution; None: torch's own, without messages.
    """

    def __init__(self, transport: Transport, settings: HaloSettings | None) -> None:
        channels, size, rank = 8, 32, transport.rank
        placement = Placement(0, CUTS)
        spec = TensorSpec(("sample", "channel", "height", "width"), (1, channels, size, size), "float32")
        attributes = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
        layers = [
            Layer("relu", "pointwise", ("x",), (spec,)),
            Layer("conv", "conv", ("relu",), (spec,), (), attributes),
        ]
        divided = {layer.name: LayerDivision.of(layer, (spec,), (), placement, 1) for layer in layers}
        division = Division(divided, 2, 1)
        held, wanted = division.held("relu"), division.wanted("conv", 0)
        exchange = Exchange.of(PeerGroup(transport, (0, 1)), held, wanted, division.moves("conv", 0), key=0)
        conv = divided["conv"]
        part = ConvPart(
            ConvWindow((3, 3), (1, 1), (1, 1), (1, 1)), conv.done[rank], conv.needed[0][rank], (channels, channels)
        )
        self._form = None if settings is None else local_form(part, exchange, replace(settings, most_extra=1.0))
        self._x, self._weight, self._bias = (
            torch.randn(shape).requires_grad_()
            for shape in ((1, channels, size // 2, size), (channels, channels, 3, 3), (channels,))
        )
        self._dy = torch.randn(1, channels, size // 2, size)

    def step(self) -> None:
        """See :class:`Side`."""
        self._x.grad = self._weight.grad = self._bias.grad = None
        if self._form is None:
            y = torch.conv2d(self._x, self._weight, self._bias, (1, 1), (1, 1))
        else:
            y = self._form(self._x, self._weight, self._bias)
        y.backward(self._dy)


CASES = [
    Case("mesh-like stack, 512 x 512", mesh_like, (1, 18, 512, 512), 0.97, 1.85),
    Case("mesh-like stack, 256 x 256", mesh_like, (1, 18, 256, 256), 0.95),
    Case("ResNet-50's stage at 56 x 56, 2 samples", residual_stage, (2, 64, 56, 56), 0.90),
    Case("one convolution 64 -> 64, 128 x 128", one_convolution, (1, 64, 128, 128), 0.95),
    Case("ResNet's stem, synchronised batch norm, 4 samples", stem, (4, 3, 224, 224), 0.90),
]
OVERHEAD = "overhead of a convolution, forward and backward"
SETTINGS = {"linear": LINEAR, "blocking": HaloSettings("blocking")}
MODES = (*SETTINGS, "gloo")
ONE = "one device"
GOAL_US = 100.0


@dataclass(frozen=True, slots=True)
class Raced:
    """Medians of one rank, by side.

    Attributes:
        cpu_s: of the main thread.
    """

    wall_s: Mapping[str, float]
    cpu_s: Mapping[str, float]


def measure(quick: bool, only: str) -> list[Row]:
    """A block of rows for each case, then the overhead."""
    rows = []
    for case in CASES:
        if only in case.name:
            rows += shares(case, raced(case, 5 if quick else 60))
    if only in OVERHEAD:
        rows += overheads(
            on_ranks(2, lambda transport: race_small(transport, 200 if quick else 2000), opened=open_shared)
        )
    return rows


def shares(case: Case, found: Sequence[Raced]) -> list[Row]:
    """Shares of the ideal half."""
    half_s = max(each.wall_s["half"] for each in found)
    rows = [Row(f"{case.name}: ideal half", 1e3 * half_s, "ms")]
    for mode in MODES:
        share = half_s / max(each.wall_s[mode] for each in found)
        rows.append(at_least(f"{case.name}: {mode}", share, "of ideal", case.goal if mode == "linear" else None))
    speed_up = max(each.wall_s[ONE] for each in found) / max(each.wall_s["linear"] for each in found)
    return [*rows, at_least(f"{case.name}: speed-up", speed_up, "times", case.speed_up)]


def overheads(found: Sequence[Raced]) -> list[Row]:
    """CPU time above the ideal half's."""
    rows = []
    for mode in MODES:
        above_us = max(each.cpu_s[mode] - each.cpu_s["half"] for each in found) * 1e6
        rows.append(at_most(f"{OVERHEAD}: {mode}", above_us, "us CPU", GOAL_US if mode == "linear" else None))
    return rows


def raced(case: Case, steps: int) -> list[Raced]:
    """On both ranks."""
    captured = captured_case(case)
    return on_ranks(2, lambda transport: race(case, captured, transport, steps), opened=open_shared)


def race(case: Case, captured: CapturedModule, transport: Transport, steps: int) -> Raced:
    """All sides in turn, ``steps`` times after some to warm up."""
    divided = {mode: Divided(case, captured, transport, settings) for mode, settings in SETTINGS.items()}
    divided["gloo"] = Divided(case, captured, GlooTransport(), LINEAR)
    for each in divided.values():
        each.step()
    require_equal({mode: each.results for mode, each in divided.items()})
    one = Alone(case, 1) if transport.rank == 0 else Idle()
    return timed({"half": Alone(case, 2), ONE: one, **divided}, transport, steps)


def race_small(transport: Transport, steps: int) -> Raced:
    """A convolution alone, so small that what is around it counts."""
    divided = {mode: Convolution(transport, settings) for mode, settings in SETTINGS.items()}
    divided["gloo"] = Convolution(GlooTransport(), LINEAR)
    return timed({"half": Convolution(transport, None), **divided}, transport, steps)


def timed(sides: Mapping[str, Side], transport: Transport, steps: int) -> Raced:
    """Medians of wall and CPU time."""
    calls = {name: side.step for name, side in sides.items()}
    return Raced(*medians(calls, steps, transport.barrier, (time.perf_counter, time.thread_time)))


if __name__ == "__main__":
    hide_gpus()
    only = {"default": "", "help": "cases whose name holds this text"}
    raise SystemExit(run("Rows divided between 2 ranks, beside the ideal half", measure, own={"--only": only}))
