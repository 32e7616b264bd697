"""Networks that choose by their data: branches, routing, selection, early exits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import WHOLE_BATCH, network

_BY_DATA = "data-dependent|depends on (its )?data|could not guard|GuardOnDataDependent|guard|values of"


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(6, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) if x.mean() > 0 else self.b(x)
        return self.out(torch.relu(h))


@network("if x.mean() > 0", refused=_BY_DATA)
def branch_on_mean() -> Network:
    return Branch(), classes(), F.cross_entropy


class EarlyExit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 8)
        self.two = nn.Linear(8, 8)
        self.exit = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.one(x))
        if self.exit(h).softmax(1).max() > 0.99:
            return self.exit(h)
        return self.exit(torch.relu(self.two(h)))


@network("an early exit where the classifier is sure", refused=_BY_DATA)
def early_exit() -> Network:
    return EarlyExit(), classes(), F.cross_entropy


class BooleanIndex(nn.Module):
    """Only the valid tokens go through the head; the loss takes their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h[ids != 0]
        return self.head(h)


@network("boolean indexing: as many rows as there are tokens", refused=_BY_DATA + "|unbacked|u0|nonzero")
def boolean_indexing() -> Network:
    ids = torch.randint(1, 9, (4, 5))
    ids[1, 3:] = 0
    return BooleanIndex(), (ids, torch.zeros(4)), lambda out, _: out.logsumexp(1).mean()


class Experts(nn.Module):
    """A mixture of experts as on the forums: a loop over experts, nonzero, index_add_."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 6)) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), 2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return self.head(out)


@network("a mixture of experts that gathers the tokens of each expert", refused=_BY_DATA + "|u0|nonzero|where")
def experts_by_nonzero() -> Network:
    return Experts(), classes(), F.cross_entropy


class DenseExperts(nn.Module):
    """All experts run, topk weights select."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.w = nn.Parameter(torch.randn(3, 6, 6) * 0.3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        kept = torch.full_like(scores, float("-inf"))
        top = scores.topk(2, dim=-1)
        weights = kept.scatter(-1, top.indices, top.values).softmax(-1)
        every = torch.einsum("bi,eio->beo", x, self.w)
        return self.head((every * weights.unsqueeze(-1)).sum(1))


@network("a dense mixture of experts: topk, scatter, softmax")
def dense_experts() -> Network:
    return DenseExperts(), classes(), F.cross_entropy


class TopPool(nn.Module):
    """k-max pooling and a gather of the best positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        index = h.topk(2, dim=2).indices.sort(dim=2).values
        return self.fc(h.gather(2, index).flatten(1))


@network("k-max pooling: topk, sort, gather")
def k_max_pooling() -> Network:
    return TopPool(), (torch.randn(4, 3, 7), torch.randint(3, (4,))), F.cross_entropy


class Unique(nn.Module):
    """As many prototypes as there are classes in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.enc(x)
        protos = torch.stack([z[y == c].mean(0) for c in y.unique()])
        return -torch.cdist(z, protos)


@network("prototypes of the classes that are in the batch", refused=_BY_DATA + "|u0|unique|captured|iterat")
def prototypes() -> Network:
    x = torch.randn(4, 6)
    y = torch.tensor([0, 1, 0, 1])
    return Unique(), ((x, y), y), F.cross_entropy


class ItemScale(nn.Module):
    """A number is read out of a tensor and used as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x / x.abs().max().item())


@network("x.abs().max().item() as a scale", mixes=True, refused=_BY_DATA + "|item|u0|scalar|all samples of a step")
def item_scale() -> Network:
    return ItemScale(), classes(), F.cross_entropy


class MeanOverBatch(nn.Module):
    """Centres by the mean over the batch, and adds its size."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h - h.mean(dim=0, keepdim=True)
        return self.b(torch.tanh(h)) / x.shape[0] ** 0.5


@network("centred by the mean over the batch, scaled by x.shape[0]", mixes=True, refused=WHOLE_BATCH)
def mean_over_batch() -> Network:
    return MeanOverBatch(), classes(), F.cross_entropy


class Mixed(nn.Module):
    """Two neighbours of the batch are joined to one row: half as many outputs as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.reshape(x.shape[0] // 2, 12)).squeeze(1)


@network("a reshape that joins two samples to one row", mixes=True, micro_batches=((4, 2), (2, 2, 2), (4,), (4, 2)))
def samples_joined() -> Network:
    return Mixed(), (torch.randn(4, 6), torch.zeros(4)), lambda out, _: out.square().mean()


class MixUp(nn.Module):
    """Each sample is mixed with the next one in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(0.7 * x + 0.3 * x.flip(0) + 0.1 * x.roll(1, 0))


@network("samples mixed with the batch flipped and rolled", mixes=True, refused=WHOLE_BATCH)
def batch_flipped() -> Network:
    return MixUp(), classes(), F.cross_entropy


class Clamped(nn.Module):
    """Infinite values are clamped while it is trained, as in DETR; those of the example are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if self.training and not torch.isfinite(x).all():
            x = torch.clamp(x, -1e9, 1e9)
        if torch.isinf(x).any() or torch.isnan(x).any():
            x = torch.nan_to_num(x)
        return self.head(F.relu(x))


@network("a branch on whether values are finite, which they are")
def clamped_where_infinite() -> Network:
    return Clamped(), classes(), F.cross_entropy
