"""The NVIDIA GPUs of this host, as this process sees them: what they are, and at which clocks they run.

A captured graph on another device than the one that it was captured on.

A model is captured on the processor, wherever it is to run: so its graph and its fingerprint are the same everywhere,
and a rank's GPU never holds more than that rank's stages.  Operators that make tensors from nothing (a mask, positions)
have the device of the capture among their arguments, which is what changes here.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops.dense.data_dependent import Unit

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

    if not torch.backends.cuda.is_built():
        return NO_CUDA
    return "" if torch.cuda.is_available() else NO_GPU


def num_gpus() -> int:
    """How many GPUs this process may use (``CUDA_VISIBLE_DEVICES``); none is started to use."""
    import torch

    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


def gpu_descriptions() -> tuple[GpuDescription, ...]:
    """All GPUs that this process may use.

    It starts to use each of them, some 0.5 GB of it while the process lives: ask in a process that ends soon.
    """
    import torch

    found = []
    for index in range(num_gpus()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, _ = torch.cuda.mem_get_info(index)
        found.append(GpuDescription(properties.name, free_bytes, properties.total_memory))
    return tuple(found)


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
    words = [word.strip() for word in answer.strip().partition("\n")[0].split(",")]
    numbers = zip(("sm", "memory"), words, strict=False)
    return {name: _MEGA * float(word) for name, word in numbers if word.replace(".", "", 1).isdigit()}


def on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of ``module`` whose operators make their tensors on ``device``.

    Parameters and buffers are the same objects, where they were: see :func:`move`.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda each: _placed(each, device))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda each: _placed(each, device))
        if isinstance(node.target, Unit):
            node.target = node.target.changed(lambda each: _placed(each, device))
    found = fx.GraphModule(module, graph)
    for name, inner in module.named_modules():
        if name and isinstance(inner, fx.GraphModule) and _has(found, name):  # of operators that call a graph
            found.set_submodule(name, on_device(inner, device))
    return found


def move(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Moves parameters and buffers to ``device``, those that are there already aside.

    The tensors stay the same objects, so that everyone who has one (the user's module, a captured graph) sees it there.
    Moved before there are gradients: an optimiser that holds one is right as well.
    """
    for tensor in tensors:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def tensors_of(module: fx.GraphModule) -> tuple[Tensor, ...]:
    """The parameters and buffers of a captured graph, constants included."""
    return (*module.parameters(), *module.buffers())


def _placed(argument: Any, device: torch.device) -> Any:
    return device if isinstance(argument, torch.device) else argument


def _has(module: fx.GraphModule, name: str) -> bool:
    try:
        module.get_submodule(name)
    except AttributeError:
        return False
    return True
