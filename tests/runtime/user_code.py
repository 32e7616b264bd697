"""Modules with autograd and modes of their own, and choices that follow from data, for tests of whole plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.models.example import Example, normal

WIDTH = 4


class StraightThrough(torch.autograd.Function):
    """Signs whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Reversed(torch.autograd.Function):
    """The identity, of which the gradient is turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * g, None


class Same(torch.autograd.Function):
    """Returns its very input; the gradient is three times what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g


class Clamped(torch.autograd.Function):
    """The identity that bounds its gradient, number by number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.01, 0.01)


class Product(torch.autograd.Function):
    """A weighted product in the newer style, with a tensor beside its result and a backward of a half."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, options: dict[str, float], rows: int) -> tuple[Tensor, Tensor, str]:
        return x * weight * options["scale"], (x > 0).sum(1), f"{rows}"

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, options, _ = inputs
        ctx.save_for_backward(x, weight)
        ctx.mark_non_differentiable(output[1])
        ctx.scale = options["scale"] / 2

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x = g * weight * ctx.scale if ctx.needs_input_grad[0] else None
        return to_x, (g * x * ctx.scale).sum(0) if ctx.needs_input_grad[1] else None, None, None


class Doubled(torch.autograd.Function):
    """Writes to its input, and says so; its gradient is five times too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 5 * g


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return x


class Signs(Base):
    def between(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(x) + StraightThrough.apply(x - 0.1)


class Adversarial(Base):
    _reversed = Reversed.apply  # as many modules have it

    def between(self, x: Tensor) -> Tensor:
        return type(self)._reversed(x, 0.5).tanh() + x


class Identities(Base):
    def between(self, x: Tensor) -> Tensor:
        return Clamped.apply(Same.apply(x).tanh())


class Weighted(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def between(self, x: Tensor) -> Tensor:
        product, counts, text = Product.apply(x, self.weight, {"scale": 3.0}, x.shape[0])
        assert isinstance(text, str)
        return product + counts.unsqueeze(1)


class InPlace(Base):
    def between(self, x: Tensor) -> Tensor:
        y = x * 1
        z = Doubled.apply(y)
        return z.tanh() + y


class Twice(Base):
    """Reads one value twice, in products, in a list and as queries, keys and values."""

    def between(self, x: Tensor) -> Tensor:
        heads = x.view(-1, 2, 2, 1)
        attended = functional.scaled_dot_product_attention(heads, heads, heads).reshape(-1, WIDTH)
        return x * x + torch.cat([x, x], 1)[:, 2:6] + attended


class Attending(Base):
    """One head of keys and values for two of queries, with masks of several shapes; keys of fewer dims."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.linspace(-1, 1, WIDTH).view(1, WIDTH, 1))

    def between(self, x: Tensor) -> Tensor:
        queries = x.view(-1, 2, 2, 1)
        keys = x.view(-1, 1, 4, 1)
        mask = torch.tensor([[True, False, True, True]])
        found = functional.scaled_dot_product_attention(
            value=keys * 2, query=queries, key=keys, attn_mask=mask, enable_gqa=True, scale=0.3
        )
        shared = self.shared * 2
        apart = functional.scaled_dot_product_attention(queries, shared, shared.tanh(), attn_mask=x.view(-1, 1, 1, 4))
        causal = functional.scaled_dot_product_attention(queries, queries, queries.exp(), is_causal=True)
        return (found + causal + apart).reshape(-1, WIDTH)


class Checkpointed(Base):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def between(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self._inner, x, use_reentrant=self.reentrant)

    def _inner(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Detached(Base):
    """No gradient here, one there, and a gradient within the forward."""

    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
            with torch.enable_grad():
                z = x * 3
        inner = x.tanh()
        (slope,) = torch.autograd.grad((inner**3).sum(), inner, create_graph=True)
        return y + z + x.detach() * x + slope


class Hooked(Base):
    """Hooks on forward that change what goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        self.last.register_forward_hook(lambda module, inputs, output: output.tanh())


class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)
        self.last = nn.utils.parametrizations.spectral_norm(self.last)


class Frozen(Base):
    """Parts in evaluation mode, parameters that are not trained, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Linear(2, 2)
        self.norm.running_mean += torch.arange(WIDTH)
        self.norm.eval()
        self.drop.eval()
        self.first.requires_grad_(False)
        self.norm.bias.requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x)).tanh()


class Counting(Base):
    """Buffers that forward changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("last_mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.last_mean = self.average * 2
        return x.tanh() - self.average


class Experts(Base):
    """A mixture of experts: each reads the rows that a router sends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def between(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places].unsqueeze(1))
        return out


class Masked(Base):
    def between(self, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        out = x.clone()
        out[positive] = x[positive].tanh()
        return out


def made(module: str, *arguments: Any, input_shape: tuple[int, ...] = (6, WIDTH)) -> Example:
    """The module of that name, with an example."""
    return globals()[module](*arguments), (normal(input_shape, 0), normal(input_shape, 1)), functional.mse_loss
