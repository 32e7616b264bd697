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
from torch.utils.data import TensorDataset


def model(input_shape=(16, 1, 8, 8), num_classes=10):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def data():
    return TensorDataset(rand(64, 1, 8, 8), randint(10, (64,)))


def wide(input_shape=(16, 1, 8, 8)):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def any_shape(input_shape=(16, 64)):
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
    network(randn(input_shape))
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


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
    return Loop(64, 10), (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


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
    return Rotated(), (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def alone():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


class Inverse(nn.Linear):
    """Fails on a matrix that has no inverse."""

    def forward(self, x):
        return super().forward(torch.linalg.inv(x.squeeze(1)).flatten(1))


def inverse(input_shape=(16, 1, 8, 8)):
    return Inverse(64, 10), (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def normed(input_shape=(16, 1, 8, 8)):
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def spoilt():
    raise RuntimeError("it is not ready")


def read_both(path):
    return read(path), randint(10, (16,))
