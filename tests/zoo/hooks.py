"""Networks with hooks on modules, tensors and parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

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


@network("forward wrapped on the instance, and that of a layer as well")
def wrapped_forward() -> Network:
    net = mlp()

    def scaled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: forward(x) * 2

    net.forward = scaled(net.forward)
    net[2].forward = scaled(net[2].forward)
    return net, classes(), F.cross_entropy


class Adapter:
    """Low-rank matrices beside a layer, put around its forward from outside."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.forward = layer.forward
        layer.down = nn.Parameter(torch.randn(2, layer.in_features))
        layer.up = nn.Parameter(torch.zeros(layer.out_features, 2))
        layer.requires_grad_(False)
        layer.down.requires_grad_()
        layer.up.requires_grad_()

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x) + x @ self.layer.down.T @ self.layer.up.T


@network("LoRA put around the forward of layers by an object")
def adapters() -> Network:
    net = mlp()
    for layer in (net[0], net[2]):
        layer.forward = Adapter(layer)
    return net, classes(), F.cross_entropy


@network("a layer's forward within torch.no_grad(), another in a checkpoint, by assignment")
def forwards_in_contexts() -> Network:
    net = mlp()
    net[0].forward = torch.no_grad()(net[0].forward)
    net[2].forward = lambda x, forward=net[2].forward: checkpoint(forward, x, use_reentrant=False)
    return net, classes(), F.cross_entropy


@network("hooks that read another layer: from a closure, from a default, its parameter alone")
def hooks_read_others() -> Network:
    net = mlp()
    bias = net[4].bias
    net[0].register_forward_hook(lambda module, args, out: out + net[2].weight.mean())
    net[2].register_forward_hook(lambda module, args, out, other=net[0]: out * other.bias.sigmoid())
    net[4].register_forward_pre_hook(lambda module, args: (args[0] - bias.mean(),))
    return net, classes(), F.cross_entropy


@network("a loss that reads the module's weights from its closure, and what a hook kept")
def loss_reads_module() -> Network:
    net = mlp()
    kept = dict[str, Tensor]()
    net[1].register_forward_hook(lambda module, args, out: kept.__setitem__("hidden", out))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in net.parameters())
        return F.cross_entropy(out, y) + 0.01 * decay + 0.1 * kept["hidden"].abs().mean()

    return net, classes(), loss
