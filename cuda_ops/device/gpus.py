"""The NVIDIA GPUs of this host, as this process sees them: what they are, and at which clocks they run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SMI_S = 10.0
_MEGA = 1e6
_DRIVER = ("/dev/nvidiactl", "/dev/dxg")  # the latter where Windows has the driver

NO_CUDA = "this build of torch has no CUDA"
NO_GPU = "torch finds no NVIDIA GPU"


@dataclass(frozen=True, slots=True)
class GpuDescription:
    """One GPU.

    Attributes:
        name: as its driver calls it: ``NVIDIA H200``.
        memory_bytes: what a process finds free that has started to use it: the driver's own share is gone already.
        total_bytes: all of its memory.
    """

    name: str
    memory_bytes: int
    total_bytes: int


def may_have_gpus() -> bool:
    """Whether there is a driver of NVIDIA's; asked where loading torch would take too long for nothing."""
    return any(Path(path).exists() for path in _DRIVER)


def why_no_gpu() -> str:
    """Why no GPU can be used here; empty if one can."""
    import torch  # late: describing a host may come before its process is prepared

    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]  # torch's has no types
        return NO_CUDA
    return "" if torch.cuda.is_available() else NO_GPU


def num_gpus() -> int:
    """How many GPUs this process may use (``CUDA_VISIBLE_DEVICES``); none is started to use."""
    import torch

    is_built = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]  # torch's has no types
    return torch.cuda.device_count() if is_built else 0


def gpu_descriptions() -> tuple[GpuDescription, ...]:
    """All GPUs that this process may use.

    It starts to use each of them, some 0.5 GB of it while the process lives: ask in a process that ends soon.
    """
    import torch

    gpus = []
    for index in range(num_gpus()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, _ = torch.cuda.mem_get_info(index)
        gpus.append(GpuDescription(properties.name, free_bytes, properties.total_memory))
    return tuple(gpus)


def gpu_clocks(index: int) -> Mapping[str, float]:
    """Hertz by name (``sm``, ``memory``) of a GPU that this process uses; empty where nvidia-smi does not say.

    torch.cuda.clock_rate needs a package of its own, and has been said to count in hertz and in megahertz.
    """
    import torch

    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    program = shutil.which("nvidia-smi")
    if program is None or not uuid:
        return {}
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    query = ("--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader,nounits", f"--id={name}")
    try:
        answer = subprocess.run([program, *query], capture_output=True, text=True, timeout=_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return parse_clocks(answer)


def parse_clocks(answer: str) -> dict[str, float]:
    """Hertz by name, of nvidia-smi's answer in megahertz: ``1980, 3201``; what it does not know is left out."""
    columns = [word.strip() for word in answer.strip().partition("\n")[0].split(",")]
    numbers = zip(("sm", "memory"), columns, strict=False)
    return {name: _MEGA * float(word) for name, word in numbers if word.replace(".", "", 1).isdigit()}
