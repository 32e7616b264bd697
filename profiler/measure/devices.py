"""The kinds of devices that can be profiled: one record a torch backend.

Everything else in the profiler asks ``torch.device``: tensors are made where the model is, and
:mod:`profiler.measure.noise` times by its type.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from cuda_ops import core_of, cores_beside, device_description
from cuda_ops.device.gpus import gpu_clocks, gpu_descriptions, may_have_gpus, num_gpus, why_no_gpu
from planner.ir.cluster import DeviceSpec
from planner.ir.errors import MissingDeviceError, RankCountError, UsageError
from profiler.measure.child_process import Child, Report

AUTO = "auto"
CPU = "cpu"
CUDA = "cuda"
NUM_WORKERS = 2
_MOST_TURNS = 16
"""Workers of one core: what they measure of links is then the system's scheduler."""

_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Backend:
    """One torch backend.

    Attributes:
        type: as of ``torch.device``.
        word: what its devices are called: ``n0/gpu0``.
        count: how many devices this process may use; without beginning to use them.
        describe: the first so many of them, called after a host.
        cores: those of the process that drives one of so many devices.
        clocks: hertz by name of an accelerator at work (``sm``, ``memory``); empty if not known.
        is_accelerator: beside a host's cores: only those that there are can be planned for, by default all of them, and
            describing them begins to use them.
    """

    type: str
    word: str
    count: Callable[[], int]
    describe: Callable[[str, int], tuple[DeviceSpec, ...]]
    cores: Callable[[int, int], int | Collection[int] | None]
    clocks: Callable[[int], Mapping[str, float]]
    is_accelerator: bool = False


def chosen(name: str, num_workers: int = 0) -> tuple[Backend, int]:
    """The backend called ``name``, and how many of its devices are planned for.

    Args:
        name: ``cpu``, ``cuda``, or ``auto``: the GPUs, if there are some and enough for the workers.
        num_workers: 0: two cores, or all GPUs.

    Raises:
        UsageError: there is no such backend.
        MissingDeviceError: this host has no such device.
        RankCountError: so many processes would not take turns on its cores.
    """
    if name == AUTO:
        name = CUDA if may_have_gpus() and num_gpus() >= max(1, num_workers) else CPU
    if name not in BACKENDS:
        raise UsageError(f"device {name!r} is not known", [f"known: {', '.join((*BACKENDS, AUTO))}"])
    if name == CUDA and (why := why_no_gpu()):
        raise MissingDeviceError("there is no GPU to profile", [why], ["--device cpu", "a machine with a GPU"])
    kind = BACKENDS[name]
    cores = len(os.sched_getaffinity(0))
    most = _MOST_TURNS * cores
    if not kind.is_accelerator and num_workers > most:
        raise RankCountError(
            f"{num_workers} workers are asked for, at most {most} can be measured on this host",
            [f"{cores} cores; so many as {_MOST_TURNS} processes take turns on one"],
            [f"--workers {most}"],
        )
    return kind, num_workers or (kind.count() if kind.is_accelerator else NUM_WORKERS)


def num_at_once(kind: Backend, count: int) -> int:
    """How many of ``count`` devices of this host compute at once: those on cores of their own."""
    return count if kind.is_accelerator else min(count, len(os.sched_getaffinity(0)))


def described(kind: Backend, host: str, count: int) -> tuple[DeviceSpec, ...]:
    """The first ``count`` devices of a kind on this host, called after ``host``.

    Raises:
        MissingDeviceError: there are fewer.
    """
    if not kind.is_accelerator:
        return kind.describe(host, count)
    there = kind.count()
    if count > there:
        raise MissingDeviceError(
            f"{count} devices are to be planned for, this host has {there}",
            [f"kind: {kind.type}"],
            [f"--workers {there}"],
        )
    with Child("profiler.measure.devices:describe", kind.type, host, count, core=None) as child:
        devices: tuple[DeviceSpec, ...] = child.result(_DEADLINE_S)
    return devices


def describe(report: Report, name: str, host: str, count: int) -> tuple[DeviceSpec, ...]:
    """What a process of its own finds; see :attr:`Backend.describe`."""
    return BACKENDS[name].describe(host, count)


def _cores(host: str, count: int) -> tuple[DeviceSpec, ...]:
    processor = device_description(count)
    return tuple(
        DeviceSpec(f"{host}/cpu{rank}", processor.processor, host, processor.memory_bytes) for rank in range(count)
    )


def _gpus(host: str, count: int) -> tuple[DeviceSpec, ...]:
    """GPUs of the host; what moves messages is not what computes."""
    return tuple(
        DeviceSpec(f"{host}/gpu{index}", each.name, host, each.memory_bytes, core_share=0.0)
        for index, each in enumerate(gpu_descriptions()[:count])
    )


BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        CPU: Backend(
            CPU,
            "cpu",
            lambda: device_description().num_cores,
            _cores,
            lambda rank, count: core_of(rank),
            lambda rank: {},
        ),
        CUDA: Backend(CUDA, "gpu", num_gpus, _gpus, cores_beside, gpu_clocks, is_accelerator=True),
    }
)
