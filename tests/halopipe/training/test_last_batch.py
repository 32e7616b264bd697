"""A last batch that a plan cannot train on is known before the first step, from the length of the data."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from halopipe.data.shared_source import DataSources
from planner.ir.errors import UsageError
from planner.ir.profile import ModelSource
from profiler.models.example import Example
from profiler.source.source import load_model
from tests.captures import capture
from tests.halopipe.plans import plan_of
from tests.halopipe.training.sessions import together

HERE = "tests.halopipe.training.test_last_batch"
SOURCE = ModelSource(f"{HERE}:classifier", {}, (4, 5), "float64")


def classifier(*, input_shape: tuple[int, ...] = (4, 5)) -> Example:
    """Batch norm over vectors, as people write it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return module, (torch.randn(input_shape), torch.arange(input_shape[0]) % 3), nn.functional.cross_entropy


def nine() -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(torch.randn(9, 5, dtype=torch.float64), torch.arange(9) % 3)


def eight() -> Dataset[tuple[Tensor, ...]]:
    return Subset(nine(), range(8))


def kept() -> object:
    return DataLoader(nine(), batch_size=4)


def dropped() -> object:
    return DataLoader(nine(), batch_size=4, drop_last=True)


def supply(name: str, steps: int, schedule: str = "") -> DataSources:
    plan = plan_of(SOURCE, [0.5], (2, 2), **({"schedule": schedule} if schedule else {}))
    model = load_model(SOURCE)
    consumer = SimpleNamespace(decision=plan.decision, graph=capture(model).graph, transport=SimpleNamespace(rank=0))
    options = SimpleNamespace(data=f"{HERE}:{name}", data_from="each", eval_data="", steps=steps)
    return DataSources(consumer, options, model, 0)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["nine", "kept"])
def test_one_sample_for_batch_norm_is_refused_and_each_remedy_works(name: str) -> None:
    with pytest.raises(UsageError, match=r"layer 1 normalises over the batch[\s\S]*9 samples: 1 of 4") as caught:
        supply(name, 3)
    assert caught.value.remedies[:2] == (
        "leave the last 1 out: torch.utils.data.Subset(dataset, range(8))",
        "DataLoader(..., drop_last=True)",
    )
    for remedied in ("eight", "dropped"):
        supply(remedied, 30)
    supply(name, 2)  # the last batch is never reached


def test_a_schedule_that_updates_within_a_step_has_its_last_batch_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a full batch[\s\S]*10 samples: 2 of 4"):
        supply("ten", 3, "pipedream")


def ten() -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(torch.randn(10, 5, dtype=torch.float64), torch.arange(10) % 3)


def test_a_script_whose_batch_has_one_sample_is_told_the_layer_and_goes_on() -> None:
    inputs, targets = torch.randn(4, 5, dtype=torch.float64), torch.arange(4) % 3

    def run(execution: object) -> float:
        with pytest.raises(UsageError, match=r"layer 1 normalises[\s\S]*1 value a channel[\s\S]*drop_last=True"):
            execution.step((inputs[:1], targets[:1]))
        return execution.step((inputs, targets))

    first, second = together(plan_of(SOURCE, [0.5], (2, 2)), run)
    assert first == second
