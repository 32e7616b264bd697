"""Networks of papers: distributions, splines, scans, exits by chance, teachers, weights made by networks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import DATA, PIPELINE, SPLIT, WHOLE_BATCH, network
from tests.zoo.frozen import images

_ONE_STAGE = "must be on one stage|one stage"


class Spline(nn.Module):
    """A layer of B-splines on a grid in a buffer (Liu et al. 2024), as efficient-kan writes it."""

    grid: Tensor

    def __init__(self, inside: int, outside: int, size: int = 4, order: int = 3) -> None:
        super().__init__()
        self.order = order
        knots = torch.arange(-order, size + order + 1) * 2 / size - 1
        self.register_buffer("grid", knots.expand(inside, -1).contiguous())
        self.base = nn.Parameter(torch.randn(outside, inside) / math.sqrt(inside))
        self.spline = nn.Parameter(0.1 * torch.randn(outside, inside, size + order))

    def forward(self, x: Tensor) -> Tensor:
        assert x.size(1) == self.grid.size(0)
        z = x.unsqueeze(-1)
        grid = self.grid.to(x.dtype)
        bases = ((z >= grid[:, :-1]) & (z < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (z - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]
            bases = left + (grid[:, k + 1 :] - z) / (grid[:, k + 1 :] - grid[:, 1:-k]) * bases[:, :, 1:]
        return F.linear(F.silu(x), self.base) + F.linear(
            bases.view(x.size(0), -1), self.spline.view(len(self.base), -1)
        )


@network("KAN: B-splines by recursion on a grid in a buffer")
def kan() -> Network:
    return nn.Sequential(Spline(6, 5), Spline(5, 3)), classes(), F.cross_entropy


class ScanBlock(nn.Module):
    """A selective scan as a product of decays: cumsum of logarithms, no loop (S6 by segments)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 12)
        self.delta = nn.Linear(6, 6)
        self.b = nn.Linear(6, 4)
        self.c = nn.Linear(6, 4)
        self.log_a = nn.Parameter(torch.log(torch.arange(1, 5).double().repeat(6, 1)))
        self.d = nn.Parameter(torch.ones(6))
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        x, gate = self.inner(self.norm(h)).chunk(2, -1)
        delta = F.softplus(self.delta(x)).unsqueeze(-1)
        decay = (-delta * self.log_a.exp()).cumsum(1)
        drive = delta * self.b(x).unsqueeze(2) * x.unsqueeze(-1)
        seen = (decay.unsqueeze(2) - decay.unsqueeze(1)).exp()
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
        seen = seen.masked_fill(~causal[None, :, :, None, None], 0.0)
        state = torch.einsum("btsdn,bsdn->btdn", seen, drive)
        y = torch.einsum("btdn,btn->btd", state, self.c(x)) + self.d * x
        return self.out(h + y * F.silu(gate))


@network("a selective scan without a loop: differences of cumulated decays, einsum")
def scan_by_segments() -> Network:
    x = torch.randint(11, (4, 5))
    return ScanBlock(), (x, x.roll(-1, 1)), lambda out, y: F.cross_entropy(out.transpose(1, 2), y)


class StochasticBlock(nn.Module):
    """ConvNeXt's block with layer scale, dropped by sample (drop path), channels last."""

    def __init__(self, dim: int, rate: float) -> None:
        super().__init__()
        self.dw = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.rate = rate
        self.gamma = nn.Parameter(1e-2 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dw(x).permute(0, 2, 3, 1)
        y = (self.gamma * self.down(F.gelu(self.up(self.norm(y))))).permute(0, 3, 1, 2)
        if self.rate > 0.0 and self.training:
            keep = 1 - self.rate
            mask = y.new_empty((y.shape[0],) + (1,) * (y.ndim - 1)).bernoulli_(keep)
            y = y * mask.div_(keep)
        return x + y


@network("ConvNeXt with layer scale and drop path by sample", draws=True)
def convnext_drop_path() -> Network:
    rates = [each.item() for each in torch.linspace(0, 0.4, 3)]
    blocks = [StochasticBlock(4, rate) for rate in rates]
    net = nn.Sequential(nn.Conv2d(3, 4, 2, 2), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return net, images(), F.cross_entropy


class MBConv(nn.Module):
    """EfficientNet's block: SE, drop-connect as the authors' port writes it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(dim, 2 * dim, 1, bias=False)
        self.bn0 = nn.BatchNorm2d(2 * dim, momentum=0.01, eps=1e-3)
        self.dw = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim, bias=False)
        self.bn1 = nn.BatchNorm2d(2 * dim, momentum=None)
        self.reduce = nn.Conv2d(2 * dim, 2, 1)
        self.widen = nn.Conv2d(2, 2 * dim, 1)
        self.project = nn.Conv2d(2 * dim, dim, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.silu(self.bn0(self.expand(inputs)))
        x = F.silu(self.bn1(self.dw(x)))
        x = torch.sigmoid(self.widen(F.silu(self.reduce(F.adaptive_avg_pool2d(x, 1))))) * x
        x = self.project(x)
        keep = 0.7
        random_tensor = keep + torch.rand([x.shape[0], 1, 1, 1], dtype=x.dtype, device=x.device)
        return x / keep * torch.floor(random_tensor) + inputs


@network("EfficientNet's block: squeeze and excitation, drop-connect, a norm that averages over batches", draws=True)
def mbconv() -> Network:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), MBConv(4), MBConv(4), nn.Flatten(), nn.Linear(256, 3))
    return net, images(), F.cross_entropy


class Detector(nn.Module):
    """DETR's way: learned queries read a picture; boxes and classes, matched to targets in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Conv2d(3, 8, 3, 2, 1)
        self.rows = nn.Parameter(torch.rand(4, 4))
        self.cols = nn.Parameter(torch.rand(4, 4))
        self.queries = nn.Parameter(torch.rand(5, 8))
        layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2)
        self.kinds = nn.Linear(8, 4)
        self.boxes = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.back(x)
        high, wide = h.shape[-2:]
        places = [self.cols[:wide].unsqueeze(0).repeat(high, 1, 1), self.rows[:high].unsqueeze(1).repeat(1, wide, 1)]
        memory = (torch.cat(places, -1).flatten(0, 1) + h.flatten(2).transpose(1, 2)) * 0.1
        found = self.decoder(self.queries.unsqueeze(0).repeat(len(x), 1, 1), memory)
        return {"logits": self.kinds(found), "boxes": self.boxes(found).sigmoid()}


def _of_set(out: dict[str, Tensor], y: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each target goes to the query that is nearest (a stand-in of the assignment), all others are background."""
    cost = torch.cdist(y["boxes"], out["boxes"], p=1).detach()
    nearest = cost.argmin(-1)
    kinds = torch.full(out["logits"].shape[:2], 3, dtype=torch.long).scatter(1, nearest, y["kinds"])
    weight = torch.tensor([1.0, 1.0, 1.0, 0.1], dtype=out["logits"].dtype)
    picked = out["boxes"].gather(1, nearest.unsqueeze(-1).expand(-1, -1, 4))
    each = F.cross_entropy(out["logits"].transpose(1, 2), kinds, weight, reduction="none").mean()
    return {"kinds": each, "boxes": 5 * F.l1_loss(picked, y["boxes"])}


def _of_set_summed(out: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    return sum(_of_set(out, y).values())


@network("DETR: learned queries, a decoder, targets put to the nearest query in the loss")
def detr() -> Network:
    targets = {"kinds": torch.randint(3, (4, 2)), "boxes": torch.rand(4, 2, 4)}
    return Detector(), (images()[0], targets), _of_set_summed


class Pyramid(nn.Module):
    """A feature pyramid and RetinaNet's head, with its bias of rare objects."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = (nn.Conv2d(i, o, 3, 2, 1) for i, o in ((3, 4), (4, 6), (6, 8)))
        self.lateral = nn.ModuleList(nn.Conv2d(each, 4, 1) for each in (4, 6, 8))
        self.smooth = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 1))
        nn.init.constant_(self.head[-1].bias, -math.log((1 - 0.01) / 0.01))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for part in (self.c1, self.c2, self.c3):
            found.append(x := part(x).relu())
        last = self.lateral[-1](found[-1])
        levels = [self.smooth[-1](last)]
        for place in range(len(found) - 2, -1, -1):
            last = self.lateral[place](found[place]) + F.interpolate(last, size=found[place].shape[-2:])
            levels.insert(0, self.smooth[place](last))
        flat = [self.head(level).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 3) for level in levels]
        return torch.cat(flat, dim=1)


def _focal(out: Tensor, y: Tensor) -> Tensor:
    target = F.one_hot(y.clamp(min=0), 3).to(out.dtype) * (y > 0).unsqueeze(-1)
    p = out.sigmoid()
    ce = F.binary_cross_entropy_with_logits(out, target, reduction="none")
    at = p * target + (1 - p) * (1 - target)
    weight = 0.25 * target + 0.75 * (1 - target)
    valid = (y >= 0).unsqueeze(-1).to(out.dtype)
    return (weight * (1 - at) ** 2 * ce * valid).sum() / (y > 0).sum().clamp(min=1).to(out.dtype)


@network("FPN and RetinaNet's head, focal loss over the number of objects in the batch")
def retina() -> Network:
    return Pyramid(), (images()[0], torch.randint(-1, 3, (4, 42))), _focal


class HyperConv(nn.Module):
    """A network makes a kernel for each sample: conv2d with as many groups as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(5, 4 * 3 * 9)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        batch, channels, high, wide = x.size()
        kernels = self.maker(z).view(batch * 4, channels, 3, 3)
        y = F.conv2d(x.reshape(1, batch * channels, high, wide), kernels, padding=1, groups=batch)
        return self.head(y.view(batch, 4, high, wide).mean((2, 3)))


@network("a hypernetwork: kernels by sample, groups=batch, the batch by size()")
def hyper_convolution() -> Network:
    x, y = images()
    return HyperConv(), ((x, torch.randn(4, 5)), y), F.cross_entropy


class Momentum(nn.Module):
    """DINO: a teacher follows in a forward pre-hook, outputs are centred by a buffer."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        self.register_buffer("center", torch.zeros(1, 4))
        self.register_forward_pre_hook(Momentum._follow)

    @staticmethod
    @torch.no_grad()
    def _follow(module: Momentum, _: object) -> None:
        for mine, others in zip(module.teacher.parameters(), module.student.parameters(), strict=True):
            mine.data.mul_(0.9).add_(others.data, alpha=0.1)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            aims = ((self.teacher(b) - self.center) / 0.1).softmax(-1)
        return self.student(a) / 0.2, aims.detach()


@network(
    "DINO: a teacher that follows in a forward pre-hook, by .data",
    mixes=True,
    refused={PIPELINE: _ONE_STAGE, SPLIT: _ONE_STAGE},
)
def dino_in_a_hook() -> Network:
    def loss(out: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        return -(out[1] * F.log_softmax(out[0], -1)).sum(-1).mean()

    return Momentum(), ((torch.randn(4, 6), torch.randn(4, 6)), torch.zeros(4)), loss


class Memory(nn.Module):
    """Messages along edges that are inputs: index_add, scatter_reduce, index_copy, within each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(12, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.a(nodes).relu()
        source = edges[:, 0].unsqueeze(-1).expand(-1, -1, 6)
        target = edges[:, 1].unsqueeze(-1).expand(-1, -1, 6)
        sent = self.b(h.gather(1, source))
        most = torch.zeros_like(h).scatter_reduce(1, target, sent, "amax", include_self=False)
        total = torch.zeros_like(h).scatter_add_(1, target, sent)
        return self.c(torch.cat([most, total], -1).mean(1))


@network("messages along edges of each sample: gather, scatter_reduce amax, scatter_add_ on zeros")
def messages() -> Network:
    nodes = torch.randn(4, 5, 4)
    edges = torch.randint(5, (4, 2, 7))
    return Memory(), ((nodes, edges), torch.randint(3, (4,))), F.cross_entropy


class FlatGraph(nn.Module):
    """All graphs of a batch in one vector of nodes, as PyG has it: index_add by a batch vector."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.b = nn.Linear(6, 3)

    def forward(self, nodes: Tensor, batch: Tensor) -> Tensor:
        h = self.a(nodes).relu()
        return self.b(torch.zeros(2, 6, dtype=h.dtype).index_add(0, batch, h))


@network(
    "graphs of a batch in one vector of nodes, index_add by a batch vector, the number of graphs fixed",
    mixes=True,
    refused=dict.fromkeys((PIPELINE, SPLIT, DATA), "sample|captured|whole batch"),
)
def nodes_in_one_vector() -> Network:
    batch = torch.tensor([0, 0, 1, 1])
    return FlatGraph(), ((torch.randn(4, 4), batch), torch.randint(3, (2,))), F.cross_entropy


class FourierConv(nn.Module):
    """A long convolution by FFT (Hyena, H3), with a kernel made by a network of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.filter = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 6))
        self.bias = nn.Parameter(torch.zeros(6))
        self.out = nn.Linear(6, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).transpose(1, 2)
        length = h.shape[-1]
        places = torch.linspace(0, 1, length, dtype=h.dtype).unsqueeze(-1)
        kernel = self.filter(places).t() * torch.exp(-3 * places.t())
        y = torch.fft.irfft(torch.fft.rfft(h, 2 * length) * torch.fft.rfft(kernel, 2 * length), 2 * length)[
            ..., :length
        ]
        return self.out((y + self.bias[:, None] * h).transpose(1, 2))


@network("Hyena: a long convolution by FFT, its kernel made by a network of positions")
def fourier_convolution() -> Network:
    x = torch.randint(11, (4, 6))
    return FourierConv(), (x, x.roll(-1, 1)), lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())


class Recogniser(nn.Module):
    """CRNN (Shi et al. 2015): columns of a picture as time, CTC over them with blank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, (2, 1), 1)
        self.norm = nn.BatchNorm2d(4)
        self.rnn = nn.LSTM(16, 6, bidirectional=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.norm(self.conv(x)).relu(), (1, 2))
        b, c, high, wide = h.size()
        assert high == 4, "the height must be 8"
        y, _ = self.rnn(h.permute(3, 0, 1, 2).reshape(wide, b, c * high))
        return self.head(y).log_softmax(2)


@network("CRNN with CTC: log probabilities time first, lengths as integers", mixes=True)
def crnn_ctc() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        lengths = torch.full((out.size(1),), out.size(0), dtype=torch.long)
        return F.ctc_loss(out, y, lengths, torch.full((out.size(1),), 3, dtype=torch.long), zero_infinity=True)

    return Recogniser(), (torch.randn(4, 1, 8, 12), torch.randint(1, 5, (4, 3))), loss


class Mixture(nn.Module):
    """Mixture density by torch.distributions, with a covariance of full rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.weights = nn.Linear(12, 3)
        self.means = nn.Linear(12, 6)
        self.scales = nn.Linear(12, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.body(x)
        raw = self.scales(h).view(-1, 3, 3)
        lower = torch.zeros(len(raw), 3, 2, 2, dtype=raw.dtype)
        lower[..., 0, 0] = F.softplus(raw[..., 0]) + 0.1
        lower[..., 1, 1] = F.softplus(raw[..., 1]) + 0.1
        lower[..., 1, 0] = raw[..., 2]
        return self.weights(h), self.means(h).view(-1, 3, 2), lower


@network("a mixture of normals with full covariances: MixtureSameFamily, a matrix filled by slices")
def full_mixture() -> Network:
    def loss(out: tuple[Tensor, Tensor, Tensor], y: Tensor) -> Tensor:
        kinds = torch.distributions.Categorical(logits=out[0])
        parts = torch.distributions.MultivariateNormal(out[1], scale_tril=out[2])
        mixture = torch.distributions.MixtureSameFamily(kinds, parts)
        return -mixture.log_prob(y).mean()

    return Mixture(), (torch.randn(4, 6), torch.randn(4, 2)), loss


class Sinkhorn(nn.Module):
    """Balanced assignments over the batch (SwAV): rows and columns of the batch are normalised in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.codes = nn.Linear(4, 3, bias=False)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.codes(F.normalize(self.body(a))), self.codes(F.normalize(self.body(b)))
        with torch.no_grad():
            q = torch.exp(scores[0] / 0.5).t()
            q = q / q.sum()
            for _ in range(2):
                q = q / q.sum(1, keepdim=True) / q.shape[0]
                q = q / q.sum(0, keepdim=True) / q.shape[1]
        return scores[1], (q * q.shape[1]).t()


@network("SwAV: Sinkhorn's assignments over the batch under no_grad", mixes=True, refused=WHOLE_BATCH)
def sinkhorn() -> Network:
    def loss(out: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
        return -(out[1] * F.log_softmax(out[0] / 0.1, 1)).sum(1).mean()

    return Sinkhorn(), ((torch.randn(4, 6), torch.randn(4, 6)), torch.zeros(4)), loss


class Gated(nn.Module):
    """Hard concrete gates (Louizos et al. 2018): noise on a parameter, the expected number of gates in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.log_alpha = nn.Parameter(torch.randn(8) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            u = torch.empty_like(self.log_alpha).uniform_(1e-2, 1 - 1e-2)
            s = torch.sigmoid((torch.log(u) - torch.log(1 - u) + self.log_alpha) / 0.66)
        else:
            s = torch.sigmoid(self.log_alpha)
        gate = torch.clamp(s * 1.2 - 0.1, 0, 1)
        return self.b(self.a(x).relu() * gate), torch.sigmoid(self.log_alpha - 0.66 * math.log(0.1 / 1.1)).sum()


@network("hard concrete gates: noise on a parameter, drawn once for all samples; a penalty as an output", draws=True)
def hard_concrete() -> Network:
    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + 0.01 * out[1]

    return Gated(), classes(), loss


class Equilibrium(nn.Module):
    """A fixed point by iterations under no_grad, the gradient by one more step (Bai et al. 2019, phantom gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.inject = nn.Linear(6, 5)
        self.cell = nn.utils.parametrizations.orthogonal(nn.Linear(5, 5))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(0.5 * self.cell(z) + x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(5):
                z = self.step(z, x)
        return self.head(self.step(z.detach(), x))


@network("a deep equilibrium: five steps under no_grad, one with a gradient; an orthogonal parametrisation")
def equilibrium() -> Network:
    return Equilibrium(), classes(), F.cross_entropy


class Upcycled(nn.Module):
    """Patches by unfold, weights for each place, back by fold with a count of overlaps (local attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Conv2d(3, 9, 1)
        self.value = nn.Linear(27, 27)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        patches = F.unfold(x, 3, padding=1).transpose(1, 2)
        weights = self.score(x).flatten(2).transpose(1, 2).softmax(-1).repeat_interleave(3, -1)
        back = F.fold((self.value(patches) * weights).transpose(1, 2), size, 3, padding=1)
        count = F.fold(F.unfold(torch.ones_like(x), 3, padding=1), size, 3, padding=1)
        return self.head((back / count).mean((2, 3)))


@network("unfold, repeat_interleave, fold over a count of overlaps")
def overlaps() -> Network:
    return Upcycled(), images(), F.cross_entropy


@network(
    "Mixup inside the loss: targets of a rolled batch, lambda drawn by Beta",
    refused="whole batch|at once|random|beta|Beta",
    draws=True,
)
def mixup_in_loss() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.roll(1))

    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), classes(), loss
