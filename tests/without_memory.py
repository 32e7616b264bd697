"""Graphs on a device without memory, which stands for a GPU: operators refuse to mix it with the CPU."""

from __future__ import annotations

import torch
from torch import fx, nn

from cuda_ops.device.placing import on_device

META = torch.device("meta")


def on_meta(module: fx.GraphModule) -> fx.GraphModule:
    """The graph there, with parameters and buffers of its own; ``move`` cannot bring tensors to this device."""
    found = on_device(module, META)
    for name, parameter in list(found.named_parameters(remove_duplicate=False)):
        _set(found, name, nn.Parameter(parameter.detach().to(META), parameter.requires_grad))
    for name, buffer in list(found.named_buffers(remove_duplicate=False)):
        _set(found, name, buffer.to(META))
    return found


def _set(module: nn.Module, name: str, value: torch.Tensor) -> None:
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, value)
