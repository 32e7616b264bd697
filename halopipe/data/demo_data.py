"""Data to train on, for demonstrations: a factory takes (global_batch, input_shape, seed) and yields (inputs, targets).

``halopipe run --data pkg.mod:factory`` takes any function of that form; every rank calls it and gets the same batches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from planner.ir.errors import UsageError

LabelledBatch = tuple[Tensor, Tensor]


def digits(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[LabelledBatch]:
    """Scikit-learn's 1797 handwritten digits as images of ``input_shape``'s channels, height and width, without end.

    The 8 x 8 images are resized bilinearly, repeated over the channels and brought to mean 0 and variance 1; each pass
    over them is shuffled anew, and a batch may reach into the next pass.

    Raises:
        UsageError: scikit-learn is not installed, or ``input_shape`` is not (sample, channel, height, width).
    """
    if len(input_shape) != 4:
        raise UsageError(
            f"the digits are images, input_shape {input_shape} has {len(input_shape)} dims",
            ["4 dims are needed: sample, channel, height, width"],
            ["halopipe profile MODEL --input 8,3,64,64"],
        )
    pixels, labels = _read_digits()
    images = pixels.reshape(-1, 1, 8, 8)
    images = functional.interpolate(images, size=tuple(input_shape[2:]), mode="bilinear", align_corners=False)
    images = ((images - images.mean()) / images.std()).to(torch.get_default_dtype())
    generator = torch.Generator().manual_seed(seed)
    waiting = torch.empty(0, dtype=torch.int64)
    while True:
        while len(waiting) < global_batch:
            waiting = torch.cat((waiting, torch.randperm(len(labels), generator=generator)))
        now = waiting[:global_batch]
        waiting = waiting[global_batch:]
        yield images[now].expand(-1, input_shape[1], -1, -1).contiguous(), labels[now]


def _read_digits() -> tuple[Tensor, Tensor]:
    """Pixels [1797, 64] and labels from scikit-learn's own file: importing it takes each rank two seconds."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise UsageError("the digits need scikit-learn", [], ["pip install 'halopipe[demo]'"])
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = torch.from_numpy(numpy.loadtxt(file, delimiter=",", dtype="float32"))
    return rows[:, :-1], rows[:, -1].long()


def synthetic(
    global_batch: int, input_shape: tuple[int, ...], seed: int, num_classes: int = 10
) -> Iterator[LabelledBatch]:
    """Normal numbers of ``input_shape``; a label is the largest of a few fixed random projections."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.get_default_dtype()
    shape = (global_batch, *input_shape[1:])
    projection = torch.randn((int(torch.Size(input_shape[1:]).numel()), num_classes), generator=generator, dtype=dtype)
    while True:
        inputs = torch.randn(shape, generator=generator, dtype=dtype)
        yield inputs, (inputs.flatten(1) @ projection).argmax(1)
