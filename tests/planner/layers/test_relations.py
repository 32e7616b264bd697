"""Layer kinds beside torch in float64: in the boxes it finds all that it needs, and it needs all of them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import pytest
import torch
import torch.nn.functional as F

from planner.ir.box import Box, Interval, volume, whole
from planner.ir.graph import SAMPLE, Attribute, Graph, Layer, TensorSpec
from planner.layers import kind
from planner.layers.sized import SizedLayer
from tests.planner.layers.oracle import Run, assert_reads_no_more, outside_spoilt, random_boxes, slices, spec_of

IMAGE = "sample channel height width"
ROWS = "sample time feature"
HEADS = "sample head time feature"
SQUARE: Mapping[str, Attribute] = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
HALVES: Mapping[str, Attribute] = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
Input = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Case:
    """An operation: its inputs with their dims, the dims of its output, its parameters, and torch's way to do it.

    Attributes:
        integers: whether inputs are.
        by_samples: the rule keeps samples apart and nothing else.
        is_smallest: whether no smaller box of the first input would do.
        cut: dims along which a part reads less than the whole; "" if that is not asked.
        flops: of a forward; -1 if that is not asked.
    """

    kind: str
    inputs: tuple[Input, ...]
    dims: str
    run: Run
    parameters: tuple[tuple[int, ...], ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    integers: bool = False
    by_samples: bool = False
    is_smallest: bool = True
    cut: str = ""
    flops: int = -1


def rows(*shape: int, dims: str = ROWS) -> Input:
    return shape or (4, 3, 5), dims


def image(*shape: int) -> Input:
    return shape or (4, 3, 5, 2), IMAGE


def reshape(given: Input, dims: str, run: Run, *kept: int, is_smallest: bool = True) -> Case:
    """Of which ``kept`` says where each dim comes from; nothing but samples apart if it says nothing."""
    attributes = {"kept": kept} if kept else {}
    return Case("reshape", (given,), dims, run, (), attributes, False, not kept, is_smallest and bool(kept))


def group_norm(parts: int, is_smallest: bool = True, **attributes: Attribute) -> Case:
    def run(x: list[torch.Tensor], p: list[torch.Tensor]) -> torch.Tensor:
        return F.group_norm(x[0], parts, p[0], p[1])

    known = {"dims": (1, 2, 3), **attributes}
    return Case("layer_norm", (image(4, 6, 2, 3),), IMAGE, run, ((6,), (6,)), known, is_smallest=is_smallest)


def prelu(slopes: int) -> Case:
    attributes = {"op": "aten.prelu.default"}
    return Case("pointwise", (image(),), IMAGE, lambda x, p: F.prelu(x[0], p[0]), ((slopes,),), attributes)


def recurrent(x: list[torch.Tensor], p: list[torch.Tensor]) -> torch.Tensor:
    return torch.lstm(x[0], (x[1], x[2]), list(p), True, 1, 0.0, False, False, True)[0]


STATE: Input = ((1, 4, 6), "dim0 sample feature")
QUERIES = rows(4, 2, 5, 3, dims=HEADS)
KEYS = (4, 2, 6, 3)
VALUES = (4, 2, 6, 4)
MASK = rows(5, 6, dims="time dim1")
CASES = {
    "add": Case("pointwise", (rows(), rows()), ROWS, lambda x, p: x[0] + x[1], cut=ROWS, flops=4 * 3 * 5),
    "mask": Case(
        "pointwise",
        (
            rows(4, 3, 5, 5, dims=HEADS),
            rows(1, 1, 5, 5, dims="dim0 dim1 time feature"),
            rows(5, 1, dims="time feature"),
        ),
        HEADS,
        lambda x, p: x[0] * x[1] + x[2],
    ),
    "scale": Case("pointwise", (rows(),), ROWS, lambda x, p: x[0] * p[0] + p[1] + p[2], ((5,), (1, 3, 1), ())),
    "prelu": prelu(3),
    "prelu with one slope": prelu(1),
    "conv": Case(
        "conv",
        (image(4, 4, 6, 6),),
        IMAGE,
        lambda x, p: F.conv2d(x[0], p[0], padding=1),
        ((6, 4, 3, 3),),
        {**SQUARE, "groups": 1},
        cut=IMAGE,
        flops=2 * (4 * 6 * 6 * 6) * 4 * 9,
    ),
    "pool": Case("pool", (image(4, 4, 6, 6),), IMAGE, lambda x, p: F.max_pool2d(x[0], 2), attributes=HALVES, cut=IMAGE),
    "batch_norm": Case(
        "batch_norm",
        (image(),),
        IMAGE,
        lambda x, p: F.batch_norm(x[0], torch.zeros(3).double(), torch.ones(3).double(), p[0], p[1]),
        ((3,), (3,)),
        cut=IMAGE,
    ),
    "layer_norm": Case(
        "layer_norm",
        (rows(),),
        ROWS,
        lambda x, p: F.layer_norm(x[0], (5,), p[0], p[1]),
        ((5,), (5,)),
        {"dims": (2,)},
        cut="sample time",
    ),
    "layer_norm of as long as wide": Case(
        "layer_norm",
        (rows(4, 5, 5),),
        ROWS,
        lambda x, p: F.layer_norm(x[0], (5,), p[0], p[1]),
        ((5,), (5,)),
        {"dims": (2,)},
    ),
    "group_norm": group_norm(2, groups=2, by_channel=True),
    "group_norm of an old profile": group_norm(2, is_smallest=False),
    "one group": group_norm(1, groups=1, by_channel=True),
    "instance_norm": group_norm(6, dims=(2, 3), by_channel=True),
    "concat": Case(
        "concat",
        (image(4, 2, 3, 3), image(4, 5, 3, 3), image(4, 1, 3, 3)),
        IMAGE,
        lambda x, p: torch.cat(x, 1),
        attributes={"dim": 1},
        flops=0,
    ),
    "concat of two": Case(
        "concat", (image(4, 2, 6, 6),) * 2, IMAGE, lambda x, p: torch.cat(x, 1), attributes={"dim": 1}, cut=IMAGE
    ),
    "stack": Case(
        "concat",
        (rows(4, 2, 3),) * 3,
        "sample time dim2 feature",
        lambda x, p: torch.stack(x, 2),
        attributes={"dim": 2},
    ),
    "linear": Case(
        "linear",
        (rows(),),
        ROWS,
        lambda x, p: F.linear(x[0], p[0], p[1]),
        ((7, 5), (7,)),
        cut=ROWS,
        flops=2 * 4 * 3 * 5 * 7,
    ),
    "matmul": Case("linear", (rows(), rows(4, 5, 6, dims="sample feature dim2")), ROWS, lambda x, p: x[0] @ x[1]),
    "attention": Case(
        "attention",
        (QUERIES, (KEYS, HEADS), (VALUES, HEADS), MASK),
        HEADS,
        lambda x, p: torch.softmax(x[0] @ x[1].mT + x[3], -1) @ x[2],
        cut="sample head feature",  # its values are larger than all else
        flops=2 * 4 * 2 * 5 * 6 * (3 + 4),
    ),
    "shared keys": Case(
        "attention",
        (QUERIES, ((4, 1, 6, 3), HEADS), ((4, 1, 6, 4), HEADS)),
        HEADS,
        lambda x, p: torch.softmax(x[0] @ x[1].mT, -1) @ x[2],
        cut="sample head time",  # its queries are
    ),
    "lstm": Case(
        "lstm",
        (rows(), STATE, STATE),
        ROWS,
        recurrent,
        ((24, 5), (24, 6), (24,), (24,)),
        {"op": "aten.lstm.input"},
        by_samples=True,
        flops=2 * 4 * 4 * 3 * 6 * (5 + 6),
    ),
    "embedding": Case(
        "embedding",
        (rows(4, 3, dims="sample time"),),
        ROWS,
        lambda x, p: F.embedding(x[0], p[0]),
        ((5, 6),),
        integers=True,
        cut=ROWS,
        flops=0,
    ),
    "mean of channels": Case(
        "reduce",
        (image(),),
        "sample height width",
        lambda x, p: x[0].mean(1),
        attributes={"dims": (1,), "keeps": False},
    ),
    "maximum kept": Case(
        "reduce",
        (image(),),
        IMAGE,
        lambda x, p: x[0].amax((1, 3), keepdim=True),
        attributes={"dims": (1, 3), "keeps": True},
    ),
    "softmax": Case(
        "softmax", (rows(),), ROWS, lambda x, p: x[0].log_softmax(1), attributes={"dim": 1}, cut="sample feature"
    ),
    "flatten": reshape(rows(), "sample feature", lambda x, p: x[0].flatten(0, 1)),  # 3 rows a sample
    "unflatten": reshape(rows(12, 5, dims="sample feature"), ROWS, lambda x, p: x[0].view(4, 3, 5)),
    "permute": reshape(rows(), "time sample feature", lambda x, p: x[0].transpose(0, 1)),
    "channels last": reshape(image(), "sample height width channel", lambda x, p: x[0].permute(0, 2, 3, 1), 0, 2, 3, 1),
    "flattened space": reshape(image(), "sample channel dim2", lambda x, p: x[0].flatten(2), 0, 1, -1),
    "grouped channels": reshape(
        image(4, 6, 5, 2),
        "sample dim1 dim2 height width",
        lambda x, p: x[0].view(4, 2, 3, 5, 2),
        *(0, -1, -1, 2, 3),
        is_smallest=False,
    ),
    "heads": reshape(
        rows(4, 3, 12), "sample time head dim3", lambda x, p: x[0].view(4, 3, 4, 3), 0, 1, -1, -1, is_smallest=False
    ),
    "heads joined and cut anew": reshape(
        rows(4, 4, 3, 2, dims="sample head dim2 dim3"),
        "sample dim1 dim2",
        lambda x, p: x[0].reshape(4, 6, 4),
        *(0, -1, -1),
        is_smallest=False,
    ),
    "expanded": reshape(image(4, 1, 5, 2), IMAGE, lambda x, p: x[0].expand(4, 3, 5, 2), 0, -1, 2, 3),
    "fft": Case(
        "opaque",
        (rows(), rows(3, 5, dims="time feature")),
        ROWS,
        lambda x, p: torch.fft.fft2(x[0] * x[1]).real,
        by_samples=True,
        cut="sample",
    ),
}


@dataclass(frozen=True)
class Made:
    """A case with its tensors, and the layer that the planner sees."""

    case: Case
    inputs: list[torch.Tensor]
    parameters: list[torch.Tensor]
    layer: Layer
    specs: tuple[TensorSpec, ...]
    output: TensorSpec

    @classmethod
    def of(cls, name: str) -> Made:
        case = CASES[name]
        torch.manual_seed(0)
        inputs = [torch.randint(0, 2, x) if case.integers else torch.randn(x).double() for x, _ in case.inputs]
        parameters = [torch.randn(shape, dtype=torch.float64) for shape in case.parameters]
        output = spec_of(case.run(inputs, parameters), case.dims)
        specs = tuple(spec_of(x, dims) for x, (_, dims) in zip(inputs, case.inputs, strict=True))
        names = tuple(f"x{k}" for k in range(len(inputs)))
        weights = tuple(f"w{k}" for k in range(len(parameters)))
        return cls(case, inputs, parameters, Layer("layer", case.kind, names, (output,), weights, case.attributes),
                   specs, output)  # fmt: skip

    def of_samples(self, first: int, last: int) -> Box:
        """Of the output, whatever of it is of these samples, of 4 in all."""
        dim = self.output.dims.index(SAMPLE)
        rows = self.output.shape[dim] // 4
        return tuple(
            Interval(first * rows, last * rows) if d == dim else i for d, i in enumerate(whole(self.output.shape))
        )


@pytest.mark.every_case  # a kind of layer may be in one of them alone
@pytest.mark.parametrize("name", CASES)
def test_the_work_box_comes_out_of_the_boxes_alone(name: str) -> None:
    made = Made.of(name)
    dim = made.output.dims.index(SAMPLE)
    rows = made.output.shape[dim] // 4
    for box in random_boxes(made.output.shape, random.Random(name), 25):
        if made.case.by_samples:
            box = made.of_samples(box[dim].start // rows, -(-box[dim].stop // rows))
        is_smallest = made.case.is_smallest and not (made.case.by_samples or made.case.integers)
        assert_reads_no_more(made.layer, made.inputs, made.specs, made.parameters, made.case.run, box, is_smallest)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_one_sample_reads_one_sample_and_no_sample_reads_nothing(name: str) -> None:
    made = Made.of(name)
    relation = kind(made.case.kind)
    for spec, box in zip(made.specs, relation.input_boxes(made.layer, made.specs, made.of_samples(2, 3)), strict=True):
        if made.case.kind not in ("conv", "pool"):  # which say where padding is
            assert volume(box) == volume(whole(spec.shape)) // (4 if spec.has_samples else 1)
    read = relation.input_boxes(made.layer, made.specs, made.of_samples(2, 2))
    assert [volume(box) for box in read] == [0] * len(made.specs)


@pytest.mark.every_case
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.flops >= 0])
def test_flops_are_what_one_counts_by_hand(name: str) -> None:
    made = Made.of(name)
    assert kind(made.case.kind).forward_flops(made.layer, made.specs) == made.case.flops


@pytest.mark.every_case
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.cut])
def test_the_dims_that_a_layer_may_be_cut_along(name: str) -> None:
    made = Made.of(name)
    values = dict(zip(made.layer.inputs, made.specs, strict=True))
    weights = [TensorSpec(("dim",) * len(shape), shape, "float64") for shape in made.case.parameters]
    graph = Graph(4, values, (made.layer,), dict(zip(made.layer.parameters, weights, strict=True)), "layer")
    sized = [SizedLayer.of(graph, made.layer, graph.values(), 4, mixes_samples=mixes) for mixes in (False, True)]
    assert [each.divisible for each in sized] == [{*made.case.cut.split()}, {*made.case.cut.split()} - {SAMPLE}]


LOSS = spec_of(torch.empty(()), "")
CLASSES = (4, 5, 3, 6)
LOSSES = {
    "squares": ("elements", CLASSES, (CLASSES,), lambda y, t: F.mse_loss(y, t, reduction="none")),
    "broadcast targets": ("elements", CLASSES, ((4, 1, 3, 6), (6,)), lambda y, t, w: (y - t).abs() * w),
    "classes": ("places", CLASSES, ((4, 3, 6),), lambda y, t: F.cross_entropy(y, t, reduction="none")),
    "probabilities": ("places", CLASSES, (CLASSES,), lambda y, t: F.cross_entropy(y, t, reduction="none")),
    "labels": ("places", (4, 5), ((4,),), lambda y, t: F.cross_entropy(y, t, reduction="none")),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_term_of_the_loss_comes_out_of_the_boxes_alone(name: str) -> None:
    torch.manual_seed(0)
    terms, shape, others, function = LOSSES[name]
    is_class = name in ("classes", "labels")
    inputs = [torch.randn(shape).double()]
    inputs += [torch.randint(0, 2, each) if is_class else torch.rand(each).double() for each in others]
    specs = tuple(spec_of(x, IMAGE if x.dim() == 4 else " ".join(f"dim{d}" for d in range(x.dim()))) for x in inputs)
    layer = Layer("loss", "loss", ("y", "t", "w")[: len(inputs)], (LOSS,), (), {"terms": terms})
    expected = function(*inputs)
    for box in random_boxes(shape, random.Random(name), 25):
        work_box = (box[0], Interval(0, shape[1]), *box[2:]) if terms == "places" else box  # classes are never apart
        place = slices((work_box[0], *work_box[2:]) if terms == "places" else work_box)
        boxes = kind("loss").input_boxes(layer, specs, box)
        found = function(*(outside_spoilt(x, each) for x, each in zip(inputs, boxes, strict=True)))
        assert torch.equal(found[place], expected[place])
        assert boxes[0] == work_box
        assert [volume(each) for each in boxes[1:]] == [
            _at_most(each.shape, work_box, terms == "places") for each in inputs[1:]
        ]


def _at_most(shape: tuple[int, ...], box: Box, is_by_place: bool) -> int:
    """Elements of targets that a box of the prediction has, if it is cut wherever it can be."""
    along = (box[0], *box[2:]) if is_by_place and len(shape) < len(box) else box[len(box) - len(shape) :]
    return prod(min(extent, len(interval)) for extent, interval in zip(shape, along, strict=True))


def test_the_loss_reads_targets_of_the_predictions_samples() -> None:
    """4 samples of 3 times; one that is cut through is read whole."""
    inputs = spec_of(torch.empty(12, 10), "sample feature"), spec_of(torch.empty(4, 3), "sample time")
    inputs += (spec_of(torch.empty(10), "feature"),)
    layer = Layer("loss", "loss", ("logits", "targets", "weights"), (LOSS,))
    assert kind("loss").work(layer, inputs) == inputs[0]
    for first, last in ((3, 9), (4, 8)):
        boxes = kind("loss").input_boxes(layer, inputs, (Interval(first, last), Interval(0, 10)))
        assert boxes == ((Interval(first, last), Interval(0, 10)), (Interval(1, 3), Interval(0, 3)), (Interval(0, 10),))


@pytest.mark.parametrize(("cut", "read"), [((0, 1), (1, 3)), ((0, 2), (0, 6))])
def test_a_reshape_reads_the_run_of_regrouped_dims(cut: tuple[int, int], read: tuple[int, int]) -> None:
    made = Made.of("grouped channels")
    box = (Interval(0, 4), Interval(*cut), Interval(1, 3), Interval(2, 4), Interval(1, 2))
    found = kind("reshape").input_boxes(made.layer, made.specs, box)
    assert found == ((box[0], Interval(*read), *box[3:]),)


def test_what_boxes_do_not_cover_is_said() -> None:
    names = ("loss", "global_pool", "batch_norm", "linear")
    assert [kind(name).REDUCTION for name in names] == ["sum", "sum", "statistics", ""]
    x = spec_of(torch.empty(4, 5), "sample feature")
    total = spec_of(torch.empty(5), "feature")
    layer = Layer("sum", "opaque", ("x",), (total,))
    assert kind("opaque").input_boxes(layer, (x,), (Interval(0, 2),)) == (whole((4, 5)),)  # of all samples


def test_flops_of_stacked_bidirectional_recurrences_count_every_cell() -> None:
    x = spec_of(torch.empty(4, 3, 5), ROWS)
    output = spec_of(torch.empty(4, 3, 14), ROWS)  # hidden 7, both directions
    state = spec_of(torch.empty(4, 4, 7), "dim0 sample feature")  # 2 layers x 2 directions
    layer = Layer("gru", "lstm", ("x",), (output, state), attributes={"op": "aten.gru.input"})
    cells = 2 * 7 * (5 + 7) + 2 * 7 * (14 + 7)
    assert kind("lstm").forward_flops(layer, (x,)) == 2 * 4 * 3 * 3 * cells
