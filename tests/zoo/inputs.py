"""Networks whose inputs, outputs or constructors are not one tensor in, one tensor out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import PIPELINE, SPLIT, network

_BAGS = "layer text joins samples"  # what a bag holds may be said by offsets, hence bags count as reading all samples


class Multimodal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text = nn.EmbeddingBag(9, 4)
        self.image = nn.Linear(6, 4)
        self.fuse = nn.Linear(9, 3)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        z = torch.cat([self.text(batch["ids"]), self.image(batch["pixels"]), batch["age"][:, None]], dim=1)
        return {"logits": self.fuse(z), "features": z}


@network("a dict as the only input", refused={PIPELINE: _BAGS, SPLIT: _BAGS})
def dict_input() -> Network:
    batch = {"ids": torch.randint(9, (4, 5)), "pixels": torch.randn(4, 6), "age": torch.rand(4)}
    return Multimodal(), (batch, torch.randint(3, (4,))), lambda out, y: F.cross_entropy(out["logits"], y)


@network("a tuple within the inputs")
def nested_inputs() -> Network:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 4)
            self.b = nn.Linear(5, 4)

        def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
            return self.a(x) + self.b(state[0]) * state[1]

    state = (torch.randn(4, 5), torch.randn(4, 4))
    return Nested(), ((torch.randn(4, 6), state), torch.randint(4, (4,))), F.cross_entropy


class Keyword(nn.Module):
    """Only keywords besides the first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        return self.fc(x * mask)


@network("an argument that is keyword-only", refused="keyword|mask|arguments")
def keyword_only() -> Network:
    x, y = classes()
    return Keyword(), ((x, torch.rand(4, 6).round()), y), F.cross_entropy


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.aux = nn.Linear(6, 3)

    def forward(self, x: Tensor, extra: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        out = self.fc(x)
        if extra is not None:
            out = out + self.aux(extra)
        return out


@network("optional arguments of which one is not given")
def optional_argument() -> Network:
    x, y = classes()
    return Optional(), ((x, x * 2), y), F.cross_entropy


class Output(NamedTuple):
    logits: Tensor
    hidden: tuple[Tensor, ...]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Output:
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return Output(self.head(x), tuple(hidden))


@network("a named tuple as output, with all hidden states")
def named_tuple_output() -> Network:
    def loss(out: Output, y: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, y) + 0.01 * sum(h.pow(2).mean() for h in out.hidden)

    return Named(), classes(), loss


@dataclass
class ModelOutput:
    logits: Tensor
    loss: Tensor | None = None


class HasLoss(nn.Module):
    """The module computes its own loss from labels, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> ModelOutput:
        logits = self.fc(x)
        return ModelOutput(logits, None if labels is None else F.cross_entropy(logits, labels))


@network("the model computes its loss itself and returns a dataclass")
def own_loss() -> Network:
    x, y = classes()
    return HasLoss(), ((x, y), y), lambda out, _: out.loss


class Lambda(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@network("nn.Sequential with lambdas for reshaping")
def lambdas() -> Network:
    net = nn.Sequential(
        Lambda(lambda x: x.view(-1, 1, 6, 6)), nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        Lambda(lambda x: x.view(x.size(0), -1)), nn.Linear(36, 3),
    )  # fmt: skip
    return net, (torch.randn(4, 36), torch.randint(3, (4,))), F.cross_entropy


@network("lazy modules, initialised by the first batch")
def lazy() -> Network:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    x = torch.randn(4, 3, 6, 6)
    net(x)
    return net, (x, torch.randint(3, (4,))), F.cross_entropy


@network("lazy modules that no batch has initialised", refused="lazy|uninitiali")
def lazy_uninitialised() -> Network:
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3)), classes(), F.cross_entropy


class Counting(nn.Module):
    """Attributes of the module change in forward: a warm-up by a counter in Python.  A graph cannot follow that."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) * min(1.0, self.calls / 10)


@network("a Python counter in forward that scales the output", refused="attribute|calls|Python|changes|another loss")
def python_counter() -> Network:
    return Counting(), classes(), F.cross_entropy


class Cached(nn.Module):
    """Keeps the last activation as an attribute, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        return self.head(F.relu(self.last))


@network("an activation kept as an attribute for later inspection")
def cached_activation() -> Network:
    return Cached(), classes(), F.cross_entropy


class Shared(nn.Module):
    """The second input has no samples: an adjacency for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(3, 8)
        self.w2 = nn.Linear(8, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = F.relu(torch.einsum("ij,bjf->bif", adjacency, self.w1(x)))
        return self.w2(torch.einsum("ij,bjf->bif", adjacency, h)).mean(dim=1)


@network("a graph network: an adjacency matrix of all samples is a second input")
def shared_adjacency() -> Network:
    a = torch.rand(6, 6).round()
    return Shared(), ((torch.randn(4, 6, 3), a / a.sum(1, keepdim=True).clamp(min=1)), torch.randn(4, 2)), F.mse_loss


class WantsGradients(nn.Module):
    """Tells its input to require gradients, so that checkpointed layers get some, as wav2vec 2.0 does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None]
        x.requires_grad = True
        return self.head(F.relu(self.fc(x))).squeeze(1)


@network("an input that is told to require gradients")
def input_with_gradients() -> Network:
    return WantsGradients(), classes(), F.cross_entropy
