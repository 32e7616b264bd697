"""Modules and data of rows, and of the refusals that they provoke; it lies in their folders as ``model.py``.

Each is a factory, as users have them: its name says what is special about it.
"""
# ruff: noqa: D103 - see above

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import torch
from torch import nn, rand, randint, randn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from halopipe import sparse


def _classifying(network, input_shape):
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def model(input_shape=(16, 1, 8, 8), num_classes=10):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))
    return _classifying(network, input_shape)


def data():
    return TensorDataset(rand(64, 1, 8, 8), randint(10, (64,)))


def wide(input_shape=(16, 1, 8, 8)):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return _classifying(network, input_shape)


def any_shape(input_shape=(16, 64)):
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    network(randn(input_shape))
    return _classifying(network, input_shape)


def _batch(rows=16):
    return rand(rows, 1, 8, 8), randint(10, (rows,))


def four_batches():
    for _ in range(4):
        yield _batch()


def twice_as_large():
    while True:
        yield _batch(32)


def smaller():
    while True:
        yield _batch(12)


def bright():
    while True:
        yield 1e6 * rand(16, 1, 8, 8), randint(10, (16,))


def nothing():
    yield from ()


def of_this_process():
    generator = torch.Generator().manual_seed(os.getpid())
    return TensorDataset(rand(64, 1, 8, 8, generator=generator), randint(10, (64,), generator=generator))


def _once(step):
    """Whether a run comes to this step for the first time."""
    mark = Path(f"came-to-{step}")
    is_first = step == 5 and not mark.exists()
    if is_first:
        mark.touch()
    return is_first


def dies_once():
    for step in range(99):
        if _once(step):
            os._exit(9)
        yield _batch()


def is_asked_to_end_once():
    for step in range(99):
        if _once(step):
            os.kill(os.getpid(), signal.SIGTERM)
        yield _batch()


def is_singular_once():
    for step in range(99):
        inputs, targets = _batch()
        yield inputs * (not _once(step)), targets


def one_too_many():
    return TensorDataset(rand(33, 1, 8, 8), randint(10, (33,)))


class Joined(torch.optim.SGD):
    """Divides by the norm of all gradients."""

    def step(self, closure=None):
        parameters = [each for group in self.param_groups for each in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        super().step(closure)


def joined(parameters):
    return Joined(parameters, lr=0.01)


def read(path):
    return torch.from_numpy(np.loadtxt(path, np.float32).reshape(16, 1, 8, 8))


class Loop(nn.Linear):
    """Its code fixes the number of samples."""

    def forward(self, x):
        return torch.stack([super(Loop, self).forward(row.flatten()) for row in x])


def of_one_size(input_shape=(4, 1, 8, 8)):
    return _classifying(Loop(64, 10), input_shape)


def reading(input_shape=(16, 1, 8, 8)):
    network, batch, loss = wide(input_shape)
    return network if network[1].weight.sum().item() < 1e9 else None, batch, loss


def without_values(input_shape=(16, 1, 8, 8)):
    network, batch, loss = wide(input_shape)
    return network.to("meta"), batch, loss


class Rotated(nn.Module):
    """Has a complex weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(randn(64, 10, dtype=torch.complex64))

    def forward(self, x):
        return (x.flatten(1).to(self.weight.dtype) @ self.weight).abs()


def rotated(input_shape=(16, 1, 8, 8)):
    return _classifying(Rotated(), input_shape)


def alone():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Inverse(nn.Linear):
    """Fails on a matrix that has no inverse."""

    def forward(self, x):
        return super().forward(torch.linalg.inv(x.squeeze(1)).flatten(1))


def inverse(input_shape=(16, 1, 8, 8)):
    return _classifying(Inverse(64, 10), input_shape)


def normed(input_shape=(16, 1, 8, 8)):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    return _classifying(network, input_shape)


def spoilt():
    raise RuntimeError("it is not ready")


def read_both(path):
    return read(path), randint(10, (16,))


class Causal(nn.Module):
    """Attention to earlier tokens."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(9, 8)
        self.heads = nn.Linear(8, 24)
        self.out = nn.Linear(8, 9)

    def forward(self, tokens):
        heads = (part[:, None] for part in self.heads(self.token(tokens)).chunk(3, -1))
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True)[:, 0])


def causal(input_shape=(16, 12)):
    tokens = randint(9, input_shape)
    return (
        Causal(),
        (tokens, tokens),
        lambda scores, wanted: functional.cross_entropy(scores.flatten(0, 1), wanted.flatten()),
    )


def cloudy(input_shape=(4, 40, 4)):
    """Of clouds: (samples, points, features)."""
    samples, _, width = input_shape
    network = nn.Sequential(
        sparse.nn.Conv3d(width, 8, 3), sparse.nn.ReLU(), sparse.nn.GlobalAvgPool(), nn.Linear(8, 10)
    )
    with torch.device("cpu"):
        coordinates = torch.tensor([[n, x, 0, 0] for n in range(samples) for x in range(30)], dtype=torch.int32)
        cloud = sparse.SparseTensor(randn(len(coordinates), width), coordinates)
        return network, (cloud, randint(10, (samples,))), nn.CrossEntropyLoss()


class Scaled(nn.Linear):
    """Scales what it is given by numbers that are the same for all samples."""

    def forward(self, x, scale):
        return super().forward(x.flatten(1) * scale)


def scaled(input_shape=(16, 1, 8, 8)):
    return Scaled(64, 10), ((randn(input_shape), rand(64)), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


class WithScales(Dataset):
    """Samples, each with the numbers that are the same for all."""

    def __len__(self):
        return 64

    def __getitem__(self, number):
        return (torch.full((1, 8, 8), number / 64), torch.arange(64.0)), torch.tensor(number % 10)


def with_scales():
    return WithScales()


def whole_batches():
    while True:
        inputs, targets = _batch()
        yield (inputs, torch.arange(64.0)), targets


def of_its_process(input_shape=(16, 1, 8, 8)):
    network, batch, loss = wide(input_shape)
    generator = torch.Generator().manual_seed(os.getpid())
    return nn.Sequential(network, Shifted(float(rand((), generator=generator)))), batch, loss


class Shifted(nn.Module):
    """Adds a number."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def forward(self, x):
        return x + self.by


class Moody(nn.Linear):
    """Draws once more where it is not captured, and nothing comes of it."""

    def forward(self, x):
        x = functional.dropout(x.flatten(1), 0.5)
        return super().forward(x if torch.compiler.is_compiling() else x + 0 * torch.rand_like(x))


def moody(input_shape=(16, 1, 8, 8)):
    return _classifying(Moody(64, 10), input_shape)


def linear(input_shape=(16, 1, 8, 8)):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return network, (randn(input_shape), randn(input_shape[0], 10)), lambda made, wanted: (made - wanted).mean()


def cancelling():
    """Samples whose sum is small beside them."""
    while True:
        half = 1e5 * randn(8, 1, 8, 8)
        yield torch.cat([half, 1 - half]), randn(16, 10)


class Means(nn.Module):
    """A picture, of which the loss reads the means."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.last(self.first(x).relu())


def means(input_shape=(16, 1, 8, 8)):
    batch = randn(input_shape), randn(input_shape[0], 3)
    return Means(), batch, lambda made, wanted: (made.sum((2, 3)) * wanted).mean()


def pictures():
    return TensorDataset(rand(64, 1, 8, 8), rand(64, 3))


class MeanError:
    """A metric."""

    def __init__(self):
        self.errors = []

    def update(self, prediction, target):
        self.errors.append((prediction.mean((2, 3)) - target).abs().mean())

    def compute(self):
        return torch.stack(self.errors).mean()


def summed(input_shape=(16, 1, 8, 8)):
    network, batch, mean = normed(input_shape)
    return network, batch, lambda made, wanted: mean(made, wanted) + 1e-3 * made.square().sum()
