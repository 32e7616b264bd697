"""What the trials train: a small network with dropout, its data and its optimiser, each with a place for a fault.

The fault is a file in the temporary directory of the trial, which ranks read; it happens once, in the process that is
the first to come to it.  The network's layers have widths of their own, so that an optimiser knows whose it is.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FORWARD, BACKWARD, OPTIMISER, BETWEEN, EVALUATION = "forward", "backward", "optimiser", "between steps", "evaluation"
LAYERS, WIDTH, SAMPLES, HELD_OUT = 6, 8, 8, 2
_FAULT, _DONE = "fault.json", "fault.done"

DEEDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit 0": lambda: os._exit(0),
    "hang": lambda: time.sleep(3600),
}

_calls: Counter[str] = Counter()
_trains = False


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, where, and when.

    Attributes:
        layer: of a forward or backward, or whose stage's optimiser; else whoever comes first.
        call: of its kind, counted from 1 in each process.
    """

    deed: str
    moment: str
    layer: int
    call: int

    def plant(self, folder: Path) -> None:
        """For the ranks whose temporary directory is ``folder``."""
        (folder / _FAULT).write_text(json.dumps(asdict(self)), encoding="utf-8")


def happened(folder: Path) -> bool:
    """Whether it has."""
    return (folder / _DONE).exists()


@functools.cache
def _planted(folder: str) -> Fault | None:
    try:
        return Fault(**json.loads((Path(folder) / _FAULT).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _at(moment: str, layer: int = -1) -> None:
    """Here the fault happens, if it is due."""
    folder = os.environ.get("TMPDIR", "")
    fault = _planted(folder) if _trains else None
    if fault is None or fault.moment != moment or (layer >= 0 and fault.layer != layer):
        return
    _calls[moment] += 1
    if _calls[moment] != fault.call:
        return
    try:
        (Path(folder) / _DONE).open("x").close()
    except FileExistsError:
        return
    if fault.deed == "exception":
        raise ValueError("a fault was planted here")
    if fault.deed == "out of memory":
        raise torch.OutOfMemoryError("a fault was planted here")
    DEEDS[fault.deed]()


@torch.library.custom_op("halopipe_benchmarks::victim", mutates_args=())
def _victim(x: Tensor, layer: int) -> Tensor:
    _at(FORWARD, layer)
    return x.clone()


@_victim.register_fake
def _(x: Tensor, layer: int) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.layer = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    _at(BACKWARD, ctx.layer)
    return gradient, None


_victim.register_autograd(_backward, setup_context=_keep)


class _Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(WIDTH + number, WIDTH + number + 1), number

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _victim(torch.tanh(self.linear(x)), self.number)
        return functional.dropout(found, 0.1, self.training)


def network() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """Six layers with dropout."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn((SAMPLES, width), generator=generator) for width in (WIDTH, WIDTH + LAYERS))
    return nn.Sequential(*map(_Layer, range(LAYERS))), (inputs, targets), functional.mse_loss


def data(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random numbers without end."""
    global _trains
    _trains = True
    generator = torch.Generator().manual_seed(seed)
    while True:
        _at(BETWEEN)
        yield _batch(global_batch, generator)


def held_out(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A few batches to evaluate on."""
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(HELD_OUT):
        _at(EVALUATION)
        yield _batch(global_batch, generator)


def _batch(samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    found = torch.randn((samples, 2 * WIDTH + LAYERS), generator=generator)
    return found[:, :WIDTH].contiguous(), found[:, WIDTH:].contiguous()


class _Adam(torch.optim.Adam):
    """Adam, with a place for a fault."""

    def step(self, closure: Any = None) -> Any:
        for layer in {p.shape[0] - WIDTH - 1 for group in self.param_groups for p in group["params"]}:
            _at(OPTIMISER, layer)
        return super().step(closure)


def optimiser(parameters: Any) -> torch.optim.Optimizer:
    """Of a stage."""
    return _Adam(parameters, lr=1e-2)
