"""Complex numbers: as inputs, targets, weights and buffers, conjugated, multiplied, taken apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import network


def signals(rows: int = 4, width: int = 6) -> Tensor:
    return torch.randn(rows, width, dtype=torch.complex64)


def classes(rows: int = 4) -> Tensor:
    return torch.randint(3, (rows,))


class Magnitudes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(signals(6, 4) / 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.weight).abs())


@network("complex inputs and a complex matrix, of which magnitudes are read")
def complex_inputs() -> Network:
    return Magnitudes(), (signals(), classes()), F.cross_entropy


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.view_as_real(x).flatten(1))


@network("complex inputs as pairs of real numbers: no parameter is complex")
def pairs_of_numbers() -> Network:
    return Parts(), (signals(), classes()), F.cross_entropy


@network("layers of torch in complex numbers, and complex targets")
def complex_layers() -> Network:
    net = nn.Sequential(nn.Linear(6, 4, dtype=torch.complex64), nn.Tanh(), nn.Linear(4, 2, dtype=torch.complex64))
    return net, (signals(), signals(4, 2)), lambda out, y: (out - y).abs().square().mean()


class PowerSpectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.body(x))
        return self.head((spectrum * spectrum.conj()).real)


@network("a power spectrum: x * x.conj()")
def power_spectrum() -> Network:
    return PowerSpectrum(), (torch.randn(4, 6), classes()), F.cross_entropy


class Correlations(nn.Module):
    """Cross-correlation of two branches in the frequency domain, as trackers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.a(x)) * torch.conj(torch.fft.rfft(self.b(x)))
        return self.head(torch.fft.irfft(spectrum, n=8))


@network("correlations by spectra: irfft(rfft(a) * conj(rfft(b)))")
def correlations() -> Network:
    return Correlations(), (torch.randn(4, 6), classes()), F.cross_entropy


class HermitianAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 3, dtype=torch.complex64) for _ in range(3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.q(x) @ self.k(x).mH).real.softmax(-1)
        return self.head((scores.to(x.dtype) @ self.v(x)).abs().mean(1))


@network("attention between complex vectors: q @ k.mH, the real part of it")
def hermitian_attention() -> Network:
    return HermitianAttention(), (torch.randn(4, 5, 3, dtype=torch.complex64), classes()), F.cross_entropy


class Rotations(nn.Module):
    """Knowledge-graph embeddings (RotatE): relations turn heads in the complex plane."""

    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Embedding(7, 8)
        self.phases = nn.Embedding(3, 4)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        a, b = (torch.view_as_complex(self.entities(each).unflatten(-1, (4, 2))) for each in (head, tail))
        turn = torch.polar(torch.ones_like(self.phases.weight[relation]), self.phases(relation))
        return (a * turn - b).abs().sum(-1)


@network("relations as rotations: torch.polar, entities as pairs of numbers")
def rotations() -> Network:
    triples = torch.randint(7, (4,)), torch.randint(3, (4,)), torch.randint(7, (4,))
    return Rotations(), (triples, torch.rand(4)), lambda out, y: F.softplus(out - y).mean()


class Complexes(nn.Module):
    """ComplEx: the score is the real part of a trilinear product, the last conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.entities = nn.Parameter(signals(7, 4))
        self.relations = nn.Parameter(signals(3, 4))

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor) -> Tensor:
        return torch.einsum(
            "bd,bd,bd->b", self.entities[head], self.relations[relation], self.entities[tail].conj()
        ).real


@network("a trilinear score, the last factor conjugated: einsum of complex rows")
def trilinear() -> Network:
    triples = torch.randint(7, (4,)), torch.randint(3, (4,)), torch.randint(7, (4,))
    return Complexes(), (triples, torch.rand(4)), F.binary_cross_entropy_with_logits


class Filters(nn.Module):
    """A filter bank in a complex buffer, in front of a real network."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.fft.fft(torch.eye(6))[:4])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.to(self.bank.dtype), self.bank)
        return self.head(torch.cat([y.real, y.imag], -1))


@network("a complex buffer, real and imaginary parts of what it gives")
def filter_bank() -> Network:
    return Filters(), (torch.randn(4, 6), classes()), F.cross_entropy


class Spectrogram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))
        self.conv = nn.Conv1d(5, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, 8, hop_length=4, window=self.window, return_complex=True)
        return self.head(F.relu(self.conv(spectrum.abs().log1p())).mean(-1))


@network("a spectrogram by torch.stft(return_complex=True)")
def spectrogram() -> Network:
    return Spectrogram(), (torch.randn(4, 32), classes()), F.cross_entropy


@network("a complex convolution, modReLU by torch.polar of magnitude and angle")
def complex_convolution() -> Network:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 4, 3, padding=1, dtype=torch.complex64)
            self.bias = nn.Parameter(torch.zeros(4, 1))
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y = torch.polar(F.relu(y.abs() + self.bias), y.angle())
            return self.head(y.real.mean(-1) + y.conj().imag.mean(-1))

    return Net(), (torch.randn(4, 2, 6, dtype=torch.complex64), classes()), F.cross_entropy
