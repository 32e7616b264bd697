"""A model on the device that it is measured on.

It is built, and captured, on the processor: so its weights and its graph are the same wherever it is measured or
trained.  Under autocast alone it is captured where it runs, since which operators cast differs from device to device,
and the dtypes of values are in the graph.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cuda_ops.placing import move, on_device, tensors_of
from profiler.capture import Captured, capture
from profiler.kinds import NO_RULES, Rules
from profiler.model import LoadedModel


def capture_for(
    model: LoadedModel, device: torch.device, rules: Rules = NO_RULES, *, whole: bool = True
) -> tuple[LoadedModel, Captured]:
    """The model and its graph, to be run on ``device``.

    Args:
        model: as it was loaded, on the processor.
        rules: as of :func:`profiler.capture.capture`.
        whole: move it there; else (but for autocast) all stays on the processor, for the runtime to move what a rank
            needs.

    Raises:
        UnsupportedModelError: the model cannot be captured.
    """
    if device.type == "cpu":
        return model, capture(model, rules)
    if model.autocast is not None:
        model = placed(model, device)
        return model, capture(model, rules)
    captured = capture(model, rules)
    if not whole:
        return model, captured
    captured = replace(captured, graph_module=on_device(captured.graph_module, device))
    move(tensors_of(captured.graph_module), device)  # constants, too, which the module may not list
    return placed(model, device), captured


def placed(model: LoadedModel, device: torch.device) -> LoadedModel:
    """The model with its parameters, buffers and example on ``device``; clouds are prepared on the processor."""
    loss = getattr(model.loss_fn, "function", model.loss_fn)
    for module in (model.module, loss):
        if isinstance(module, torch.nn.Module):
            move((*module.parameters(), *module.buffers()), device)
    inputs, targets = (tuple(tensor.to(device) for tensor in each) for each in (model.inputs, model.targets))
    return replace(model, inputs=inputs, targets=targets)
