"""What a module keeps from its first call, so that later ones compute something else: no graph holds that.

A second call, of another batch and with other weights, is made twice: by the module that was called before, and by one
of which only tensors that were written in place remember that call, as a graph does.  Both must come out alike.  Where
the graph itself gives what the module does to the last bit (loss, gradients and buffers), it is that other one: so the
module need not be called a third time only because it counts its calls.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from planner.ir.errors import UnsupportedModelError
from profiler.capture.user_module import is_users_frame
from profiler.capture.user_state import Moved, UserState, refill
from profiler.source.model import LoadedModel

LossOf = Callable[[Mapping[str, Tensor]], Tensor]
_EPSILONS = 64
"""The same code run twice differs by less, of the largest number."""
CALLED_ONCE = "call it, and the loss, once on a batch before it is given: what they keep then stays"
"""What to do about a module that does something at its first call alone."""
_OF_OBJECTS = (
    "if no factory does so but the module itself is given, keep it in an attribute of the module first: what classes "
    "and global variables hold stays behind"
)
_MOST_TRIED = 32
_NUM_FACTORS = 65_521
"""A prime that hardly any dim of a weight is a multiple of: along each of its dims factors differ."""
FIRST = 0
LATER = 2
"""Seeds of the calls."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What came of a call.

    Attributes:
        tensors: gradients and buffers, by what they are and name.
        gradients: the names of the parameters that have one.
    """

    loss: Tensor
    tensors: Mapping[str, Tensor]
    error: str = ""
    gradients: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LaterCall:
    """A second call, with changed weights.

    Attributes:
        tensors: its batch.
        loss: by the module.
        gradients: the trained parameters that get one, by name; none where its backward was not run.
        is_by_graph: whether the graph gives that loss, its gradients and buffers to the last bit.
    """

    tensors: Mapping[str, Tensor]
    loss: Tensor
    gradients: frozenset[str]
    is_by_graph: bool


class FirstCall:
    """A module between its first call and the next.

    Args:
        loss_of, graph_loss_of: the loss of a batch by the module, and by its graph.
        before: the state that the module is in.

    Attributes:
        before, after: the state before the first call, and behind it.
        changed: names of what the first call changed in Python.
        moved: the numbers among that.
    """

    def __init__(self, model: LoadedModel, loss_of: LossOf, graph_loss_of: LossOf, before: UserState) -> None:
        self._model = model
        self._loss_of = loss_of
        self._graph_loss_of = graph_loss_of
        self.before = self.after = before
        self._buffers = self._named()
        self._left: dict[str, Tensor] = {}
        self.changed: list[str] = []
        self.moved: list[Moved] = []

    def note(self) -> None:
        """Takes the state that it is in for that after the first call."""
        self.changed = self.before.changed()
        self.moved = self.before.moved()
        self.after = UserState(self._model.stateful) if self.changed else self.before.read_again()
        self._left = {name: buffer.detach().clone() for name, buffer in self._named().items()}

    def later_call(self, whole: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> LaterCall | None:
        """A second call, with changed weights, which are not put back; None where the module runs on no other batch.

        Args:
            whole: the batch of the first call.
            rest: one of other samples, or the same.

        Raises:
            UnsupportedModelError: what the first call left in Python alters it.
        """
        change_weights(self._model)
        for tensors in _others(whole, rest):
            self.as_called()
            kept = self.call(tensors, has_gradients=bool(self.changed))
            if self.changed and _is_identical(kept, self.forgotten(tensors, self._graph_loss_of)):
                return LaterCall(tensors, kept.loss, kept.gradients, is_by_graph=True)
            fresh = self.forgotten(tensors) if self.changed else kept
            if not kept.error and _is_alike(kept, fresh):
                return LaterCall(tensors, kept.loss, kept.gradients, is_by_graph=False)
            if not fresh.error:
                raise _refusal(self._model, self, whole, tensors, (kept, fresh))
        return None

    def as_called(self) -> None:
        """As after the first call."""
        self.after.forget_all()
        self.after.values()
        self._write_buffers()

    def forgotten(self, tensors: Mapping[str, Tensor], loss_of: LossOf | None = None) -> _Outcome:
        """As :meth:`call`, by a module of which only what the first call wrote in place remembers that."""
        self.as_called()
        self.before.forget_all()
        self._write_buffers()
        return self.call(tensors, loss_of=loss_of)

    def without(self, name: str) -> None:
        """As after the first call, but for one value."""
        self.as_called()
        self.before.forget(name)
        self._write_buffers()

    def _write_buffers(self) -> None:
        with torch.no_grad():
            for name, buffer in self._named().items():
                left = self._left.get(name)
                if left is not None and left.shape == buffer.shape:
                    refill(buffer, left)

    def call(
        self,
        tensors: Mapping[str, Tensor],
        seed: int = LATER,
        *,
        loss_of: LossOf | None = None,
        has_gradients: bool = True,
    ) -> _Outcome:
        """One call; parameters that it writes to are put back.

        Args:
            loss_of: by the module, or its graph; None: by the module.
            has_gradients: whether its backward is run as well.
        """
        owners = self._model.owners.items()
        trained = {prefix + name: p for prefix, each in owners for name, p in each.named_parameters()}
        for parameter in trained.values():
            parameter.grad = None
        torch.manual_seed(seed)
        nothing = torch.full((), math.nan)
        try:
            loss = (loss_of or self._loss_of)(tensors)
            if has_gradients and loss.requires_grad and loss.numel() == 1:
                loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        except Exception as error:  # noqa: BLE001 - the user's module may refuse another batch in any way
            return _Outcome(nothing, {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        gradients = {name: p.grad.detach() for name, p in trained.items() if p.grad is not None}
        made = {f"gradient {name}": each for name, each in gradients.items()}
        left = {f"buffer {name}": b.detach().clone() for name, b in self._named().items() if name in self._buffers}
        return _Outcome(loss.detach(), {**made, **left}, gradients=frozenset(gradients))

    def _named(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters, which a graph may write to."""
        named: dict[str, Tensor] = {}
        for k, module in enumerate(self._model.owners.values()):
            named |= {f"{k} {name}": buffer for name, buffer in module.named_buffers()}
            named |= {f"{k} {name}": each for name, each in module.named_parameters() if not each.requires_grad}
        return named


def _is_identical(a: _Outcome, b: _Outcome) -> bool:
    """Whether two calls came to their end with the same numbers, each to the last bit."""
    if a.error or b.error or a.tensors.keys() != b.tensors.keys():
        return False
    return is_equal(a.loss, b.loss) and all(is_equal(value, b.tensors[name]) for name, value in a.tensors.items())


def _is_alike(a: _Outcome, b: _Outcome) -> bool:
    if a.error or b.error or a.tensors.keys() != b.tensors.keys():
        return bool(a.error) and bool(b.error)
    pairs = [(a.loss, b.loss), *((value, b.tensors[name]) for name, value in a.tensors.items())]
    differing = [(x, y) for x, y in pairs if not is_equal(x, y)]
    scale = max((_largest(x) for x, _ in pairs[1:]), default=0.0) if differing else 0.0
    return all(_is_close(x, y, scale) for x, y in differing)


def is_equal(x: Tensor, y: Tensor) -> bool:
    """Whether each number is the same: asked first, since it takes a fraction of what a comparison by size does."""
    return x.dtype == y.dtype and x.layout is y.layout is torch.strided and torch.equal(x, y)


def _is_close(x: Tensor, y: Tensor, scale: float) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if not (x.is_floating_point() or x.is_complex()) or x.layout is not torch.strided:
        return x.layout is not torch.strided or torch.equal(x, y)
    allowed = _EPSILONS * torch.finfo(x.dtype).eps
    return torch.allclose(x, y, rtol=allowed, atol=allowed * max(_largest(x), 1e-3 * scale), equal_nan=True)


def _largest(x: Tensor) -> float:
    if x.layout is not torch.strided or not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return 0.0
    return float(x.abs().nan_to_num(posinf=0.0).max())


def _others(whole: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Other batches, the one that differs most first, and at last the same one."""
    turned = {name: tensor.flip(0) if tensor.ndim else tensor for name, tensor in rest.items()}
    generator = torch.Generator().manual_seed(0)

    def smaller(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        factors = 0.6 + 0.4 * torch.rand(tensor.shape, generator=generator)
        return tensor * factors.to(tensor)

    yield {name: smaller(tensor) for name, tensor in turned.items()}
    yield turned
    yield whole


@torch.no_grad()
def change_weights(model: LoadedModel) -> None:
    """Each by up to a half of itself, with its sign; what is zero becomes a little more.

    Factors are drawn once, and repeated along each weight, beginning with another one.  That shows as much as if each
    entry had drawn its own: neighbours along any dim get unlike ones, and so do two weights of one shape, so norms,
    ratios and products of rows, columns or weights all become others.
    """
    drawn = torch.rand(_NUM_FACTORS, generator=torch.Generator().manual_seed(0)).add_(0.5)
    every = [each for module in model.owners.values() for each in module.parameters() if each.requires_grad]
    for number, parameter in enumerate(every):
        if parameter.is_floating_point() or parameter.is_complex():
            size = parameter.numel()
            repeated = drawn.roll(number).repeat(-(-size // _NUM_FACTORS))[:size].view(parameter.shape)
            factors = repeated.to(parameter.device, parameter.dtype)
            is_zero = parameter == 0
            parameter.mul_(factors)
            parameter[is_zero] = 0.02 * factors[is_zero]


def _refusal(
    model: LoadedModel,
    memory: FirstCall,
    whole: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    both: tuple[_Outcome, _Outcome],
) -> UnsupportedModelError:
    kept, fresh = both
    names = []
    for name in memory.changed[:_MOST_TRIED]:
        memory.without(name)
        if not _is_alike(kept, memory.call(tensors)):
            names.append(name)
    names = names or memory.changed
    is_shared = not memory.before.shared().isdisjoint(names)
    memory.before.restore()
    line = _line(memory, names[0], whole)
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    details = [f"the first call changes {shown}" + (f", {line}" if line else "")]
    if kept.error:
        details.append(f"a second call then raises {kept.error}")
    else:
        details.append(f"loss of a second call: {kept.loss.item():.9g}, {fresh.loss.item():.9g} without what is kept")
    in_buffers = "keep what changes from call to call in buffers, written in place at every call: self.mean.copy_(...)"
    if kept.error or _changes_on(model, memory, whole, tensors):
        return UnsupportedModelError(
            "the module computes something else when it is called again, by what it keeps from its first call",
            [*details, "it keeps something else from every call, and no graph holds that"],
            [in_buffers],
        )
    return UnsupportedModelError(
        "the module computes something else when it is called again, by what it keeps from its first call",
        details,
        [CALLED_ONCE, *[_OF_OBJECTS] * is_shared, in_buffers],
    )


def _changes_on(
    model: LoadedModel, memory: FirstCall, whole: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> bool:
    """Whether the module that was called once would be refused as well."""
    memory.as_called()
    second = FirstCall(model, memory._loss_of, memory._graph_loss_of, UserState(model.stateful))
    second.call(tensors, FIRST)
    second.note()
    change_weights(model)
    if not second.changed:
        return False
    second.as_called()
    return not _is_alike(second.call(whole), second.forgotten(whole))


def _line(memory: FirstCall, name: str, whole: Mapping[str, Tensor]) -> str:
    """The user's line behind which ``name`` has another value; empty where that is not to be seen."""
    place = ""
    last: FrameType | None = None
    line = 0

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal place, last, line
        if place:
            return None
        if last is not None and name in memory.before.changed():
            code = last.f_code
            place = f"at {code.co_filename}:{line} in {code.co_name}"
            return None
        last = frame
        line = frame.f_lineno
        return local

    def entered(frame: FrameType, event: str, argument: Any) -> Any:
        return local if not place and is_users_frame(frame) else None

    traced = sys.gettrace()
    sys.settrace(entered)
    try:
        memory.call(whole, FIRST)
    finally:
        sys.settrace(traced)
    return place
