"""Random numbers of a given shape and distribution, made as torch's own operators make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_ATEN = torch.ops.aten

Filled = Callable[[Tensor, torch.Generator], Tensor]
"""Fills a tensor in place."""


class Noise(Protocol):
    """Where numbers come from; see :class:`runtime.stage.random.streams.Noise`."""

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


def bernoulli(noise: Noise, self: Tensor, p: Any = None, *, generator: object = None) -> Tensor:
    """Ones and zeros; the probability of a one is ``p`` or, without it, ``self``."""
    if isinstance(p, float | int):
        return noise.fill(tuple(self.shape), self.dtype, self.device, lambda t, g: t.bernoulli_(p, generator=g))
    return (_uniform(noise, self) < (self if p is None else p)).to(self.dtype)


def uniform(noise: Noise, self: Tensor, *bounds: float, generator: object = None, **names: float) -> Tensor:
    """Numbers between two bounds, 0 and 1 if not given, in the shape of ``self``."""
    low, high = _two(bounds, names, ("from", "to"), (0.0, 1.0))
    return _like(noise, self, lambda t, g: t.uniform_(low, high, generator=g))


def normal_functional(noise: Noise, self: Tensor, *moments: float, generator: object = None, **names: float) -> Tensor:
    """Normal numbers in the shape of ``self``."""
    mean, std = _two(moments, names, ("mean", "std"), (0.0, 1.0))
    return _like(noise, self, lambda t, g: t.normal_(mean, std, generator=g))


def exponential(noise: Noise, self: Tensor, lambd: float = 1.0, *, generator: object = None) -> Tensor:
    """Exponential numbers in the shape of ``self``."""
    return _like(noise, self, lambda t, g: t.exponential_(lambd, generator=g))


def normal(noise: Noise, mean: Any, std: Any = 1.0, *, generator: object = None) -> Tensor:
    """Normal numbers about ``mean``, at least one of the arguments a tensor; neither has a gradient by them."""
    mean, std = (each.detach() if isinstance(each, Tensor) else each for each in (mean, std))
    like = mean + std
    found: Tensor = mean + std * _like(noise, like, lambda t, g: t.normal_(generator=g))
    return found


def normal_numbers(
    noise: Noise, mean: float, std: float, size: Sequence[int], *, generator: object = None, **options: Any
) -> Tensor:
    """Normal numbers of a given shape."""
    return _new(noise, size, lambda t, g: t.normal_(mean, std, generator=g), options)


def rand(noise: Noise, size: Sequence[int], **options: Any) -> Tensor:
    """Numbers between 0 and 1."""
    return _new(noise, size, lambda t, g: t.uniform_(generator=g), options)


def randn(noise: Noise, size: Sequence[int], **options: Any) -> Tensor:
    """Standard normal numbers."""
    return _new(noise, size, lambda t, g: t.normal_(generator=g), options)


def rand_like(noise: Noise, self: Tensor, **options: Any) -> Tensor:
    """Numbers between 0 and 1 in the shape of ``self``."""
    return rand(noise, self.shape, **_as(self, options))


def randn_like(noise: Noise, self: Tensor, **options: Any) -> Tensor:
    """Standard normal numbers in the shape of ``self``."""
    return randn(noise, self.shape, **_as(self, options))


def randint(noise: Noise, *bounds_and_size: Any, **options: Any) -> Tensor:
    """Integers from a lower bound, 0 if not given, to below an upper one."""
    *bounds, size = bounds_and_size
    low, high = bounds if len(bounds) == 2 else (0, *bounds)
    dtype, device = options.get("dtype") or torch.int64, torch.device(options.get("device") or "cpu")
    return noise.fill(tuple(size), torch.int64, device, lambda t, g: t.random_(low, high, generator=g)).to(dtype)


def randint_like(noise: Noise, self: Tensor, *bounds: int, **options: Any) -> Tensor:
    """The same in the shape of ``self``."""
    return randint(noise, *bounds, self.shape, **_as(self, options))


def _uniform(noise: Noise, like: Tensor) -> Tensor:
    return noise.fill(tuple(like.shape), torch.float32, like.device, lambda t, g: t.uniform_(generator=g))


def _like(noise: Noise, like: Tensor, filled: Filled) -> Tensor:
    return noise.fill(tuple(like.shape), torch.float32, like.device, filled).to(like.dtype)


def _new(
    noise: Noise,
    size: Sequence[int],
    filled: Filled,
    options: Mapping[str, Any],
) -> Tensor:
    device = torch.device(options.get("device") or "cpu")
    return noise.fill(tuple(size), torch.float32, device, filled).to(options.get("dtype") or torch.get_default_dtype())


def _as(like: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"dtype": options.get("dtype") or like.dtype, "device": options.get("device") or like.device}


def _two(
    values: tuple[float, ...], names: Mapping[str, float], both: tuple[str, str], defaults: tuple[float, float]
) -> tuple[float, float]:
    found = {**dict(zip(both, defaults, strict=True)), **dict(zip(both, values, strict=False)), **names}
    return found[both[0]], found[both[1]]


NUMBERS: Mapping[Any, Callable[..., Any]] = {
    _ATEN.bernoulli.default: bernoulli,
    _ATEN.bernoulli.p: bernoulli,
    _ATEN.bernoulli.Tensor: bernoulli,
    _ATEN.uniform.default: uniform,
    _ATEN.normal_functional.default: normal_functional,
    _ATEN.exponential.default: exponential,
    _ATEN.normal.Tensor_float: normal,
    _ATEN.normal.float_Tensor: normal,
    _ATEN.normal.Tensor_Tensor: normal,
    _ATEN.normal.float_float: normal_numbers,
    _ATEN.rand.default: rand,
    _ATEN.randn.default: randn,
    _ATEN.rand_like.default: rand_like,
    _ATEN.randn_like.default: randn_like,
    _ATEN.randint.default: randint,
    _ATEN.randint.low: randint,
    _ATEN.randint_like.default: randint_like,
    _ATEN.randint_like.low_dtype: randint_like,
}
"""By operator, as ``torch.export`` writes it."""
