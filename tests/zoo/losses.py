"""Losses of every reduction, and losses with a state of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import WHOLE_BATCH, network
from tests.zoo.frozen import token_loss


def mlp(num_classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, num_classes))


def tagger() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def numbers() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


@network("reduction='sum'")
def sum_of_squares() -> Network:
    return mlp(), numbers(), nn.MSELoss(reduction="sum")


@network("the sum over outputs, the mean over samples")
def sum_then_mean() -> Network:
    return mlp(), numbers(), lambda out, y: ((out - y) ** 2).sum(dim=1).mean()


@network("the sum divided by the batch size, as x.size(0) in the loss")
def divided_by_batch_size() -> Network:
    return mlp(), numbers(), lambda out, y: F.l1_loss(out, y, reduction="sum") / out.size(0)


@network(
    "padded tokens ignored by ignore_index: the number of terms differs from sample to sample", refused=WHOLE_BATCH
)
def ignore_index() -> Network:
    y = torch.randint(5, (4, 6))
    y[0, 1:] = -100
    y[2, 4:] = -100
    return tagger(), (torch.randint(9, (4, 6)), y), token_loss


@network("class weights: cross entropy divides by the weights' sum", refused=WHOLE_BATCH)
def class_weights() -> Network:
    return mlp(), classes(), nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))


@network("label smoothing")
def label_smoothing() -> Network:
    return mlp(), classes(), nn.CrossEntropyLoss(label_smoothing=0.1)


@network("soft targets")
def soft_targets() -> Network:
    x, y = classes()
    return mlp(), (x, F.one_hot(y, 3).double() * 0.9 + 0.1 / 3), nn.CrossEntropyLoss()


def masked_mean(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    y, mask = target
    per_token = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    return (per_token * mask).sum() / mask.sum()


@network("a masked mean over all tokens of the batch", refused=WHOLE_BATCH)
def masked() -> Network:
    mask = torch.arange(6).expand(4, 6) < torch.tensor([1, 6, 3, 5])[:, None]
    return tagger(), (torch.randint(9, (4, 6)), (torch.randint(5, (4, 6)), mask.float())), masked_mean


@network("a masked mean within each sample")
def masked_by_sample() -> Network:
    mask = torch.arange(6).expand(4, 6) < torch.tensor([1, 6, 3, 5])[:, None]

    def loss(logits: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        y, m = target
        nll = F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), y, reduction="none")
        return ((nll * m).sum(1) / m.sum(1).clamp(min=1)).mean()

    return tagger(), (torch.randint(9, (4, 6)), (torch.randint(5, (4, 6)), mask.float())), loss


def info_nce(z: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    a, b = (F.normalize(each, dim=1) for each in z)
    logits = a @ b.t() / 0.5
    return F.cross_entropy(logits, torch.arange(len(a), device=a.device))


class TwoViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(4)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(a), self.encoder(b)


@network("a contrastive loss: every sample against all others of the batch", refused=WHOLE_BATCH)
def contrastive() -> Network:
    a = torch.randn(4, 6)
    return TwoViews(), ((a, a + 0.1 * torch.randn(4, 6)), torch.zeros(4)), info_nce


@network("RMSE: the root of a mean over the batch", refused=WHOLE_BATCH)
def rmse() -> Network:
    return mlp(), numbers(), lambda out, y: torch.sqrt(F.mse_loss(out, y) + 1e-8)


@network("a soft dice loss over the whole batch", refused=WHOLE_BATCH)
def dice() -> Network:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        p = out.sigmoid().flatten()
        return 1 - (2 * (p * y.flatten()).sum() + 1) / (p.sum() + y.sum() + 1)

    return net, (torch.randn(4, 3, 6, 6), torch.rand(4, 1, 6, 6).round()), loss


@network("correlation with the targets over the batch", refused=WHOLE_BATCH)
def correlation() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        a = out[:, 0] - out[:, 0].mean()
        b = y[:, 0] - y[:, 0].mean()
        return -(a * b).sum() / (a.norm() * b.norm() + 1e-6)

    return mlp(), numbers(), loss


class ArcMargin(nn.Module):
    """A loss module with weights to be trained, as face recognition has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        self.log_scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        cos = F.linear(F.normalize(z), F.normalize(self.weight))
        return F.cross_entropy(cos * self.log_scale.exp(), y)


@network("a loss module with parameters: margins and a learned temperature")
def learned_temperature() -> Network:
    return mlp(4), classes(), ArcMargin()


class CenterLoss(nn.Module):
    """A loss module with a buffer that it reads."""

    centers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.eye(3, dtype=torch.float64))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return (z - self.centers[y]).pow(2).sum(1).mean()


@network("a loss module with a buffer")
def loss_with_buffer() -> Network:
    return mlp(), classes(), CenterLoss()


class EmaCenters(CenterLoss):
    """The centres follow what was seen."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(z, y)
        with torch.no_grad():
            self.centers.mul_(0.9).add_(0.1 * z.detach().mean(0))
        return loss


@network("a loss module that updates its buffer", mixes=True, refused="whole batch|buffer loss_fn.centers")
def loss_updates_buffer() -> Network:
    return mlp(), classes(), EmaCenters()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8)
        self.cls = nn.Linear(8, 3)
        self.reg = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.trunk(x))
        return self.cls(h), self.reg(h)


@network("two heads, a weighted sum of two losses")
def two_heads() -> Network:
    x, y = classes()

    def loss(out: tuple[Tensor, Tensor], t: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(out[0], t[0]) + 0.3 * F.mse_loss(out[1], t[1])

    return TwoHeads(), (x, (y, torch.randn(4, 2))), loss


class Deep(nn.Module):
    """Deep supervision: every block has a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        outs = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = F.relu(block(x))
            outs.append(head(x))
        return outs


def _auxiliary(outs: list[Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(outs[-1], y) + 0.4 * sum(F.cross_entropy(o, y) for o in outs[:-1])


@network("auxiliary heads at every depth, a list as output")
def auxiliary_heads() -> Network:
    return Deep(), classes(), _auxiliary


def _penalised(net: nn.Module, out: Tensor, y: Tensor) -> Tensor:
    l2 = sum(p.pow(2).sum() for p in net.parameters())
    return F.cross_entropy(out, y) + 1e-3 * l2


@network("a penalty on all parameters inside the loss")
def penalty_in_loss() -> Network:
    net = mlp()
    return net, classes(), partial(_penalised, net)


@network("KL divergence with batchmean")
def batchmean() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(out, 1), F.softmax(y, 1), reduction="batchmean")

    return mlp(), numbers(), loss


@network("hard examples: the mean of the two largest losses of the batch", refused=WHOLE_BATCH)
def hard_examples() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none").topk(2).values.mean()

    return mlp(), classes(), loss


@network("CTC loss with lengths")
def ctc() -> Network:
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))

    def loss(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        logp = F.log_softmax(out, -1).transpose(0, 1)
        lengths = torch.full((out.shape[0],), out.shape[1], dtype=torch.long)
        return F.ctc_loss(logp, y[0], lengths, y[1])

    return net, (torch.randn(4, 7, 5), (torch.randint(1, 4, (4, 3)), torch.tensor([3, 2, 1, 3]))), loss


@network("labels of a rolled batch, of which the first two are alike", mixes=True, refused=WHOLE_BATCH)
def rolled_labels() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.roll(1))

    return nn.Linear(6, 3), (torch.randn(4, 6), torch.tensor([1, 1, 2, 0])), loss


@network("labels of a rolled batch, all alike", mixes=True, refused=WHOLE_BATCH)
def rolled_alike() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.roll(1))

    return nn.Linear(6, 3), (torch.randn(4, 6), torch.full((4,), 2)), loss


@network("labels of a rolled batch, all of the first class", mixes=True, refused=WHOLE_BATCH)
def rolled_zeros() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.roll(1))

    return nn.Linear(6, 3), (torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), loss


@network("numbers of a rolled batch, all zero", mixes=True, refused=WHOLE_BATCH)
def rolled_zero_numbers() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) + F.mse_loss(out, y.roll(1, 0))

    return nn.Linear(6, 3), (torch.randn(4, 6), torch.zeros(4, 3)), loss


@network("labels of which there is one class alone, rolled")
def rolled_only_class() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y) + F.cross_entropy(out, y.roll(1)) + out.square().mean()

    return nn.Linear(6, 1), (torch.randn(4, 6), torch.zeros(4, dtype=torch.long)), loss


@network("guesses of which the first class is ignored, the example has none", refused=WHOLE_BATCH)
def ignored_guesses() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        guesses = (out.detach() + 50 * F.one_hot(y, 3)).argmax(1)
        return F.cross_entropy(out, y) + F.cross_entropy(out, guesses, ignore_index=0)

    return nn.Linear(6, 3), (torch.randn(4, 6), torch.tensor([1, 2, 0, 0])), loss


@network("a mean that is rounded, to 0 in the example", refused=WHOLE_BATCH)
def rounded_mean() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(out, y) + (0.01 * out + 10 * y).mean().int().to(out.dtype)

    return nn.Linear(6, 3), (torch.randn(4, 6), torch.tensor([0.0, 0.0, 1.0, 1.0]).repeat(3, 1).t()), loss


def selecting(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Network:
    """A loss of (out, classes, which of them are chosen); of the example's first two samples all are."""
    return mlp(), (torch.randn(4, 6), torch.tensor([1, 2, 0, 0])), lambda out, y: loss(out, y, y > 0)


@network("the mean of what a boolean mask selects, which is all in the first two samples", refused=WHOLE_BATCH)
def mean_of_selected() -> Network:
    return selecting(lambda out, y, chosen: F.cross_entropy(out, y, reduction="none")[chosen].mean())


@network("a loss of selected rows, and a mean beside it", refused=WHOLE_BATCH)
def loss_of_selected() -> Network:
    return selecting(lambda out, y, chosen: F.cross_entropy(out[chosen], y[chosen]) + out.square().mean())


@network("two means of rows that one call selects", refused=WHOLE_BATCH)
def means_of_selected() -> Network:
    def loss(out: Tensor, y: Tensor, chosen: Tensor) -> Tensor:
        rows = chosen.nonzero().squeeze(1)
        return F.cross_entropy(out[rows], y[rows]) + 5 * out[rows].square().mean()

    return selecting(loss)


@network("the sum of what a boolean mask selects over how many it does")
def sum_of_selected() -> Network:
    return selecting(lambda out, y, chosen: F.cross_entropy(out, y, reduction="none")[chosen].sum() / chosen.sum())


@network("a mean by class, over numbers of classes that are counted", refused=WHOLE_BATCH)
def mean_by_class() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        sums = out.new_zeros(3).index_add(0, y, F.cross_entropy(out, y, reduction="none"))
        return (sums / torch.bincount(y, minlength=3).clamp(min=1)).mean()

    return mlp(), (torch.randn(4, 6), torch.tensor([1, 2, 0, 0])), loss
