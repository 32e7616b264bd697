"""What is compared on two ranks: a network whose rows are divided between them, and half of it without messages.

Convolution by interior and boundary, as Dryden et al. (IPDPS 2019, section 4.2) overlap it.

Outputs that read only what is held are computed while the halo travels; then the boundary outputs, each side from a
piece put together of held and received rows.  The runtime's own form (``runtime.spatial.convolution.overlapped``) is
compared with it; it is slower in all cases here, and no part of the runtime.

        . . . . . .
        . i i i i .          i: interior, one call       .: boundary, two calls along each dim that is cut
        . . . . . .
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from cuda_ops._torch import schema_of
from planner.ir.box import Box, Interval, intersect, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision, layer_division
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.pipeline.routing import DimCuts, cuts_of, narrowed, slices
from runtime.spatial.convolution.layer import LINEAR, HaloSettings, convolve, local_form
from runtime.spatial.convolution.overlapped import ConvPart, PutGradients
from runtime.spatial.convolution.term_call import TermCall
from runtime.spatial.convolution.terms import LEADING, ConvWindow, main_term
from runtime.spatial.decompose import DividedStage
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import Exchange, PeerGroup
from runtime.stage.functions import StageCut
from runtime.stage.modes import MicrobatchShard
from runtime.transport import Transport

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
    first = [(18, 16, 5, 2), *[(16, 16, 3, 1)] * 3]
    second = [(16, 32, 3, 2), *[(32, 32, 3, 1)] * 3]
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
        self._samples = case.shape[0]
        rank = transport.rank
        graph = captured.graph
        names = [layer.name for layer in graph.layers if not layer.name.startswith(graph.loss)]
        placement = Placement(0, CUTS)
        by_name = graph.by_name()
        values = graph.values()
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
        layer = captured.layer_of_node.get(node.name)
        function = rule(node)
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
        channels = 8
        size = 32
        rank = transport.rank
        placement = Placement(0, CUTS)
        spec = TensorSpec(("sample", "channel", "height", "width"), (1, channels, size, size), "float32")
        attributes = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
        layers = [
            Layer("relu", "pointwise", ("x",), (spec,)),
            Layer("conv", "conv", ("relu",), (spec,), (), attributes),
        ]
        divided = {layer.name: LayerDivision.of(layer, (spec,), (), placement, 1) for layer in layers}
        division = Division(divided, 2, 1)
        held = division.held("relu")
        wanted = division.wanted("conv", 0)
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


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Some of the outputs.

    Attributes:
        reads: of the input, inside the tensor.
        place: in the outputs.
        sources: by entry of ``receives``, what of the piece is read, and where it goes in ``reads``; the last entry is
            of what is held.
    """

    call: TermCall
    reads: Box
    place: DimCuts
    sources: tuple[tuple[DimCuts, DimCuts] | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class InteriorConv:
    """A rank's part of a convolution.

    Attributes:
        regions: the interior first.
        places: by entry of ``exchange.sends``, where gradients that come are added.
    """

    exchange: Exchange
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    places: tuple[DimCuts, ...]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, put: PutGradients | None = None) -> Tensor:
        """The outputs; differentiable."""
        convolve: Callable[[Tensor, Tensor, Tensor | None, InteriorConv], Tensor] = _InteriorConv.apply
        return convolve(x, weight, bias, self)


def interior_form(part: ConvPart, exchange: Exchange) -> InteriorConv | None:
    """As ``HaloSettings.instead`` asks for it: the form of a rank's part, None where there is none."""
    is_possible = all(map(len, part.outputs)) and part.is_of_whole_groups
    return interior_conv(part.local, part.outputs, exchange) if is_possible else None


INTERIOR = HaloSettings("blocking", instead=interior_form)
"""Convolutions by interior and boundary, blocking where that cannot be."""


def interior_conv(window: ConvWindow, outputs: Box, exchange: Exchange) -> InteriorConv | None:
    """The form for ``outputs``; None where no output reads only what is held, or channels or samples move."""
    held = exchange.held
    wanted = exchange.wanted
    moved = [box for _, box in exchange.receives]
    if window.transposed or held[:LEADING] != wanted[:LEADING] or any(box[:2] != held[:2] for box in moved):
        return None
    inside = list(outputs)
    for dim in range(LEADING, len(outputs)):
        inside[dim] = _inside(window, dim - LEADING, outputs[dim], held[dim], wanted[dim])
    if not all(map(len, inside)):
        return None
    boxes = [tuple(inside), *_shell(outputs, tuple(inside))]
    regions = [_region(window, box, outputs, exchange) for box in boxes]
    if any(region is None for region in regions):
        return None
    return InteriorConv(
        exchange,
        tuple(map(len, outputs)),
        tuple(region for region in regions if region is not None),
        tuple(cuts_of(box, held) for _, box in exchange.sends),
    )


class _InteriorConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv: InteriorConv) -> Tensor:
        arriving = conv.exchange.start(x)
        y = x.new_empty(conv.shape)
        interior, *boundary = conv.regions
        saved = [_read(interior, [*[None] * len(conv.exchange.receives), x])]
        narrowed(y, interior.place).copy_(interior.call.outputs(saved[0], weight, bias))
        pieces = [*(piece for _, piece in arriving.wait()), x]
        for region in boundary:
            saved.append(_read(region, pieces))
            narrowed(y, region.place).copy_(region.call.outputs(saved[-1], weight, bias))
        ctx.save_for_backward(weight, *saved)
        ctx.conv = conv
        ctx.held = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        conv: InteriorConv = ctx.conv
        mask = ctx.needs_input_grad[:3]
        weight, *saved = ctx.saved_tensors
        gradients = [dy.new_zeros(tuple(map(len, box))) for _, box in conv.exchange.receives]
        gradients.append(dy.new_zeros(ctx.held))
        arriving = None
        totals: list[Tensor | None] = [None, None]
        order = list(zip(conv.regions, saved, strict=True))
        for region, source in (*order[1:], order[0]):  # the interior while messages travel
            if region is conv.regions[0] and mask[0]:
                arriving = conv.exchange.start_adjoint(gradients[:-1], dy)
            dx, *others = region.call.gradients(narrowed(dy, region.place), source, weight, mask)
            if dx is not None:
                _give(region, dx, gradients)
            for index, found in enumerate(others):
                total = totals[index]
                totals[index] = found if total is None or found is None else total.add_(found)
        if arriving is not None:
            for place, (_, piece) in zip(conv.places, arriving.wait(), strict=True):
                narrowed(gradients[-1], place).add_(piece)
        return gradients[-1] if mask[0] else None, *totals, None


def _read(region: Region, pieces: Sequence[Tensor | None]) -> Tensor:
    """The cut input of a region."""
    own = pieces[-1]
    if own is None:
        raise ValueError("what is held is always there")
    shape = tuple(map(len, region.reads))
    used = [(cuts, piece) for cuts, piece in zip(region.sources, pieces, strict=True) if cuts and piece is not None]
    if len(used) == 1 and not used[0][0][1]:
        return region.call.cut(narrowed(used[0][1], used[0][0][0]))
    source = own.new_empty(shape)
    for (of_piece, of_reads), piece in used:
        narrowed(source, of_reads).copy_(narrowed(piece, of_piece))
    return region.call.cut(source)


def _give(region: Region, gradient: Tensor, gradients: Sequence[Tensor]) -> None:
    """Adds the gradient of what a region reads to those of the pieces it was read from."""
    for cuts, total in zip(region.sources, gradients, strict=True):
        if cuts is not None:
            narrowed(total, cuts[0]).add_(narrowed(gradient, cuts[1]))


def _region(window: ConvWindow, outputs: Box, whole: Box, exchange: Exchange) -> Region | None:
    read = intersect((*exchange.wanted[:LEADING], *_reads(window, outputs)), exchange.wanted)
    term = None if read is None else main_term(window, read, outputs)
    if read is None or term is None:
        return None
    sources: list[tuple[DimCuts, DimCuts] | None] = []
    for box in (*(box for _, box in exchange.receives), exchange.held):
        shared = intersect(box, read)
        sources.append(None if shared is None else (cuts_of(shared, box), cuts_of(shared, read)))
    return Region(TermCall(term, tuple(map(len, outputs))), read, cuts_of(outputs, whole), tuple(sources))


def _reads(window: ConvWindow, outputs: Box) -> tuple[Interval, ...]:
    """What ``outputs`` read along each dim of space, outside the tensor too."""
    numbers = zip(outputs[LEADING:], window.kernel, window.stride, window.padding, window.dilation, strict=True)
    return tuple(
        Interval(part.start * stride - padding, (part.stop - 1) * stride - padding + dilation * (kernel - 1) + 1)
        for part, kernel, stride, padding, dilation in numbers
    )


def _inside(window: ConvWindow, dim: int, outputs: Interval, held: Interval, wanted: Interval) -> Interval:
    """The outputs along one dim that read, of what is wanted, only what is held."""
    stride = window.stride[dim]
    padding = window.padding[dim]
    start = outputs.start
    stop = outputs.stop
    if held.start > wanted.start:
        start = max(start, -(-(held.start + padding) // stride))
    if held.stop < wanted.stop:
        span = window.dilation[dim] * (window.kernel[dim] - 1) + 1
        stop = min(stop, (held.stop - span + padding) // stride + 1)
    return Interval(start, max(start, stop))


def _shell(outputs: Box, inside: Box) -> list[Box]:
    """Disjoint boxes around ``inside`` that make up ``outputs`` with it."""
    found = []
    rest = list(outputs)
    for dim in range(len(outputs)):
        for side in (Interval(outputs[dim].start, inside[dim].start), Interval(inside[dim].stop, outputs[dim].stop)):
            if len(side):
                found.append((*rest[:dim], side, *rest[dim + 1 :]))
        rest[dim] = inside[dim]
    return found
