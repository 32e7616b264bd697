"""Fresh processes on this machine, forked from one that has done nothing yet: as separate as workers, there at once.

Cores that never sleep while something is measured.

The cores of a virtual machine are threads of its host.  One that sleeps is put to rest, and where it wakes is up to the
host: perhaps beside this machine's other core, on one physical core, where both compute at little more than half their
speed, or it has lost its caches, or has to wait.  On the machine that most of our figures come from, adding to 16 MiB
took up to twice as long on two cores at once as on one, changing from second to second; with both cores kept awake both
took the same as one, and the spread fell from a factor of 2 to a tenth.  Pipelines wait for messages all the time, so
that their layers took a quarter longer than the same layers in a profile.

So a process spins on every core that this one may use.  It has the policy ``SCHED_IDLE``: whatever else wants the core
has it at once.  That holds within one group of the scheduler, hence sessions are not given groups meanwhile
(``kernel.sched_autogroup_enabled``), which takes root; without it cores are left as they are.

Steps of a plan on ranks that are virtual devices, timed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.devices.virtual_device import VirtualDevice
from benchmarks.turns import no_collector
from cuda_ops import die_with_parent
from cuda_ops.device.host import core_of, prepare_process
from cuda_ops.memory import MemoryCounter
from planner.ir.profile import ModelSource
from planner.ir.schedule import Action
from planner.ir.timeline import Span
from profiler.measure.contention import RunDelay
from runtime.engine import Engine
from runtime.transport import Transport, open_gloo
from tests import forks

if TYPE_CHECKING:
    from profiler.source.model import LoadedModel
    from runtime.captured import CapturedModule

_GROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


@contextmanager
def awake() -> Iterator[bool]:
    """Keeps the cores awake inside; whether that was possible."""
    with _no_session_groups() as possible:
        if not possible or not hasattr(os, "SCHED_IDLE"):
            yield False
            return
        command = [sys.executable, "-m", "benchmarks.devices.ranks"]
        spinning = [subprocess.Popen([*command, str(core), str(os.getpid())]) for core in os.sched_getaffinity(0)]
        try:
            yield True
        finally:
            for process in spinning:
                process.kill()
                process.wait()


def _spin(core: int, parent: int) -> None:
    die_with_parent(parent)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


@contextmanager
def _no_session_groups() -> Iterator[bool]:
    """Whether all processes compete alike, whatever their session."""
    if not _GROUPS.exists():
        yield True
        return
    before = _GROUPS.read_text(encoding="ascii").strip()
    try:
        _GROUPS.write_text("0", encoding="ascii")
    except OSError:
        yield before == "0"
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            _GROUPS.write_text(before, encoding="ascii")


def hide_gpus() -> None:
    """For programs whose ranks are processors: called before anything is computed.

    Capturing a model runs a backward pass.  Where torch sees a GPU, its autograd starts a thread for it, and refuses to
    run in processes that are forked later.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


T = TypeVar("T")
_LIMIT_S = 600.0


def on_ranks(
    num_ranks: int,
    work: Callable[[Transport], T],
    groups: Sequence[tuple[int, ...]] = (),
    limit_s: float = _LIMIT_S,
    enter: Callable[[int], None] | None = None,
    opened: Callable[..., Transport] = open_gloo,
) -> list[T]:
    """What ``work(transport)`` returns on every rank, each with one thread, pinned to a core; ranks may share cores.

    The process group of the transport is torch's default one, so torch's own pipelining works beside it.

    Args:
        groups: of ranks that do something together.
        limit_s: the longest that one rank may take.
        enter: called with its number in each new process, before it meets the others.
        opened: gives the transport; ranks that stand for several hosts must not share memory.

    Raises:
        RuntimeError: a rank failed; the text has its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:

        def call(rank: int) -> tuple[T]:
            if enter is not None:
                enter(rank)
            prepare_process(core_of(rank))
            store = dist.FileStore(str(Path(folder) / "store"), num_ranks)
            transport = opened(rank, num_ranks, store, 60.0, groups)
            found = work(transport)
            transport.barrier()  # who leaves first breaks what the others still have to say
            transport.close()
            return (found,)

        return [value for (value,) in forked(num_ranks, call, limit_s)]


def forked(num_ranks: int, call: Callable[[int], T], limit_s: float = _LIMIT_S) -> list[T]:
    """What ``call(rank)`` returns in each of ``num_ranks`` processes, forked from this one; anything but None.

    Raises:
        RuntimeError: a rank failed; the text has its traceback.
    """
    outcomes = forks.outcomes(num_ranks, call, limit_s=limit_s)
    failed = [
        f"rank {rank}:\n{told or 'died'}"
        for rank, (succeeded, told) in enumerate(outcomes)
        if not succeeded or told is None
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [told for _, told in outcomes]


class CapturedNetwork:
    """A model of which steps are run; captured once, in this process."""

    def __init__(self, source: ModelSource) -> None:
        from profiler import load_model  # here, since processes that keep cores awake need no capture
        from profiler.capture.graph import capture

        torch.set_num_threads(1)  # an OpenMP team does not survive a fork
        self.model: LoadedModel = load_model(source)
        self.captured: CapturedModule = capture(self.model)


WARM_UP = 2


@dataclass(frozen=True, slots=True)
class RankStep:
    """A step on one rank.

    Attributes:
        start_s, stop_s: on the clock that all processes of a machine share; with the time of finding sites before.
        busy_s: of the device, in which it worked.
        late_s: by how much its work took longer than the device's time, since something else had the core.
        delay: share of the time in which the process was ready and had no core.
        sites_s: of finding sites and sharing them out, before the program.
        peak_bytes: of tensors made since the engine was, the most in use at once; 0 if memory was not counted.
    """

    start_s: float
    stop_s: float
    busy_s: float
    late_s: float
    delay: float
    sites_s: float
    spans: tuple[Span, ...]
    peak_bytes: int
    loss: float | None

    @property
    def by_action_s(self) -> Mapping[str, float]:
        """Seconds by stage and kind of action, such as ``1B``."""
        return by_action(self.spans)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, by rank."""

    ranks: tuple[RankStep, ...]

    @property
    def seconds(self) -> float:
        """From the common start to the end of the last rank."""
        return max(rank.stop_s for rank in self.ranks) - min(rank.start_s for rank in self.ranks)

    @property
    def loss(self) -> float:
        """Of the batch."""
        return next(rank.loss for rank in self.ranks if rank.loss is not None)

    @property
    def delay(self) -> float:
        """Of the rank that waited most for a core."""
        return max(rank.delay for rank in self.ranks)

    @property
    def balance(self) -> float:
        """The longest device time over the mean."""
        busy_s = [rank.busy_s for rank in self.ranks]
        return max(busy_s) / (sum(busy_s) / len(busy_s))


def timed_steps(
    engine: Engine,
    device: VirtualDevice,
    transport: Transport,
    batches: Iterable[tuple[Any, ...]],
    counter: MemoryCounter | None = None,
) -> list[RankStep]:
    """A rank's part in a step on each of ``batches``, of which all start together.

    Args:
        counter: of the bytes of tensors; None: they are not counted.
    """
    found = []
    with no_collector():
        for batch in batches:
            transport.barrier()
            before = device.busy_s, device.late_s, device.sites_s
            if counter is not None:
                counter.reset_peak()
            device.begin_step()
            delay = RunDelay()
            start_s = time.perf_counter()
            result = engine.step(*batch)
            stop_s = time.perf_counter()
            busy_s, late_s, sites_s = (
                now - then for now, then in zip((device.busy_s, device.late_s, device.sites_s), before, strict=True)
            )
            peak_bytes = 0 if counter is None else counter.peak_bytes
            times = start_s, stop_s, busy_s, late_s, delay.share(), sites_s
            found.append(RankStep(*times, result.spans, peak_bytes, result.loss))
    return found


def by_action(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by stage and kind of action, messages too."""
    found: dict[str, float] = {}
    for span in spans:
        action = Action.parse(span.action)
        key = f"{action.stage}{action.op.value}"
        found[key] = found.get(key, 0.0) + span.stop_s - span.start_s
    return found


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the benchmarks' runs."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


if __name__ == "__main__":
    _spin(*map(int, sys.argv[1:]))
