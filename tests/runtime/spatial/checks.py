"""What every local form has to do, asked of it for random layouts: see :mod:`tests.runtime.spatial.one_layer`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runtime.pipeline.routing import slices
from tests.runtime.spatial.one_layer import OneLayer, all_of, listed, one_layer

_SPACE = {1: "width", 2: "height width", 3: "depth height width"}


def images(*extents: int, samples: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(samples, channels, *extents, dtype=torch.float64)


def spatial(function: Callable[..., Any], x: Tensor, outputs: int = 1) -> OneLayer:
    names = f"sample channel {_SPACE[x.ndim - 2]}"
    return one_layer(function, [x], [names], [names] * outputs)


def layouts(one: OneLayer, seed: int, count: int = 6, dims: tuple[str, ...] = ()) -> list[dict[str, tuple[int, ...]]]:
    """Random cuts of up to three of the dims of the output, into 2 to 6 parts."""
    rng = random.Random(seed)
    spec = one.layer.outputs[0]
    extents = dict(zip(spec.dims, spec.shape, strict=True))
    names = dims or spec.dims
    found = []
    for _ in range(count):
        chosen = rng.sample(names, rng.randint(1, min(3, len(names))))
        ways = [rng.choice((2, 3, 4, 6))] if len(chosen) == 1 else [rng.choice((2, 3)) for _ in chosen]
        found.append({name: random_cuts(rng, extents[name], n) for name, n in zip(chosen, ways, strict=True)})
    return found


def check_all(one: OneLayer, kind: str, seed: int = 0, count: int = 6, dims: tuple[str, ...] = ()) -> None:
    assert one.layer.kind == kind
    for at, cuts in enumerate(layouts(one, seed, count, dims)):
        check(one, cuts)
        if at == 0:
            check_connected(one, cuts)


def check(one: OneLayer, cuts: Mapping[str, tuple[int, ...]], margin: int = 0, tolerance: float = 1e-12) -> None:
    """Every part equals what one device makes there, and gradients of all parts add up to its gradients."""
    whole = one.whole()
    cotangents = [torch.randn_like(each) if each.is_floating_point() else each for each in whole]
    leaves = [each for each in one.tensors if each.requires_grad]
    floats = [each.is_floating_point() for each in whole]
    total = sum((each * by).sum() for each, by, real in zip(whole, cotangents, floats, strict=True) if real)
    expected = (
        torch.autograd.grad(total, leaves, allow_unused=True)
        if isinstance(total, Tensor) and total.requires_grad
        else ()
    )
    sums: list[Tensor] = []
    need: list[set[bool]] = [set() for _ in whole]
    for step, result in one.ranks(cuts, margin):
        parts = listed(result)
        assert len(parts) == len(whole)
        for output, (part, everything, by) in enumerate(zip(parts, whole, cotangents, strict=True)):
            held = step.done if output == 0 else step.division.held[output][step.position]
            there = everything[slices(held, all_of(everything))]
            assert part.shape == there.shape, (step.position, output)
            assert part.dtype == there.dtype
            _close(part, there, tolerance)
            need[output].add(part.requires_grad)
            assert part.requires_grad or not everything.requires_grad, "a part is not connected"
            if part.requires_grad:
                owned = step.division.owned[output]
                own = owned[step.position]
                if owned.index(own) == step.position:
                    sums.append((part[slices(own, held)] * by[slices(own, all_of(by))]).sum())
                else:
                    sums.append(part.sum() * 0)
    assert all(len(each) == 1 for each in need), "backward goes another way on some rank"
    if sums and any(each is not None for each in expected):
        found = torch.autograd.grad(sum(sums), leaves, allow_unused=True)
        for mine, theirs in zip(found, expected, strict=True):
            if theirs is not None:
                assert mine is not None, "a gradient is missing"
                _close(mine, theirs, tolerance)


def check_connected(one: OneLayer, cuts: Mapping[str, tuple[int, ...]]) -> None:
    """Backward from every rank's part alone reaches the same of what the layer reads, empty or not."""
    reached, ways = set[int](), set[frozenset[int]]()
    leaves = one.tensors
    watched = tuple(_Watched.apply(each, at, reached) if each.requires_grad else each for at, each in enumerate(leaves))
    for _, result in replace(one, tensors=watched).ranks(cuts):
        reached.clear()
        for part in listed(result):
            if part.requires_grad:
                part.sum().backward(retain_graph=True)
        ways.add(frozenset(reached))
    assert len(ways) == 1
    expected = {at for at, each in enumerate(leaves) if each.requires_grad}
    assert ways == {frozenset(expected)} or "detach" in str(one.target)


class _Watched(torch.autograd.Function):
    """Notes that backward came by, with a gradient or without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, reached: set[int]) -> Tensor:
        ctx.place, ctx.reached = place, reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.reached.add(ctx.place)
        return gradient, None, None


def random_cuts(rng: random.Random, extent: int, parts: int) -> tuple[int, ...]:
    """Uneven, some of them empty."""
    return (0, *sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent)


def _close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    if not mine.is_floating_point():
        assert torch.equal(mine, theirs)
        return
    scale = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    assert torch.allclose(mine, theirs, rtol=0, atol=tolerance * scale), float((mine - theirs).detach().abs().max())
