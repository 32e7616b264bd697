"""Ranks that read the same data for themselves read the same batches, whatever the data draws."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch

from halopipe.data.sources import batches
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from tests.zoo.data import DATA

NUM_BATCHES = 6  # more than two epochs


def read(name: str, rank: int, answer: Connection) -> None:
    """Digests of the first batches, as a rank reads them whose random states nobody else has."""
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(100 + rank)
    model = load_model(ModelSource("tests.zoo.data:linear"))
    stream = batches(f"tests.zoo.data:{name}", model, 4, 0)
    found = []
    for _ in range(NUM_BATCHES):
        inputs, targets = next(stream)
        tensors = b"".join(tensor.contiguous().numpy().tobytes() for tensor in (*inputs, *targets))
        found.append(hashlib.sha256(tensors).hexdigest()[:8])
        torch.rand(rank + 1), random.random(), np.random.rand()  # noqa: NPY002  # the model draws between batches
    answer.send(found)


@pytest.mark.parametrize("name", [factory.__name__ for factory in DATA])
def test_two_ranks_read_the_same_batches(name: str) -> None:
    context = multiprocessing.get_context("fork")
    found = []
    for rank in range(2):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=read, args=(name, rank, there))
        process.start()
        there.close()
        found.append(here.recv())
        process.join()
    assert found[0] == found[1]
    assert len(set(found[0])) == NUM_BATCHES, "every batch is another"
