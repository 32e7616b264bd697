from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from halopipe.data.sources import Position, Samples, bound, drawing, open_data, read
from halopipe.launch.restart import may_pass
from planner.ir.errors import FactoryError, OutOfMemoryError, UsageError
from planner.ir.graph import TensorSpec
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.pipeline.microbatches import InputSpecs, MicroBatches, WholeBatch
from runtime.stage.shapes import step_inputs
from tests.captures import capture
from tests.halopipe import learners

HERE = __name__
DATA = "tests.halopipe.learners:"
START = Position()
SIZES = [6, 6, 6, 1]
"""Batches of up to 6 of the 19 samples."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(learners.plan().inputs.model)


def first(model: LoadedModel, name: str, number: int, start: Position = START, seed: int = 0) -> list[object]:
    return list(islice(read(open_data(DATA + name, model, 6, seed), start), number))


def same(one: list[object], other: list[object]) -> bool:
    return all(
        a == b and torch.equal(x, u) and torch.equal(y, v)
        for (a, ((x,), (y,))), (b, ((u,), (v,))) in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", ["dataset", "noisy", "loader"])
def test_an_epoch_shows_every_sample_once_and_the_next_in_another_order(model: LoadedModel, name: str) -> None:
    found = first(model, name, 9)
    assert [epoch for epoch, _ in found] == [0] * 4 + [1] * 4 + [2]
    assert [len(inputs) for _, ((inputs,), _) in found[:8]] == SIZES * 2
    epochs = [torch.cat([targets for _, (_, (targets,)) in found[i : i + 4]]) for i in (0, 4)]
    assert torch.equal(epochs[0].bincount(), epochs[1].bincount())
    assert not torch.equal(*epochs)
    assert {inputs.dtype for _, ((inputs,), _) in found} == {torch.float64}
    assert {targets.dtype for _, (_, (targets,)) in found} == {torch.int64}


@pytest.mark.parametrize("name", ["dataset", "noisy", "loader", "stream"])
def test_the_seed_alone_says_what_comes_also_from_the_middle_on(model: LoadedModel, name: str) -> None:
    torch.manual_seed(1)
    found = first(model, name, 9)
    torch.manual_seed(2)
    assert same(found, first(model, name, 9))
    assert not same(found, first(model, name, 9, seed=1))
    position = Position()
    for done, (epoch, ((inputs,), _)) in enumerate(found, start=1):
        position = position.after(epoch, len(inputs))
        assert same(found[done:], first(model, name, 9 - done, position))


def test_what_a_sample_draws_depends_on_its_number_and_the_epoch_alone(model: LoadedModel) -> None:
    samples = open_data(DATA + "noisy", model, 6, 0)
    assert isinstance(samples, Samples)
    ((whole,), _) = samples.collated(2, [3, 8, 5])
    parts = [samples.collated(2, indices)[0][0] for indices in ([3], [8, 5])]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, samples.collated(1, [3, 8, 5])[0][0])


def test_reading_leaves_torchs_own_generator_alone(model: LoadedModel) -> None:
    before = torch.get_rng_state()
    for name in ("dataset", "noisy", "loader"):
        first(model, name, 5)
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_data_is_in_its_own_order_for_one_epoch(model: LoadedModel) -> None:
    data = open_data(DATA + "dataset", model, 6, 0, shuffled=False)
    found = [inputs for _, ((inputs,), _) in read(data, Position(), 1)]
    assert torch.equal(torch.cat(found), learners.samples()[0].double())


def test_an_iterator_asked_again_begins_anew(model: LoadedModel) -> None:
    data = open_data(f"{HERE}:three", model, 6, 0)
    once, again = (list(read(data, Position(), 1)) for _ in range(2))
    assert len(once) == 3
    assert same(once, again)


def test_an_iterable_dataset_is_put_into_batches(model: LoadedModel) -> None:
    found = list(islice(read(open_data(f"{HERE}:iterable", model, 6, 0), Position()), 3))
    assert [(epoch, len(inputs)) for epoch, ((inputs,), _) in found] == [(0, 6), (0, 2), (1, 6)]


def three(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    return islice(learners.stream(global_batch, input_shape, seed), 3)


class Counting(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.ones(learners.WIDTH), torch.tensor(1))] * 8)


def iterable(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Counting:
    return Counting()


def own_generator(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[tuple[Tensor, ...]]:
    dataset = TensorDataset(*learners.samples())
    return DataLoader(dataset, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(99))


def test_a_generator_that_a_loader_owns_goes_on_from_the_middle_too(model: LoadedModel) -> None:
    found = list(islice(read(open_data(f"{HERE}:own_generator", model, 6, 0), Position()), 7))
    rest = list(islice(read(open_data(f"{HERE}:own_generator", model, 6, 0), Position(1, 1, 6)), 2))
    assert same(found[5:], rest)


class Empty(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 0


def empty(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Empty:
    return Empty()


class Broken(Empty):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise OSError("no such image")


def broken(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Broken:
    return Broken()


class Hungry(Broken):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1 << 55, dtype=torch.uint8), torch.zeros(())


def hungry(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Hungry:
    return Hungry()


def nothing(global_batch: int, input_shape: tuple[int, ...], seed: int) -> None:
    return None


def test_data_that_cannot_be_used_is_named(model: LoadedModel) -> None:
    with pytest.raises(FactoryError, match="empty gave a Dataset without samples"):
        open_data(f"{HERE}:empty", model, 6, 0)
    with pytest.raises(FactoryError, match="broken raised OSError") as caught:
        next(read(open_data(f"{HERE}:broken", model, 6, 0), Position()))
    assert "no such image" in str(caught.value)
    with pytest.raises(FactoryError, match="nothing gave None, which is no data"):
        open_data(f"{HERE}:nothing", model, 6, 0)


def test_data_that_have_no_memory_may_be_asked_again(model: LoadedModel) -> None:
    with pytest.raises(OutOfMemoryError, match="hungry ran out of memory") as caught:
        next(read(open_data(f"{HERE}:hungry", model, 6, 0), Position()))
    assert "test_sources.py" in str(caught.value)
    assert may_pass(caught.value)


def test_a_list_of_tuples_is_micro_batches_and_a_list_of_tensors_is_a_batch(model: LoadedModel) -> None:
    captured = capture(model)
    inputs = step_inputs(captured)
    (_, pieces), (_, whole) = (first(model, name, 1)[0] for name in ("pieces", "loader"))
    batch = bound(pieces, inputs, (3, 3))
    assert isinstance(batch, MicroBatches)
    assert batch.rows == (3, 1)
    assert isinstance(bound(whole, inputs, (3, 3)), WholeBatch)


def test_a_batch_of_another_dtype_is_refused_but_for_targets_that_a_loss_promotes() -> None:
    dims = ("sample", "feature")
    specs = {"inputs": TensorSpec(dims, (4, 2), "float32"), "targets": TensorSpec(dims, (4, 2), "float32")}
    inputs, floats = InputSpecs(specs, 4), torch.zeros(2, 2)
    for targets in (floats, floats.double()):
        bound(((floats,), (targets,)), inputs, (2, 2))
    for given, targets, name in ((floats.double(), floats, "inputs"), (floats, floats.long(), "targets")):
        for item in (((given,), (targets,)), [((floats,), (floats,)), ((given,), (targets,))]):
            with pytest.raises(UsageError, match=rf"{name} is of torch\.\w+64, the model .* with torch\.float32"):
                bound(item, inputs, (2, 2))


def test_drawing_leaves_no_trace() -> None:
    before = torch.get_rng_state()
    with drawing(1, 2):
        one = torch.rand(3)
    with drawing(1, 2):
        assert torch.equal(one, torch.rand(3))
    assert torch.equal(before, torch.get_rng_state())


def test_data_says_what_it_is_and_how_it_was_asked_for(model: LoadedModel) -> None:
    told = {name: open_data(DATA + name, model, 6, 3).origin for name in ("dataset", "loader", "stream")}
    call = "(global_batch=6, input_shape=(4, 5), seed=3)"
    assert told["dataset"].startswith(f"{DATA}dataset{call} gave a Dataset of 19 samples")
    assert told["loader"] == f"{DATA}loader{call} gave batches in epochs (DataLoader)"
    assert told["stream"] == f"{DATA}stream{call} gave an iterator of batches"
