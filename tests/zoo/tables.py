"""Tables and rankings: categorical columns, interactions, weights of samples, losses of pairs and of times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import WHOLE_BATCH, network
from tests.zoo.losses import mlp


class DLRM(nn.Module):
    """A table a column, interactions of all pairs by the lower triangle (Naumov et al. 2019)."""

    def __init__(self, **of_embeddings: object) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 4, **of_embeddings) for n in (7, 5, 9))
        self.bottom = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(4 + 6, 8), nn.ReLU(), nn.Linear(8, 1))
        i, j = torch.tril_indices(4, 4, offset=-1)
        self.register_buffer("i", i, persistent=False)
        self.register_buffer("j", j, persistent=False)

    def forward(self, dense: Tensor, columns: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = torch.stack([x] + [table(columns[:, k]) for k, table in enumerate(self.tables)], dim=1)
        pairs = torch.bmm(every, every.transpose(1, 2))[:, self.i, self.j]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(-1)


def clicks() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    columns = torch.stack([torch.randint(n, (4,)) for n in (7, 5, 9)], 1)
    return (torch.randn(4, 3), columns), (torch.randint(2, (4,)).float(), torch.rand(4) + 0.5)


def _weighted(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    y, w = target
    return (F.binary_cross_entropy_with_logits(out, y, reduction="none") * w).mean()


def _weighted_mean(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    y, w = target
    each = F.binary_cross_entropy_with_logits(out, y, reduction="none", pos_weight=torch.tensor(2.0, dtype=out.dtype))
    return (each * w).sum() / w.sum()


@network("DLRM: tables and pairs of their rows; samples with weights")
def click_rate() -> Network:
    return DLRM(), clicks(), _weighted


@network("weights of samples, divided by their sum; pos_weight")
def click_rate_weighted_mean() -> Network:
    return DLRM(), clicks(), _weighted_mean


@network("nn.Embedding with sparse=True", refused="sparse")
def sparse_gradients() -> Network:
    return DLRM(sparse=True), clicks(), _weighted


@network("nn.Embedding with max_norm: forward scales the rows that it reads", refused="max_norm|renorm|parameter")
def rows_of_bounded_norm() -> Network:
    return DLRM(max_norm=1.0), clicks(), _weighted


class Bags(nn.Module):
    """nn.EmbeddingBag of padded bags with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 5, mode="sum", padding_idx=0)
        self.fc = nn.Linear(5, 3)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.fc(self.bag(ids, per_sample_weights=weights))


@network("nn.EmbeddingBag with weights and padding")
def weighted_bags() -> Network:
    return Bags(), ((torch.randint(9, (4, 5)), torch.rand(4, 5)), torch.randint(3, (4,))), F.cross_entropy


@dataclass
class Heads:
    click: Tensor
    price: Tensor
    aux: dict[str, Tensor]


class MultiTask(nn.Module):
    """A dict in, of which one entry is optional; a dataclass out; tasks weighed by learned variances."""

    def __init__(self, branches: str = "ab") -> None:
        super().__init__()
        kinds = {"a": nn.Linear(6, 8), "b": nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), "c": nn.Linear(6, 8)}
        self.branches = nn.ModuleDict({name: kinds[name] for name in branches})
        self.extra = nn.Linear(2, 8)
        self.click = nn.Linear(8, 1)
        self.price = nn.Linear(8, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, batch: dict[str, Tensor | None]) -> Heads:
        h = sum(branch(batch["x"]) for branch in self.branches.values())
        if batch.get("extra") is not None:
            h = h + self.extra(batch["extra"])
        h = F.silu(h)
        return Heads(self.click(h).squeeze(1), self.price(h).squeeze(1), {"log_vars": self.log_vars})


def _by_variance(out: Heads, y: dict[str, Tensor]) -> Tensor:
    losses = torch.stack([F.binary_cross_entropy_with_logits(out.click, y["click"]), F.mse_loss(out.price, y["price"])])
    return (losses * torch.exp(-out.aux["log_vars"]) + out.aux["log_vars"]).sum()


@network(
    "a dict with an entry that is None, branches by a flag, a dataclass with a dict in it, learned weights of tasks"
)
def multi_task() -> Network:
    y = {"click": torch.randint(2, (4,)).float(), "price": torch.randn(4)}
    return MultiTask(), ({"batch": {"x": torch.randn(4, 6), "extra": None}}, y), _by_variance


class Sparsemax(nn.Module):
    """TabNet's mask: a projection by sort and cumsum (Martins and Astudillo 2016), twice, with priors."""

    def __init__(self) -> None:
        super().__init__()
        self.att = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.fc = nn.Linear(6, 3)

    def sparsemax(self, z: Tensor) -> Tensor:
        ordered = z.sort(-1, descending=True).values
        sums = ordered.cumsum(-1)
        k = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
        support = (1 + k * ordered > sums).sum(-1, keepdim=True)
        tau = (sums.gather(-1, support - 1) - 1) / support.to(z.dtype)
        return (z - tau).clamp_min(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prior = torch.ones_like(x)
        total = 0
        entropy = 0
        for layer in self.att:
            mask = self.sparsemax(layer(x) * prior)
            prior = prior * (1.3 - mask)
            total = total + mask * x
            entropy = entropy - (mask * torch.log(mask + 1e-15)).sum(1).mean()
        return self.fc(total), entropy


@network("sparsemax by sort, cumsum and gather, an entropy beside the loss")
def sparse_attention_of_columns() -> Network:
    return Sparsemax(), classes(), lambda out, y: F.cross_entropy(out[0], y) + 1e-2 * out[1]


class GhostNorm(nn.Module):
    """Batch norm over parts of the batch, cut in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.bn = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.relu(torch.cat([self.bn(part) for part in h.chunk(2, 0)], 0)))


@network(
    "ghost batch norm: halves of the batch are normalised apart",
    mixes=True,
    refused="samples|batch|num_batches|running",
    micro_batches=((4, 4), (4, 4), (4,), (4, 4)),
)
def ghost_norm() -> Network:
    return GhostNorm(), classes(), F.cross_entropy


def _cox(risk: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    time, event = target
    order = time.argsort(descending=True)
    risk = risk.squeeze(1)[order]
    event = event[order]
    return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum()


@network("Cox's partial likelihood: samples sorted by time, logcumsumexp over them", refused=WHOLE_BATCH)
def cox() -> Network:
    x, _ = classes()
    return mlp(1), (x, (torch.rand(4), torch.tensor([1.0, 1.0, 0.0, 1.0]))), _cox


def _supervised_contrast(z: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    logits = z @ z.T / 0.5
    logits = logits - logits.max(1, keepdim=True).values.detach()
    other = 1 - torch.eye(len(z), dtype=z.dtype)
    same = (y[:, None] == y[None]).to(z.dtype) * other
    logp = logits - torch.log((logits.exp() * other).sum(1, keepdim=True))
    return -((same * logp).sum(1) / same.sum(1).clamp(min=1)).mean()


@network("supervised contrast: pairs of equal labels in the batch", refused=WHOLE_BATCH)
def supervised_contrast() -> Network:
    return mlp(4), classes(), _supervised_contrast


def _listwise(scores: Tensor, relevance: Tensor) -> Tensor:
    return F.kl_div(scores.squeeze(-1).log_softmax(1), relevance.softmax(1), reduction="batchmean")


@network("a listwise ranking: a list is a sample")
def listwise() -> Network:
    return mlp(1), (torch.randn(4, 5, 6), torch.rand(4, 5)), _listwise


@network("a listwise ranking in which the batch is the list", refused=WHOLE_BATCH)
def batch_is_the_list() -> Network:
    def loss(scores: Tensor, relevance: Tensor) -> Tensor:
        return -(relevance.softmax(0) * scores.squeeze(1).log_softmax(0)).sum()

    return mlp(1), (torch.randn(4, 6), torch.rand(4)), loss


def _mixture(out: Tensor, y: Tensor) -> Tensor:
    logits, mean, log_scale = out.view(-1, 3, 4).unbind(1)
    normal = torch.distributions.Normal(mean, log_scale.exp())
    return -torch.logsumexp(logits.log_softmax(-1) + normal.log_prob(y.unsqueeze(1)), -1).mean()


@network("a mixture density network: views of one output, torch.distributions in the loss")
def mixture_density() -> Network:
    return mlp(12), (torch.randn(4, 6), torch.randn(4)), _mixture


def _normalised(out: Tensor, y: Tensor) -> Tensor:
    a = F.mse_loss(out, y)
    b = F.l1_loss(out, y)
    return a / a.detach() + b / b.detach()


@network("two losses, each divided by its own detached value", refused=WHOLE_BATCH)
def losses_divided_by_themselves() -> Network:
    return mlp(), (torch.randn(4, 6), torch.randn(4, 3)), _normalised


def _worst_of(out: Tensor, y: Tensor) -> Tensor:
    return torch.max(F.mse_loss(out, y), F.l1_loss(out, y))


@network("the larger of two losses", refused=WHOLE_BATCH)
def larger_of_two() -> Network:
    return mlp(), (torch.randn(4, 6), torch.randn(4, 3)), _worst_of


def _focal(out: Tensor, y: Tensor) -> Tensor:
    logp = F.log_softmax(out, 1)
    pt = logp.exp().gather(1, y[:, None]).squeeze(1)
    alpha = torch.tensor([0.25, 0.5, 0.25], dtype=out.dtype)[y]
    return (alpha * (1 - pt) ** 2 * F.nll_loss(logp, y, reduction="none")).sum() / y.size(0)


@network("focal loss with a factor by class, divided by y.size(0)")
def focal() -> Network:
    return mlp(), classes(), _focal


def _selected(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    y, valid = target
    return F.cross_entropy(out[valid], y[valid])


@network("the loss of those samples that a mask selects by indexing", refused="whole batch|at once|u0|data|capture")
def selected_samples() -> Network:
    x, y = classes()
    return mlp(), (x, (y, torch.tensor([True, False, True, True]))), _selected


class Distilled(nn.Module):
    """A teacher that is a Python attribute in a list, so that it is no part of the module's state."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp()
        self.teacher = [mlp().eval().requires_grad_(False).double()]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            t = self.teacher[0](x)
        return self.student(x), t


def _distillation(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    s, t = out
    soft = F.kl_div(F.log_softmax(s / 2, 1), F.softmax(t / 2, 1), reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * F.cross_entropy(s, y)


@network("distillation from a teacher hidden in a Python list")
def hidden_teacher() -> Network:
    return Distilled(), classes(), _distillation


class PlainList(nn.Module):
    """Branches in a plain Python list, which nn.Module does not see: they are never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 6).double() for _ in range(2)]
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.fc(x)


@network("layers in a plain Python list, which no optimiser sees", refused="list|registered|parameter|not part")
def plain_list() -> Network:
    return PlainList(), classes(), F.cross_entropy


class Largest(nn.Module):
    """Of the embeddings of a bag the largest, by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 6, mode="max")
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bag(x))


@network("nn.EmbeddingBag of maxima, whose further outputs nobody reads")
def largest_of_bags() -> Network:
    return Largest(), (torch.randint(9, (4, 5)), torch.arange(4) % 3), F.cross_entropy
