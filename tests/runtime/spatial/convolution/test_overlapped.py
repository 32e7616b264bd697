from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.ir.box import Box, Transfer, intersect, whole
from runtime.pipeline.routing import slices
from runtime.spatial.convolution.layer import HaloMode, HaloSettings, local_form
from runtime.spatial.exchange import Exchange
from tests.runtime.spatial.convolution.cases import ConvCase, Tensors, random_case

MODES: tuple[HaloMode, ...] = ("linear", "blocking")
TOLERANCE = 1e-12


class _Came:
    def __init__(self, pieces: list[tuple[Box, Tensor]]) -> None:
        self._pieces = tuple(pieces)

    def wait(self) -> tuple[tuple[Box, Tensor], ...]:
        return self._pieces


@dataclass
class OneThread:
    """An exchange among ranks that run one after the other: what is sent is cut out of the whole tensor, and gradients
    that are sent back go to a ledger."""

    x: Tensor
    held: Box
    wanted: Box
    receives: tuple[tuple[int, Box], ...]
    sends: tuple[tuple[int, Box], ...]
    is_local: bool
    ledger: list[tuple[Box, Tensor]] = field(default_factory=list)
    _laid: dict[int, Any] = field(default_factory=dict)
    peers: Any = field(default_factory=lambda: SimpleNamespace(transport=None))

    laid = Exchange.laid

    @classmethod
    def of(cls, x: Tensor, case: ConvCase, moves: tuple[Transfer, ...], rank: int) -> OneThread:
        return cls(
            x,
            case.held()[rank],
            case.wanted()[rank],
            tuple((move.src, move.box) for move in moves if move.dst == rank),
            tuple((move.dst, move.box) for move in moves if move.src == rank),
            not moves,
        )

    @property
    def kept(self) -> tuple[Box, ...]:
        shared = intersect(self.held, self.wanted)
        return () if shared is None else (shared,)

    def start(self, x: Tensor) -> _Came:
        assert tuple(x.shape) == tuple(map(len, self.held))
        return _Came([(box, self.x[slices(box, whole(tuple(self.x.shape)))].clone()) for _, box in self.receives])

    def start_adjoint(self, gradients: list[Tensor], like: Tensor) -> _Came:
        for gradient, (_, box) in zip(gradients, self.receives, strict=True):
            assert tuple(gradient.shape) == tuple(map(len, box))
            self.ledger.append((box, gradient))
        return _Came([(box, like.new_zeros(tuple(map(len, box)))) for _, box in self.sends])


def computed(case: ConvCase, tensors: Tensors, settings: HaloSettings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What all ranks make together: y, and the sums of their gradients."""
    y = torch.full(case.output_shape, torch.nan, dtype=tensors.x.dtype)
    dx, dweight, dbias = (torch.zeros_like(each) for each in (tensors.x, tensors.weight, tensors.bias))
    origin = whole(case.input_shape)
    moves = case.moves()
    for rank in range(case.num_ranks):
        exchange = OneThread.of(tensors.x, case, moves, rank)
        form = local_form(case.part(rank), exchange, settings)
        of_weight, of_bias = case.weight_boxes(rank)
        x = tensors.x[slices(exchange.held, origin)].clone().requires_grad_()
        weight = tensors.weight[slices(of_weight, whole(case.weight_shape))].clone().requires_grad_()
        bias = tensors.bias[slices(of_bias, whole((case.channels[1],)))].clone().requires_grad_()
        found = form(x, weight, bias)
        y[slices(case.done()[rank], whole(case.output_shape))] = found.detach()
        found.backward(tensors.dys[rank])
        dx[slices(exchange.held, origin)] += _or_nothing(x)
        for box, gradient in exchange.ledger:
            dx[slices(box, origin)] += gradient
        dweight[slices(of_weight, whole(case.weight_shape))] += _or_nothing(weight)
        dbias[slices(of_bias, whole((case.channels[1],)))] += _or_nothing(bias)
    return y, dx, dweight, dbias


def _or_nothing(leaf: Tensor) -> Tensor | float:
    return 0.0 if leaf.grad is None else leaf.grad


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest element."""
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))


def check(case: ConvCase, settings: HaloSettings) -> float:
    """The largest difference from one device."""
    tensors = Tensors.of(case)
    found = computed(case, tensors, settings)
    expected = tensors.expected(case)
    worst = 0.0
    for name, ours, theirs in zip(("y", "dx", "dweight", "dbias"), found, expected, strict=True):
        off = difference(ours, theirs)
        assert off <= TOLERANCE, f"{name} differs by {off} from one device with {settings} in {case}"
        worst = max(worst, off)
    return worst


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_any_convolution_is_what_one_device_computes(mode: HaloMode, transposed: bool) -> None:
    numbers = random.Random(f"{mode} {transposed}")
    for number in range(200):
        check(random_case(numbers, transposed), HaloSettings(mode, most_extra=1e9 if number % 2 else 0.25))
