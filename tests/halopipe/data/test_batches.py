from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halopipe.data.sources import batches, take
from planner.ir.errors import FactoryError, ModelNotFoundError, UsageError
from planner.ir.profile import ModelSource
from profiler.source.model import LoadedModel
from profiler.source.source import load_model

HERE = __name__


@pytest.fixture
def model() -> LoadedModel:
    return load_model(ModelSource("tests.halopipe.bombs:mined", {}, (4, 3), "float64"))


def test_the_example_is_repeated_to_the_global_batch(model: LoadedModel) -> None:
    stream = batches("", model, 10, 0)
    (inputs,), (targets,) = take(stream, 0)
    assert inputs.shape == targets.shape == (10, 3)
    assert torch.equal(inputs, torch.cat([model.inputs[0]] * 3)[:10])
    assert torch.equal(take(stream, 1)[0][0], inputs)


def test_a_factory_gives_batches_in_the_models_dtype(model: LoadedModel) -> None:
    stream = batches("tests.halopipe.bombs:short", model, 6, 0)
    (inputs,), (targets,) = take(stream, 0)
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((6, 3), torch.float64, torch.int64)
    take(stream, 1)
    with pytest.raises(UsageError, match="ended after 2 batches") as caught:
        take(stream, 2)
    assert caught.value.remedies == ("--steps 2",)


def several(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[object]:
    yield [torch.ones(global_batch)], torch.ones(global_batch, dtype=torch.int64)
    yield 1, torch.ones(global_batch)


def broken(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[object]:
    yield (1 / 0, seed)


def not_pairs(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[object]:
    yield torch.ones(global_batch)


def test_tuples_of_tensors_pass_and_integers_keep_their_dtype(model: LoadedModel) -> None:
    stream = batches(f"{HERE}:several", model, 6, 0)
    inputs, targets = take(stream, 0)
    assert [tensor.dtype for tensor in (*inputs, *targets)] == [torch.float64, torch.int64]
    with pytest.raises(FactoryError, match=r"another batch[\s\S]*batch\[0\] is 1, a tensor in the example"):
        take(stream, 1)


def test_a_factory_that_fails_is_named_with_the_place(model: LoadedModel) -> None:
    with pytest.raises(FactoryError, match="broken raised ZeroDivisionError") as caught:
        take(batches(f"{HERE}:broken", model, 6, 0), 0)
    assert "test_batches.py" in str(caught.value)
    with pytest.raises(FactoryError, match=r"gave no \(inputs, targets\)"):
        take(batches(f"{HERE}:not_pairs", model, 6, 0), 0)
    with pytest.raises(ModelNotFoundError):
        take(batches(f"{HERE}:missing", model, 6, 0), 0)
