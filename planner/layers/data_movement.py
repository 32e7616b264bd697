"""Data that is moved, not computed: reshapes, slices, concatenation, padding; and interpolation."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import floor, prod

from planner.ir.box import Box, Boxes, Interval, whole
from planner.ir.graph import SAMPLE, Layer, TensorSpec
from planner.layers._kinds import Kind
from planner.layers._rules import (
    NOTHING,
    Specs,
    all_apart,
    empty_work_reads_nothing,
    integer,
    integers,
    num_elements,
    samples_apart,
)


class ReshapeKind(Kind, name="reshape", dims="own"):
    """Views, flattening, permutations, expansion: which part of the input makes a part of the output.

    Attribute ``kept`` says, for each dim of the output, which dim of the input it is, and -1 where it is none of them.
    Without it the samples alone are known to stay apart.

        [sample, channel, height, width] -> [sample, height, width, channel]      kept (0, 2, 3, 1)
        [sample, channel, height, width] -> [sample, channel, height x width]     kept (0, 1, -1)
        [sample, time, feature] -> [sample, time, head, size]                     kept (0, 1, -1, -1)

    Dims that are joined, split or regrouped lie one after another in both (:func:`regrouped`); a part along the
    first of them is a run of elements, and so is what it reads: heads [2, 4) of size 64 are features [128, 256).
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same place along dims that are kept; of regrouped ones the run, of the rest the samples of the work."""
        if "kept" not in layer.attributes:
            return all_apart(layer, inputs, work_box)
        box = list(samples_apart(layer.outputs[0], work_box, inputs[0]))
        for interval, dim in zip(work_box, integers(layer.attributes["kept"]), strict=True):
            if dim >= 0:
                box[dim] = interval
        for dim, interval in regrouped(layer, inputs[0], work_box)[0].items():
            box[dim] = interval
        return (tuple(box),)


def copied_at(chain: Sequence[Layer], shapes: Sequence[Sequence[int]]) -> int | None:
    """Which of reshapes, each of what the one before makes, copies a gradient on its way back; None: it stays a view.

    The gradient begins in one piece, in the order of the last output, as what is received.  Back through a permutation
    its elements lie in another order than its dims, and where dims are then joined or split, they have to be copied.

    Args:
        shapes: of their inputs.
    """
    shape = list(chain[-1].outputs[0].shape) if chain else []
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for place in reversed(range(len(chain))):
        data = list(shapes[place])
        kept = [*integers(chain[place].attributes.get("kept", ()))]
        if sorted(kept) == [*range(len(data))]:
            data_strides: list[int] | None = [strides[kept.index(dim)] for dim in range(len(data))]
        else:
            data_strides = _viewed(shape, strides, data) if prod(shape) == prod(data) else None
        if data_strides is None:
            return place
        shape = data
        strides = data_strides
    return None


def _viewed(shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]) -> list[int] | None:
    """The strides of the same elements in another shape; None where they would have to be copied for that."""
    if prod(shape) < 2:
        return [1] * len(wanted)
    view_strides = [0] * len(wanted)
    dim = len(wanted)
    stretch = 1  # elements that lie one after another at ``step``
    step = strides[-1] if strides else 1
    for at in reversed(range(len(shape))):
        stretch *= shape[at]
        if at and (shape[at - 1] == 1 or strides[at - 1] == stretch * step):
            continue
        made = 1
        while dim and (made < stretch or wanted[dim - 1] == 1):
            dim -= 1
            view_strides[dim] = made * step
            made *= wanted[dim]
        if made != stretch:
            return None
        stretch = 1
        step = strides[at - 1] if at else 1
    return view_strides if not dim else None


def regrouped(layer: Layer, data: TensorSpec, work_box: Box) -> tuple[dict[int, Interval], dict[int, Interval]]:
    """Of dims that a reshape joins, splits or regroups: by dim what is read of its input, and what that makes.

    Both are boxes of the same run of elements, which holds those of ``work_box``.
    """
    read: dict[int, Interval] = {}
    made: dict[int, Interval] = {}
    for outer, inner in _regroupings(layer, data):
        sizes = [layer.outputs[0].shape[dim] for dim in outer]
        input_sizes = [data.shape[dim] for dim in inner]
        run = _elements([work_box[dim] for dim in outer], sizes)
        while True:  # until the run is a box of either shape
            larger = _elements(_hull(_elements(_hull(run, input_sizes), input_sizes), sizes), sizes)
            if larger == run:
                break
            run = larger
        read.update(zip(inner, _hull(run, input_sizes), strict=True))
        made.update(zip(outer, _hull(run, sizes), strict=True))
    return read, made


def _regroupings(layer: Layer, data: TensorSpec) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Neighbouring dims (of the output, of the input) of a reshape that hold the same elements in the same order.

    Those along which samples lie are left out: a cut along samples is between samples, and not of a run of elements.
    """
    kept = layer.attributes.get("kept")
    output = layer.outputs[0]
    if not isinstance(kept, tuple):
        return
    places = [(at, dim) for at, dim in enumerate(kept) if dim >= 0]
    if [dim for _, dim in places] != sorted(dim for _, dim in places):
        return  # dims change places
    outer_begin = 0
    inner_begin = 0
    for place, dim in (*places, (len(kept), len(data.shape))):
        outer = tuple(range(outer_begin, place))
        inner = tuple(range(inner_begin, dim))
        outer_begin = place + 1
        inner_begin = dim + 1
        same = prod(output.shape[at] for at in outer) == prod(data.shape[at] for at in inner)
        names = {*(output.dims[at] for at in outer), *(data.dims[at] for at in inner)}
        if outer and inner and same and SAMPLE not in names:
            yield outer, inner


def _elements(box: Sequence[Interval], shape: Sequence[int]) -> Interval:
    """From the first element of a box to its last, as places in the tensor laid flat."""
    first = last = 0
    for interval, extent in zip(box, shape, strict=True):
        first = first * extent + interval.start
        last = last * extent + interval.stop - 1
    return Interval(first, last + 1)


def _hull(run: Interval, shape: Sequence[int]) -> list[Interval]:
    """The smallest box that holds a run of elements."""
    box: list[Interval] = []
    first = run.start
    last = run.stop - 1
    stride = prod(shape)
    for extent in shape:
        if not stride or (box and len(box[-1]) > 1):
            box.append(Interval(0, extent))
            continue
        stride //= extent
        begin = first // stride
        end = last // stride
        box.append(Interval(begin, end + 1))
        first = first - begin * stride
        last = last - end * stride
    return box


class SliceKind(Kind, name="slice", dims="input"):
    """Parts of a tensor along ``dim``: slices, one element, and division into several parts.

    Attributes ``dim``, ``starts`` (where each output begins), ``step``, and ``drops``: whether the outputs lack the
    dim.

        starts 3, step 2:      output [1, 3)  reads  input [5, 8)
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same place along other dims; along ``dim`` what the part is cut from, of several parts that of all.

        (The work is the first part.  Parts may differ in length, so that its box does not tell those of the others.)
        """
        dim = integer(layer.attributes.get("dim"))
        step = integer(layer.attributes.get("step", 1))
        starts = integers(layer.attributes.get("starts"))
        if layer.attributes.get("drops"):
            return ((*work_box[:dim], Interval(min(starts), max(starts) + 1), *work_box[dim:]),)
        if len(starts) > 1:
            stop = max(start + spec.shape[dim] for start, spec in zip(starts, layer.outputs, strict=True))
            along = Interval(min(starts), stop)
        else:
            o = work_box[dim]
            along = Interval(starts[0] + o.start * step, starts[0] + (o.stop - 1) * step + 1)
        return ((*work_box[:dim], along, *work_box[dim + 1 :]),)


class ConcatKind(Kind, name="concat", dims="input"):
    """Concatenation along ``dim`` (and stacking, where ``dim`` is new): each input has its own place in the output."""

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """What of each input's place lies in the work box; nothing of inputs beside it."""
        dim = integer(layer.attributes.get("dim"))
        boxes = []
        offset = 0
        for spec in inputs:
            stacked = len(spec.shape) < len(layer.outputs[0].shape)
            extent = 1 if stacked else spec.shape[dim]
            boxes.append(_piece(spec, work_box, dim, Interval(offset, offset + extent), stacked))
            offset += extent
        return tuple(boxes)


def _piece(spec: TensorSpec, work_box: Box, dim: int, place: Interval, stacked: bool) -> Box:
    shared = work_box[dim] & place
    if not len(shared) and whole(spec.shape):
        return tuple(NOTHING for _ in spec.shape)
    along = () if stacked else (Interval(shared.start - place.start, shared.stop - place.start),)
    return (*work_box[:dim], *along, *work_box[dim + 1 :])


class PadKind(Kind, name="pad", dims="input"):
    """Padding of any dims: attributes ``before`` and ``after`` (a number per dim, negative: rows go), and ``mode``.

    Output o stands for position o - before of the input.  Outside of the tensor, of n elements,

        constant   reads nothing, so that a box may reach outside, as a convolution's does
        reflect    reads -o and 2 (n - 1) - o
        replicate  reads the outermost element
        circular   reads o modulo n: a part with an edge and what lies beside it reads the other edge too, hence all

        before 2, n 5:      output [0, 4)  reads  input [0, 3)  reflected,  [0, 2)  replicated,  [0, 5)  circular
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """Along each dim the hull of what the outputs stand for."""
        mode = str(layer.attributes.get("mode", "constant"))
        places = zip(work_box, integers(layer.attributes.get("before")), inputs[0].shape, strict=True)
        return (
            tuple(_padded(Interval(o.start - before, o.stop - before), extent, mode) for o, before, extent in places),
        )


def _padded(positions: Interval, extent: int, mode: str) -> Interval:
    """The hull of the elements at ``positions``, which may lie outside of a dim of ``extent``."""
    if mode == "constant" or (positions.start >= 0 and positions.stop <= extent):
        return positions
    left = Interval(positions.start, min(positions.stop, 0))
    right = Interval(max(positions.start, extent), positions.stop)
    inside = positions & Interval(0, extent)
    pieces = [_image(piece, extent, mode) for piece in (left, right) if len(piece)] + ([inside] if len(inside) else [])
    return Interval(min(piece.start for piece in pieces), max(piece.stop for piece in pieces))


def _image(outside: Interval, extent: int, mode: str) -> Interval:
    """What positions on one side of the tensor read."""
    is_left = outside.start < 0
    if mode == "replicate":
        return Interval(0, 1) if is_left else Interval(extent - 1, extent)
    if mode == "circular":
        move = extent if is_left else -extent
        return Interval(outside.start + move, outside.stop + move)
    mirror = 0 if is_left else 2 * (extent - 1)
    return Interval(mirror - outside.stop + 1, mirror - outside.start + 1)


_REACH = {"nearest": (0, 0), "nearest-exact": (0, 0), "linear": (0, 1), "cubic": (1, 2)}
"""How many elements before and after the one at the floor are read."""


_TAPS = {"nearest": 1, "nearest-exact": 1, "linear": 2, "cubic": 4}


class UpsampleKind(Kind, name="upsample", dims="input"):
    """Interpolation to another size: nearest, linear (bilinear, trilinear) or cubic, of the trailing dims.

    Attributes ``mode`` (``nearest``, ``nearest-exact``, ``linear``, ``cubic``), ``align_corners``, ``space`` (how many
    dims are interpolated), and, where the caller gave factors rather than sizes, these as ``factor_numerators`` and
    ``factor_denominators``.  Output o lies at input position

        nearest        o s               s = 1 / factor, or inputs / outputs
        nearest-exact  (o + 1/2) s
        linear, cubic  (o + 1/2) s - 1/2
                       o s               with aligned corners, where s = (inputs - 1) / (outputs - 1)

    and reads the element at the floor of that, linear the next one too, cubic the one before and the next two.  Indices
    are clipped to the tensor; linear takes what lies before the first element for it.

    torch computes positions in float32 or in float64, by dtype and back end, fused or not.  Where these disagree about
    a floor, the hull of them is read.  A dim that keeps its size is copied, but by cubic, and of one that doubles
    indices are halved, in some back ends whatever factor was given: then the hull has both.

        linear, factor 2:      output [2, 4)  reads  input [0, 3)
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same place, but along interpolated dims what lies about the outputs' positions."""
        shape = inputs[0].shape
        outputs = layer.outputs[0].shape
        first = len(shape) - integer(layer.attributes.get("space"))
        along = []
        for dim in range(first, len(shape)):
            steps = tuple(_steps(layer, dim - first, shape[dim], outputs[dim]))
            along.append(_interpolated(layer, work_box[dim], shape[dim], outputs[dim], steps))
        return ((*work_box[:first], *along),)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """A multiply and an add per output element and element that it reads."""
        taps = prod((_TAPS[str(layer.attributes.get("mode"))],) * integer(layer.attributes.get("space")))
        return 2 * num_elements(layer.outputs[0]) * taps


def _steps(layer: Layer, position: int, inputs: int, outputs: int) -> Iterator[float]:
    """How far apart, in elements of the input, outputs lie: as computed in either precision."""
    if layer.attributes.get("align_corners"):
        exact = (inputs - 1) / (outputs - 1) if outputs > 1 else 0.0
    elif "factor_numerators" in layer.attributes:
        numerator = integers(layer.attributes.get("factor_numerators"))[position]
        exact = 1.0 / (numerator / integers(layer.attributes.get("factor_denominators"))[position])
    else:
        exact = inputs / outputs
    yield exact
    yield _single(exact)


def _interpolated(layer: Layer, o: Interval, inputs: int, outputs: int, steps: tuple[float, ...]) -> Interval:
    """The hull over all ways to round."""
    mode = str(layer.attributes.get("mode"))
    if inputs == outputs and steps[0] == 1 and mode != "cubic":
        return o
    before, after = _REACH[mode]
    is_aligned = bool(layer.attributes.get("align_corners"))
    first = min(floor(position) for step in steps for position in _positions(mode, is_aligned, o.start, step))
    last = max(floor(position) for step in steps for position in _positions(mode, is_aligned, o.stop - 1, step))
    read = Interval(_clipped(first - before, inputs), _clipped(last + after, inputs) + 1)
    times = outputs // inputs
    if mode == "cubic" or outputs not in (inputs, 2 * inputs) or steps[0] * times == 1:
        return read
    return Interval(min(read.start, o.start // times), max(read.stop, -(-o.stop // times)))


def _positions(mode: str, is_aligned: bool, output: int, step: float) -> tuple[float, ...]:
    """Where an output lies, computed in float64, in float32, and in float32 with the last step fused."""
    offset = 0.5 if mode == "nearest-exact" or (mode in ("linear", "cubic") and not is_aligned) else 0.0
    less = 0.5 if offset and mode != "nearest-exact" else 0.0
    exact = (output + offset) * step
    roundings = exact - less, _single(_single(exact) - less), _single(exact - less)
    return tuple(max(position, 0.0) for position in roundings) if mode == "linear" else roundings


def _clipped(index: int, extent: int) -> int:
    return min(max(index, 0), extent - 1)


def _single(number: float) -> float:
    """``number`` in float32."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded
