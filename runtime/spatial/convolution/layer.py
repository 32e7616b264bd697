"""A convolution of the graph on one rank, transposed or not: from the operator's arguments to the form of its part.

Which form a rank's part of a convolution takes: overlapped where that pays, else gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cuda_ops.dense.conv_kernels import NATIVE, kernel_for
from cuda_ops.dense.deferred_gradients import as_autocast
from planner.ir.box import Box, Interval
from planner.layers import kind
from planner.layers.backward_halo import backward_halo
from runtime.pipeline.routing import DimCuts, narrowed
from runtime.spatial.convolution.gathered import gathered_conv, shared_conv
from runtime.spatial.convolution.overlapped import (
    ConvPart,
    ConvTerms,
    PutGradients,
    ReturnedHalo,
    halo_conv,
    linear_conv,
    linear_terms,
    num_multiplications,
    pays,
)
from runtime.spatial.convolution.term_call import TermCall
from runtime.spatial.convolution.terms import ConvWindow, piece_term
from runtime.spatial.exchange import Exchange
from runtime.spatial.layer_shard import LayerShard

HaloMode = Literal["linear", "blocking"]
FormOf = Callable[["ConvPart", "Exchange"], "LocalForm | None"]


@dataclass(frozen=True, slots=True)
class HaloSettings:
    """How convolutions over cut space are computed; every mode gives the same result.

    Attributes:
        mode: ``linear``: held rows while messages travel, then what came is added; ``blocking``: everything is fetched,
            then one convolution.
        backward: whether the halo of dx or that of dy moves: ``fewest`` elements, where both can.
        most_extra: share of additional multiplications above which a part is computed blocking all the same: of a few
            rows, zeros around them would be most of the work.
        fewest: multiplications of a part below which it is, too: what they take is less than the calls for what came.
            None: :data:`FEWEST`.
        instead: of ``blocking``, where it gives a form: one that a benchmark compares with.
    """

    mode: HaloMode = "linear"
    most_extra: float = 0.25
    backward: Literal["fewest", "dx", "dy"] = "fewest"
    instead: FormOf | None = None
    fewest: int | None = None


LINEAR = HaloSettings()

FEWEST = 2**19
"""Multiplications, which take no longer than messages do; see ``HaloSettings``.

Measured on one core, what a convolution of 8 channels and 16 x 32 rows costs beside torch's own, forward and backward:
195 us overlapped, 120 us fetched first.
"""


class LocalForm(Protocol):
    """A rank's part of a convolution, for one size."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, put: PutGradients | None = None) -> Tensor:
        """The outputs from what is held; differentiable."""


def local_form(
    part: ConvPart, exchange: Exchange, settings: HaloSettings = LINEAR, returned: Exchange | None = None
) -> LocalForm:
    """The form for one rank; ranks of a stage may differ in theirs, since all of them exchange the same messages.

    Args:
        returned: of dy, where its halo moves backward in place of that of dx; all ranks have terms then, and one each.
    """
    if settings.mode == "linear":
        boxes = exchange.held, exchange.wanted, [box for _, box in exchange.receives]
        terms = overlapped(part, *boxes, settings)
        if terms is not None:
            shape = tuple(map(len, part.outputs))
            halo = None if returned is None else _returned(part, exchange, returned)
            return partial(halo_conv, local=linear_conv(terms, shape, exchange, halo))
    elif settings.instead is not None:
        other = settings.instead(part, exchange)
        if other is not None:
            return other
    return gathered_conv(part.window, part.outputs, part.needed, exchange, part.channels)


def overlapped(
    part: ConvPart, held: Box, wanted: Box, received: Sequence[Box], settings: HaloSettings
) -> ConvTerms | None:
    """The terms of the overlapped form; None where it cannot be, does not pay or is not wanted."""
    terms = linear_terms(part, held, wanted, received) if settings.mode == "linear" else None
    if terms is None or not pays(part, terms, wanted, settings.most_extra):
        return None
    fewest = FEWEST if settings.fewest is None else settings.fewest
    return terms if num_multiplications(part, terms, held) >= fewest else None


def _returned(part: ConvPart, exchange: Exchange, returned: Exchange) -> ReturnedHalo:
    """Dx is made of dy by the transposed convolution, and the other way round."""
    window = replace(part.local, transposed=not part.window.transposed)
    shape = tuple(map(len, exchange.held))
    terms = [piece_term(window, box, exchange.held) for _, box in returned.receives]
    return ReturnedHalo(returned, tuple(None if term is None else TermCall(term, shape) for term in terms))


Operator = Callable[..., Any]
_BATCH = Interval(0, 1)


@dataclass(frozen=True, slots=True)
class PreparedConv:
    """What a convolution's form needs of its step, for tensors of one dtype on one device.

    Attributes:
        form: None where the operator itself is all there is to do: nothing is exchanged, and it reads what is held.
        is_batch: whether inputs have a dim of samples.
        weight, bias: what of a weight that is computed, hence whole, belongs to this rank's filters.
        may_wait: whether gradients of parameters are put off: where ranks of the stage wait for statistics meanwhile.
    """

    form: LocalForm | None
    is_batch: bool
    weight: DimCuts
    bias: DimCuts
    may_wait: bool = False


def convolve(
    shard: LayerShard, op: Operator, arguments: dict[str, Any], transposed: bool, settings: HaloSettings = LINEAR
) -> Tensor:
    """The outputs that this rank does, from the input as it is held."""
    x = arguments["input"]
    weight = arguments["weight"]
    bias = arguments["bias"]
    key = ("convolution", settings, x.dtype, x.device.type)
    ready = shard.memo.get(key)
    if ready is None:
        ready = shard.memo[key] = _ready(shard, x, weight, bias, transposed, settings)
    if ready.form is None:
        y: Tensor = op(**arguments)
        return y
    weight = _of_filters(shard, "weight", weight, ready.weight)
    bias = _of_filters(shard, "bias", bias, ready.bias)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = as_autocast(x, dtype)
        weight = as_autocast(weight, dtype)
        bias = as_autocast(bias, dtype)
        with torch.autocast(device, enabled=False):
            return _convolved(shard, ready, x, weight, bias)
    return _convolved(shard, ready, x, weight, bias)


def _convolved(shard: LayerShard, ready: PreparedConv, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    form = ready.form
    if form is None:
        raise ValueError("the operator itself was to be called")
    if ready.is_batch:
        return form(x, weight, bias, put=_put(shard, weight, bias) if ready.may_wait else None)
    output = form(shard.get(0, x).unsqueeze(0), weight, bias)
    return output.squeeze(0)


def _ready(
    shard: LayerShard, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, settings: HaloSettings
) -> PreparedConv:
    window = _window(shard, transposed)
    exchange = shard.exchange(0)
    outputs = shard.done
    needed = shard.needed(0)
    channel = len(outputs) - len(window.kernel) - 1
    is_batch = channel == 1
    if not is_batch:
        exchange = _alone(shard, exchange)
        outputs = (_BATCH, *outputs)
        needed = (_BATCH, *needed)
    channels = (shard.division.inputs[0].shape[channel], shard.layer.outputs[0].shape[channel])
    may_wait = _may_wait(shard)
    if _is_operator(shard, window, x, weight) and not may_wait:
        return PreparedConv(None, is_batch, (), ())
    if shard.division.ways > 1:
        return PreparedConv(shared_conv(shard, window), is_batch, (), ())
    returned = _exchange_of_dy(shard, window, channels, settings) if is_batch else None
    form = local_form(ConvPart(window, outputs, needed, channels), exchange, settings, returned)
    filters = (outputs[1].start, len(outputs[1]))
    is_all = len(outputs[1]) == channels[1] or (transposed and window.groups > 1)
    of_weight = 1 if transposed else 0
    cuts = () if is_all else ((of_weight, *filters),), () if is_all else ((0, *filters),)
    return PreparedConv(form, is_batch, *cuts, may_wait)


def _may_wait(shard: LayerShard) -> bool:
    """Whether something waits for statistics meanwhile, and no other layer adds to the gradients of the parameters."""
    others = [each.layer for name, each in shard.whole.layers.items() if name != shard.layer.name]
    is_tied = any(name in other.parameters for name in shard.layer.parameters for other in others)
    return not is_tied and any(kind(other.kind).REDUCTION == "statistics" for other in others)


def _exchange_of_dy(
    shard: LayerShard, window: ConvWindow, channels: tuple[int, int], settings: HaloSettings
) -> Exchange | None:
    """The exchange of dy, where its halo moves backward; the same answer on all ranks."""
    division = shard.division
    name = shard.layer.name
    held = shard.whole.held(shard.layer.inputs[0])
    wanted = shard.whole.wanted(name, 0)
    moves = shard.whole.moves(name, 0)
    halo = None if settings.backward == "dx" else backward_halo(division, held, moves)
    if halo is None or not (halo.is_dy or settings.backward == "dy"):
        return None
    for position in range(len(held)):
        part = ConvPart(window, division.done[position], division.needed[0][position], channels)
        received = [move.box for move in moves if move.dst == position]
        if overlapped(part, held[position], wanted[position], received, settings) is None:
            return None
    key = shard.key(0)  # the adjoint of the input's exchange does not run
    return Exchange.of(shard.peers, division.own, halo.reached, halo.moves, None if key is None else key | 1)


def _window(shard: LayerShard, transposed: bool) -> ConvWindow:
    of: Mapping[str, Any] = shard.layer.attributes
    return ConvWindow(of["kernel"], of["stride"], of["padding"], of["dilation"], of.get("groups", 1), transposed)


def _is_operator(shard: LayerShard, window: ConvWindow, x: Tensor, weight: Tensor) -> bool:
    """Whether the operator with its own arguments computes this part: what is cut, if anything, are the samples."""
    exchange = shard.exchange(0)
    data = shard.division.inputs[0]
    output = shard.layer.outputs[0]
    channel = len(output.shape) - len(window.kernel) - 1
    if shard.division.ways > 1 or not exchange.is_local or exchange.held != exchange.wanted or shard.is_empty:
        return False
    if not _is_whole(shard.done, output.shape, channel) or not _is_whole(exchange.held, data.shape, channel):
        return False
    if any(shard.input_of(name) is not None for name in ("weight", "bias")):
        return False
    if x.device.type != "cpu" or window.transposed or x.ndim != len(window.kernel) + 2:
        return True
    options = (window.stride, window.padding, window.dilation, False, (0,) * len(window.kernel), window.groups)
    return kernel_for(x, weight, options) is NATIVE


def _is_whole(box: Box, shape: tuple[int, ...], first: int) -> bool:
    return all(part == Interval(0, extent) for part, extent in list(zip(box, shape, strict=True))[first:])


def _alone(shard: LayerShard, exchange: Exchange) -> Exchange:
    """Of an input without samples that was fetched already, with a dim for them."""
    box = (_BATCH, *exchange.wanted)
    boxes = [box] * len(shard.peers.ranks)
    return Exchange.of(shard.peers, boxes, boxes, ())


def _of_filters(shard: LayerShard, name: str, tensor: Tensor | None, cuts: DimCuts) -> Any:
    """A parameter is this rank's part already; a weight that is computed comes whole."""
    index = shard.input_of(name)
    if tensor is None or not isinstance(index, int):
        return tensor
    return narrowed(shard.get(index, tensor), cuts)


def _put(shard: LayerShard, weight: Tensor, bias: Tensor | None) -> PutGradients | None:
    """Where gradients of parameters may wait; None where they are not this layer's own leaves."""
    if shard.later is None or not torch.is_grad_enabled():
        return None
    is_own = weight.is_leaf and (bias is None or bias.is_leaf)
    return shard.later.put_gradients if is_own else None
