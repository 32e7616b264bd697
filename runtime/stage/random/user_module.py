"""The user's own module with the numbers of a plan: its random operators are answered, in the order of its calls.

        the module, as it is called     bernoulli_ (of a dropout)   bernoulli_ (of attention)   normal_
        the captured graph's nodes      dropout                     scaled_dot_product_...      normal_functional

``torch.export`` keeps the order of calls, so the i-th number drawn by the module belongs to the i-th node that draws.
What reaches the kernels is answered: dropout is a ``bernoulli_`` by then, a recurrent layer one for each of its layers
but the last.  Where the module draws otherwise than the graph, nothing is said of it: :class:`UnlikeDrawsError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from cuda_ops._torch import TorchDispatchMode, schema_of
from cuda_ops.calls import arguments_of, draws
from cuda_ops.dense.evaluation import is_random
from cuda_ops.operator_table import operator_row
from runtime.captured import CapturedModule
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.layers import Filled, drawing, native_dropout, rrelu
from runtime.stage.random.streams import CounterRng, NodeStream, RandomNodes

_SAMPLES_AND_CHANNELS = 2


class UnlikeDrawsError(Exception):
    """The module draws other numbers than its captured graph, or draws them again in its backward."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """One call that reaches a kernel.

    Attributes:
        index: of the draw, where the node draws more than once.
        num_dims: dims after these are 1; None: all are drawn.
        is_transposed: the kernel is given time first, the node samples.
    """

    node: fx.Node
    noise: NodeStream
    index: int = 0
    num_dims: int | None = None
    is_transposed: bool = False

    def is_answered_by(self, name: str) -> bool:
        row = operator_row(self.node.target)
        if row.drops:
            return name in ("bernoulli_", "native_dropout")
        if row.name == "rrelu":
            return name == "rrelu_with_noise"
        return name.rstrip("_") == _name(self.node.target).removesuffix("_functional").rstrip("_")


class Answers:
    """What a captured model draws, for its user's own module to draw.

    Attributes:
        in_parts: whether the numbers of several micro-batches can be those of one call: all are drawn by sample.
    """

    def __init__(self, model: CapturedModule, rng: CounterRng) -> None:
        nodes = RandomNodes(model)
        self._rng = rng
        self._expected = [
            each
            for node in model.graph_module.graph.nodes
            if is_random(node)
            for each in _calls(node, nodes.noise(node, rng))
        ]
        self.in_parts = all(
            each.noise.dim is not None and drawing(each.node.target) is not None for each in self._expected
        )

    def __bool__(self) -> bool:
        return bool(self._expected)

    @contextmanager
    def given(self, rows: Sequence[int], first: int = 0) -> Iterator[None]:
        """Inside, the module draws what the micro-batches of ``rows`` samples draw, the first of number ``first``.

        Raises:
            UnlikeDrawsError: it does not draw as the graph does.
        """
        microbatch_shards = [MicrobatchShard(first + number, count, 0, count) for number, count in enumerate(rows)]
        answering = _Answering(self._expected, self._rng, microbatch_shards)
        with ExitStack() as stack:
            if self._expected:  # fused kernels draw where nobody can answer them
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                stack.enter_context(
                    torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and not self._recurs)
                )
            stack.enter_context(answering)
            yield
        answering.require_all()

    @property
    def _recurs(self) -> bool:
        return any(operator_row(each.node.target).drops == "layers" for each in self._expected)


class _Answering(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ has no types
    def __init__(
        self, expected: Sequence[_Expected], rng: CounterRng, microbatch_shards: Sequence[MicrobatchShard]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's constructor has no types
        self._expected = expected
        self._rng = rng
        self._microbatch_shards = microbatch_shards
        self._count = 0

    def require_all(self) -> None:
        if self._count < len(self._expected):
            raise UnlikeDrawsError(
                f"the module drew {self._count} times, its captured graph draws {len(self._expected)} times"
            )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func) or not _draws(func, args):
            return func(*args, **kwargs)
        name = _name(func)
        if self._count == len(self._expected):
            raise UnlikeDrawsError(
                f"the module draws by {name} once more than its captured graph, which draws {len(self._expected)} times"
            )
        expected = self._expected[self._count]
        if not expected.is_answered_by(name):
            raise UnlikeDrawsError(
                f"draw {self._count + 1} is by {name} in the module, by {expected.node.target} in its graph"
            )
        self._count += 1
        return self._answer(expected, func, name, args, kwargs)

    def _answer(self, expected: _Expected, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        noise = _Joined(expected.noise, self._rng, self._microbatch_shards, expected)
        operator = drawing(expected.node.target)
        row = operator_row(expected.node.target)
        if name == "bernoulli_" and operator is not None and row.drops:
            kept: Tensor = args[0]
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            return kept.copy_(
                noise.fill(tuple(kept.shape), kept.dtype, kept.device, lambda t, g: t.bernoulli_(rate, generator=g))
            )
        if name == "native_dropout":
            return native_dropout(noise, *args, **kwargs)
        if name == "rrelu_with_noise":
            return _rrelu(noise, *args, **kwargs)
        if operator is None:
            self._rng.at(self._microbatch_shards[0])
            return expected.noise.run(func, *args, **kwargs)
        numbers = operator(noise, *args, **kwargs)
        return args[0].copy_(numbers) if name.endswith("_") else numbers


@dataclass(frozen=True, slots=True)
class _Joined:
    """The numbers of several micro-batches, one after another along the samples."""

    noise: NodeStream
    rng: CounterRng
    microbatch_shards: Sequence[MicrobatchShard]
    expected: _Expected

    def fill(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        filled: Filled,
        *,
        index: int = 0,
        num_dims: int | None = None,
    ) -> Tensor:
        expected = self.expected
        dim = self.noise.dim
        if expected.is_transposed:
            shape = (shape[1], shape[0], *shape[2:])
        rows = [microbatch_shard.num_samples for microbatch_shard in self.microbatch_shards]
        parts = []
        for microbatch_shard in self.microbatch_shards:
            self.rng.at(microbatch_shard)
            part = list(shape)
            if dim is not None:
                part[dim] = shape[dim] * microbatch_shard.num_samples // sum(rows)
            parts.append(
                self.noise.fill(
                    tuple(part),
                    dtype,
                    device,
                    filled,
                    index=expected.index or index,
                    num_dims=num_dims or expected.num_dims,
                )
            )
        numbers = parts[0] if len(parts) == 1 else torch.cat(parts, dim or 0)
        return numbers.transpose(0, 1) if expected.is_transposed else numbers


def _calls(node: fx.Node, noise: NodeStream) -> Iterator[_Expected]:
    arguments = arguments_of(node)
    drops = operator_row(node.target).drops
    rate = next((arguments[name] for name in ("p", "dropout_p", "dropout") if name in arguments), None)
    if drops and rate == 1:
        return  # nothing is left to chance
    if drops == "layers":
        for layer in range(arguments["num_layers"] - 1):
            yield _Expected(node, noise, layer, is_transposed=bool(arguments.get("batch_first")))
    else:
        yield _Expected(node, noise, num_dims=_SAMPLES_AND_CHANNELS if drops == "channels" else None)


def _draws(func: Any, args: Sequence[Any]) -> bool:
    """Operators that may draw: not those switched off, and none of an empty tensor."""
    name = _name(func)
    if name in ("rrelu_with_noise",):
        return bool(args[4]) if len(args) > 4 else False
    if name == "native_dropout":
        return bool(args[1]) and args[2] is not False and args[0].numel() > 0
    return not name.startswith("_scaled_dot_product") or any(isinstance(each, float) and each for each in args)


def _rrelu(
    noise: _Joined,
    x: Tensor,
    kept: Tensor,
    lower: Any = 0.125,
    upper: Any = 1 / 3,
    training: bool = True,
    generator: object = None,
) -> Tensor:
    """The slopes go to ``kept``, which the backward multiplies by."""
    slopes = rrelu(noise, torch.full_like(x, -1.0), lower, upper, True).neg_()
    kept.copy_(torch.where(x <= 0, slopes, torch.ones_like(x)))
    return x * kept


def _name(operator: Any) -> str:
    return str(schema_of(operator).name).removeprefix("aten::")
