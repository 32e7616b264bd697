"""A job whose processes may not grow beyond a number of bytes: trains on a sample that is large for one of them.

    python -m tests.runtime.spatial.capped WORLD_SIZE STORE CAP_BYTES

One rank of one trains as one device does.  Each prints the loss of a step, or ``out of memory``.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.numerics.single_device import serial_step
from runtime.optim.ties import groups_of
from runtime.transport import open_gloo
from tests.runtime.divided import divided
from tests.runtime.plans import engine_of, sgd

SIDE = 768
CHANNELS = 8
DEPTH = 5


def network() -> tuple[LoadedModel, CapturedModule]:
    """Convolutions over one large image; an activation is 18 MiB, of which one device keeps ten."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, CHANNELS, 3, padding=1)]
    for _ in range(DEPTH):
        layers += [nn.Tanh(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)]
    image = torch.randn(1, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    model = LoadedModel(nn.Sequential(*layers), (image,), (image.expand(1, CHANNELS, SIDE, SIDE).clone(),), _loss)
    return model, capture(model)


def _loss(output: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.mse_loss(output, *targets)


def allow(num_bytes: int) -> None:
    """From now on the process may take so many bytes more, and no more."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now = int(status["VmSize"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))


def train(rank: int, world_size: int, store: str, cap_bytes: int, network: tuple[LoadedModel, CapturedModule]) -> float:
    """The loss of one step under the limit."""
    model, captured = network
    batch = (model.inputs, model.targets)
    if world_size == 1:
        optimizer = sgd(model.module.parameters())
        allow(cap_bytes)
        return serial_step(model.loss, optimizer, *batch, (1,))
    decision = divided(captured.graph, {"height": (0, 1, 2), "width": (0, 1, 2)}, (1,))
    files = dist.FileStore(store, world_size)
    transport = open_gloo(rank, world_size, files, 60.0, groups_of(decision, captured.graph))
    engine = engine_of(decision, model, captured, transport)
    transport.barrier()
    allow(cap_bytes)
    loss = engine.step(*batch).loss
    engine.close()
    return float("nan") if loss is None else loss


def say(text: str) -> None:
    """A line in one piece: several processes share the output."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def run(*arguments: Any) -> None:
    """One process."""
    try:
        say(str(train(*arguments)))
    except Exception as error:  # what torch raises differs by where the memory ends
        if "can't allocate memory" not in str(error):
            raise
        say("out of memory")


def main(world_size: int, store: str, cap_bytes: int) -> None:
    """All processes, which share what was captured."""
    torch.set_num_threads(1)
    captured = network()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=run, args=(rank, world_size, store, cap_bytes, captured)) for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
