"""Networks that change dtypes inside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import network


class FloatSoftmax(nn.Module):
    """Softmax in float32 whatever the rest is in."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 6**0.5
        weights = F.softmax(scores.float(), dim=-1).type_as(x)
        return self.o(weights @ self.v(x)).mean(1)


@network("softmax in .float() within a model of another dtype", tolerance=1e-6)
def float_softmax() -> Network:
    return FloatSoftmax(), (torch.randn(4, 5, 6), torch.randn(4, 6)), F.mse_loss


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)


@network("Llama's RMSNorm: to float32 and back", tolerance=1e-6)
def rms_norm() -> Network:
    net = nn.Sequential(nn.Linear(6, 8), RMSNorm(8), nn.SiLU(), nn.Linear(8, 8), RMSNorm(8), nn.Linear(8, 3))
    return net, classes(), F.cross_entropy


class Half(nn.Module):
    """A section in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).to(torch.bfloat16)
        h = (h * torch.sigmoid(h)).to(x.dtype)
        return self.b(h)


@network("an activation computed in bfloat16", tolerance=1e-6)
def bfloat16_section() -> Network:
    return Half(), classes(), F.cross_entropy


class IntegerMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6, padding_idx=0)
        self.fc = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        mask = ids.ne(0).long()
        lengths = mask.sum(dim=1).clamp(min=1)
        return self.fc((self.emb(ids) * mask.unsqueeze(-1)).sum(1) / lengths.unsqueeze(-1))


@network("integer masks and lengths, an embedding with padding_idx")
def integer_mask() -> Network:
    ids = torch.randint(1, 9, (4, 5))
    ids[1, 2:] = 0
    ids[3, 4:] = 0
    return IntegerMask(), (ids, torch.randint(3, (4,))), F.cross_entropy


class Buffers(nn.Module):
    """Buffers of several dtypes: a float mean, an integer table, a boolean mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3, 0.0, -0.1, 0.5]))
        self.register_buffer("order", torch.tensor([5, 3, 1, 0, 2, 4]))
        self.register_buffer("keep", torch.tensor([True, True, False, True, True, True]))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - self.mean)[:, self.order]
        return self.fc(torch.where(self.keep, x, torch.zeros_like(x)))


@network("buffers of floats, integers and booleans")
def buffers_of_dtypes() -> Network:
    return Buffers(), classes(), F.cross_entropy


@network("complex numbers: a Fourier layer with complex weights", refused="complex")
def fourier_layer() -> Network:
    class SpectralConv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, 4, 2) * 0.2)
            self.skip = nn.Conv1d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            ft = torch.fft.rfft(x)
            out = torch.zeros_like(ft)
            out[..., :4] = torch.einsum("bix,iox->box", ft[..., :4], torch.view_as_complex(self.weight))
            return F.gelu(torch.fft.irfft(out, n=x.size(-1)) + self.skip(x))

    return SpectralConv(), (torch.randn(4, 3, 12), torch.randn(4, 3, 12)), F.mse_loss


class Rotary(nn.Module):
    """Rotary positions through complex multiplication, as in Meta's Llama."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(8).double(), 1.0 / 100 ** (torch.arange(0, 4, 2) / 4))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)
        self.o = nn.Linear(4, 4)

    def rotate(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        z = z * torch.complex(self.cos, self.sin)[: x.shape[1]]
        return torch.view_as_real(z).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        a = (self.rotate(self.q(x)) @ self.rotate(self.k(x)).transpose(-1, -2) / 2).softmax(-1)
        return self.o(a @ x).mean(1)


@network("rotary positions by complex multiplication")
def complex_rotary() -> Network:
    return Rotary(), (torch.randn(4, 5, 4), torch.randn(4, 4)), F.mse_loss


class Mixed(nn.Module):
    """A frozen encoder kept in bfloat16, the head in the model's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.encoder.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = F.linear(x.bfloat16(), self.encoder.weight.bfloat16(), self.encoder.bias.bfloat16())
        return self.head(h.to(x.dtype))


@network("a frozen encoder run in bfloat16 under no_grad", tolerance=1e-2)
def frozen_in_bfloat16() -> Network:
    return Mixed(), classes(), F.cross_entropy


class Places(nn.Module):
    """A table of places, not trained, is cast as the activations are: of these it reads the dtype alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.places = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return self.head(F.relu(h + self.places.detach().type_as(h).to(h.device).clone()))


@network("a constant table in the dtype of the activations, by type_as")
def table_as_activations() -> Network:
    return Places(), classes(), F.cross_entropy


class Stamped(nn.Module):
    """Time stamps in another dtype than the rest; what is done with them is the module's own."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.dtype = dtype

    def forward(self, x: Tensor, stamps: Tensor) -> Tensor:
        seconds = stamps - 1.7e9
        phase = torch.sin(seconds if self.dtype is None else seconds.to(self.dtype))
        return self.b(torch.tanh(self.a(x) + phase.unsqueeze(1).to(x.dtype)))


def stamped(dtype: torch.dtype) -> tuple[Any, Tensor]:
    x, y = classes()
    return (x, torch.tensor([3.0, 1.5, 0.25, 2.75]).to(dtype) + (0 if dtype == torch.float16 else 1.7e9)), y


@network("time stamps in float64 that are made small and cast in forward")
def stamps_in_float64() -> Network:
    return Stamped(None), stamped(torch.float64), F.cross_entropy


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.conv(x.to(self.conv.weight.dtype))).mean((2, 3)))


def images(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.rand(4, 3, 6, 6).to(dtype), torch.randint(3, (4,))


@network("images in half precision that forward casts to its weights' dtype")
def half_images() -> Network:
    return Image(), images(torch.float16), F.cross_entropy


@network("images in bfloat16 that forward casts to its weights' dtype")
def bfloat16_images() -> Network:
    return Image(), images(torch.bfloat16), F.cross_entropy


@network("features in half precision that no code casts", refused="does not run on .*example")
def half_features() -> Network:
    x, y = classes()
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), (x.half(), y), F.cross_entropy


@network("targets in half precision, which the loss promotes")
def half_targets() -> Network:
    return nn.Linear(6, 3), (torch.randn(4, 6), torch.randn(4, 3).half()), F.mse_loss


@network("targets in float64 behind an output in float32", tolerance=1e-6)
def float64_targets() -> Network:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).float()

    return Single(), (torch.randn(4, 6), torch.randn(4, 3).double()), F.mse_loss


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, features: Tensor, weight: Tensor) -> Tensor:
        return self.fc(features) * weight.unsqueeze(1)


@network("a dict batch with weights in half precision, which an operator promotes")
def half_in_dict() -> Network:
    data = {"features": torch.randn(4, 6), "weight": torch.rand(4).half()}
    return Weighed(), (data, torch.randn(4, 3)), F.mse_loss


@network("a dict of targets of several dtypes, one of which is called as a parameter is")
def targets_of_dtypes() -> Network:
    targets = {"value": torch.randn(4, 3).double(), "weight": torch.rand(4, 3).half()}
    return nn.Linear(6, 3), (torch.randn(4, 6), targets), lambda out, y: (y["weight"] * (out - y["value"]) ** 2).mean()


class Precise(nn.Module):
    """Differences of large coordinates, in the dtype that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, places: Tensor) -> Tensor:
        return self.fc((places - places.mean(1, keepdim=True)).to(self.fc.weight.dtype)).mean(1)


@network("large coordinates in half precision, centred before they are cast")
def half_coordinates() -> Network:
    return Precise(), ((100 + torch.randn(4, 5, 3)).half(), torch.randn(4, 3)), F.mse_loss


@network("a module in float64 by itself, with time stamps in float32")
def float32_beside_float64() -> Network:
    return (
        Stamped(torch.float32).double(),
        ((torch.randn(4, 6).double(), torch.tensor([1.0, 2.0, 3.0, 4.0])), torch.randint(3, (4,))),
        F.cross_entropy,
    )
