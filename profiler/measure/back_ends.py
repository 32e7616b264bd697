"""The back ends that torch chooses for convolutions: costs are interpolated inside one only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from cuda_ops._torch import conv_backend
from cuda_ops.calls import arguments_of
from cuda_ops.dense.conv_kernels import onednn_convolution
from planner.layers import is_convolution
from runtime.captured import CapturedModule


def back_end_keys(captured: CapturedModule, samples: int) -> dict[str, str]:
    """The back end by layer, for ``samples`` samples, where the parameters are; empty for what is no convolution.

    Costs are interpolated inside one only.  On a GPU that is cuDNN or not; which algorithm cuDNN then chooses cannot be
    asked.
    """
    values = captured.graph.values()
    parameter = next(captured.graph_module.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    kinds = {layer.name: layer for layer in captured.graph.layers}
    keys = dict.fromkeys(kinds, "")
    for node in captured.graph_module.graph.nodes:
        layer = kinds.get(captured.layer_of_node.get(node.name, ""))
        if layer is not None and node.target is onednn_convolution:
            keys[layer.name] = "Mkldnn"
        elif layer is not None and is_convolution(layer.kind) and "conv" in str(node.target):
            spec = values[layer.inputs[0]].at(samples, captured.graph.samples)
            dtype = captured.autocast or getattr(torch, spec.dtype)
            transposed = layer.kind == "transposed_conv"
            keys[layer.name] = _back_end(node, spec.shape, dtype, transposed, layer.attributes, device)
    return keys


def _back_end(
    node: fx.Node,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    transposed: bool,
    attributes: Mapping[str, Any],
    device: torch.device,
) -> str:
    weight = arguments_of(node)["weight"].meta["val"]
    # with the memory of one element
    data, filters = (torch.empty(1, dtype=dtype, device=device).expand(each) for each in (shape, weight.shape))
    padding = attributes["output_padding"] if transposed else (0,) * len(attributes["kernel"])
    numbers = attributes["stride"], attributes["padding"], attributes["dilation"]
    return conv_backend(data, filters, *numbers, transposed, padding, attributes["groups"])
