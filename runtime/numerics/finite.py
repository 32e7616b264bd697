"""Numbers that are NaN or infinite: found before an update is made of them, and where in the step they first appeared.

What looks at every step is :func:`all_finite`, a sum of each gradient and of the losses.  Only where that is not
finite, the step is run once more by all ranks, from the same weights, batch and random numbers, and each stage's
function is run operator by operator under an :class:`Examiner`:

    loss NaN  <-  add  <-  norm  <-  x (of stage 0)        values of the same kind, walked back
                                     x <- gelu <- linear   fc.weight is infinite: it begins in layer fc

An operator made NaN if none of its inputs was, and likewise infinity; so a mask of -inf in front of a softmax is not
blamed.  Where a value came from another stage, the walk goes on in what its ranks found (:func:`first_of`).  Where the
losses are finite, the first gradient in the order of backward is named instead, and the layer whose backward made it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from planner.ir.errors import NotFiniteError


class OnNan(StrEnum):
    """What is done about a step whose loss or gradients are NaN or infinite.

    ``STOP``: nothing is updated by numbers that are not finite, and all ranks raise :class:`NotFiniteError`.  Ranks
    whose own gradients are finite may have updated by then, since they wait for nobody: nothing is saved, and the
    engine cannot be used any more.  Where gradients are clipped, no rank updates.

    ``SKIP``: no rank updates.  Parameters, what optimisers keep, schedules of learning rates and the buffers that
    layers write are as they were before the step, which counts as done all the same, also for random numbers.
    """

    STOP = "stop"
    SKIP = "skip"
    IGNORE = "ignore"


FINITE = 0
INFINITE = 1
NAN = 2
WORDS: Mapping[int, str] = {INFINITE: "infinity", NAN: "NaN"}

_HALVES = (torch.float16, torch.bfloat16)
_SMALL = 1 << 14
"""Tensors of fewer elements are put together first: a call costs more than their sum."""


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is NaN or infinite, for one pass over all of them and one wait for their device."""
    values = [each.coalesce().values() if each.is_sparse else each for each in tensors]
    floating = [each for each in values if each.is_floating_point() or each.is_complex()]
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    large: list[Tensor] = []
    for each in floating:
        if each.numel() < _SMALL:
            small.setdefault((each.dtype, each.device), []).append(each.reshape(-1))
        else:
            large.append(each)
    sums = [_sum(each) for each in (*large, *(torch.cat(alike) for alike in small.values()))]
    return not sums or math.isfinite(sum(sums[1:], start=sums[0]).abs().item())


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=torch.float32) if tensor.dtype in _HALVES else tensor.sum()


def kind_of(value: Any) -> int:
    """``FINITE``, ``INFINITE`` or ``NAN``, whichever an element of a tensor, or of several, is worst."""
    if isinstance(value, (tuple, list)):
        return max(map(kind_of, value), default=FINITE)
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return FINITE
    values = value.detach()
    if torch.isnan(values).any():
        return NAN
    return FINITE if torch.isfinite(values).all() else INFINITE


@dataclass(frozen=True, slots=True)
class TracedFunction:
    """The operators of a stage's function.

    Attributes:
        graph: one node an operator; the function's arguments are its placeholders, in order.
        layers: the layer of each node, by name; what makes sizes has none.
        ops: the operator of each, as the capture has it.
    """

    graph: fx.Graph
    layers: Mapping[str, str]
    ops: Mapping[str, str]


class Function(Protocol):
    """A stage's function, as :class:`runtime.stage.cut.StageFunction` has it."""

    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def attributes(self) -> Mapping[str, Tensor | fx.GraphModule]: ...
    @property
    def mutated(self) -> frozenset[str]: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """What one rank found of one micro-batch.

    Attributes:
        value: that the stage makes and that is not finite; empty: a gradient.
        kind: ``INFINITE`` or ``NAN``.
        layer: where it appeared on this rank; empty: it came from elsewhere.
        op: the operator.
        read: what is to be said of what it reads.
        via: the stage's input that it came by.
    """

    rank: int
    microbatch: int
    value: str
    kind: int
    layer: str = ""
    op: str = ""
    read: str = ""
    via: str = ""


@dataclass(slots=True)
class Examiner:
    """Runs a stage's function operator by operator, and notes where numbers stop being finite.

    Attributes:
        values: by micro-batch and name of what the stage makes.
        gradients: by micro-batch, the first in the order of backward; None: it came from another stage.
    """

    rank: int
    values: dict[tuple[int, str], Origin] = field(default_factory=dict)
    gradients: dict[int, Origin | None] = field(default_factory=dict)
    _readers: dict[str, str] = field(default_factory=dict)
    _hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def origins(self) -> list[Origin]:
        """All of it."""
        return [*self.values.values(), *(each for each in self.gradients.values() if each is not None)]

    def run(
        self, traced: TracedFunction, function: Function, microbatch: int, arguments: Sequence[Any]
    ) -> tuple[Tensor, ...]:
        """What the function gives."""
        names = [*function.inputs, *function.attributes]
        holders = [node for node in traced.graph.nodes if node.op == "placeholder"]
        called = dict(zip(holders[len(holders) - len(names) :], names, strict=True))
        self._readers |= {
            name: next((layer for user in node.users if (layer := traced.layers.get(user.name))), "")
            for node, name in called.items()
        }
        watching = _Watching(traced.graph, partial(self._hook, traced, microbatch))
        result: tuple[Tensor, ...] = watching.run(*arguments)
        made: Any = next(node for node in traced.graph.nodes if node.op == "output").args[0]
        for name, node in zip(function.outputs, made, strict=True):
            if watching.kinds[node]:
                origin = _walked(node, watching.kinds, called, function, traced)
                self.values[microbatch, name] = replace(origin, rank=self.rank, microbatch=microbatch, value=name)
        return result

    def backward(self, microbatch: int, parameters: Mapping[str, Tensor]) -> None:
        """Call when the gradients of a micro-batch have been added to those of ``parameters``."""
        bad = next((name for name, each in parameters.items() if kind_of(each.grad)), None)
        if bad is not None and not self.gradients:
            kind = kind_of(parameters[bad].grad)
            layer = self._readers.get(bad, bad)
            self.gradients[microbatch] = Origin(self.rank, microbatch, "", kind, layer, f"gradient of {bad}")

    def close(self) -> None:
        """Takes its hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, traced: TracedFunction, microbatch: int, node: fx.Node, value: Any) -> None:
        """Has the gradient of what ``node`` made looked at, unless that is a parameter, which outlives the step."""
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, Tensor) and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                register: Callable[[Callable[[Tensor], None]], RemovableHandle] = tensor.register_hook
                self._hooks.append(register(partial(self._look, traced, microbatch, node)))

    def _look(self, traced: TracedFunction, microbatch: int, node: fx.Node, gradient: Tensor) -> None:
        if microbatch in self.gradients or not (kind := kind_of(gradient)):
            return
        users = [user for user in node.users if user.op != "output"]
        layers = list(dict.fromkeys(traced.layers.get(user.name, user.name) for user in users))
        if not layers:
            self.gradients[microbatch] = None
            return
        ops = dict.fromkeys(op for user in users if (op := traced.ops.get(user.name)))
        read = f"the same as {', '.join(layers[1:])}, where it may have begun too" if layers[1:] else ""
        self.gradients[microbatch] = Origin(self.rank, microbatch, "", kind, layers[0], " or ".join(ops), read)


class _Watching(fx.Interpreter):
    def __init__(self, graph: fx.Graph, note: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(nn.Module(), graph=graph)
        self.kinds: dict[fx.Node, int] = {}
        self._note = note

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.kinds[n] = kind_of(value)
        if n.op != "output":
            self._note(n, value)
        return value


def _walked(
    node: fx.Node,
    kinds: Mapping[fx.Node, int],
    called: Mapping[fx.Node, str],
    function: Function,
    traced: TracedFunction,
) -> Origin:
    """From what is not finite back to the operator of which no input is as bad, or that reads such an attribute.

    Attributes that layers write do not count: they were written when the step ran first.
    """
    kind = kinds[node]
    while node.op != "placeholder":
        inputs = [each for each in node.all_input_nodes if kinds[each] and called.get(each) not in function.mutated]
        worse = [each for each in inputs if kinds[each] >= kind]
        if not worse or any(called.get(each) in function.attributes for each in worse):
            sources = ((called.get(each) or traced.layers.get(each.name, each.name), kinds[each]) for each in inputs)
            texts = (f"{name}: {WORDS[of]}" for name, of in sources)
            layer = traced.layers.get(node.name, node.name)
            return Origin(0, 0, "", kind, layer, traced.ops.get(node.name, ""), ", ".join(dict.fromkeys(texts)))
        node = worse[0]
    return Origin(0, 0, "", kind, via=called.get(node, node.name))


def first_of(origins: Sequence[Origin], loss: str, order: Mapping[str, int]) -> Origin | None:
    """Where it began, of what all ranks found; None: it did not come again.

    Args:
        loss: the value that is the loss.
        order: of layers, by name, in which forward runs them.
    """

    def place(origin: Origin) -> int:
        return order.get(origin.layer, len(order))

    values: dict[tuple[int, str], list[Origin]] = {}
    for each in origins:
        if each.value:
            values.setdefault((each.microbatch, each.value), []).append(each)
    for microbatch in sorted(m for m, name in values if name == loss):
        name = loss
        while True:  # ends: each value is made of earlier ones
            worst = max(each.kind for each in values[microbatch, name])
            here = [each for each in values[microbatch, name] if each.kind == worst]
            relayed = next((each for each in here if each.via), None)
            if relayed is None:
                return min(here, key=lambda each: (place(each), each.rank))
            if (microbatch, relayed.via) not in values:
                return relayed
            name = relayed.via  # others of the stage may have it from this rank, in what they exchange inside layers
    gradients = [each for each in origins if not each.value]
    return min(gradients, key=lambda each: (each.microbatch, -place(each), each.rank), default=None)


@dataclass(frozen=True, slots=True)
class NanReport:
    """What one rank says of a step.

    Attributes:
        loss: of the step; None on ranks that do not make it.
        gradients: names of parameters, of those that it updates, whose gradients are not finite.
        origins: what it found when the step was run again.
        trouble: why it could not be run again; empty if it could.
    """

    rank: int
    loss: float | None
    gradients: tuple[str, ...]
    origins: tuple[Origin, ...] = ()
    trouble: str = ""

    def encoded(self) -> Tensor:
        """As bytes, which ranks can tell each other."""
        return torch.tensor(list(json.dumps(asdict(self)).encode()), dtype=torch.uint8)

    @classmethod
    def decoded(cls, text: Tensor) -> NanReport:
        """What :meth:`encoded` gave."""
        record = json.loads(bytes(text.tolist()))
        origins = tuple(Origin(**each) for each in record.pop("origins"))
        return cls(**{**record, "gradients": tuple(record["gradients"]), "origins": origins})


_MOST_NAMED = 3


def explained(
    step: int, reports: Sequence[NanReport], loss: str, order: Mapping[str, int], where: Callable[[int, str], str]
) -> NotFiniteError:
    """The error of a step, the same on all ranks.

    Args:
        step: counted from 1.
        where: from a rank and a layer, the rank with its device and stage.
    """
    first = first_of([origin for report in reports for origin in report.origins], loss, order)
    losses = [report.loss for report in reports if report.loss is not None]
    details = [f"the loss is {losses[0]}"] if losses else []
    if first is None:
        title = f"step {step} makes a loss or gradients that are NaN or infinite"
        troubles = [report.trouble for report in reports if report.trouble]
        details += [
            f"where is not known: {troubles[0] if troubles else 'it did not come again when the step was run again'}"
        ]
    elif not first.layer:
        title = f"step {step}: the batch has {WORDS[first.kind]} in {first.via}, micro-batch {first.microbatch}"
    else:
        way = "forward" if first.value else "backward"
        op = f" ({first.op})" if first.op else ""
        place = where(first.rank, first.layer)
        begun = f"{WORDS[first.kind]} first in layer {first.layer}{op}"
        title = f"step {step}: {begun}, {way} of micro-batch {first.microbatch}, {place}"
        details += [f"what it reads: {first.read}"] if first.read else []
    for report in reports:
        if report.gradients:
            names = ", ".join(report.gradients[:_MOST_NAMED]) + (", ..." if len(report.gradients) > _MOST_NAMED else "")
            details.append(f"rank {report.rank} had no finite gradients of {names}")
    remedies = ["mend the data"] if first is not None and not first.layer else []
    return NotFiniteError(title, details, [*remedies, *NotFiniteError.usual])
