"""Data as people write it: noise without a seed from torch, numpy and random, shuffles, workers, generators.

Each is a factory of ``--data``.  Whatever it draws, all ranks of a run must read the same batches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

WIDTH = 6
NUM_SAMPLES = 10


def linear() -> tuple[torch.nn.Module, tuple[Tensor, Tensor], object]:
    """The model that the data is for."""
    return torch.nn.Linear(WIDTH, 3), (torch.randn(4, WIDTH), torch.randint(3, (4,))), torch.nn.functional.cross_entropy


class Augmented(Dataset):
    """Samples with noise, flips and shifts, each from another library."""

    def __init__(self, torch_noise: bool = False, numpy_noise: bool = False, python_noise: bool = False) -> None:
        self.torch_noise = torch_noise
        self.numpy_noise = numpy_noise
        self.python_noise = python_noise
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self.y = torch.randint(3, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.torch_noise:
            x = x + 0.1 * torch.randn(WIDTH)
        if self.numpy_noise:
            x = x + torch.from_numpy(np.random.normal(0, 0.1, WIDTH)).float()  # noqa: NPY002  # as people write it
        if self.python_noise and random.random() < 0.5:
            x = x.flip(0)
        return x, self.y[index]


def torch_noise(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset:
    """torch.randn in __getitem__."""
    return Augmented(torch_noise=True)


def numpy_noise(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset:
    """np.random.normal in __getitem__."""
    return Augmented(numpy_noise=True)


def python_flips(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset:
    """random.random in __getitem__."""
    return Augmented(python_noise=True)


def drawn_at_once(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset:
    """All samples are drawn when the data is opened."""
    return TensorDataset(torch.randn(NUM_SAMPLES, WIDTH), torch.from_numpy(np.random.randint(0, 3, NUM_SAMPLES)))  # noqa: NPY002


def split_at_random(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset:
    """random_split without a generator: ranks would train on other samples."""
    return torch.utils.data.random_split(Augmented(), [8, 2])[0]


def shuffled_loader(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader:
    """A DataLoader with shuffle=True over noise of all three kinds."""
    return DataLoader(Augmented(True, True, True), batch_size=global_batch, shuffle=True, drop_last=True)


def loader_with_workers(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader:
    """The same with a worker process, in which numpy and random have states of their own."""
    return DataLoader(Augmented(True, True, True), batch_size=global_batch, shuffle=True, num_workers=1)


class Stream(IterableDataset):
    """Batches without end, or samples."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.randn(WIDTH), torch.tensor(random.randrange(3))


def endless_stream(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader:
    """An IterableDataset that draws."""
    return DataLoader(Stream(), batch_size=global_batch)


def generator(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A generator of batches from all three libraries."""
    while True:
        x = torch.randn(global_batch, WIDTH) + random.gauss(0, 0.1)
        yield x, torch.from_numpy(np.random.randint(0, 3, global_batch))  # noqa: NPY002


DATA = (
    torch_noise,
    numpy_noise,
    python_flips,
    drawn_at_once,
    split_at_random,
    shuffled_loader,
    loader_with_workers,
    endless_stream,
    generator,
)
