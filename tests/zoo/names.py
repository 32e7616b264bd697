"""Names that Python reads as something else: keywords, ligatures, no names at all, and such as halopipe has itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.entries import network

Made = tuple[Any, ...]


def _with_classes(module: nn.Module, inputs: object = None) -> Made:
    return module, (torch.randn(5, 6) if inputs is None else inputs, torch.arange(5) % 4), nn.CrossEntropyLoss()


class Chain(nn.Module):
    """Linear layers of these names, one after another."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.order = tuple(names)
        for name in names:
            self.add_module(name, nn.Linear(6, 6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = getattr(self, name)(x).tanh()
        return self.head(x)


class Blocks(nn.Module):
    """The same in a dictionary of modules."""

    def __init__(self, keys: Sequence[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({key: nn.Linear(6, 6) for key in keys})
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x).tanh()
        return self.head(x)


@network("modules named by keywords")
def keywords() -> Made:
    return _with_classes(Chain(("in", "class", "lambda")))


@network("modules named by words that are values")
def values() -> Made:
    return _with_classes(Chain(("None", "True", "import")))


@network("modules whose names would be one if keywords were renamed")
def underscored() -> Made:
    return _with_classes(Chain(("class", "class_", "_class")))


@network("modules with letters that Python puts into another form, and of other alphabets")
def letters() -> Made:
    return _with_classes(Chain(("\ufb01", "fi", "ключ", "π")))


@network("modules named as operators and arguments of halopipe are")
def own_words() -> Made:
    return _with_classes(Chain(("loss", "tanh", "tanh_2", "num_samples", "module")))


@network("a dictionary of modules whose keys are no names")
def keys() -> Made:
    return _with_classes(Blocks(("1x1", "a-b", "a b", "a[0]", "a,b", "x*y")))


@network("a dictionary of modules whose keys are keywords, and what modules have themselves")
def reserved() -> Made:
    return _with_classes(Blocks(("in", "self", "graph", "code", "loss_fn")))


@network("a dictionary of modules with quotes, colons and line ends in its keys")
def marks() -> Made:
    return _with_classes(Blocks(('q"t', "it's", "a:1", "a", "x=y", "a\nb", "a\\b")))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("lambda", nn.Parameter(torch.rand(6)))
        self.register_buffer("from", torch.rand(6))
        self.scales = nn.ParameterDict({key: nn.Parameter(torch.rand(6)) for key in ("is", "1", "a-b")})
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x * getattr(self, "lambda") + getattr(self, "from")
        for scale in self.scales.values():
            x = x * scale
        return self.head(x)


@network("parameters, buffers and keys of a ParameterDict named by keywords")
def parameters() -> Made:
    return _with_classes(Scaled())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("with", nn.Linear(6, 6))
        self.register_buffer("try", torch.zeros(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        layer = getattr(self, "with")
        count = getattr(self, "try")
        with torch.no_grad():
            count.add_(1)
            y = layer(x)
        return self.head(layer(x) + y + count)


@network(
    "a buffer named by a keyword that is written inside of no_grad",
    mixes=True,
    refused=dict.fromkeys(("pipeline", "split backward"), "is used by layer .* on stage 0"),
)
def written() -> Made:
    return _with_classes(Counting())


class Read(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.a(sum(batch.values()))


@network("keys of a batch that are keywords, no names, or names of layers")
def inputs() -> Made:
    keys = ("in", "lambda", "a", "a b", "x:1", "num_samples", "")
    return _with_classes(Read(), {key: torch.randn(5, 6) for key in keys})


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.a(batch["from"] * batch["is"])


@network("keyword arguments named by keywords")
def arguments() -> Made:
    return _with_classes(Keyed(), {"from": torch.randn(5, 6), "is": torch.randn(5, 6)})


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"class": self.a(x)}


class Weighing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("lambda", nn.Parameter(torch.rand(4)))
        self.add_module("is", nn.Linear(4, 4))

    def forward(self, output: dict[str, Tensor], aims: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(getattr(self, "is")(output["class"] * getattr(self, "lambda")), aims["return"])


@network("a loss module, its output and its targets named by keywords")
def losses() -> Made:
    return Returning(), (torch.randn(5, 6), {"return": torch.arange(5) % 4}), Weighing().double()
