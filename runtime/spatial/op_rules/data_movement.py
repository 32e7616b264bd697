"""Op rules of layers that move elements: views, slices, concatenation, padding and interpolation.

Outputs are numbered as in the whole tensor; what a rank reads is cut, padded or picked so that its part is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cuda_ops.operator_table import EXPANDED, PARTS, PERMUTED, operator_row
from planner.ir.box import Box, Interval, whole
from planner.ir.graph import SAMPLE
from planner.layers.data_movement import regrouped
from runtime.spatial.empties import connected, connected_to_all, empty_like_done
from runtime.spatial.layer_shard import LayerShard, gathered, picked, shape_of, within, worked_out_once
from runtime.spatial.op_rules.generic import on_operands, run_whole_samples, whole_samples

_CUBIC_A = -0.75
"""Of Keys' cubic kernel (1981, "Cubic convolution interpolation for digital image processing")."""


def run_reshape(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Views, permutations and expansion: the same elements, by the operator with the sizes of this rank's part.

        [2, 8, 4, 4] -> flatten(2) -> [2, 8, 16]        a rank with channels [0, 3) makes [2, 3, 16] of [2, 3, 4, 4]

    What is read may be more than the part, along dims that do not stay apart; then the part is cut from what it makes.
    """
    if not shard.layer.inputs or len(shard.layer.outputs) > 1:
        return run_whole_samples(shard, op, arguments)
    operands = gathered(shard, arguments)
    if shard.is_empty:
        return empty_like_done(shard, operands)
    elements = operator_row(shard.operator).elements
    made = _view_of_reads(shard)
    if elements == PERMUTED:  # which takes no sizes
        return within(op(**operands), made, shard.done)
    x = _data(shard, operands)
    result = within((x.expand if elements == EXPANDED else x.reshape)(shape_of(made)), made, shard.done)
    return connected_to_all(shard, result, operands) if len(shard.layer.inputs) > 1 else result  # view_as has a model


def _data(shard: LayerShard, operands: dict[str, Any]) -> Tensor:
    x: Tensor = next(value for name, value in operands.items() if shard.input_of(name) == 0)
    return x


def _view_of_reads(shard: LayerShard) -> Box:
    """What all that is read makes: the part along dims that stay apart, everything along others."""
    spec = shard.layer.outputs[0]
    kept = shard.layer.attributes.get("kept")
    if not isinstance(kept, tuple):
        return whole_samples(spec, shard.done)
    runs = regrouped(shard.layer, shard.division.inputs[0], shard.done)[1]
    return tuple(
        interval if dim >= 0 or name == SAMPLE else runs.get(at, total)
        for at, (dim, name, interval, total) in enumerate(
            zip(kept, spec.dims, shard.done, whole(spec.shape), strict=True)
        )
    )


def run_slice(shard: LayerShard, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Slices and division into parts: what the part reads is what it makes, but for a stride and dims that are dropped.

    Of several outputs each takes its own part from what is read, which holds the parts of all.
    """
    operands = gathered(shard, arguments)
    covered = shard.exchange(0).wanted
    gives_list = operator_row(shard.operator).elements == PARTS  # even of one part
    if not all(map(len, covered)):
        nothing = empty_like_done(shard, operands)
        return [nothing] if isinstance(nothing, Tensor) and gives_list else nothing
    attributes: Any = shard.layer.attributes
    x = _data(shard, operands)
    dim = attributes["dim"]
    drops = bool(attributes.get("drops"))
    rows = [_SliceOutput(dim, start, attributes.get("step", 1), drops) for start in attributes["starts"]]
    boxes = [shard.done, *(shard.division.held[output][shard.position] for output in range(1, len(rows)))]
    parts = [each.of(x, covered, box) for each, box in zip(rows, boxes, strict=True)]
    return parts[0] if len(parts) == 1 and not gives_list else parts


@dataclass(frozen=True, slots=True)
class _SliceOutput:
    """One output, which begins at ``start`` along ``dim``."""

    dim: int
    start: int
    stride: int
    drops: bool

    def of(self, x: Tensor, covered: Box, box: Box) -> Tensor:
        """The part ``box`` of the output, from ``x``, which covers ``covered``."""
        if not all(map(len, box)):
            return connected(x.new_empty(shape_of(box)), x)
        before = box[: self.dim]
        after = box[self.dim + (not self.drops) :]
        if self.drops:
            rows = Interval(self.start, self.start + 1)
        else:
            o = box[self.dim]
            rows = Interval(self.start + o.start * self.stride, self.start + (o.stop - 1) * self.stride + 1)
        x = within(x, covered, (*before, rows, *after))
        if self.drops:
            return x.squeeze(self.dim)
        return x if self.stride == 1 else x[(slice(None),) * self.dim + (slice(None, None, self.stride),)]


@on_operands
def run_concat(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """Concatenation and stacking: the parts of the inputs that lie in this rank's part, one after the other.

    Inputs that lie outside it are asked for nothing, and hang on the result all the same.
    """
    attributes: Any = shard.layer.attributes
    pieces = [each for each in operands["tensors"] if each.numel()]
    outside = [each for each in operands["tensors"] if not each.numel()]
    output = shard.layer.outputs[0]
    if pieces[0].ndim < len(output.shape):
        result = torch.stack(pieces, attributes["dim"])
    else:
        result = pieces[0] if len(pieces) == 1 else torch.cat(pieces, attributes["dim"])
    return connected(result.to(getattr(torch, output.dtype)), *outside)


@on_operands
def run_pad(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """Padding and cropping of any dims, one by one: outputs read what they stand for in the whole tensor.

    Rows inside the tensor are taken as they are; only a part at an edge makes others.
    """
    attributes: Any = shard.layer.attributes
    x = _data(shard, operands)
    mode = str(attributes.get("mode", "constant"))
    before = attributes["before"]
    positions = [Interval(done.start - rows, done.stop - rows) for done, rows in zip(shard.done, before, strict=True)]
    if mode == "constant":
        value = operands.get("value")
        return _padded_with(shard, x, positions, 0.0 if value is None else value)
    extents = shard.division.inputs[0].shape
    sides = zip(positions, extents, shard.exchange(0).wanted, strict=True)
    for dim, (position, extent, available) in enumerate(sides):
        if position != available:
            rows = (
                _source_place(place, extent, mode) - available.start for place in range(position.start, position.stop)
            )
            x = picked(x, dim, rows)
    return x


def _padded_with(shard: LayerShard, x: Tensor, positions: list[Interval], value: float) -> Tensor:
    """``value`` around what lies inside the tensor, of which there may be nothing."""
    available = shard.exchange(0).wanted
    if not all(map(len, available)):
        return connected(x.new_full(shape_of(shard.done), value), x)
    around = [
        rows
        for wanted, have in reversed(list(zip(positions, available, strict=True)))
        for rows in (have.start - wanted.start, wanted.stop - have.stop)
    ]
    return functional.pad(x, around, value=value) if any(around) else x


def _source_place(place: int, extent: int, mode: str) -> int:
    """The element that a place stands for, which may lie outside of a dim of ``extent``."""
    if 0 <= place < extent:
        return place
    if mode == "replicate":
        return min(max(place, 0), extent - 1)
    if mode == "circular":
        return place % extent
    return -place if place < 0 else 2 * (extent - 1) - place


@on_operands
def run_upsample(shard: LayerShard, op: Callable[..., Any], operands: dict[str, Any]) -> Any:
    """Interpolation: every output of the part lies where it lies in the whole tensor, whichever rank makes it.

    Along dims that are whole, or grow by a whole factor, torch's own operator does it: groups of as many outputs lie
    alike about every input, so that what the part reads is interpolated and the outputs of its outermost rows are cut
    off.

        factor 2, output [4, 8) reads [1, 5):      [2, 10) is made, [4, 8) is kept

    Else rows are picked and weighted, dim by dim.
    """
    x = _data(shard, operands)
    key = "taps", x.dtype, x.device
    if key not in shard.memo:
        shard.memo[key] = _taps_along(shard, x)
    sides = _resampled_dims(shard)
    taps = shard.memo[key]
    if taps is None:
        return _resized_natively(shard, sides, x)
    for dim, (side, along) in enumerate(zip(sides, taps, strict=True), x.ndim - len(sides)):
        x = resampled(x, dim, side.available.start, along)
    return x


@dataclass(frozen=True, slots=True)
class Resampling:
    """Interpolation along one dim, and the outputs that are wanted of it.

    It says which elements of the whole tensor each output reads, and with what weights.  Positions are those of
    ``at::native::upsample_*``, from global indices and sizes; see ``planner.layers.data_movement``.  They are computed
    in the dtype of the data, but in float32 for shorter ones.

    Attributes:
        mode: ``nearest``, ``nearest-exact``, ``linear`` or ``cubic``.
        inputs, outputs: extents of the whole tensors.
        factor: as the caller gave it; None: follows from the extents.
    """

    mode: str
    inputs: int
    outputs: int
    is_aligned: bool
    factor: float | None
    done: Interval

    @property
    def whole_factor(self) -> int | None:
        """How many outputs there are for each input, each group of them lying alike; None: it is no whole number."""
        times, rest = divmod(self.outputs, self.inputs)
        is_whole = not rest and not self.is_aligned and self.factor in (None, times)
        return times if is_whole else None

    def taps(self, like: Tensor) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """What the outputs read, if not the nearest: of each tap the index of the input, and its weight; None is 1."""
        if self.mode == "linear" and self.inputs == self.outputs:
            return ((torch.arange(self.done.start, self.done.stop, device=like.device), None),)
        positions = self._positions(torch.float64 if like.dtype == torch.float64 else torch.float32, like.device)
        first = positions.floor().clamp(max=self.inputs - 1)
        beyond = (positions - first).clamp(0, 1)
        weights = (1 - beyond, beyond) if self.mode == "linear" else _cubic_weights(beyond)
        before = 0 if self.mode == "linear" else 1
        indices = first.long() - before
        return tuple(
            ((indices + tap).clamp(0, self.inputs - 1), weight.to(like.dtype)) for tap, weight in enumerate(weights)
        )

    def _positions(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        o = torch.arange(self.done.start, self.done.stop, dtype=dtype, device=device)
        if self.is_aligned:
            return o * torch.tensor((self.inputs - 1) / max(1, self.outputs - 1), dtype=dtype, device=device)
        step = self.inputs / self.outputs if self.factor is None else 1 / self.factor
        positions = (o + 0.5) * torch.tensor(step, dtype=dtype, device=device) - 0.5
        return positions.clamp(min=0) if self.mode == "linear" else positions


def nearest(
    op: Callable[..., Tensor],
    inputs: Sequence[int],
    outputs: Sequence[int],
    factors: Sequence[float | None],
    like: Tensor,
) -> list[Tensor]:
    """By dim, which input each output is: asked of torch itself, whose rounding follows dtype, size and back end.

    Args:
        op: interpolates an image, as ``aten.upsample_nearest2d.default``.
    """
    dtype = like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32
    indices = []
    for dim, extent in enumerate(inputs):
        ramp = torch.arange(extent, dtype=dtype, device=like.device)
        counted = ramp.view([-1 if at == dim else 1 for at in range(len(inputs))]).expand(*inputs).contiguous()
        image = op(counted[None, None], list(outputs), *factors)[0, 0]
        indices.append(image[tuple(slice(None) if at == dim else 0 for at in range(len(inputs)))].long())
    return indices


def resampled(x: Tensor, dim: int, start: int, taps: tuple[tuple[Tensor, Tensor | None], ...]) -> Tensor:
    """The weighted sum of what ``taps`` read of ``x``, which begins at ``start`` along ``dim``."""
    shape = [-1 if each == dim else 1 for each in range(x.ndim)]
    total: Tensor | None = None
    for indices, weight in taps:
        term = x.index_select(dim, indices - start)
        term = term if weight is None else term * weight.view(shape)
        total = term if total is None else total + term
    if total is None:
        raise ValueError("no taps")
    return total


def _cubic_weights(beyond: Tensor) -> tuple[Tensor, ...]:
    def near(t: Tensor) -> Tensor:
        return ((_CUBIC_A + 2) * t - (_CUBIC_A + 3)) * t * t + 1

    def far(t: Tensor) -> Tensor:
        return ((_CUBIC_A * t - 5 * _CUBIC_A) * t + 8 * _CUBIC_A) * t - 4 * _CUBIC_A

    return far(beyond + 1), near(beyond), near(1 - beyond), far(2 - beyond)


@dataclass(frozen=True, slots=True)
class _ResampledDim:
    """One interpolated dim.

    Attributes:
        available: the rows that this rank has.
    """

    resampling: Resampling
    available: Interval

    @property
    def is_whole(self) -> bool:
        return len(self.resampling.done) == self.resampling.outputs and len(self.available) == self.resampling.inputs

    @property
    def first(self) -> int:
        """The output that the operator makes first of what is available."""
        return 0 if self.is_whole else self.available.start * (self.resampling.whole_factor or 0)

    @property
    def num_made(self) -> int:
        """How many outputs the operator makes of it."""
        if self.is_whole:
            return self.resampling.outputs
        return len(self.available) * (self.resampling.whole_factor or 0)

    @property
    def factor(self) -> float | None:
        """What the operator is told."""
        return self.resampling.factor if self.is_whole else None


def _taps_along(shard: LayerShard, like: Tensor) -> list[Any] | None:
    """What the outputs read along each dim; None: the operator makes them of what is available."""
    sides = _resampled_dims(shard)
    is_native = all(side.is_whole or side.resampling.whole_factor for side in sides)
    if not sides[0].resampling.mode.startswith("nearest"):
        return None if is_native else [side.resampling.taps(like) for side in sides]
    wholes = [side.resampling for side in sides]
    rows = nearest(
        _resize_operator(shard),
        [each.inputs for each in wholes],
        [each.outputs for each in wholes],
        [each.factor for each in wholes],
        like,
    )
    own_rows = [
        each[side.resampling.done.start : side.resampling.done.stop] for each, side in zip(rows, sides, strict=True)
    ]
    if is_native:
        local = nearest(
            _resize_operator(shard),
            [len(side.available) for side in sides],
            [side.num_made for side in sides],
            [side.factor for side in sides],
            like,
        )
        pairs = zip(local, own_rows, sides, strict=True)
        if all(_read_alike(here, there, side) for here, there, side in pairs):
            return None
    return [((each, None),) for each in own_rows]


def _read_alike(here: Tensor, there: Tensor, side: _ResampledDim) -> bool:
    first = side.resampling.done.start - side.first
    return torch.equal(here[first : first + len(there)] + side.available.start, there)


def _resize_operator(shard: LayerShard) -> Any:
    return getattr(torch.ops.aten, shard.operator).default


def _resized_natively(shard: LayerShard, sides: tuple[_ResampledDim, ...], x: Tensor) -> Tensor:
    is_nearest = sides[0].resampling.mode.startswith("nearest")
    aligned = () if is_nearest else (bool(shard.layer.attributes.get("align_corners")),)
    factors = [side.factor for side in sides]
    made: Tensor = _resize_operator(shard)(x, [side.num_made for side in sides], *aligned, *factors)
    for dim, side in enumerate(sides, x.ndim - len(sides)):
        done = side.resampling.done
        if len(done) != side.num_made:
            made = made.narrow(dim, done.start - side.first, len(done))
    return made


@worked_out_once
def _resampled_dims(shard: LayerShard) -> tuple[_ResampledDim, ...]:
    attributes: Any = shard.layer.attributes
    inputs = shard.division.inputs[0].shape
    outputs = shard.layer.outputs[0].shape
    space = attributes["space"]
    factors: list[float | None] = [None] * space
    if "factor_numerators" in attributes:
        ratios = zip(attributes["factor_numerators"], attributes["factor_denominators"], strict=True)
        factors = [numerator / denominator for numerator, denominator in ratios]
    is_aligned = bool(attributes.get("align_corners"))
    return tuple(
        _ResampledDim(Resampling(attributes["mode"], come, made, is_aligned, factor, done), rows)
        for come, made, factor, done, rows in zip(
            inputs[-space:],
            outputs[-space:],
            factors,
            shard.done[-space:],
            shard.exchange(0).wanted[-space:],
            strict=True,
        )
    )
