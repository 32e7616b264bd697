"""Networks of the sciences: operators, equations, forces, recurrences in space, wavelets."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network
from tests.zoo.entries import network


class SpectralConv(nn.Module):
    """FNO's layer in two dimensions: low modes of both signs of the height are multiplied, all others dropped."""

    def __init__(self, width: int, modes: int, complex_weights: bool) -> None:
        super().__init__()
        shape = (width, width, modes, modes)
        self.modes = modes
        if complex_weights:
            self.w1 = nn.Parameter(torch.rand(*shape, dtype=torch.cfloat) / width)
            self.w2 = nn.Parameter(torch.rand(*shape, dtype=torch.cfloat) / width)
        else:
            self.w1, self.w2 = (nn.Parameter(torch.rand(*shape, 2) / width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        m = self.modes
        ft = torch.fft.rfft2(x)
        w1, w2 = (w if w.is_complex() else torch.view_as_complex(w) for w in (self.w1, self.w2))
        out = torch.zeros(x.shape[0], x.shape[1], x.size(-2), x.size(-1) // 2 + 1, dtype=ft.dtype, device=x.device)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :m, :m], w1.to(ft.dtype))
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", ft[:, :, -m:, :m], w2.to(ft.dtype))
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class FNO(nn.Module):
    """Li et al. 2021, with the grid of places as two more channels."""

    def __init__(self, complex_weights: bool) -> None:
        super().__init__()
        self.lift = nn.Linear(3, 4)
        self.project = nn.Conv2d(4, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv(4, 2, complex_weights) for _ in range(2))
        self.skip = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(2))

    def grid(self, shape: torch.Size, like: Tensor) -> Tensor:
        b = shape[0]
        h = shape[1]
        w = shape[2]
        y = torch.linspace(0, 1, h, dtype=like.dtype).reshape(1, h, 1, 1).repeat([b, 1, w, 1])
        x = torch.linspace(0, 1, w, dtype=like.dtype).reshape(1, 1, w, 1).repeat([b, h, 1, 1])
        return torch.cat((y, x), dim=-1).to(like.device)

    def forward(self, a: Tensor) -> Tensor:
        x = self.lift(torch.cat((a, self.grid(a.shape, a)), -1)).permute(0, 3, 1, 2)
        for spectral, skip in zip(self.spectral, self.skip, strict=True):
            x = F.gelu(spectral(x) + skip(x))
        return self.project(x).permute(0, 2, 3, 1)


def _relative_l2(out: Tensor, y: Tensor) -> Tensor:
    n = out.size(0)
    error = torch.norm(out.reshape(n, -1) - y.reshape(n, -1), 2, 1)
    return (error / torch.norm(y.reshape(n, -1), 2, 1)).mean()


@network("FNO in two dimensions: pairs of numbers as complex weights, slices of modes, a relative norm as loss")
def fourier_operator() -> Network:
    return FNO(False), (torch.randn(4, 8, 8, 1), torch.randn(4, 8, 8, 1)), _relative_l2


@network("FNO with complex parameters, as its authors wrote it", refused="complex", tolerance=1e-6)
def fourier_operator_complex() -> Network:
    return FNO(True), (torch.randn(4, 8, 8, 1), torch.randn(4, 8, 8, 1)), _relative_l2


class ODE(nn.Module):
    """A neural ODE by four classical Runge-Kutta steps, time as one more feature."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 4)
        self.f = nn.Linear(5, 4)
        self.out = nn.Linear(4, 3)
        self.log_step = nn.Parameter(torch.tensor(-1.0))

    def rate(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.f(torch.cat([y, t.expand(y.shape[0], 1)], 1)))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inp(x)
        h = self.log_step.exp()
        t = self.log_step.new_zeros(())
        for _ in range(4):
            k1 = self.rate(t, y)
            k2 = self.rate(t + h / 2, y + h / 2 * k1)
            k3 = self.rate(t + h / 2, y + h / 2 * k2)
            k4 = self.rate(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            t = t + h
        return self.out(y)


@network("a neural ODE: Runge-Kutta, a step that is learned and used everywhere")
def neural_ode() -> Network:
    return ODE(), (torch.randn(4, 6), torch.randint(3, (4,))), nn.CrossEntropyLoss()


class Physics(nn.Module):
    """A physics-informed network: derivatives of the output by the coordinates, of first and second order."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.viscosity = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().clone().requires_grad_(True)
        t = t.detach().clone().requires_grad_(True)
        u = self.net(torch.cat([x, t], dim=1))
        ones = torch.ones_like(u)
        u_t = torch.autograd.grad(u, t, ones, retain_graph=True, create_graph=True)[0]
        u_x = torch.autograd.grad(u, x, ones, retain_graph=True, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        return u, u_t + u * u_x - self.viscosity * u_xx


@network("a PINN of Burgers' equation: second derivatives by autograd inside forward, a learned coefficient")
def burgers() -> Network:
    def loss(out: tuple[Tensor, Tensor], u: Tensor) -> Tensor:
        return F.mse_loss(out[0], u) + (out[1] ** 2).mean()

    return Physics(), ((torch.rand(4, 1), torch.rand(4, 1)), torch.randn(4, 1)), loss


class Prediction(NamedTuple):
    energy: Tensor
    forces: Tensor


class Potential(nn.Module):
    """SchNet's way: padded molecules, distances in radial functions, forces as the energy's gradient by positions."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, width, padding_idx=0)
        self.register_buffer("centres", torch.linspace(0, 3, 5))
        self.filters = nn.Sequential(nn.Linear(5, width), nn.Softplus(), nn.Linear(width, width))
        self.mix = nn.Linear(width, width)
        self.out = nn.Sequential(nn.Linear(width, 4), nn.SiLU(), nn.Linear(4, 1))

    def forward(self, z: Tensor, positions: Tensor) -> Prediction:
        positions = positions.clone().requires_grad_()
        there = (z > 0).to(positions.dtype)
        delta = positions[:, :, None] - positions[:, None]
        distance = (delta.pow(2).sum(-1) + 1e-6).sqrt()
        near = 0.5 * (torch.cos(distance.clamp(max=3.0) * math.pi / 3) + 1)
        pairs = there[:, :, None] * there[:, None] * (1 - torch.eye(z.shape[1], dtype=positions.dtype)) * near
        radial = torch.exp(-4 * (distance.unsqueeze(-1) - self.centres) ** 2)
        h = self.kinds(z)
        h = h + torch.tanh(self.mix((self.filters(radial) * h[:, None] * pairs.unsqueeze(-1)).sum(2)))
        energy = (self.out(h).squeeze(-1) * there).sum(1)
        forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
        return Prediction(energy, forces)


@network("a potential of molecules: energies and, as their gradient, forces, both in the loss")
def potential() -> Network:
    z = torch.randint(1, 5, (4, 5))
    z[1, 3:] = 0
    z[2, 4:] = 0

    def loss(out: Prediction, y: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(out.energy, y[0]) + 10 * F.mse_loss(out.forces, y[1])

    return Potential(), ((z, torch.randn(4, 5, 3)), (torch.randn(4), torch.randn(4, 5, 3))), loss


class DeepONet(nn.Module):
    """The branch net reads a function of each sample, the trunk net places that are the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 5))
        self.trunk = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor, places: Tensor) -> Tensor:
        return torch.einsum("bi,pi->bp", self.branch(u), self.trunk(places)) + self.bias


@network("DeepONet: places without samples go through a network of their own")
def operator_of_places() -> Network:
    return DeepONet(), ((torch.randn(4, 7), torch.rand(9, 2)), torch.randn(4, 9)), F.mse_loss


class ConvLSTM(nn.Module):
    """Shi et al. 2015, with peepholes, over frames of images; states begin as zeros."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.width = width
        self.conv = nn.Conv2d(2 + width, 4 * width, 3, padding="same")
        self.w_ci, self.w_cf = (nn.Parameter(torch.randn(1, width, 1, 1) * 0.1) for _ in range(2))
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _, height, w = x.size()
        h = torch.zeros(b, self.width, height, w, dtype=x.dtype, device=x.device)
        c = torch.zeros_like(h)
        frames = []
        for step in range(t):
            i, f, o, g = torch.split(self.conv(torch.cat([x[:, step], h], dim=1)), self.width, dim=1)
            c = torch.sigmoid(f + self.w_cf * c) * c + torch.sigmoid(i + self.w_ci * c) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            frames.append(self.out(h))
        return torch.stack(frames, 1)


@network("a convolutional LSTM with peepholes over films")
def conv_lstm() -> Network:
    return ConvLSTM(), (torch.randn(4, 3, 2, 6, 5), torch.randn(4, 3, 2, 6, 5)), F.mse_loss


class Sphere(nn.Module):
    """Weather on a globe: both ends of a row are joined, rows beyond the poles mirrored and turned by half a globe."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3)
        self.b = nn.Conv2d(4, 2, 3)

    def pad(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        north = x[:, :, :1].roll(half, -1)
        south = x[:, :, -1:].roll(half, -1)
        x = torch.cat([north, x, south], dim=2)
        return torch.cat([x[..., -1:], x, x[..., :1]], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.pad(F.silu(self.a(self.pad(x)))))


@network("a globe: both ends of a row joined, poles mirrored and rolled; errors weighted by latitude")
def globe() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        weight = torch.cos(torch.linspace(-1.4, 1.4, out.shape[2], dtype=out.dtype))[:, None]
        return ((out - y) ** 2 * weight / weight.mean()).mean()

    return Sphere(), (torch.randn(4, 3, 6, 8), torch.randn(4, 2, 6, 8)), loss


class Wavelets(nn.Module):
    """Haar's transform by strided slices, a network on the bands, and back by strided writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1, groups=4))

    def forward(self, x: Tensor) -> Tensor:
        a = x[:, :, ::2, ::2]
        b = x[:, :, 1::2, ::2]
        c = x[:, :, ::2, 1::2]
        d = x[:, :, 1::2, 1::2]
        bands = torch.cat([a + b + c + d, b - a + d - c, c - a + d - b, a - b - c + d], 1) / 2
        p, q, r, s = (bands + self.net(bands)).chunk(4, 1)
        out = torch.zeros_like(x)
        out[:, :, ::2, ::2] = (p - q - r + s) / 2
        out[:, :, 1::2, ::2] = (p + q - r - s) / 2
        out[:, :, ::2, 1::2] = (p - q + r - s) / 2
        out[:, :, 1::2, 1::2] = (p + q + r + s) / 2
        return out


@network("wavelets: strided slices forth, strided writes back")
def wavelets() -> Network:
    return Wavelets(), (torch.randn(4, 2, 8, 8), torch.randn(4, 2, 8, 8)), F.mse_loss


class Automaton(nn.Module):
    """A neural cellular automaton (Mordvintsev et al. 2020): fixed filters, cells alive by their neighbours' alpha."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
        point = torch.zeros(3, 3)
        point[1, 1] = 1
        self.register_buffer("filters", torch.stack([point, sobel, sobel.t()])[:, None].repeat(channels, 1, 1, 1))
        self.channels = channels
        self.net = nn.Sequential(nn.Conv2d(3 * channels, 8, 1), nn.ReLU(), nn.Conv2d(8, channels, 1, bias=False))

    def alive(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x[:, 3:4], 3, stride=1, padding=1) > 0.1

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            before = self.alive(x)
            x = x + self.net(F.conv2d(F.pad(x, [1, 1, 1, 1], "circular"), self.filters, groups=self.channels))
            x = x * (before & self.alive(x)).to(x.dtype)
        return x[:, :3]


@network("a cellular automaton: three steps of one rule, filters in a buffer, cells masked by a pool of neighbours")
def automaton() -> Network:
    return Automaton(), (torch.rand(4, 4, 6, 6), torch.rand(4, 3, 6, 6)), F.mse_loss


class Scan(nn.Module):
    """A selective state space (Mamba): a causal depthwise convolution, steps by data, a loop over time."""

    def __init__(self, width: int = 6, state: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 2 * width)
        self.conv = nn.Conv1d(width, width, 3, groups=width, padding=2)
        self.x_proj = nn.Linear(width, 2 + 2 * state, bias=False)
        self.dt = nn.Linear(2, width)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float()).repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, 4)
        self.state = state

    def forward(self, u: Tensor) -> Tensor:
        b, length, _ = u.shape
        x, z = self.inp(u).chunk(2, -1)
        x = F.silu(self.conv(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        dt, B, C = self.x_proj(x).split([2, self.state, self.state], -1)
        dt = F.softplus(self.dt(dt))
        decay = torch.exp(dt.unsqueeze(-1) * -torch.exp(self.A_log))
        drive = (dt * x).unsqueeze(-1) * B.unsqueeze(2)
        h = torch.zeros(b, x.shape[2], self.state, dtype=u.dtype)
        ys = []
        for i in range(length):
            h = decay[:, i] * h + drive[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i]))
        return self.out((torch.stack(ys, 1) + x * self.D) * F.silu(z))


@network("Mamba's block: a causal convolution, a scan over time with steps by data")
def selective_scan() -> Network:
    return Scan(), (torch.randn(4, 5, 4), torch.randn(4, 5, 4)), F.smooth_l1_loss
