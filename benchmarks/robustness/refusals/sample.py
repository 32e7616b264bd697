"""Modules and data of rows, and of the refusals that they provoke; it lies in their folders as ``model.py``.

Each is a factory, as users have them: its name says what is special about it.
"""
# ruff: noqa: D103 - see above

from __future__ import annotations

from torch import nn, rand, randint, randn
from torch.utils.data import TensorDataset


def model(input_shape=(16, 1, 8, 8), num_classes=10):
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))
    return network, (randn(input_shape), randint(10, (input_shape[0],))), nn.CrossEntropyLoss()


def data():
    return TensorDataset(rand(64, 1, 8, 8), randint(10, (64,)))
