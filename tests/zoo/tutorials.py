"""Networks as tutorials write them: sizes as Python numbers, losses with more than the loss, masks by loops."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from tests.zoo.attention import tokens
from tests.zoo.autograd import Network, classes
from tests.zoo.entries import DATA, WHOLE_BATCH, network
from tests.zoo.frozen import images
from tests.zoo.hooks import mlp


@network("(loss, accuracy) as a tuple", refused="no gradient")
def loss_and_accuracy() -> Network:
    def loss(out: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(out, y), (out.argmax(1) == y).to(out.dtype).mean()

    return mlp(), classes(), loss


@network("(loss, reconstruction, divergence) as a tuple, the first of them their sum", refused="twice")
def loss_and_its_parts() -> Network:
    def loss(out: Tensor, y: Tensor) -> Any:
        first = F.mse_loss(out, y)
        second = out.pow(2).mean()
        return first + 0.1 * second, first, second

    return mlp(), (torch.randn(4, 6), torch.randn(4, 3)), loss


@network("a dict of two losses and an accuracy", refused="no gradient")
def losses_and_accuracy() -> Network:
    def loss(out: Tensor, y: Tensor) -> Any:
        return {"ce": F.cross_entropy(out, y), "l2": out.pow(2).mean(), "acc": (out.argmax(1) == y).double().mean()}

    return mlp(), classes(), loss


@network("a tuple of two losses, which are added")
def two_losses() -> Network:
    def loss(out: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(out, y), 0.1 * out.pow(2).mean()

    return mlp(), classes(), loss


class Counted(nn.Module):
    """Sizes by ``len(x)``, ``int(...)`` and a float of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        batch = len(x)
        h = self.a(x.view(batch, -1)).relu()
        start = torch.zeros(int(x.shape[0]), 8, dtype=h.dtype)
        width = float(h.shape[1])
        return self.b((h + start).reshape(batch, -1) / math.sqrt(width))


@network("len(x), int(x.shape[0]) and float(x.shape[1]) as Python numbers")
def python_sizes() -> Network:
    return Counted(), classes(), F.cross_entropy


class ByRow(Counted):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.b(self.a(row).relu()) for row in x])


_ONE_SIZE = "captured for 4 samples|samples do not stay apart|mix"


@network("a Python loop over samples", mixes=True, refused={DATA: _ONE_SIZE})
def loop_over_samples() -> Network:
    return ByRow(), classes(), F.cross_entropy


@network("the sum divided by len(output)")
def divided_by_len() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="sum") / len(out)

    return mlp(), classes(), loss


class LoopMask(nn.Module):
    """A causal mask filled by nested loops, as in a first tutorial of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        mask = torch.zeros(x.size(1), x.size(1), dtype=torch.bool)
        for i in range(x.size(1)):
            for j in range(x.size(1)):
                if j > i:
                    mask[i, j] = True
        scores = torch.einsum("bid,bjd->bij", q, k) / 8**0.5
        return self.out(h + torch.einsum("bij,bjd->bid", scores.masked_fill(mask, -1e9).softmax(-1), v))


def _token_loss(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y)


@network("a causal mask filled by nested loops")
def loop_mask() -> Network:
    return LoopMask(), tokens(), _token_loss


@network("tokens of which some are padding (ignore_index=0), smoothed labels, weights of classes")
def padded_and_weighted() -> Network:
    weight = torch.linspace(0.5, 2, 11, dtype=torch.float64)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.reshape(-1, 11), y.reshape(-1), weight, ignore_index=0, label_smoothing=0.1)

    return LoopMask(), tokens(), loss


class Ensemble(nn.Module):
    """Models side by side: their parameters stacked, one called for all by vmap and functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, 4, 6) / 3)
        self.biases = nn.Parameter(torch.zeros(3, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(vmap(lambda w, b: torch.tanh(F.linear(x, w, b)))(self.weights, self.biases).mean(0))


@network("an ensemble by torch.vmap over stacked weights", refused="vmap|batched|torch.func")
def vmapped_ensemble() -> Network:
    return Ensemble(), classes(), F.cross_entropy


class PerSample(nn.Module):
    """vmap over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return vmap(lambda row: self.b(torch.tanh(self.a(row))))(x)


@network("torch.vmap over samples", refused="vmap|batched|torch.func")
def vmapped_samples() -> Network:
    return PerSample(), classes(), F.cross_entropy


class Perturbed(nn.Module):
    """The same layer by other weights: functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.head = nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: each * self.scale for name, each in self.layer.named_parameters()}
        return self.head(torch.cat([self.layer(x), functional_call(self.layer, weights, (x,))], 1).tanh())


@network("one layer by its own weights and by scaled ones, through functional_call")
def functional_layers() -> Network:
    return Perturbed(), classes(), F.cross_entropy


class Recursive(nn.Module):
    """A loop whose length is an attribute, a list that grows, a dict of layers chosen by name."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 3
        self.acts = nn.ModuleDict({"relu": nn.ReLU(), "tanh": nn.Tanh()})
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(6, 6) / 3) for _ in range(3)])
        self.gains = nn.ParameterDict({name: nn.Parameter(torch.ones(6)) for name in ("relu", "tanh")})
        self.out = nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, act: str = "tanh") -> Tensor:
        seen = [x]
        for number in range(self.steps):
            kind = act if number % 2 else "relu"
            seen.append(self.acts[kind](seen[-1] @ self.weights[number]) * self.gains[kind])
        if mask is not None:
            seen[-1] = seen[-1] * mask
        return self.out(seen[-1], sum(seen[:-1]))


@network("ParameterList, ParameterDict, ModuleDict, nn.Bilinear, an argument that is None and one by keyword")
def lists_and_dicts() -> Network:
    return Recursive(), classes(), F.cross_entropy


class Adaptive(nn.Module):
    """Adaptive softmax: the head gives the loss itself, given the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 20, cutoffs=[5, 10], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.body(self.embed(x))
        return self.head(h.flatten(0, 1), y.flatten()).loss


@network("nn.AdaptiveLogSoftmaxWithLoss: rows of each cluster by index", refused="data|u0|nonzero|whole batch|at once")
def adaptive_softmax() -> Network:
    x = torch.randint(20, (4, 5))
    return Adaptive(), ((x, x.roll(-1, 1)), torch.zeros(4)), lambda out, y: out


class Bags(nn.Module):
    """Bags of words in one vector, with offsets."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 8, mode="mean")
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.bag(words, offsets))


@network(
    "nn.EmbeddingBag with offsets: the words of all samples in one vector",
    mixes=True,
    refused="offsets",
)
def bags_by_offsets() -> Network:
    return Bags(), ((torch.randint(20, (12,)), torch.tensor([0, 2, 5, 9])), torch.randint(3, (4,))), F.cross_entropy


class PairNet(nn.Module):
    """Pairs of samples of the batch, scored by a small network."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        n = len(h)
        left = h.unsqueeze(1).expand(n, n, 4)
        right = h.unsqueeze(0).expand(n, n, 4)
        return self.b(torch.cat([left, right], -1)).squeeze(-1).mean(1)


@network("all pairs of samples, sizes by len()", mixes=True, refused=WHOLE_BATCH)
def pairs_of_samples() -> Network:
    return PairNet(), (torch.randn(4, 6), torch.randn(4)), F.mse_loss


@network("CLIP's loss of pairs: targets are arange of x.shape[0]", refused=WHOLE_BATCH)
def pairs_by_shape() -> Network:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        scores = F.normalize(out) @ F.normalize(y).t() / 0.2
        target = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, target) + F.cross_entropy(scores.t(), target)) / 2

    return mlp(), (torch.randn(4, 6), torch.randn(4, 3)), loss


class LossModule(nn.Module):
    """A network that gets the targets, and gives (output, loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        out = self.body(x)
        return out, None if y is None else F.cross_entropy(out, y)


@network("nanoGPT's way: (logits, loss), the loss picked by a lambda")
def logits_and_loss() -> Network:
    x, y = classes()
    return LossModule(), ((x, y), torch.zeros(4)), lambda out, _: out[1]


@network("gradients of other signs by detach: x + (y - x).detach() of a learned clip")
def clipped_by_detach() -> Network:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 3)
            self.alpha = nn.Parameter(torch.tensor(1.0))
            self.b = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.clamp(self.a(x), torch.zeros_like(self.alpha), self.alpha)
            steps = h / self.alpha * 15
            h = (steps + (torch.round(steps) - steps).detach()) * self.alpha / 15
            return self.b(h.flatten(2).mean(-1))

    return Quantised(), images(), F.cross_entropy
