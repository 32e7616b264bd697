"""Operators of a user's own library that have names of torch's, and compute something else."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.autograd import Network, classes
from tests.zoo.entries import network


@torch.library.custom_op("halopipe_zoo::linear", mutates_args=())
def doubled_product(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return 2 * (input @ weight.t()) + bias


def _of_product(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    x, weight, _ = ctx.saved_tensors
    return 2 * dy @ weight, 2 * dy.t() @ x, dy.sum(0)


@torch.library.custom_op("halopipe_zoo::embedding", mutates_args=())
def rows_of(table: Tensor, places: Tensor) -> Tensor:
    return table[places]


def _of_rows(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    table, places = ctx.saved_tensors
    return torch.zeros_like(table).index_add(0, places, dy), None


@torch.library.custom_op("halopipe_zoo::batch_norm", mutates_args=())
def halved(x: Tensor, training: bool) -> Tensor:
    return x / 2 if training else x * 1


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*(each for each in inputs if isinstance(each, Tensor)))


doubled_product.register_fake(lambda input, weight, bias: input.new_empty(input.shape[0], weight.shape[0]))
doubled_product.register_autograd(_of_product, setup_context=_keep)
rows_of.register_fake(lambda table, places: table.new_empty(*places.shape, table.shape[1]))
rows_of.register_autograd(_of_rows, setup_context=_keep)
halved.register_fake(lambda x, training: torch.empty_like(x))
halved.register_autograd(lambda ctx, dy: (dy / 2, None), setup_context=_keep)


class OfALibrary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.own = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = doubled_product(torch.tanh(self.a(x)), self.own.weight, self.own.bias)
        return self.head(torch.tanh(halved(x, self.training)))


@network("a library's linear and batch_norm, which compute something else")
def library() -> Network:
    return OfALibrary(), classes(), F.cross_entropy


class OwnTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, places: Tensor) -> Tensor:
        return self.head(torch.tanh(rows_of(self.table, places)))


@network("a library's embedding, with arguments of other names")
def library_table() -> Network:
    return OwnTable(), (torch.randint(50, (4,)), torch.randint(3, (4,))), F.cross_entropy
