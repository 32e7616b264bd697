"""Sparse convolution on the CPU beside spconv's CPU wheel and plain torch: maps, forward, backward, one thread.

    python -m benchmarks.sparse_conv [--quick] [--json]

A submanifold 3 x 3 x 3 convolution in float32 on the outdoor scan in voxels of 0.143 m (101,364 voxels, 1,208,398
pairs); ``--quick`` takes every fourth point.  *Ours* are the operators as a user calls them, *torch* is what they are
without a compiler.  Milliseconds are CPU time of the calling thread, medians of calls that take turns.  What is fair
and what is not:

* Voxels are given in ascending order: in a random one spconv takes far longer, since its rows then lie apart.
* spconv makes its pairs from coordinates in any order, for both directions.  Ours are held against that with
  everything that takes them there: sorting, the map and its reverse.  A network sorts once and shares its maps.
* spconv's backward raises without CUDA, since it asks for the current stream.  Here that question is answered with 0,
  and its own CPU code runs: gather, multiply, scatter.  Its gradients are checked like everybody's.
* spconv's scatter races on several threads; so it is one thread for all.

Where spconv is not installed, plain torch alone stands beside ours, without goals.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import Row, at_least, at_most, run
from benchmarks.sparse_balance import points, voxels
from benchmarks.turns import medians
from cuda_ops.device.host import prepare_process
from cuda_ops.sparse import operators, reference
from cuda_ops.sparse.dispatch import chosen

OURS = "ours"
TORCH = "torch"
SPCONV = "spconv"
CUBE = (3, 3, 3)
ONES = (1, 1, 1)
CHANNELS = (32, 64)
QUICK_CHANNELS = (32,)
REPEATS = 11
QUICK_REPEATS = 3
QUICK_EVERY = 4
MAP_GOAL = 4.0
FORWARD_GOALS = {32: 2.0, 64: 1.8}
BACKWARD_GOAL = 1.4
FALLBACK_GOAL = 1.3
AGREEMENT = 1e-5
"""Largest difference, of the largest value."""

VOXEL_M = 0.143

NO_SPCONV = "spconv is not installed: ours are beside plain torch alone\n"
NOT_NATIVE = "no compiler, so that ours are plain torch\n"

Work = Callable[[], object]
Outcome = tuple[Tensor, Tensor, Tensor]
"""Output, gradient of the features, gradient of the weight [K, Cin, Cout]."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What is convolved.

    Attributes:
        coordinates: int32 [N, 4].
        x: [N, C] in the order of `coordinates`.
        weight: [K, C, C].
        dy: [N, C], the gradient of the output.
    """

    coordinates: Tensor
    x: Tensor
    weight: Tensor
    dy: Tensor


@dataclass(frozen=True, slots=True)
class Side:
    """One library at work on one layer.

    Attributes:
        works: by what they are: "map", "forward", "backward", perhaps parts of them.
        outcome: what it computes, in the order of the coordinates.
    """

    works: Mapping[str, Work]
    outcome: Callable[[], Outcome]


def layer_of(coordinates: Tensor, channels: int) -> Layer:
    """Random features and weights."""
    generator = torch.Generator().manual_seed(0)
    rows = len(coordinates)
    scale = (27 * channels) ** -0.5
    x, dy = (torch.randn((rows, channels), generator=generator) for _ in range(2))
    return Layer(coordinates, x, torch.randn((27, channels, channels), generator=generator) * scale, dy)


def ours(layer: Layer) -> Side:
    """The operators, dispatched as for a user."""
    keys, order = operators.sorted_sites(layer.coordinates)
    neighbours = operators.kernel_map(keys, keys, CUBE, ONES, ONES)
    reverse = operators.reversed_map(neighbours, len(keys))
    x = layer.x[order].requires_grad_()
    dy = layer.dy[order]
    weight = layer.weight.clone().requires_grad_()
    y = operators.sparse_conv(x, weight, neighbours, reverse)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

    def sort_and_map() -> Tensor:
        found = operators.kernel_map(operators.sorted_sites(layer.coordinates)[0], keys, CUBE, ONES, ONES)
        return operators.reversed_map(found, len(keys))

    def outcome() -> Outcome:
        dx, gradient = backward()
        back = torch.argsort(order)
        return y.detach()[back], dx[back], gradient

    works = {
        "map": sort_and_map,
        "map of sorted sites, one direction": lambda: operators.kernel_map(keys, keys, CUBE, ONES, ONES),
        "forward": lambda: operators.sparse_conv(x, weight, neighbours, reverse),
        "backward": backward,
    }
    return Side(works, outcome)


def plain(layer: Layer) -> Side:
    """The reference, called directly."""
    keys, order = reference.sorted_sites(layer.coordinates)
    neighbours = reference.kernel_map(keys, keys, CUBE, ONES, ONES, False)
    reverse = reference.reversed_map(neighbours, len(keys))
    x = layer.x[order]
    dy = layer.dy[order]
    weight = layer.weight

    def sort_and_map() -> Tensor:
        found = reference.kernel_map(reference.sorted_sites(layer.coordinates)[0], keys, CUBE, ONES, ONES, False)
        return reference.reversed_map(found, len(keys))

    def forward() -> Tensor:
        return reference.sparse_conv(x, weight, neighbours, reverse)

    def backward() -> tuple[Tensor, Tensor]:
        dx = reference.sparse_conv(dy, weight.transpose(1, 2), reverse, neighbours)
        return dx, reference.sparse_conv_weight(x, dy, neighbours)

    def outcome() -> Outcome:
        dx, gradient = backward()
        back = torch.argsort(order)
        return forward()[back], dx[back], gradient

    return Side({"map": sort_and_map, "forward": forward, "backward": backward}, outcome)


def spconv_side(layer: Layer) -> Side:
    """SubMConv3d of spconv."""
    from spconv.core import ConvAlgo
    from spconv.pytorch import SparseConvTensor, SubMConv3d, ops

    channels = layer.x.shape[1]
    shape = (layer.coordinates[:, 1:].amax(0) + 1).tolist()
    module = SubMConv3d(channels, channels, 3, bias=False, indice_key="sites", algo=ConvAlgo.Native)
    with torch.no_grad():
        module.weight.copy_(layer.weight.view(*CUBE, channels, channels).permute(4, 0, 1, 2, 3))
    x = layer.x.clone().requires_grad_()
    sites = module(SparseConvTensor(x, layer.coordinates, shape, 1)).replace_feature(x)
    if sites.find_indice_pair("sites") is None:
        raise RuntimeError("spconv has kept no pairs: its forward would make them again")
    y = module(sites).features

    def pairs() -> object:
        triples = ([3] * 3, [1] * 3, [1] * 3, [1] * 3, [0] * 3)
        return ops.get_indice_pairs(layer.coordinates, 1, shape, ConvAlgo.Native, *triples, subm=True)

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(y, (x, module.weight), layer.dy, retain_graph=True)

    def outcome() -> Outcome:
        dx, gradient = backward()
        return y.detach(), dx, gradient.permute(1, 2, 3, 4, 0).reshape(27, channels, channels)

    return Side({"map": pairs, "forward": lambda: module(sites).features, "backward": backward}, outcome)


def without_streams() -> AbstractContextManager[object]:
    """Answers 0 where spconv asks for CUDA's current stream: on the CPU there is none, and nothing uses it."""
    from spconv.pytorch import ops

    return patch.object(ops, "get_current_stream", lambda: 0)


def medians_ms(sides: Mapping[str, Side], repeats: int) -> dict[tuple[str, str], float]:
    """CPU milliseconds by (side, work), medians of turns."""
    works = {(side, name): work for side, those in sides.items() for name, work in those.works.items()}
    (spent,) = medians(works, repeats, lambda: None, (time.thread_time,))
    return {name: 1e3 * seconds for name, seconds in spent.items()}


def rows_of(channels: int, spent: Mapping[tuple[str, str], float], with_map: bool) -> Iterator[Row]:
    """Milliseconds of everybody and ratios with their goals."""
    goals = {"map": MAP_GOAL, "forward": FORWARD_GOALS[channels], "backward": BACKWARD_GOAL}
    for (side, work), ms in spent.items():
        if with_map or not work.startswith("map"):
            yield Row(title(work, channels, side), ms, "ms")
    for work, goal in goals.items():
        if work == "map" and not with_map:
            continue
        if (SPCONV, work) in spent:
            theirs = spent[SPCONV, work]
            yield at_least(title(work, channels, "spconv / ours"), theirs / spent[OURS, work], "ratio", goal)
            yield at_most(title(work, channels, "torch / spconv"), spent[TORCH, work] / theirs, "ratio", FALLBACK_GOAL)
        yield Row(title(work, channels, "torch / ours"), spent[TORCH, work] / spent[OURS, work], "ratio")


def title(work: str, channels: int, who: str) -> str:
    """The name of a figure; a map has no channels."""
    return f"{work}: {who}" if work.startswith("map") else f"{work}, C={channels}: {who}"


def agreement(channels: int, sides: Mapping[str, Side]) -> Iterator[Row]:
    """How far ours are from the others, of the largest value."""
    found = sides[OURS].outcome()
    for name, side in sides.items():
        if name != OURS:
            pairs = zip(found, side.outcome(), strict=True)
            worst = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
            yield at_most(f"C={channels}: largest difference from {name}", worst, "of the largest value", AGREEMENT)


def measure(quick: bool) -> list[Row]:
    """The scan first, then each number of channels."""
    prepare_process(None)
    has_spconv = importlib.util.find_spec("spconv") is not None
    if not has_spconv:
        sys.stderr.write(NO_SPCONV)
    if chosen("cpu") != "native":
        sys.stderr.write(NOT_NATIVE)
    coordinates = scan_coordinates(every=QUICK_EVERY if quick else 1)
    keys, _ = operators.sorted_sites(coordinates)
    num_pairs = int((operators.kernel_map(keys, keys, CUBE, ONES, ONES) >= 0).sum())
    rows = [Row("voxels", len(keys), ""), Row("pairs", num_pairs, "")]
    with without_streams() if has_spconv else nullcontext():
        for channels in QUICK_CHANNELS if quick else CHANNELS:
            layer = layer_of(coordinates, channels)
            sides = {OURS: ours(layer), TORCH: plain(layer)}
            if has_spconv:
                sides[SPCONV] = spconv_side(layer)
            spent = medians_ms(sides, QUICK_REPEATS if quick else REPEATS)
            rows += rows_of(channels, spent, with_map=channels == CHANNELS[0])
            rows += agreement(channels, sides)
    return rows


def scan_coordinates(voxel_m: float = VOXEL_M, every: int = 1) -> Tensor:
    """int32 [N, 4]: sample 0 and the distinct voxels, ascending, of every so-many-th point of the scan.

    Coordinates start at 0.  Needs laspy and lazrs.
    """
    cloud = points()[::every]
    places = voxels(cloud - cloud.min(axis=0), voxel_m)
    return torch.from_numpy(np.pad(places, ((0, 0), (1, 0))).astype(np.int32))


main = partial(run, "Sparse convolution on the CPU, one thread (CPU time, medians)", measure)

if __name__ == "__main__":
    raise SystemExit(main())
