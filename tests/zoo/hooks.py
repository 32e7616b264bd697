"""Networks with hooks on modules, tensors and parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import network


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


@network("a forward hook that changes an output")
def forward_hook_scales() -> Network:
    net = mlp()
    net[2].register_forward_hook(lambda module, args, out: out * 0.5)
    return net, classes(), F.cross_entropy


@network("a forward pre-hook that normalises the input")
def forward_pre_hook() -> Network:
    net = mlp()
    net[0].register_forward_pre_hook(lambda module, args: (F.normalize(args[0], dim=1),))
    return net, classes(), F.cross_entropy


class Extractor(nn.Module):
    """Feature extraction as on the forums: hooks put activations into a dict, the head reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.head = nn.Linear(16, 3)
        self.features: dict[str, Tensor] = {}
        self.body[1].register_forward_hook(self._save("first"))
        self.body[3].register_forward_hook(self._save("second"))

    def _save(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.features[name] = out

        return hook

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(torch.cat([self.features["first"], self.features["second"]], 1))


@network("hooks that collect features in a dict")
def feature_extractor() -> Network:
    return Extractor(), classes(), F.cross_entropy


@network("register_full_backward_hook that only watches", refused="hook")
def watching_backward_hook() -> Network:
    net = mlp()
    net[2].register_full_backward_hook(lambda module, gi, go: None)
    return net, classes(), F.cross_entropy


@network("register_full_backward_hook that scales the gradient of its input", refused="hook")
def scaling_backward_hook() -> Network:
    net = mlp()
    net[2].register_full_backward_hook(lambda module, gi, go: (gi[0] * 0.1,))
    return net, classes(), F.cross_entropy


@network("register_full_backward_pre_hook", refused="hook")
def backward_pre_hook() -> Network:
    net = mlp()
    net[2].register_full_backward_pre_hook(lambda module, go: (go[0] * 3,))
    return net, classes(), F.cross_entropy


class TensorHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g * 0.1)
        return self.b(h)


@network("Tensor.register_hook in forward", refused="hook")
def tensor_hook() -> Network:
    return TensorHook(), classes(), F.cross_entropy


@network("Tensor.register_hook on a parameter: a mask that keeps pruned weights at zero", refused="hook")
def parameter_hook() -> Network:
    net = mlp()
    mask = (torch.rand(8, 8) > 0.5).double()
    net[2].weight.register_hook(lambda g: g * mask)
    return net, classes(), F.cross_entropy


@network("register_post_accumulate_grad_hook on a parameter", refused="hook")
def accumulate_hook() -> Network:
    net = mlp()

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    net[0].weight.register_post_accumulate_grad_hook(halve)
    return net, classes(), F.cross_entropy
