"""A sample too large for the memory of one process is trained on four, under a limit that the system enforces.

    python -m tests.runtime.spatial.test_memory_cap WORLD_SIZE STORE CAP_BYTES

runs a job whose processes may not grow beyond a number of bytes; one rank of one trains as one device does.  Each
prints the loss of a step, or ``out of memory``.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
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

SIDE, CHANNELS, DEPTH = 768, 8, 5


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


MIB = 2**20


def outputs(world_size: int, cap_bytes: int, folder: Path) -> list[str]:
    """What each rank prints."""
    store = folder / f"store-{world_size}-{cap_bytes}"
    found = subprocess.run(
        [sys.executable, "-m", "tests.runtime.spatial.test_memory_cap", *map(str, (world_size, store, cap_bytes))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is free for the system as well
    )
    return found.stdout.split("\n")[:-1]


@pytest.mark.exhaustive("four ranks at a hard limit of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_sample_too_large_for_one_process_is_trained_on_four(tmp_path: Path) -> None:
    cap_bytes = 150 * MIB
    assert outputs(1, cap_bytes, tmp_path) == ["out of memory"]
    (roomy,) = outputs(1, 2000 * MIB, tmp_path)
    found = outputs(4, cap_bytes, tmp_path)
    assert all(float(loss) == pytest.approx(float(roomy), rel=1e-5) for loss in found)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
