"""A network of equal layers, one of which does something terrible once its input is poisoned.

The poison is in the data (a batch of huge numbers), so that nothing happens while the network is captured.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

POISON = 1e6
POISONED_STEP = 2


_calls: Counter[str] = Counter()
is_training = False
"""Whether data are read in this process: capture runs the operators, too."""


def _due(once: str) -> str:
    """Of ``once:DEED:NUMBER:MARK`` the deed, at that call since :func:`noise` began, unless the file MARK is there."""
    _, deed, number, mark = once.split(":", 3)
    _calls[once] += is_training
    if not is_training or _calls[once] != int(number) or Path(mark).exists():
        return ""
    Path(mark).touch()
    return deed


def _explode(x: Tensor, deed: str) -> None:
    if deed.startswith("once:"):
        deed = _due(deed)
    elif x.abs().max() < POISON:
        return
    match deed:
        case "raise":
            raise ValueError("the bomb went off")
        case "within torch":
            functional.mse_loss(x, x, reduction="no such reduction")
        case "kill":
            sys.stderr.write("about to be killed\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(0)
        case "abort":
            os.abort()
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "memory":
            raise torch.OutOfMemoryError("no memory is left")
        case "sleep":
            time.sleep(600)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


@torch.library.custom_op("halopipe_tests::bomb", mutates_args=())
def bomb(x: Tensor, forward: str, backward: str) -> Tensor:
    _explode(x, forward)
    return x.clone()


@bomb.register_fake
def _(x: Tensor, forward: str, backward: str) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: object, inputs: tuple[Tensor, str, str], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.backward = inputs[2]


def _backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None, None]:
    _explode(ctx.saved_tensors[0], ctx.backward)
    return gradient, None, None


bomb.register_autograd(_backward, setup_context=_keep)


class Layer(nn.Module):
    def __init__(self, width: int, forward: str, backward: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.eye_(self.linear.weight)
        self.deeds = (forward, backward)

    def forward(self, x: Tensor) -> Tensor:
        return bomb(self.linear(x), *self.deeds)


def mined(
    *,
    input_shape: tuple[int, ...] = (4, 3),
    where: int = -1,
    direction: str = "F",
    deed: str = "raise",
    layers: int = 3,
    dropout: float = 0.0,
) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """Layer ``where`` does ``deed`` when poison passes it in ``direction``."""
    deeds = [
        (deed if i == where and direction == "F" else "", deed if i == where and direction == "B" else "")
        for i in range(layers)
    ]
    parts = ([Layer(input_shape[1], *each), *([nn.Dropout(dropout)] if dropout else [])] for each in deeds)
    module = nn.Sequential(*chain.from_iterable(parts))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(input_shape, generator=generator) for _ in range(2))
    return module, (inputs, targets), functional.mse_loss


def poison(
    global_batch: int, input_shape: tuple[int, ...], seed: int, *, value: float = 2 * POISON
) -> Iterator[tuple[Tensor, Tensor]]:
    """Good batches; at step ``POISONED_STEP`` the last sample is huge."""
    shape = (global_batch, *input_shape[1:])
    for step in count():
        inputs = torch.ones(shape)
        if step == POISONED_STEP:
            inputs[-1] = value
        yield inputs, torch.zeros(shape)


def noise(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random numbers, each other than the one before."""
    global is_training
    is_training = True
    generator = torch.Generator().manual_seed(seed)
    while True:
        shape = (2, global_batch, *input_shape[1:])
        inputs, targets = torch.randn(shape, generator=generator)
        yield inputs, targets


def short(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two batches and no more."""
    for _ in range(2):
        yield torch.ones(global_batch, *input_shape[1:]), torch.zeros(global_batch, dtype=torch.int64)


def broken(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Good batches; at step ``POISONED_STEP`` the last sample is no number."""
    return poison(global_batch, input_shape, seed, value=float("nan"))


DOZE_S = 4e-3


@torch.library.custom_op("halopipe_tests::doze", mutates_args=())
def doze(x: Tensor, slow: bool) -> Tensor:
    time.sleep(2 * DOZE_S if slow and x.abs().max() > TIRING else DOZE_S)
    return x.clone()


@doze.register_fake
def _(x: Tensor, slow: bool) -> Tensor:
    return torch.empty_like(x)


doze.register_autograd(lambda ctx, gradient: (gradient, None))
TIRING = 5.0
TIRING_STEP = 40


class Dozing(nn.Module):
    def __init__(self, width: int, slow: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.slow = slow
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return doze(self.linear(x), self.slow)


def tiring(*, input_shape: tuple[int, ...] = (4, 3)) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    """Two layers that take their time; the second takes twice as long once its input is tiring."""
    module = nn.Sequential(Dozing(input_shape[1], False), Dozing(input_shape[1], True))
    return module, (torch.ones(input_shape), torch.ones(input_shape)), functional.mse_loss


def tires(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches that are tiring from ``TIRING_STEP`` on."""
    shape = (global_batch, *input_shape[1:])
    for step in count():
        inputs = torch.full(shape, 2 * TIRING if step >= TIRING_STEP else 1.0)
        yield inputs, inputs
