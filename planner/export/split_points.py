"""Where stages begin, as marks on the user's modules: what ``torch.distributed.pipelining.pipeline`` splits at.

torch splits before or after the call of a module, so a cut between two layers can be told to it where the first layer
behind it begins a module, or the last one before it ends one.  Layers carry the paths of modules, but a layer such as
``relu`` may as well be an operator that a larger module calls itself; only what is certain counts:

- a layer that uses the parameters ``PATH.weight``, ``PATH.bias`` is the call of the module ``PATH``;
- a layer whose last name is not that of its operator (``features.1`` is ``relu``) is the call of a module;
- a module calls an operator itself, or a part named like it, where a layer is called ``PATH.operator``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.ir.graph import Graph, Layer

BEGINNING, END = "BEGINNING", "END"
_LOSS = "loss"
_NUMBER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class SplitPoint:
    """Where a stage begins.

    Attributes:
        module: path of a module, called once; empty if the cut falls on no certain boundary of modules.
        point: ``BEGINNING`` or ``END`` of that module, torch's own words.
        before, after: the layers on both sides of the cut.
    """

    stage: int
    module: str
    point: str
    before: str
    after: str


def is_loss(graph: Graph, layer: str) -> bool:
    """Whether the loss function computes ``layer``, which no part of the model does."""
    return layer == graph.loss or layer == _LOSS or layer.startswith(f"{_LOSS}.")


def split_points(graph: Graph, stage_of: Mapping[str, int]) -> tuple[SplitPoint, ...]:
    """Where each stage but the first begins; without a module if stages are no runs of layers in execution order."""
    names = [layer.name for layer in graph.layers]
    stages = [stage_of[name] for name in names]
    modules = _Modules(graph.layers)
    found: list[SplitPoint] = []
    for position, (a, b) in enumerate(pairwise(stages), 1):
        if a != b:
            taken = {point.module for point in found}
            candidates = (each for each in modules.boundaries(position) if each[1] not in taken)  # torch takes one each
            point, module = next(candidates, (BEGINNING, "")) if stages == sorted(stages) else (BEGINNING, "")
            found.append(SplitPoint(b, module, point, names[position - 1], names[position]))
    return tuple(found)


class _Modules:
    """The modules that layers are calls of."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._names = [layer.name for layer in layers]
        self._owners = [_owner(layer) for layer in layers]
        self._operations = [_operation(layer) for layer in layers]
        self._num_owned = Counter(owner for owner in self._owners if owner)
        self._numbered = {_plain(name) for name in self._names if _plain(name) != name}

    def boundaries(self, position: int) -> Iterator[tuple[str, str]]:
        """(point, module) of all that begin or end at a cut before the layer of number ``position``."""
        before, after = position - 1, position
        if module := self._called(after):
            yield BEGINNING, module
        if module := self._called(before):
            yield END, module
        for module in _around(self._names[after]):
            if self._encloses(module) and not any(_inside(name, module) for name in self._names[:after]):
                yield BEGINNING, module
        for module in _around(self._names[before]):
            if self._encloses(module) and not any(_inside(name, module) for name in self._names[after:]):
                yield END, module

    def _called(self, index: int) -> str:
        """The module that this layer is the only call of, if that is certain."""
        name, owner = self._names[index], self._owners[index]
        if owner in (name, _plain(name)):
            return owner if self._num_owned[owner] == 1 else ""
        repeated = name in self._numbered or (_plain(name) != name and _plain(name) in self._names)
        is_operator = _plain(_last(name)) == self._operations[index]
        return "" if owner or repeated or is_operator else name

    def _encloses(self, module: str) -> bool:
        """Whether ``module`` is certainly called, and once."""
        inside = [index for index, name in enumerate(self._names) if _inside(name, module)]
        owners = [self._owners[index] for index in inside if self._owners[index]]
        calls = any(
            _parent(self._names[index]) == module and _plain(_last(self._names[index])) == self._operations[index]
            for index in inside
        )
        return calls and bool(owners) and all(self._num_owned[owner] == 1 for owner in owners)


def _owner(layer: Layer) -> str:
    """The module whose parameters the layer uses; empty if there are none, or of several."""
    owners = {_parent(name) for name in layer.parameters}
    return owners.pop() if len(owners) == 1 else ""


def _operation(layer: Layer) -> str:
    """``relu`` of the operator ``aten.relu.default``."""
    return str(layer.attributes.get("op", "")).removeprefix("aten.").partition(".")[0].strip("_")


def _around(name: str) -> tuple[str, ...]:
    """The paths around a layer, innermost first."""
    parts = name.split(".")
    return tuple(".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))


def _inside(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _plain(name: str) -> str:
    """Without the number of a layer that is not the first of its name."""
    return _NUMBER.sub("", name)
