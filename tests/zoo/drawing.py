"""Random numbers for one device that are those of a plan.

A plan's numbers belong to the nodes of the captured graph, the user's module draws one after the other.  While
:class:`Replayed` is entered, the module's k-th request for random numbers gets those of the graph's k-th draw.  All
else is the module's own: which layers draw at all, with which rate, in which mode, and what becomes of the numbers.
More or fewer requests than the graph has, or of another kind, are an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ops.dense.evaluation import is_random
from runtime.captured import CapturedModule
from runtime.stage.random import layers
from runtime.stage.random.streams import CounterRng, RandomNodes

_ATEN = torch.ops.aten
_RECURRENT = (_ATEN.lstm.input, _ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input)
_MASKS = (_ATEN.dropout.default, _ATEN.feature_dropout.default, _ATEN.scaled_dot_product_attention.default)

_UNMASKED = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
"""What attention becomes where it draws nothing, though it is tagged as if it drew."""


class Replayed(TorchDispatchMode):
    """The user's module draws what ``model``'s graph draws for ``draw``.

    It sees operators below autograd: dropout is a ``bernoulli_`` there, be it a module's, a function's or an LSTM's.
    """

    def __init__(self, model: CapturedModule, draw: CounterRng) -> None:
        super().__init__()
        rule = RandomNodes(model).rule(draw)
        nodes = [node for node in model.graph_module.graph.nodes if is_random(node)]
        self._draws = [each for node in nodes for each in _draws_of(node, rule(node))]
        self._next = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None and self._next != len(self._draws):
            raise AssertionError(f"one device draws {self._next} times, the captured graph {len(self._draws)} times")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in function.tags or function is _UNMASKED:
            return function(*args, **given)
        if self._next == len(self._draws):
            raise AssertionError(
                f"one device draws more often ({function}) than the captured graph, {self._next} times"
            )
        node, index, drawn = self._draws[self._next]
        self._next += 1
        name = function.overloadpacket.__name__
        if name == "bernoulli_" and len(args) == 1:
            args = (*args, 0.5)  # a default is not passed on
        if node.target in (*_MASKS, *_RECURRENT) and name == "bernoulli_":
            return args[0].copy_(_mask(node, index, drawn, args[0], 1 - args[1]))
        if name.rstrip("_") != node.target.overloadpacket.__name__.removesuffix("_functional").rstrip("_"):
            raise AssertionError(f"one device draws by {function} where the captured graph has {node.target}")
        found = drawn(*args, **{name: value for name, value in given.items() if name != "generator"})
        return args[0].copy_(found) if name.endswith("_") else found


def _draws_of(node: fx.Node, drawn: Any) -> Iterator[tuple[fx.Node, int, Any]]:
    times = node.args[4] - 1 if node.target in _RECURRENT else 1  # between the layers
    for index in range(times):
        yield node, index, drawn


def _mask(node: fx.Node, index: int, drawn: Any, like: Tensor, rate: float) -> Tensor:
    """Ones where numbers are kept."""
    *_, noise = drawn.args  # behind the operator of a recurrence
    ones = torch.ones_like(like)
    if node.target in _RECURRENT and node.args[8]:  # samples first; inside, time is
        return layers.dropout(noise, ones.transpose(0, 1), rate, True, index).ne(0).transpose(0, 1)
    if node.target is _ATEN.feature_dropout.default:
        return layers.dropout(noise, ones, rate, True, by_channel=True).ne(0)
    return layers.dropout(noise, ones, rate, True, index).ne(0)
