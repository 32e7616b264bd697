"""A divided optimiser computes what one on a single device computes, and keeps a part of its state on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from planner.ir.errors import UsageError
from runtime.memory import storage_bytes
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.sharding import ELEMENTWISE, ShardedParameters
from runtime.transport import InProcessTransport
from tests.runtime.ranks import on_ranks

SHAPES = {"embedding": (7, 5), "scale": (), "weight": (4, 3, 3), "bias": (3,), "one": (1,), "half": (5, 5)}
Make = Callable[..., torch.optim.Optimizer]


def by_shape(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    flat = [parameter for parameter in parameters if parameter.ndim < 2]
    deep = [parameter for parameter in parameters if parameter.ndim >= 2]
    return torch.optim.AdamW([{"params": deep, "weight_decay": 0.5}, {"params": flat, "weight_decay": 0.0}], lr=0.1)


def but_half(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam([parameter for parameter in parameters if parameter.shape != (5, 5)], lr=0.1)


OPTIMIZERS: dict[str, Make] = {
    **{name: partial(getattr(torch.optim, name), lr=0.1) for name in ELEMENTWISE},
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "decay": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.3),
    "groups by shape": by_shape,
    "one is left out": but_half,
}
EXACT = (torch.float64,)
MIXED = (torch.float64, torch.bfloat16, torch.float32)


def named_parameters(dtypes: tuple[torch.dtype, ...] = (torch.float64,)) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtypes[index % len(dtypes)]))
        for index, (name, shape) in enumerate(SHAPES.items())
    }


def gradient(parameter: nn.Parameter, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)


def sharded(parameters: dict[str, nn.Parameter], end: InProcessTransport, bucket_bytes: int) -> ShardedParameters:
    exchange = {"ranks": tuple(range(end.world_size))}
    return ShardedParameters(
        parameters,
        end.rank,
        end.world_size,
        partial(end.reduce_scatter, **exchange),
        partial(end.all_gather, **exchange),
        bucket_bytes,
    )


def train_sharded(
    end: InProcessTransport,
    make: Make,
    parameters: dict[str, nn.Parameter],
    bucket_bytes: int = 200,
    steps: int = 3,
) -> StageOptimizer:
    shards = sharded(parameters, end, bucket_bytes)
    optimizer = StageOptimizer(parameters, make, shards)
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = gradient(parameter, step, end.rank)
        shards.reduce()
        assert all(parameter.grad is None for parameter in parameters.values())
        optimizer.step()
        shards.reset()
    return optimizer


def train_alone(
    make: Make, parameters: dict[str, nn.Parameter], num_ranks: int, steps: int = 3
) -> torch.optim.Optimizer:
    optimizer = make(parameters.values())
    for step in range(steps):
        for parameter in parameters.values():
            parameter.grad = sum(gradient(parameter, step, rank) for rank in range(num_ranks))
        optimizer.step()
    return optimizer


@pytest.mark.cases(24)
@pytest.mark.parametrize(
    ("num_ranks", "bucket_bytes", "dtypes"),
    [*((ranks, size, EXACT) for ranks in (2, 3, 4) for size in (8, 200, 10_000)), (2, 200, MIXED)],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_divided_optimiser_steps_as_one(
    name: str, num_ranks: int, bucket_bytes: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    def run(end: InProcessTransport) -> dict[str, nn.Parameter]:
        parameters = named_parameters(dtypes)
        optimizer = train_sharded(end, OPTIMIZERS[name], parameters, bucket_bytes)
        if name == "groups by shape":
            assert optimizer.group_names == (("embedding", "weight", "half"), ("scale", "bias", "one"))
        return parameters

    expected = named_parameters(dtypes)
    train_alone(lambda parameters: OPTIMIZERS[name](list(parameters)), expected, num_ranks)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtypes == EXACT else {}
    for found in on_ranks(num_ranks, run):
        for each, parameter in expected.items():
            torch.testing.assert_close(found[each], parameter, **tolerance)


@pytest.mark.parametrize("name", ["Adam", "Adagrad"])  # state from the first step, and from the start
def test_each_rank_keeps_its_part_of_the_state(name: str) -> None:
    make = OPTIMIZERS[name]

    def run(end: InProcessTransport) -> int:
        optimizer = train_sharded(end, make, named_parameters())
        states = optimizer.state.values()
        assert all(state["step"].shape == () for state in states)
        return storage_bytes([value for state in states for key, value in state.items() if key != "step"])

    alone = train_alone(make, named_parameters(), 4)
    whole = sum(value.nbytes for state in alone.state.values() for key, value in state.items() if key != "step")
    found = on_ranks(4, run)
    assert sum(found) == whole
    assert max(found) <= 1.2 * whole / 4


def test_gradients_are_summed_in_parts_and_put_together_from_all_ranks() -> None:
    def run(end: InProcessTransport) -> tuple[dict[str, torch.Tensor], int]:
        parameters = named_parameters()
        shards = sharded(parameters, end, 200)
        for parameter in parameters.values():
            parameter.grad = gradient(parameter, 0, end.rank)
        shards.reduce()
        return shards.gradients(), storage_bytes([part.view.grad for part in shards.slices.values()])

    ranks = on_ranks(3, run)
    for found, _ in ranks:
        for name, parameter in named_parameters().items():
            torch.testing.assert_close(found[name], sum(gradient(parameter, 0, rank) for rank in range(3)))
    assert sum(held for _, held in ranks) == sum(parameter.nbytes for parameter in named_parameters().values())


def test_old_weights_stay_as_they_are_where_parameters_were_given_new_storage() -> None:
    def run(end: InProcessTransport) -> tuple[dict[str, torch.Tensor], dict[str, nn.Parameter]]:
        parameters = named_parameters()
        shards = sharded(parameters, end, 200)
        optimizer = StageOptimizer(parameters, OPTIMIZERS["momentum"], shards)
        for parameter in parameters.values():
            parameter.grad = gradient(parameter, 0, end.rank)
        old = {name: parameter.data for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.data = parameter.data.clone()
        shards.reduce()
        optimizer.step()
        return old, parameters

    expected = named_parameters()
    train_alone(OPTIMIZERS["momentum"], expected, 2, steps=1)
    for old, new in on_ranks(2, run):
        for name, parameter in named_parameters().items():
            assert torch.equal(old[name], parameter)
            torch.testing.assert_close(new[name], expected[name], rtol=1e-12, atol=1e-12)


class Own(torch.optim.SGD):
    """Looks like one of torch's and may do anything."""


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, Own])
def test_an_optimiser_that_may_look_at_whole_tensors_is_refused(cls: type[torch.optim.Optimizer]) -> None:
    def run(end: InProcessTransport) -> None:
        parameters = named_parameters()
        StageOptimizer(parameters, partial(cls, lr=0.1), sharded(parameters, end, 200))

    with pytest.raises(UsageError, match=f"state of {cls.__name__} cannot be divided") as caught:
        on_ranks(2, run)
    assert "AdamW" in caught.value.details[0]
