"""Networks with a backward of their own: functions, clipped and reversed gradients, hooks, and hand-made steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.entries import network

Network = tuple[Any, ...]


def classes(rows: int = 4, width: int = 6, num_classes: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randint(num_classes, (rows,))


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class QuantMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        x = RoundSTE.apply(x)
        return self.fc2(x)


@network("straight-through estimator: activations are rounded, the gradient goes through")
def straight_through() -> Network:
    return QuantMLP(), classes(), F.cross_entropy


class Teacher(nn.Module):
    """A part without gradients: by ``torch.inference_mode`` as a block, or as a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 8)
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    @torch.inference_mode()
    def taught(self, x: Tensor) -> Tensor:
        return torch.tanh(self.teacher(x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = x.square().mean(1, keepdim=True)
        return self.head(self.body(x) * scale.clone() + self.taught(x).clone())


@network("parts of forward in torch.inference_mode, as a block and by a decorator")
def inference_mode() -> Network:
    return Teacher(), classes(), F.cross_entropy


class SignSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1).to(grad.dtype)


class BinaryLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        w = SignSTE.apply(self.weight)
        return F.linear(x, w, self.bias)


@network("binarised weights: a custom function of a parameter")
def binary_weights() -> Network:
    net = nn.Sequential(BinaryLinear(6, 8), nn.Hardtanh(), BinaryLinear(8, 8), nn.Hardtanh(), nn.Linear(8, 3))
    return net, classes(), nn.CrossEntropyLoss()


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.alpha, None


class DANN(nn.Module):
    """Domain-adversarial training: two heads, one of them behind a gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.class_classifier = nn.Linear(8, 3)
        self.domain_classifier = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.feature(x)
        return self.class_classifier(f), self.domain_classifier(GradReverse.apply(f, 0.3))


def dann_loss(out: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(out[0], targets[0]) + F.cross_entropy(out[1], targets[1])


@network("gradient reversal before a domain head")
def gradient_reversal() -> Network:
    x, y = classes()
    return DANN(), (x, (y, torch.randint(2, (4,)))), dann_loss


class ClipGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.clamp(-ctx.limit, ctx.limit), None


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(ClipGrad.apply(self.a(x), 1e-2)))


@network("a function clips each gradient on its way back", mixes=True)
def clipped_gradient() -> Network:
    # the clipping is not linear, and the gradient's scale is that of the micro-batch's loss
    return Clipped(), classes(), F.cross_entropy


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Tapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h + Identity.apply(h))


@network("a custom identity whose input is read once more beside it")
def custom_identity() -> Network:
    return Tapped(), classes(), F.cross_entropy


class SplitHalf(torch.autograd.Function):
    """Two outputs, one input; the second half's gradient is doubled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, dim=1)
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, ga: Tensor, gb: Tensor) -> Tensor:
        return torch.cat([ga, 2 * gb], dim=1)


class TwoOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = SplitHalf.apply(self.inp(x))
        return self.out(a * torch.sigmoid(b))


@network("a custom function with two outputs")
def two_outputs() -> Network:
    return TwoOut(), classes(), F.cross_entropy


class SwishFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, i: Tensor) -> Tensor:
        result = i * torch.sigmoid(i)
        ctx.save_for_backward(i)
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        i = ctx.saved_tensors[0]
        sigmoid_i = torch.sigmoid(i)
        return grad_output * (sigmoid_i * (1 + i * (1 - sigmoid_i)))


class MemoryEfficientSwish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return SwishFn.apply(x)


@network("EfficientNet's swish, a memory-saving custom function, among convolutions", mixes=True)
def efficient_swish() -> Network:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), MemoryEfficientSwish(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4), MemoryEfficientSwish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    return net, (torch.randn(4, 3, 8, 8), torch.randint(3, (4,))), nn.CrossEntropyLoss()


class DetachTrick(nn.Module):
    """VQ-VAE: nearest code, straight through by ``x + (q - x).detach()``; codebook and commitment losses."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4)
        self.dec = nn.Linear(4, 6)
        self.codebook = nn.Embedding(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.enc(x)
        d = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codebook.weight.t() + self.codebook.weight.pow(2).sum(1)
        q = self.codebook(d.argmin(1))
        return self.dec(z + (q - z).detach()), z, q


def vq_loss(out: tuple[Tensor, ...], target: Tensor) -> Tensor:
    recon, z, q = out
    return F.mse_loss(recon, target) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach())


@network("vector quantisation: straight-through by detach, three terms in the loss")
def vector_quantised() -> Network:
    x, _ = classes()
    return DetachTrick(), (x, x.clone()), vq_loss


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@network("blocks under torch.utils.checkpoint")
def checkpointed() -> Network:
    return Checkpointed(), classes(), F.cross_entropy


class NoGradTeacher(nn.Module):
    """Part of the forward pass is under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 5)
        self.teacher = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            t = self.teacher(x).softmax(-1)
        s = self.student(x)
        return self.head(s), -(t * s.log_softmax(-1)).sum(-1)


@network("a teacher under no_grad, whose parameters require gradients and get none")
def teacher_without_gradient() -> Network:
    return NoGradTeacher(), classes(), lambda out, y: F.cross_entropy(out[0], y) + out[1].mean()
