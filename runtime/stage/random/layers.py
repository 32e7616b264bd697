"""Layers with dropout and its like, with the random numbers given to them.

Each takes what torch's own operator takes, after ``noise``, and computes the same; attention and recurrent layers are
composed of operators without dropout.  Random numbers of a shape and distribution are made as torch's own operators
make them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from cuda_ops._torch import attention_with_weights, overload_name
from cuda_ops.operator_table import functional_row

_ATEN = torch.ops.aten

Filled = Callable[[Tensor, torch.Generator], Tensor]
"""Fills a tensor in place."""


class NumberSource(Protocol):
    """Where numbers come from; see :class:`runtime.stage.random.streams.NodeStream`."""

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
        """A tensor drawn by ``filled``."""


def bernoulli(noise: NumberSource, self: Tensor, p: Any = None, *, generator: object = None) -> Tensor:
    """Ones and zeros; the probability of a one is ``p`` or, without it, ``self``."""
    if isinstance(p, float | int):
        return noise.fill(tuple(self.shape), self.dtype, self.device, lambda t, g: t.bernoulli_(p, generator=g))
    return (_uniform(noise, self) < (self if p is None else p)).to(self.dtype)


def fill(
    name: str, noise: NumberSource, self: Tensor, *arguments: float, generator: object = None, **names: float
) -> Tensor:
    """Numbers in the shape of ``self``, by the method ``name`` of tensors, ``exponential_``, which fills in place."""
    return _like(noise, self, lambda t, g: getattr(t, name)(*arguments, generator=g, **names))


def normal(
    noise: NumberSource,
    mean: Any,
    std: Any = 1.0,
    size: Sequence[int] | None = None,
    *,
    generator: object = None,
    **options: Any,
) -> Tensor:
    """Normal numbers of a given shape, or about a tensor or of its deviation; neither has a gradient by them."""
    if size is not None:
        return _new(noise, size, lambda t, g: t.normal_(mean, std, generator=g), options)
    mean, std = (each.detach() if isinstance(each, Tensor) else each for each in (mean, std))
    like = mean + std
    numbers: Tensor = mean + std * _like(noise, like, lambda t, g: t.normal_(generator=g))
    return numbers


def rand(noise: NumberSource, size: Sequence[int], **options: Any) -> Tensor:
    """Numbers between 0 and 1."""
    return _new(noise, size, lambda t, g: t.uniform_(generator=g), options)


def randn(noise: NumberSource, size: Sequence[int], **options: Any) -> Tensor:
    """Standard normal numbers."""
    return _new(noise, size, lambda t, g: t.normal_(generator=g), options)


def randint(noise: NumberSource, *bounds_and_size: Any, **options: Any) -> Tensor:
    """Integers from a lower bound, 0 if not given, to below an upper one."""
    *bounds, size = bounds_and_size
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    dtype = options.get("dtype") or torch.int64
    device = torch.device(options.get("device") or "cpu")
    return noise.fill(tuple(size), torch.int64, device, lambda t, g: t.random_(low, high, generator=g)).to(dtype)


def multinomial(
    noise: NumberSource, self: Tensor, num_samples: int, replacement: bool = False, *, generator: object = None
) -> Tensor:
    """Classes in proportion to their weights ``self``, (..., class); one number a result, as ranks draw their own."""
    weights = self.detach().double()
    like = weights.new_empty(()).expand(*self.shape[:-1], num_samples)

    def picked(numbers: Tensor) -> Tensor:
        sums = weights.cumsum(-1)
        return torch.searchsorted(sums, numbers * sums[..., -1:], right=True)

    if replacement:
        return picked(_uniform(noise, like).double())
    classes: list[Tensor] = []
    for numbers in _uniform(noise, like).double().unbind(-1):
        classes.append(picked(numbers.unsqueeze(-1)))
        weights = weights.scatter(-1, classes[-1], 0.0)
    return torch.cat(classes, -1)


def in_shape_of(
    function: Callable[..., Tensor], noise: NumberSource, self: Tensor, *bounds: int, **options: Any
) -> Tensor:
    """What ``function`` draws, in the shape of ``self``."""
    kept = {name: options.get(name) or getattr(self, name) for name in ("dtype", "device")}
    return function(noise, *bounds, self.shape, **kept)


def _uniform(noise: NumberSource, like: Tensor) -> Tensor:
    return noise.fill(tuple(like.shape), torch.float32, like.device, lambda t, g: t.uniform_(generator=g))


def _like(noise: NumberSource, like: Tensor, filled: Filled) -> Tensor:
    return noise.fill(tuple(like.shape), torch.float32, like.device, filled).to(like.dtype)


def _new(
    noise: NumberSource,
    size: Sequence[int],
    filled: Filled,
    options: Mapping[str, Any],
) -> Tensor:
    device = torch.device(options.get("device") or "cpu")
    return noise.fill(tuple(size), torch.float32, device, filled).to(options.get("dtype") or torch.get_default_dtype())


_ALPHA = 1.7580993408473766
"""Minus the value that SELU tends to (Klambauer et al. 2017, "Self-Normalizing Neural Networks")."""


def dropout(
    noise: NumberSource, input: Tensor, p: float, train: bool, index: int = 0, by_channel: bool = False
) -> Tensor:
    """Each number, or channel, is kept with probability 1 - p, and then divided by it."""
    if p == 0 or not train or not input.numel():
        return input
    if p == 1:
        return input * 0
    if input.device.type == "cpu" or by_channel:
        return input * _kept(noise, input, p, input.dtype, index, by_channel).div_(1 - p)
    masked: Callable[[Tensor, Tensor, float], Tensor] = _Masked.apply
    return masked(input, _kept(noise, input, p, torch.bool, index), 1 / (1 - p))


def alpha_dropout(noise: NumberSource, input: Tensor, p: float, train: bool, by_channel: bool = False) -> Tensor:
    """Dropout that keeps mean and variance of what SELU gives."""
    if p == 0 or not train or not input.numel():
        return input
    if p == 1:
        return input * 0
    slope = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
    kept = _kept(noise, input, p, input.dtype, by_channel=by_channel)
    offset = (kept - 1).mul_(_ALPHA * slope).add_(_ALPHA * slope * p)
    return input * kept.mul_(slope) + offset


def native_dropout(noise: NumberSource, input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """The result, and which numbers were kept."""
    if p == 0 or train is False or not input.numel():
        return input, torch.ones_like(input, dtype=torch.bool)
    mask = _kept(noise, input, p, torch.bool)
    return input * mask * (0.0 if p == 1 else 1 / (1 - p)), mask


def rrelu(
    noise: NumberSource,
    input: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: object = None,
) -> Tensor:
    """A leaky ReLU of random slopes."""
    if not training:
        even: Tensor = _ATEN.rrelu.default(input, lower, upper, False)
        return even
    slopes = fill("uniform_", noise, input, lower, upper)
    return torch.where(input <= 0, input * slopes, input)


def attention(
    noise: NumberSource,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention with dropout of its weights, which takes torch's way without a fused kernel."""
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # the operator below would add ones
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
    nothing = value[..., :0]  # the weights alone
    _, weights = attention_with_weights(
        query, key, nothing, attn_mask, 0.0, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return dropout(noise, weights, dropout_p, True) @ value


def recurrence(
    operator: Callable[..., tuple[Tensor, ...]],
    noise: NumberSource,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    rate: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Layer by layer, with dropout between them."""
    x = input
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    directions = 2 if bidirectional else 1
    count = len(params) // num_layers
    ends: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        first = [state.narrow(0, layer * directions, directions) for state in states]
        own = params[layer * count : (layer + 1) * count]
        options = has_biases, 1, 0.0, train, bidirectional, batch_first
        x, *last = operator(x, first if len(first) > 1 else first[0], own, *options)
        ends.append(tuple(last))
        if layer < num_layers - 1:
            x = dropout(noise, x, rate, train, layer)
    return x, *(torch.cat(each) for each in zip(*ends, strict=True))


class _Masked(torch.autograd.Function):
    """``x * mask * scale`` in one kernel, which keeps one byte a number for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        y: Tensor = _ATEN.native_dropout_backward.default(x, mask, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _ATEN.native_dropout_backward.default(dy, *ctx.saved_tensors, ctx.scale), None, None


def _kept(
    noise: NumberSource, like: Tensor, p: float, dtype: torch.dtype, index: int = 0, by_channel: bool = False
) -> Tensor:
    """Ones and zeros, one for each number of ``like`` or for each of its channels."""
    shape = (*like.shape[:2], *[1] * (like.ndim - 2)) if by_channel else tuple(like.shape)
    num_dims = 2 if by_channel else None
    return noise.fill(
        shape, dtype, like.device, lambda t, g: t.bernoulli_(1 - p, generator=g), index=index, num_dims=num_dims
    )


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    each.__name__: each
    for each in (
        alpha_dropout,
        attention,
        bernoulli,
        dropout,
        multinomial,
        native_dropout,
        normal,
        rand,
        randint,
        randn,
        recurrence,
        rrelu,
    )
}


def drawing(target: Any) -> Callable[..., Any] | None:
    """What computes an operator from the numbers that it is given, as its row says; None: it is drawn whole.

    It takes a :class:`NumberSource` and then the operator's own arguments.
    """
    row = functional_row(target)
    if not row.draws or (row.drops == "layers" and overload_name(target) != "input"):  # not of packed sequences
        return None
    if row.draws == "fill":
        return partial(fill, row.name.removesuffix("_functional") + "_")
    function = _FUNCTIONS[row.draws]
    if row.drops == "layers":
        return partial(function, target)
    if row.drops == "channels":
        return partial(function, by_channel=True)
    return partial(in_shape_of, function) if row.name.endswith("_like") else function
