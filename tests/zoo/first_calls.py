"""Networks that do something at their first call alone, and networks that only seem to.

A graph holds one call.  What the first call leaves, and later ones compute with, is in none: it is refused, and the
module may be called once on a batch before it is given.  What comes out alike with and without it, is equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import network

FIRST = "keeps from its first call"


class Centred(nn.Module):
    """Subclasses say where the mean of the first batch is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def shift(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x - self.shift(x))))


class MeanOfFirstBatch(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.mu: Tensor | None = None

    def shift(self, x: Tensor) -> Tensor:
        if self.mu is None:
            self.mu = x.mean(0, keepdim=True).detach()
        return self.mu


@network("the mean of the first batch, kept as an attribute", refused=FIRST)
def mean_of_first_batch() -> Network:
    return MeanOfFirstBatch(), classes(), F.cross_entropy


class NewAttribute(Centred):
    def shift(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mu"):
            self.mu = x.mean(0, keepdim=True).detach()
        return self.mu


@network("the mean of the first batch, an attribute that is not there before", refused=FIRST)
def new_attribute() -> Network:
    return NewAttribute(), classes(), F.cross_entropy


class NewBuffer(Centred):
    def shift(self, x: Tensor) -> Tensor:
        if "mu" not in dict(self.named_buffers()):
            self.register_buffer("mu", x.mean(0, keepdim=True).detach())
        return self.mu


@network("the mean of the first batch, a buffer that is registered then", refused=FIRST)
def new_buffer() -> Network:
    return NewBuffer(), classes(), F.cross_entropy


class Nested(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Tensor]] = {"mu": []}

    def shift(self, x: Tensor) -> Tensor:
        if not self.kept["mu"]:
            self.kept["mu"].append(x.mean(0, keepdim=True).detach())
        return self.kept["mu"][0]


@network("the mean of the first batch, in a list in a dict", refused=FIRST)
def nested_container() -> Network:
    return Nested(), classes(), F.cross_entropy


class Normaliser:
    """No module, as data pipelines have them."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0, keepdim=True).detach()
        return self.mean


class Helped(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.normaliser = Normaliser()

    def shift(self, x: Tensor) -> Tensor:
        return self.normaliser(x)


@network("the mean of the first batch, in an object of the module's that is no module", refused=FIRST)
def helper_object() -> Network:
    return Helped(), classes(), F.cross_entropy


class PlainTensor(Centred):
    def __init__(self) -> None:
        super().__init__()
        self.mu = torch.zeros(1, 6, dtype=torch.float64)
        self.is_set = False

    def shift(self, x: Tensor) -> Tensor:
        if not self.is_set:
            self.mu.copy_(x.mean(0, keepdim=True).detach())
            self.is_set = True
        return self.mu


@network("the mean of the first batch, written to a tensor that is no buffer", refused=FIRST)
def plain_tensor() -> Network:
    return PlainTensor(), classes(), F.cross_entropy


class ActNorm(nn.Module):
    """Glow's, with a flag."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.is_initialized = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_initialized:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.std.copy_(x.std(0, unbiased=False) + 1e-3)
            self.is_initialized = True
        return (x - self.mean) / self.std


def flow() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), ActNorm(8), nn.Tanh(), nn.Linear(8, 3))


@network("ActNorm: a flag, and buffers that the first batch fills", refused=FIRST)
def act_norm() -> Network:
    return flow(), classes(), F.cross_entropy


@network("ActNorm that was called on a batch before")
def act_norm_called() -> Network:
    net = flow()
    data = classes()
    net(data[0])
    return net, data, F.cross_entropy


class ActNormFlag(ActNorm):
    """The flag in a buffer, so that it is in the state dict."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.std.copy_(x.std(0, unbiased=False) + 1e-3)
                self.initialized.fill_(1)
        return (x - self.mean) / self.std


@network("ActNorm whose flag is a buffer", refused="data-dependent")
def act_norm_flag_in_buffer() -> Network:
    net = nn.Sequential(nn.Linear(6, 8), ActNormFlag(8), nn.Tanh(), nn.Linear(8, 3))
    return net, classes(), F.cross_entropy


class ActNormOfParameters(nn.Module):
    """Glow's as it is written most often: parameters, which the first batch initialises."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(width))
        self.is_initialized = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_initialized:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0, unbiased=False) + 1e-3))
            self.is_initialized = True
        return (x + self.bias) * self.scale


@network("ActNorm whose parameters the first batch initialises", refused=f"{FIRST}|parameter")
def act_norm_of_parameters() -> Network:
    net = nn.Sequential(nn.Linear(6, 8), ActNormOfParameters(8), nn.Tanh(), nn.Linear(8, 3))
    return net, classes(), F.cross_entropy


class Anchored(nn.Module):
    """L2-SP: a term that holds weights near those that it began with."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.start: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.start:
            self.start = [p.detach().clone() for p in self.net.parameters()]
        anchor = sum((p - was).square().sum() for p, was in zip(self.net.parameters(), self.start, strict=True))
        return self.net(x), anchor


@network("an anchor to the weights of the first call", refused=FIRST)
def anchor() -> Network:
    return Anchored(), classes(), lambda out, y: F.cross_entropy(out[0], y) + 1e-3 * out[1]


class Snapshot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    @functools.cached_property
    def weight(self) -> Tensor:
        return F.normalize(self.a.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) + F.linear(x, self.weight))


@network("a snapshot of a weight, as a cached property", refused=FIRST)
def snapshot() -> Network:
    return Snapshot(), classes(), F.cross_entropy


class Detached(nn.Module):
    """The value is the same, the gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.is_warm = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if not self.is_warm:
            h = h.detach()
        self.is_warm = True
        return self.b(h)


@network("a part that is not trained at the first call", refused=f"{FIRST}|other gradients")
def detached_at_first() -> Network:
    return Detached(), classes(), F.cross_entropy


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.noise is None:
            self.noise = torch.randn_like(h[:1])
        return self.b(h + self.noise)


@network("noise that is drawn at the first call and kept", refused=FIRST)
def noise_of_first_call() -> Network:
    return Noise(), classes(), F.cross_entropy


class Replaced(Centred):
    def shift(self, x: Tensor) -> Tensor:
        mu = x.mean(0, keepdim=True).detach()
        self.shift = lambda x: mu  # type: ignore[method-assign]
        return mu


@network("a method that the first call replaces", refused=FIRST)
def replaced_method() -> Network:
    return Replaced(), classes(), F.cross_entropy


class RelativeLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(out, y)
        if self.first is None:
            self.first = loss.detach()
        return loss / self.first


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


@network("a loss module that divides by its first value", refused=FIRST)
def loss_relative_to_its_first() -> Network:
    return plain(), classes(), RelativeLoss()


class Weighted:
    """A loss that is an object; its class weights are those of the first batch."""

    def __init__(self) -> None:
        self.weights: Tensor | None = None

    def __call__(self, out: Tensor, y: Tensor) -> Tensor:
        if self.weights is None:
            self.weights = 1 / (1 + F.one_hot(y, 3).sum(0)).to(out.dtype)
        return F.cross_entropy(out, y, weight=self.weights)


@network("a loss object with class weights of the first batch", refused=FIRST)
def loss_object() -> Network:
    return plain(), classes(), Weighted()


def scaled() -> Callable[[Tensor, Tensor], Tensor]:
    scale = None

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal scale
        if scale is None:
            scale = out.detach().abs().mean()
        return F.cross_entropy(out / scale, y)

    return loss


@network("a loss whose closure keeps the scale of the first output", refused=FIRST)
def loss_closure() -> Network:
    return plain(), classes(), scaled()


def from_dict() -> Callable[[Tensor, Tensor], Tensor]:
    state: dict[str, Any] = {}

    def loss(out: Tensor, y: Tensor, *, power: float) -> Tensor:
        state.setdefault("scale", out.detach().abs().mean())
        return F.cross_entropy(out / state["scale"] ** power, y)

    return functools.partial(loss, power=1.0)


@network("a partial of a loss with a dict in its closure", refused=FIRST)
def loss_dict_in_closure() -> Network:
    return plain(), classes(), from_dict()


@functools.lru_cache(maxsize=8)
def table(length: int, width: int) -> Tensor:
    return torch.outer(torch.arange(length).double(), 1 / 10 ** torch.arange(width).double()).sin()


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.fc = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        return self.fc((h + table(h.shape[1], h.shape[2]).to(h)).mean(1))


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(9, (4, 5)), torch.randint(3, (4,))


@network("a table of places by lru_cache, a function of sizes")
def cached_table() -> Network:
    return Places(), words(), F.cross_entropy


class Rotary(nn.Module):
    """Caches that are built again for another length; a mask for the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / 10 ** (torch.arange(0, 4, 2) / 4), persistent=False)
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)
        self.o = nn.Linear(4, 4)
        self.length = 0
        self.cos = None
        self.sin = None
        self.masks: dict[int, Tensor] = {}

    def _tables(self, length: int) -> None:
        if length != self.length:
            angles = torch.outer(torch.arange(length).to(self.inverse), self.inverse).repeat(1, 2)
            self.length = length
            self.cos = angles.cos()
            self.sin = angles.sin()
        if length not in self.masks:
            self.masks[length] = torch.ones(length, length, dtype=torch.bool).triu(1)

    def _rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        self._tables(x.shape[1])
        scores = self._rotated(self.q(x)) @ self._rotated(self.k(x)).transpose(1, 2) / 2
        self.attention = scores.masked_fill(self.masks[x.shape[1]], -torch.inf).softmax(-1)
        return self.o(self.attention @ x).mean(1)


@network("rotary caches and masks by length, and the last attention kept to look at")
def rotary_cache() -> Network:
    return Rotary(), (torch.randn(4, 5, 4), torch.randn(4, 4)), F.mse_loss


class Counted(nn.Module):
    """Counters, logs and flags that nothing is computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.calls = 0
        self.history = []
        self.is_told = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.is_told:
            self.is_told = True
            self.device = x.device
        h = torch.tanh(self.a(x.to(self.device)))
        self.history.append(h.detach())
        return self.b(h)


@network("a counter, a history, and a flag of the first call, for nothing")
def counted() -> Network:
    return Counted(), classes(), F.cross_entropy


class Projected(nn.Module):
    """What is cached of weights that are not trained stays what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.frozen.requires_grad_(False)
        self.projection: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.projection is None:
            self.projection = F.normalize(self.frozen.weight)
        return self.b(torch.tanh(F.linear(x, self.projection)))


@network("what the first call makes of weights that are not trained")
def cached_of_frozen() -> Network:
    return Projected(), classes(), F.cross_entropy


class Drifting(nn.Module):
    """Averages in buffers, written at every call: the first call is as all others."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(h.mean(0), 0.1)
        return self.b(h - self.mean)


@network("an average in a buffer that every call writes", mixes=True, refused="state|batch|mean")
def written_at_every_call() -> Network:
    return Drifting(), classes(), F.cross_entropy


_MEANS: dict[str, Tensor] = {}
_MEAN: Tensor | None = None
_NORMALISER = Normaliser()
_CALLS = 0


class InGlobal(Centred):
    def shift(self, x: Tensor) -> Tensor:
        global _MEAN
        if _MEAN is None:
            _MEAN = x.mean(0, keepdim=True).detach()
        return _MEAN


@network("the mean of the first batch, in a global variable", refused=FIRST)
def in_global() -> Network:
    return InGlobal(), classes(), F.cross_entropy


def mean_of_first(x: Tensor) -> Tensor:
    if "mu" not in _MEANS:
        _MEANS["mu"] = x.mean(0, keepdim=True).detach()
    return _MEANS["mu"]


class InGlobalDict(Centred):
    def shift(self, x: Tensor) -> Tensor:
        return mean_of_first(x)


@network("the mean of the first batch, in a global dict that a function beside the module fills", refused=FIRST)
def in_global_dict() -> Network:
    return InGlobalDict(), classes(), F.cross_entropy


class InGlobalObject(Centred):
    def shift(self, x: Tensor) -> Tensor:
        return _NORMALISER(x)


@network("the mean of the first batch, in a global object", refused=FIRST)
def in_global_object() -> Network:
    return InGlobalObject(), classes(), F.cross_entropy


class InClass(Centred):
    mu: Tensor | None = None

    def shift(self, x: Tensor) -> Tensor:
        if InClass.mu is None:
            InClass.mu = x.mean(0, keepdim=True).detach()
        return InClass.mu


@network("the mean of the first batch, in an attribute of the class", refused=FIRST)
def in_class() -> Network:
    return InClass(), classes(), F.cross_entropy


class InClassDict(Centred):
    kept: ClassVar[dict[str, Tensor]] = {}

    def shift(self, x: Tensor) -> Tensor:
        return self.kept.setdefault("mu", x.mean(0, keepdim=True).detach())


@network("the mean of the first batch, in a dict of the class", refused=FIRST)
def in_class_dict() -> Network:
    return InClassDict(), classes(), F.cross_entropy


class InFunction(Centred):
    def shift(self, x: Tensor) -> Tensor:
        own = shape_mean
        if not hasattr(own, "mu"):
            own.mu = x.mean(0, keepdim=True).detach()
        return own.mu


def shape_mean() -> None:
    """Has an attribute, as functions may."""


@network("the mean of the first batch, in an attribute of a function", refused=FIRST)
def in_function() -> Network:
    return InFunction(), classes(), F.cross_entropy


class Warmed(Centred):
    def shift(self, x: Tensor) -> Tensor:
        global _CALLS
        _CALLS += 1
        return x.mean(-1, keepdim=True) * min(1.0, _CALLS / 1e15)


@network("a warm-up over very many calls, counted in a global variable", refused="changes itself from call to call")
def warm_up_in_global() -> Network:
    return Warmed(), classes(), F.cross_entropy


_TABLES: dict[int, Tensor] = {}


class GlobalTables(Centred):
    count: ClassVar[int] = 0

    def shift(self, x: Tensor) -> Tensor:
        GlobalTables.count += 1
        if x.shape[1] not in _TABLES:
            _TABLES[x.shape[1]] = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return _TABLES[x.shape[1]]


@network("a table by length in a global dict, and a count in the class")
def global_tables() -> Network:
    return GlobalTables(), classes(), F.cross_entropy
