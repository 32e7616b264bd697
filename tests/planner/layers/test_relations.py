"""Every kind without a window: torch in float64 finds in the boxes all that it needs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import pytest
import torch
import torch.nn.functional as F

from planner.ir.box import Box, Interval, volume, whole
from planner.ir.graph import SAMPLE, Attribute, Layer
from planner.layers import kind
from tests.planner.layers.oracle import (
    Run,
    assert_reads_no_more,
    outside_spoilt,
    random_boxes,
    slices,
    spec_of,
)

IMAGE = "sample channel height width"
HEADS = "sample head time feature"


@dataclass(frozen=True)
class Case:
    """An operation: its inputs with their dims, the dims of its output, its parameters, and torch's way to do it."""

    kind: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    dims: str
    run: Run
    parameters: tuple[tuple[int, ...], ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    integers: bool = False
    only_samples: bool = False  # the rule keeps samples apart and nothing else


def flattened(x, p):
    """Samples and times in one dim, 3 rows a sample."""
    return x[0].flatten(0, 1)


def recurrent(x, p):
    weights = [p[0], p[1], p[2], p[3]]
    return torch.lstm(x[0], (x[1], x[2]), weights, True, 1, 0.0, False, False, True)[0]


CASES = {
    "add": Case(
        "pointwise", (((4, 3, 5), "sample time feature"),) * 2, "sample time feature", lambda x, p: x[0] + x[1]
    ),
    "mask": Case(
        "pointwise",
        (((4, 3, 5, 5), HEADS), ((1, 1, 5, 5), "dim0 dim1 time feature"), ((5, 1), "time feature")),
        HEADS,
        lambda x, p: x[0] * x[1] + x[2],
    ),
    "scale": Case(
        "pointwise",
        (((4, 3, 5), "sample time feature"),),
        "sample time feature",
        lambda x, p: x[0] * p[0] + p[1] + p[2],
        ((5,), (1, 3, 1), ()),
    ),
    "prelu": Case(
        "pointwise",
        (((4, 3, 3, 3), IMAGE),),
        IMAGE,
        lambda x, p: F.prelu(x[0], p[0]),
        ((3,),),
        {"op": "aten.prelu.default"},
    ),
    "prelu with one slope": Case(
        "pointwise",
        (((4, 3, 3, 3), IMAGE),),
        IMAGE,
        lambda x, p: F.prelu(x[0], p[0]),
        ((1,),),
        {"op": "aten.prelu.default"},
    ),
    "batch_norm": Case(
        "batch_norm",
        (((4, 3, 2, 5), IMAGE),),
        IMAGE,
        lambda x, p: F.batch_norm(x[0], torch.zeros(3).double(), torch.ones(3).double(), p[0], p[1]),
        ((3,), (3,)),
    ),
    "layer_norm": Case(
        "layer_norm",
        (((4, 3, 5), "sample time feature"),),
        "sample time feature",
        lambda x, p: F.layer_norm(x[0], (5,), p[0], p[1]),
        ((5,), (5,)),
        {"dims": (2,)},
    ),
    "group_norm": Case(
        "layer_norm",
        (((4, 6, 2, 3), IMAGE),),
        IMAGE,
        lambda x, p: F.group_norm(x[0], 2, p[0], p[1]),
        ((6,), (6,)),
        {"dims": (1, 2, 3), "groups": 2, "by_channel": True},
    ),
    "group_norm of an old profile": Case(
        "layer_norm",
        (((4, 6, 2, 3), IMAGE),),
        IMAGE,
        lambda x, p: F.group_norm(x[0], 2, p[0], p[1]),
        ((6,), (6,)),
        {"dims": (1, 2, 3)},
    ),
    "one group": Case(
        "layer_norm",
        (((4, 6, 2, 3), IMAGE),),
        IMAGE,
        lambda x, p: F.group_norm(x[0], 1, p[0], p[1]),
        ((6,), (6,)),
        {"dims": (1, 2, 3), "groups": 1, "by_channel": True},
    ),
    "instance_norm": Case(
        "layer_norm",
        (((4, 3, 4, 5), IMAGE),),
        IMAGE,
        lambda x, p: F.instance_norm(x[0], weight=p[0], bias=p[1]),
        ((3,), (3,)),
        {"dims": (2, 3), "by_channel": True},
    ),
    "as long as wide": Case(
        "layer_norm",
        (((4, 5, 5), "sample time feature"),),
        "sample time feature",
        lambda x, p: F.layer_norm(x[0], (5,), p[0], p[1]),
        ((5,), (5,)),
        {"dims": (2,)},
    ),
    "concat": Case(
        "concat",
        (((4, 2, 3, 3), IMAGE), ((4, 5, 3, 3), IMAGE), ((4, 1, 3, 3), IMAGE)),
        IMAGE,
        lambda x, p: torch.cat(x, 1),
        attributes={"dim": 1},
    ),
    "stack": Case(
        "concat",
        (((4, 2, 3), "sample time feature"),) * 3,
        "sample time dim2 feature",
        lambda x, p: torch.stack(x, 2),
        attributes={"dim": 2},
    ),
    "linear": Case(
        "linear",
        (((4, 3, 5), "sample time feature"),),
        "sample time feature",
        lambda x, p: F.linear(x[0], p[0], p[1]),
        ((7, 5), (7,)),
    ),
    "matmul": Case(
        "linear",
        (((4, 3, 5), "sample time feature"), ((4, 5, 6), "sample feature dim2")),
        "sample time feature",
        lambda x, p: x[0] @ x[1],
    ),
    "attention": Case(
        "attention",
        (((4, 2, 5, 3), HEADS), ((4, 2, 6, 3), HEADS), ((4, 2, 6, 4), HEADS), ((5, 6), "time dim1")),
        HEADS,
        lambda x, p: torch.softmax(x[0] @ x[1].mT + x[3], -1) @ x[2],
    ),
    "shared keys": Case(
        "attention",
        (((4, 2, 5, 3), HEADS), ((4, 1, 6, 3), HEADS), ((4, 1, 6, 4), HEADS)),
        HEADS,
        lambda x, p: torch.softmax(x[0] @ x[1].mT, -1) @ x[2],
    ),
    "lstm": Case(
        "lstm",
        (((4, 3, 5), "sample time feature"), ((1, 4, 6), "dim0 sample feature"), ((1, 4, 6), "dim0 sample feature")),
        "sample time feature",
        recurrent,
        ((24, 5), (24, 6), (24,), (24,)),
        only_samples=True,
    ),
    "embedding": Case(
        "embedding",
        (((4, 3), "sample time"),),
        "sample time feature",
        lambda x, p: F.embedding(x[0], p[0]),
        ((5, 6),),
        integers=True,
    ),
    "mean of channels": Case(
        "reduce",
        (((4, 3, 5, 2), IMAGE),),
        "sample height width",
        lambda x, p: x[0].mean(1),
        attributes={"dims": (1,), "keeps": False},
    ),
    "maximum kept": Case(
        "reduce",
        (((4, 3, 5, 2), IMAGE),),
        IMAGE,
        lambda x, p: x[0].amax((1, 3), keepdim=True),
        attributes={"dims": (1, 3), "keeps": True},
    ),
    "softmax": Case(
        "softmax",
        (((4, 3, 5), "sample time feature"),),
        "sample time feature",
        lambda x, p: x[0].log_softmax(1),
        attributes={"dim": 1},
    ),
    "flatten": Case("reshape", (((4, 3, 5), "sample time feature"),), "sample feature", flattened, only_samples=True),
    "unflatten": Case(
        "reshape",
        (((12, 5), "sample feature"),),
        "sample time feature",
        lambda x, p: x[0].view(4, 3, 5),
        only_samples=True,
    ),
    "channels last": Case(
        "reshape",
        (((4, 3, 5, 2), IMAGE),),
        "sample height width channel",
        lambda x, p: x[0].permute(0, 2, 3, 1),
        attributes={"kept": (0, 2, 3, 1)},
    ),
    "flattened space": Case(
        "reshape",
        (((4, 3, 5, 2), IMAGE),),
        "sample channel dim2",
        lambda x, p: x[0].flatten(2),
        attributes={"kept": (0, 1, -1)},
    ),
    "grouped channels": Case(
        "reshape",
        (((4, 6, 5, 2), IMAGE),),
        "sample dim1 dim2 height width",
        lambda x, p: x[0].view(4, 2, 3, 5, 2),
        attributes={"kept": (0, -1, -1, 2, 3)},
    ),
    "heads": Case(
        "reshape",
        (((4, 3, 12), "sample time feature"),),
        "sample time head dim3",
        lambda x, p: x[0].view(4, 3, 4, 3),
        attributes={"kept": (0, 1, -1, -1)},
    ),
    "heads joined and cut anew": Case(
        "reshape",
        (((4, 4, 3, 2), "sample head dim2 dim3"),),
        "sample dim1 dim2",
        lambda x, p: x[0].reshape(4, 6, 4),
        attributes={"kept": (0, -1, -1)},
    ),
    "expanded": Case(
        "reshape",
        (((4, 1, 5, 2), IMAGE),),
        IMAGE,
        lambda x, p: x[0].expand(4, 3, 5, 2),
        attributes={"kept": (0, -1, 2, 3)},
    ),
    "permute": Case(
        "reshape",
        (((4, 3, 5), "sample time feature"),),
        "time sample feature",
        lambda x, p: x[0].transpose(0, 1),
        only_samples=True,
    ),
    "fft": Case(
        "opaque",
        (((4, 3, 5), "sample time feature"), ((3, 5), "time feature")),
        "sample time feature",
        lambda x, p: torch.fft.fft2(x[0] * x[1]).real,
        only_samples=True,
    ),
}


def tensors(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = [
        torch.randint(0, 2, shape) if case.integers else torch.randn(shape, dtype=torch.float64)
        for shape, _ in case.inputs
    ]
    return inputs, [torch.randn(shape, dtype=torch.float64) for shape in case.parameters]


def samples_alone(box: Box, case: Case, shape: tuple[int, ...]) -> Box:
    """``box`` along the sample dim, cut between samples (4 in all), whole along others."""
    dim = case.dims.split().index(SAMPLE)
    rows = shape[dim] // 4
    first, last = box[dim].start // rows, -(-box[dim].stop // rows)
    return (*whole(shape[:dim]), Interval(first * rows, last * rows), *whole(shape[dim + 1 :]))


def test_the_work_box_comes_out_of_the_boxes_alone() -> None:
    for name in CASES:  # in one test, so that none is left out: a kind of layer may be in one of them alone
        work_box_comes_out_of_the_boxes_alone(name)


def work_box_comes_out_of_the_boxes_alone(name: str) -> None:
    case = CASES[name]
    inputs, parameters = tensors(case)
    output = case.run(inputs, parameters)
    specs = tuple(spec_of(x, dims) for x, (_, dims) in zip(inputs, case.inputs, strict=True))
    names = tuple(f"x{k}" for k in range(len(inputs)))
    layer = Layer("layer", case.kind, names, (spec_of(output, case.dims),), attributes=case.attributes)
    rng = random.Random(name)
    for box in random_boxes(tuple(output.shape), rng, 25):
        work_box = samples_alone(box, case, tuple(output.shape)) if case.only_samples else box
        assert_reads_no_more(layer, inputs, specs, parameters, case.run, work_box)


def test_one_sample_reads_one_sample_and_no_sample_reads_nothing() -> None:
    for name in CASES:
        one_sample_reads_one_sample_and_no_sample_reads_nothing(name)


def one_sample_reads_one_sample_and_no_sample_reads_nothing(name: str) -> None:
    case = CASES[name]
    inputs, parameters = tensors(case)
    output = spec_of(case.run(inputs, parameters), case.dims)
    specs = tuple(spec_of(x, dims) for x, (_, dims) in zip(inputs, case.inputs, strict=True))
    names = tuple(f"x{k}" for k in range(len(inputs)))
    layer = Layer("layer", case.kind, names, (output,), attributes=case.attributes)
    dim = output.dims.index(SAMPLE)
    rows = output.shape[dim] // 4
    one = (*whole(output.shape[:dim]), Interval(2 * rows, 3 * rows), *whole(output.shape[dim + 1 :]))
    for spec, box in zip(specs, kind(case.kind).input_boxes(layer, specs, one), strict=True):
        expected = volume(whole(spec.shape)) // (4 if spec.has_samples else 1)
        assert volume(box) == expected
    none = (*one[:dim], Interval(2 * rows, 2 * rows), *one[dim + 1 :])
    assert [volume(box) for box in kind(case.kind).input_boxes(layer, specs, none)] == [0] * len(specs)


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
    layer = Layer("loss", "loss", ("y", "t", "w")[: len(inputs)], (spec_of(torch.empty(()), ""),), (), {"terms": terms})
    expected = function(*inputs)
    for box in random_boxes(shape, random.Random(name), 25):
        work_box = (box[0], Interval(0, shape[1]), *box[2:]) if terms == "places" else box
        place = slices((work_box[0], *work_box[2:]) if terms == "places" else work_box)
        boxes = kind("loss").input_boxes(layer, specs, work_box)
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


def test_classes_are_never_apart() -> None:
    prediction, targets = (
        spec_of(torch.empty(4, 5, 6), "sample channel width"),
        spec_of(torch.empty(4, 6), "sample dim1"),
    )
    layer = Layer("loss", "loss", ("y", "t"), (spec_of(torch.empty(()), ""),), (), {"terms": "places"})
    half = (Interval(0, 4), Interval(0, 2), Interval(1, 3))
    boxes = kind("loss").input_boxes(layer, (prediction, targets), half)
    assert boxes == ((Interval(0, 4), Interval(0, 5), Interval(1, 3)), (Interval(0, 4), Interval(1, 3)))


@pytest.mark.parametrize(
    ("name", "box", "read"),
    [
        ("channels last", ((1, 2), (3, 5), (0, 1), (1, 3)), ((1, 2), (1, 3), (3, 5), (0, 1))),
        ("flattened space", ((1, 2), (1, 2), (3, 7)), ((1, 2), (1, 2), (1, 4), (0, 2))),
        ("grouped channels", ((0, 4), (0, 1), (1, 3), (2, 4), (1, 2)), ((0, 4), (1, 3), (2, 4), (1, 2))),
        ("grouped channels", ((0, 4), (0, 2), (1, 3), (2, 4), (1, 2)), ((0, 4), (0, 6), (2, 4), (1, 2))),
        ("expanded", ((2, 4), (1, 2), (0, 3), (0, 2)), ((2, 4), (0, 1), (0, 3), (0, 2))),
    ],
)
def test_a_reshape_reads_the_same_place_along_dims_that_are_kept_and_the_run_of_regrouped_ones(
    name: str, box, read
) -> None:
    case = CASES[name]
    source = spec_of(torch.empty(case.inputs[0][0]), case.inputs[0][1])
    output = spec_of(case.run([torch.empty(source.shape)], []), case.dims)
    layer = Layer("layer", "reshape", ("x",), (output,), (), case.attributes)
    found = kind("reshape").input_boxes(layer, (source,), tuple(Interval(*ends) for ends in box))
    assert found == (tuple(Interval(*ends) for ends in read),)


def test_a_group_of_channels_is_read_whole_and_others_not_at_all() -> None:
    spec = spec_of(torch.empty(4, 12, 5), "sample channel width")
    attributes: dict[str, Attribute] = {"dims": (1, 2), "groups": 4, "by_channel": True}
    layer = Layer("norm", "layer_norm", ("x",), (spec,), ("weight",), attributes)
    box = (Interval(0, 2), Interval(4, 9), Interval(0, 1))
    assert kind("layer_norm").input_boxes(layer, (spec,), box) == ((box[0], Interval(3, 9), Interval(0, 5)),)
    weight = spec_of(torch.empty(12), "dim0")
    assert kind("layer_norm").weight_boxes(layer, (weight,), box) == ((Interval(4, 9),),)


def test_the_loss_reads_targets_of_the_predictions_samples() -> None:
    logits = spec_of(torch.empty(12, 10), "sample feature")  # 4 samples of 3 times
    targets = spec_of(torch.empty(4, 3), "sample time")
    weights = spec_of(torch.empty(10), "feature")
    layer = Layer("loss", "loss", ("logits", "targets", "weights"), (spec_of(torch.empty(()), ""),))
    inputs = (logits, targets, weights)
    assert kind("loss").work(layer, inputs) == logits
    boxes = kind("loss").input_boxes(layer, inputs, (Interval(3, 9), Interval(0, 10)))
    assert boxes == (
        (Interval(3, 9), Interval(0, 10)),
        (Interval(1, 3), Interval(0, 3)),
        (Interval(0, 10),),
    )
    cut_through = kind("loss").input_boxes(layer, inputs, (Interval(4, 8), Interval(0, 10)))
    assert cut_through[1] == (Interval(1, 3), Interval(0, 3)), "a sample that is cut through is read whole"
    assert kind("loss").REDUCTION == "sum"


def test_work_without_samples_reads_all_of_them() -> None:
    x, total = spec_of(torch.empty(4, 5), "sample feature"), spec_of(torch.empty(5), "feature")
    layer = Layer("sum", "opaque", ("x",), (total,))
    assert kind("opaque").input_boxes(layer, (x,), (Interval(0, 2),)) == (whole((4, 5)),)


def test_normalisation_over_samples_needs_statistics() -> None:
    assert kind("batch_norm").REDUCTION == "statistics"


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("linear", 2 * 4 * 3 * 5 * 7),
        ("add", 4 * 3 * 5),
        ("attention", 2 * 4 * 2 * 5 * 6 * (3 + 4)),
        ("lstm", 2 * 4 * 4 * 3 * 6 * (5 + 6)),
        ("concat", 0),
        ("embedding", 0),
    ],
)
def test_flops_are_what_one_counts_by_hand(name: str, flops: int) -> None:
    case = CASES[name]
    inputs, parameters = tensors(case)
    specs = tuple(spec_of(x, dims) for x, (_, dims) in zip(inputs, case.inputs, strict=True))
    output = spec_of(case.run(inputs, parameters), case.dims)
    layer = Layer("layer", case.kind, (), (output,), attributes={"op": f"aten.{case.kind}.input", **case.attributes})
    assert kind(case.kind).forward_flops(layer, specs) == flops


def test_flops_of_stacked_bidirectional_recurrences_count_every_cell() -> None:
    x = spec_of(torch.empty(4, 3, 5), "sample time feature")
    output = spec_of(torch.empty(4, 3, 14), "sample time feature")  # hidden 7, both directions
    state = spec_of(torch.empty(4, 4, 7), "dim0 sample feature")  # 2 layers x 2 directions
    layer = Layer("gru", "lstm", ("x",), (output, state), attributes={"op": "aten.gru.input"})
    cells = 2 * 7 * (5 + 7) + 2 * 7 * (14 + 7)
    assert kind("lstm").forward_flops(layer, (x,)) == 2 * 4 * 3 * 3 * cells


def test_flops_of_a_convolution_and_its_adjoint_are_equal() -> None:
    small, large = (
        spec_of(torch.empty(2, 6, 4), "sample channel width"),
        spec_of(torch.empty(2, 4, 9), "sample channel width"),
    )
    attributes = {"kernel": (3,), "stride": (2,), "padding": (0,), "dilation": (1,), "groups": 2}
    forward = Layer("conv", "conv", ("x",), (small,), attributes=attributes)
    adjoint = Layer("conv", "transposed_conv", ("x",), (large,), attributes=attributes)
    flops = 2 * (2 * 6 * 4) * (4 // 2) * 3
    assert kind("conv").forward_flops(forward, (large,)) == flops
    assert kind("transposed_conv").forward_flops(adjoint, (small,)) == flops
