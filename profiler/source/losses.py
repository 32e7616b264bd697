"""The loss that is trained: the user's own, summed where there are several, or what the module computes itself.

A loop of one's own says by its names what is trained: ``loss, accuracy = loss_fn(output, targets)``.  Here a tuple, or
a dict without ``"loss"``, is a sum of terms, as detection networks return them.  So each of its numbers must be one:
what has no gradient (an accuracy, a count, a detached copy for a chart) is none, and neither is a number that another
one is made of already (``loss, reconstruction, divergence`` of a variational autoencoder).  Both are refused.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from planner.ir.errors import UnsupportedModelError
from profiler.source.structure import leaves

_THE_LOSS_ALONE = "return the loss alone, or a dict with 'loss', of which the other values are left out"
_LOOKED_AT = "what is only looked at: run.evaluate(batch, metric=...), halopipe run --eval-metric"


@dataclass(frozen=True, slots=True)
class TrainedLoss:
    """The loss that is trained: the user's own, summed where there are several.

    Attributes:
        function: as it was given, of output and targets; or :func:`own_loss`.
        unpacked: the user's targets are one tensor, which may also come as the tuple that a step is fed.
    """

    function: Callable[..., Any]
    unpacked: bool = False

    def __call__(self, output: Any, targets: Any = ()) -> Tensor:
        return summed(self.function(output, targets[0] if self.unpacked and isinstance(targets, tuple) else targets))


def summed(losses: Any) -> Tensor:
    """A loss function's result as one number: of a dict its ``loss``, else the sum of what it or a tuple holds.

    Raises:
        UnsupportedModelError: it holds something else than losses, or numbers that are no terms of their sum.
    """
    if isinstance(losses, Tensor) or not isinstance(losses, (Mapping, tuple, list)):
        return cast("Tensor", losses)  # what is no tensor is refused by the capture
    if isinstance(losses, Mapping) and _is_number(losses.get("loss")):
        return cast("Tensor", losses["loss"])
    named = dict(losses) if isinstance(losses, Mapping) else dict(enumerate(losses))
    odd = [name for name, value in named.items() if not _is_number(value)]
    if odd or not named:
        value = named[odd[0]] if odd else None
        kind = f"tensor of {value.ndim} dims, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise UnsupportedModelError(
            "the loss is not a sum of numbers",
            [f"{odd[0]!r} is a {kind}" if odd else f"an empty {type(losses).__name__}"],
            [
                "return one loss, or a dict or tuple of losses, each a tensor without dims: loss.mean()",
                *([_THE_LOSS_ALONE, _LOOKED_AT] if len(named) > 1 else []),
            ],
        )
    _require_terms(type(losses).__name__, named)
    return cast("Tensor", functools.reduce(operator.add, named.values()))


def _require_terms(kind: str, named: Mapping[Any, Tensor]) -> None:
    """Raises :class:`UnsupportedModelError` where some numbers are no terms of their sum, though others are.

    Where there are no gradients, as in evaluation, nothing tells; there the capture has judged before.
    """
    if len(named) < 2 or not any(value.requires_grad for value in named.values()):
        return
    still = [name for name, value in named.items() if not value.requires_grad]
    if still:
        raise UnsupportedModelError(
            f"the loss is a {kind} of numbers, whose sum is trained, and some of them have no gradient",
            [f"{', '.join(map(repr, still))} of {', '.join(map(repr, named))}: as an accuracy or a count has none"],
            [_THE_LOSS_ALONE, _LOOKED_AT],
        )
    for name, value in named.items():
        behind = frozenset(_behind(value.grad_fn))
        twice = next((other for other, term in named.items() if other != name and term.grad_fn in behind), None)
        if twice is not None:
            raise UnsupportedModelError(
                f"the loss is a {kind} of numbers, whose sum is trained, and would count one of them twice",
                [f"{name!r} is made of {twice!r} already"],
                [_THE_LOSS_ALONE, _LOOKED_AT],
            )


def _behind(function: Any) -> Iterator[Any]:
    visited = {None}
    waiting = [function]
    while waiting:
        each = waiting.pop()
        if each not in visited:
            visited.add(each)
            yield each
            waiting += [before for before, _ in each.next_functions]


def own_loss(output: Any, targets: Any = ()) -> Tensor:
    """The loss where none was given: what the module computes itself, else :func:`mean_of_squares` of its output.

    That is ``output.loss`` or ``output["loss"]``; a number; a dict or tuple of numbers, summed; the one number of a
    tuple such as ``(logits, loss)``.

    Raises:
        UnsupportedModelError: a tuple holds several numbers beside other tensors.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(own, (Mapping, tuple, list)):
        return summed(own)
    if _is_number(output):
        return cast("Tensor", output)
    if isinstance(output, (Mapping, tuple, list)) and output:
        values = list(output.values() if isinstance(output, Mapping) else output)
        numbers = [value for value in values if _is_number(value)]
        if len(numbers) == len(values):
            return summed(output)
        if isinstance(output, (tuple, list)) and numbers:
            if len(numbers) == 1:
                return cast("Tensor", numbers[0])
            raise UnsupportedModelError(
                "the module gives several losses, and it is not known which is trained",
                [f"its output is a tuple of {len(values)}, {len(numbers)} of them tensors without dims"],
                ["loss_fn=lambda output, targets: output[0]", "return a dict with 'loss', or losses alone: their sum"],
            )
    return mean_of_squares(output)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.ndim and value.is_floating_point()


def mean_of_squares(output: Any, targets: Any = ()) -> Tensor:
    """The loss of last resort: for each float tensor of ``output`` the mean of its squares, summed."""
    floats = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floats:
        raise TypeError("the module's output holds no float tensor, so a loss function is needed")
    total = floats[0].square().mean()
    for tensor in floats[1:]:
        total = total + tensor.square().mean()
    return total
