"""Networks that call a module more than once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import PIPELINE, SPLIT, network
from tests.zoo.frozen import backbone


class Siamese(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Linear(8, 4)
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.pairwise_distance(self.net(a), self.net(b))


def contrastive_margin(distance: Tensor, same: Tensor) -> Tensor:
    return (same * distance.pow(2) + (1 - same) * F.relu(1.0 - distance).pow(2)).mean()


def pairs() -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(4, 6), torch.randn(4, 6)), torch.tensor([1.0, 0.0, 1.0, 0.0])


@network("a siamese network: two inputs through one encoder")
def siamese() -> Network:
    return Siamese(False), pairs(), contrastive_margin


_ONE_STAGE = r"num_batches_tracked|running_(mean|var)"


@network(
    "a siamese network with batch norm, which sees two batches a step",
    mixes=True,
    refused={PIPELINE: _ONE_STAGE, SPLIT: _ONE_STAGE},
)
def siamese_batch_norm() -> Network:
    return Siamese(True), pairs(), contrastive_margin


class SharedLSTM(nn.Module):
    """Question and answer through one LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 5)
        self.lstm = nn.LSTM(5, 4, batch_first=True)
        self.fc = nn.Linear(8, 1)

    def forward(self, q: Tensor, a: Tensor) -> Tensor:
        _, (hq, _) = self.lstm(self.emb(q))
        _, (ha, _) = self.lstm(self.emb(a))
        return self.fc(torch.cat([hq[-1], ha[-1]], dim=1)).squeeze(1)


@network("question and answer through one shared LSTM")
def shared_lstm() -> Network:
    data = (torch.randint(9, (4, 3)), torch.randint(9, (4, 5))), torch.rand(4).round()
    return SharedLSTM(), data, F.binary_cross_entropy_with_logits


class Loop(nn.Module):
    """ALBERT's way: one block applied several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for _ in range(4):
            x = x + self.block(x)
        return self.out(x)


@network("one block applied four times, over both stages")
def weight_sharing_loop() -> Network:
    return Loop(), classes(), F.cross_entropy


class Pyramid(nn.Module):
    """RetinaNet's way: one head for all scales."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = backbone()
        self.down = nn.Conv2d(6, 6, 3, stride=2, padding=1)
        self.head = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.down(a)
        return torch.cat([self.head(each).flatten(2).transpose(1, 2) for each in (a, b)], dim=1)


@network("one detection head on two scales, box outputs joined", mixes=True)
def shared_head() -> Network:
    x = torch.randn(4, 3, 8, 8)
    return Pyramid(), (x, torch.randn(4, 20, 2)), F.smooth_l1_loss


@network("one nn.ReLU and one nn.Linear object at several places of a Sequential")
def same_object_twice() -> Network:
    act = nn.ReLU(inplace=True)
    mid = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(6, 8), act, mid, act, mid, act, nn.Linear(8, 3)), classes(), nn.CrossEntropyLoss()


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.embed(anchor), self.embed(positive), self.embed(negative)


@network("triplets through one encoder, triplet loss, targets not used")
def triplet() -> Network:
    data = tuple(torch.randn(4, 6) for _ in range(3)), torch.zeros(4)
    return Triplet(), data, lambda out, _: F.triplet_margin_loss(*out, margin=2.0)


class Concatenated(nn.Module):
    """Both views in one batch of twice the samples, split again behind."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.enc(torch.cat([a, b], dim=0)).chunk(2, dim=0)
        return (za - zb).pow(2).sum(1)


@network("two views put into one batch of twice the samples and split again")
def views_concatenated() -> Network:
    data, same = pairs()
    return Concatenated(), (data, same), lambda d, y: (d * y).mean()


class ViewedAsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return torch.tanh(h.view_as(h))


@network("a view that is like itself")
def viewed_as_itself() -> Network:
    return ViewedAsItself(), (torch.randn(4, 6), torch.randn(4, 3)), F.mse_loss
