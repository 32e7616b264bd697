"""What the trials train: a small network with dropout, its data and its optimiser, each with a place for a fault.

The fault is a file in the temporary directory of the trial, which ranks read; it happens once, in the process that is
the first to come to it.  The network's layers have widths of their own, so that an optimiser knows whose it is.
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
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

FORWARD = "forward"
BACKWARD = "backward"
OPTIMISER = "optimiser"
BETWEEN = "between steps"
EVALUATION = "evaluation"
LAYERS = 6
WIDTH = 8
SAMPLES = 8
HELD_OUT = 2
LAYERS_A_RANK = 2
MICRO_BATCHES = 4
"""Of plans whose layers sleep: pipelines of three ranks."""
_FAULT = "fault.json"
_DONE = "fault.done"
_BEGUN = "begun"
_PAUSE = "pause"
_GROUP = "group"
_PACE = "pace.json"
_HOLD = "hold"

_BLOCK_BYTES = 8 << 20
_ROOM_BYTES = 64 << 20
_LOOK_S = 0.01
_REPEATS = 8192


def _refused() -> None:
    """Asks for more memory than the kernel gives: what is there and a little more is all that this process may have."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use * resource.getpagesize() + _ROOM_BYTES, before[1]))
    try:
        torch.ones(4 * _ROOM_BYTES, dtype=torch.uint8)
    finally:  # an error is to be told
        resource.setrlimit(resource.RLIMIT_AS, before)


def _killed() -> None:
    """Takes more memory than its group may have: the kernel kills it."""
    group = Path((Path(os.environ["TMPDIR"]) / _GROUP).read_text("utf-8"))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    taken = []
    while True:
        taken.append(torch.ones(_BLOCK_BYTES, dtype=torch.uint8))


REFUSED = "memory refused"
KILLED = "memory killed"

DEEDS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": os.abort,
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit 0": lambda: os._exit(0),
    "hang": lambda: time.sleep(3600),
    REFUSED: _refused,
    KILLED: _killed,
}

_calls: Counter[str] = Counter()
_passes: Counter[tuple[str, int]] = Counter()
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

    def plant(self, folder: Path, group: Path | None = None) -> None:
        """For the ranks whose temporary directory is ``folder``; those to be killed for memory join ``group``."""
        if group is not None:
            (folder / _GROUP).write_text(str(group), encoding="utf-8")
        (folder / _FAULT).write_text(json.dumps(asdict(self)), encoding="utf-8")


def happened(folder: Path) -> bool:
    """Whether it has."""
    return (folder / _DONE).exists()


def has_begun(folder: Path) -> bool:
    """Whether some rank reads data."""
    return (folder / _BEGUN).exists()


@dataclass(frozen=True, slots=True)
class Pace:
    """Layers that sleep.

    Attributes:
        forward_s: of a layer; backward takes twice as long.
        rank: of which :data:`LAYERS_A_RANK` layers take ``factor`` times as long after ``since`` steps; -1: none.
        noise: deviation of what a step of a rank takes, of its mean.
    """

    forward_s: float
    rank: int = -1
    since: int = 0
    factor: float = 1.0
    noise: float = 0.0
    seed: int = 0

    def plant(self, folder: Path) -> None:
        """For the ranks whose temporary directory is ``folder``."""
        (folder / _PACE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def seconds(self, layer: int, step: int) -> float:
        """Of its forward in a step, counted from 0."""
        rank = layer // LAYERS_A_RANK
        factor = self.factor if rank == self.rank and step >= self.since else 1.0
        return (
            self.forward_s * factor * max(0.1, 1.0 + self.noise * random.Random(f"{self.seed} {rank} {step}").gauss())
        )


@functools.cache
def _pace(folder: str) -> Pace | None:
    path = Path(folder) / _PACE
    return Pace(**json.loads(path.read_text("utf-8"))) if path.exists() else None


def _sleep(moment: str, layer: int) -> None:
    """As long as the layer is to take, if it is to."""
    pace = _pace(os.environ.get("TMPDIR", "")) if _trains else None
    if pace is not None:
        _passes[moment, layer] += 1
        seconds = pace.seconds(layer, (_passes[moment, layer] - 1) // MICRO_BATCHES)
        time.sleep(seconds if moment == FORWARD else 2 * seconds)


def hold(folder: Path) -> None:
    """No data are read there before :func:`let_go`."""
    (folder / _HOLD).touch()


def let_go(folder: Path) -> None:
    """From now on they are."""
    (folder / _HOLD).unlink()


def slow_data(folder: Path, pause_s: float) -> None:
    """Each batch takes so long to read."""
    (folder / _PAUSE).write_text(str(pause_s), encoding="utf-8")


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
    DEEDS[fault.deed]()


@torch.library.custom_op("halopipe_benchmarks::victim", mutates_args=())
def _victim(x: Tensor, layer: int) -> Tensor:
    _at(FORWARD, layer)
    _sleep(FORWARD, layer)
    return x.clone()


@_victim.register_fake
def _(x: Tensor, layer: int) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.layer = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    _at(BACKWARD, ctx.layer)
    _sleep(BACKWARD, ctx.layer)
    return gradient, None


_victim.register_autograd(_backward, setup_context=_keep)


class _Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH + number, WIDTH + number + 1)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _victim(torch.tanh(self.linear(x)), self.number)
        return functional.dropout(found, 0.1, self.training)


def network() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """Six layers with dropout."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn((SAMPLES, width), generator=generator) for width in (WIDTH, WIDTH + LAYERS))
    return nn.Sequential(*map(_Layer, range(LAYERS))), (inputs, targets), functional.mse_loss


class _Repeated(nn.Module):
    """Each feature many times over, so that a small network has large activations; or their means again."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.back = back

    def forward(self, x: Tensor) -> Tensor:
        if self.back:
            x = x.unflatten(1, (_REPEATS, WIDTH)).mean(1)
        found: Tensor = _victim(self.linear(x), int(self.back))
        return found if self.back else found.repeat(1, _REPEATS)


def wide() -> tuple[nn.Module, tuple[Tensor, Tensor], Any]:
    """Two layers with a quarter of a megabyte a sample between them."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn((SAMPLES, WIDTH), generator=generator) for _ in range(2))
    return nn.Sequential(_Repeated(False), _Repeated(True)), (inputs, targets), functional.mse_loss


def data(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of random numbers without end."""
    global _trains
    _trains = True
    folder = Path(os.environ.get("TMPDIR", "."))
    (folder / _BEGUN).touch()
    pause_s = float((folder / _PAUSE).read_text("utf-8")) if (folder / _PAUSE).exists() else 0.0
    while (folder / _HOLD).exists():
        time.sleep(_LOOK_S)
    generator = torch.Generator().manual_seed(seed)
    while True:
        _at(BETWEEN)
        time.sleep(pause_s)
        yield _batch(global_batch, generator)


def wide_data(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same for the network with large activations."""
    for inputs, targets in data(global_batch, input_shape, seed):
        yield inputs, targets[:, :WIDTH].contiguous()


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
