"""Random numbers for one device that are those of a plan.

A plan's numbers belong to the nodes of the captured graph, the user's module draws one after the other.  While
:class:`Replayed` is entered, the module's k-th request for random numbers gets those of the graph's k-th node that
draws.  Everything else (which layers draw at all, with which rate, in which mode, and what becomes of the numbers) is
the module's own: more or fewer requests than nodes, or of another kind, are an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from runtime.stages.captured import CapturedModel
from runtime.stages.draws import Draw, Draws, is_random

_DROPOUTS = ("dropout", "dropout_", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_LIKE = ("rand_like", "randn_like", "bernoulli", "randint_like", "multinomial")
_NEW = ("rand", "randn")
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")
_OTHERS = ("rrelu", "lstm", "gru", "scaled_dot_product_attention", "randint", "randperm")


class Replayed(TorchFunctionMode):
    """The user's module draws what ``model``'s graph draws for ``draw``."""

    def __init__(self, model: CapturedModel, draw: Draw) -> None:
        super().__init__()
        rule = Draws(model).rule(draw)
        self._nodes = [node for node in model.graph_module.graph.nodes if is_random(node)]
        self._functions = [rule(node) for node in self._nodes]
        self._total, self._next = draw.total, 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self._next != len(self._nodes):
            raise AssertionError(f"one device draws {self._next} times, the captured graph {len(self._nodes)} times")

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in _DROPOUTS and function is not getattr(torch.nn.functional, name, None):
            x, rate, training = args
            if not training or not rate:
                return function(*args, **given)
            return self._drawn(name.removesuffix("_"), x, rate, training)
        if name in _LIKE:
            return self._drawn(name, *args, **given)
        if name in _NEW:
            shape = args[0] if args and isinstance(args[0], tuple | list) else args
            return self._drawn(name, list(shape), **{"dtype": torch.get_default_dtype(), **given})
        if name in _IN_PLACE:
            return args[0].copy_(self._drawn(name.removesuffix("_"), *args, **given))
        return function(*args, **given)

    def _drawn(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if self._next == len(self._nodes):
            raise AssertionError(f"one device draws more often ({name}) than the captured graph, {self._next} times")
        node, drawn = self._nodes[self._next], self._functions[self._next]
        self._next += 1
        if name not in str(node.target):
            raise AssertionError(f"one device draws by {name} where the captured graph has {node.target}")
        assert drawn is not None
        with torch.overrides.BaseTorchFunctionMode():
            return drawn(*args, **kwargs)


__all__ = ["Replayed", "fx"]
