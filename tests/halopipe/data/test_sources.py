"""What data give: batches of factories, datasets, loaders and the demo, and the part of them that a rank needs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from halopipe.data import demo_data as digits
from halopipe.data.factories import call_of
from halopipe.data.rank_slices import Need, needs, portion, whole_needs
from halopipe.data.sources import Position, Samples, batches, bound, open_data, read, take
from halopipe.launch.restart import may_pass
from planner.ir.errors import FactoryError, HalopipeError, ModelNotFoundError, OutOfMemoryError, UsageError
from planner.ir.graph import Graph, TensorSpec
from planner.ir.profile import ModelSource
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.pipeline.microbatches import InputSpecs, MicroBatches, WholeBatch
from runtime.stage.shapes import step_inputs
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import RESNET
from tests.runtime.plans import decide, folded

HERE = __name__
DATA = "tests.halopipe.learners:"
START = Position()
SIZES = [6, 6, 6, 1]
"""Batches of up to 6 of the 19 samples."""


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(learners.plan().inputs.model)


def first(model: LoadedModel, name: str, number: int, start: Position = START, seed: int = 0) -> list[object]:
    name = name if ":" in name else DATA + name
    return list(islice(read(open_data(name, model, 6, seed), start), number))


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
    before = torch.get_rng_state()
    assert same(found, first(model, name, 9))
    assert not same(found, first(model, name, 9, seed=1))
    position = Position()
    for done, (epoch, ((inputs,), _)) in enumerate(found, start=1):
        position = position.after(epoch, len(inputs))
        assert same(found[done:], first(model, name, 9 - done, position))
    assert torch.equal(before, torch.get_rng_state()), "torch's own generator is left alone"


def test_what_a_sample_draws_depends_on_its_number_and_the_epoch_alone(model: LoadedModel) -> None:
    samples = open_data(DATA + "noisy", model, 6, 0)
    assert isinstance(samples, Samples)
    ((whole,), _) = samples.collated(2, [3, 8, 5])
    parts = [samples.collated(2, indices)[0][0] for indices in ([3], [8, 5])]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, samples.collated(1, [3, 8, 5])[0][0])


def test_evaluation_data_is_in_its_own_order_for_one_epoch(model: LoadedModel) -> None:
    data = open_data(DATA + "dataset", model, 6, 0, shuffled=False)
    found = [inputs for _, ((inputs,), _) in read(data, START, 1)]
    assert torch.equal(torch.cat(found), learners.samples()[0].double())
    three = open_data(f"{HERE}:three", model, 6, 0)
    once, again = (list(read(three, START, 1)) for _ in range(2))
    assert len(once) == 3
    assert same(once, again), "an iterator asked again begins anew"


def three(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    return islice(learners.stream(global_batch, input_shape, seed), 3)


class Counting(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.ones(learners.WIDTH), torch.tensor(1))] * 8)


def own_generator() -> DataLoader[tuple[Tensor, ...]]:
    dataset = TensorDataset(*learners.samples())
    return DataLoader(dataset, batch_size=6, shuffle=True, generator=torch.Generator().manual_seed(99))


def test_iterable_datasets_and_loaders_with_a_generator_of_their_own_are_read(model: LoadedModel) -> None:
    found = first(model, f"{HERE}:Counting", 3)
    assert [(epoch, len(inputs)) for epoch, ((inputs,), _) in found] == [(0, 6), (0, 2), (1, 6)]
    found = first(model, f"{HERE}:own_generator", 7)
    assert same(found[5:], first(model, f"{HERE}:own_generator", 2, Position(1, 1, 6)))


def test_the_example_is_repeated_to_the_global_batch(model: LoadedModel) -> None:
    stream = batches("", model, 10, 0)
    (inputs,), (targets,) = take(stream, 0)
    assert (len(inputs), len(targets)) == (10, 10)
    assert torch.equal(inputs, torch.cat([model.inputs[0]] * 3)[:10])
    assert torch.equal(take(stream, 1)[0][0], inputs)


class Empty(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 0


class Broken(Empty):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise OSError("no such image")


class Hungry(Broken):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1 << 55, dtype=torch.uint8), torch.zeros(())


def nothing() -> None:
    return None


def failing() -> Iterator[object]:
    yield 1 / 0


def no_pairs() -> Iterator[object]:
    yield torch.ones(6)


def no_tensor() -> Iterator[object]:
    yield 1, torch.ones(6)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Empty", FactoryError, "Empty gave a Dataset without samples"),
        ("Broken", FactoryError, r"Broken raised OSError[\s\S]*no such image"),
        ("Hungry", OutOfMemoryError, r"Hungry ran out of memory[\s\S]*test_sources.py"),
        ("nothing", FactoryError, "nothing gave None, which is no data"),
        ("failing", FactoryError, r"failing raised ZeroDivisionError[\s\S]*test_sources.py"),
        ("no_pairs", FactoryError, r"gave no \(inputs, targets\)"),
        ("no_tensor", FactoryError, r"another batch[\s\S]*batch\[0\] is 1, a tensor in the example"),
        ("missing", ModelNotFoundError, "missing"),
    ],
)
def test_data_that_cannot_be_used_is_named(
    model: LoadedModel, name: str, kind: type[HalopipeError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        take(batches(f"{HERE}:{name}", model, 6, 0), 0)
    assert may_pass(caught.value) is (name == "Hungry"), "memory may be there when it is asked again"


def test_data_that_end_say_after_how_many_batches(model: LoadedModel) -> None:
    stream = batches("tests.halopipe.bombs:short", load_model(BOMBS), 6, 0)
    for step in range(2):
        (inputs,), (targets,) = take(stream, step)
        assert (inputs.shape, inputs.dtype, targets.dtype) == ((6, 3), torch.float64, torch.int64)
    with pytest.raises(UsageError, match="ended after 2 batches") as caught:
        take(stream, 2)
    assert caught.value.remedies == ("--steps 2",)


BOMBS = ModelSource("tests.halopipe.bombs:mined", {}, (4, 3), "float64")


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
    inputs = InputSpecs(specs, 4)
    floats = torch.zeros(2, 2)
    for targets in (floats, floats.double()):
        bound(((floats,), (targets,)), inputs, (2, 2))
    for given, targets, name in ((floats.double(), floats, "inputs"), (floats, floats.long(), "targets")):
        for item in (((given,), (targets,)), [((floats,), (floats,)), ((given,), (targets,))]):
            with pytest.raises(UsageError, match=rf"{name} is of torch\.\w+64, the model .* with torch\.float32"):
                bound(item, inputs, (2, 2))


def test_data_says_what_it_is_and_how_it_was_asked_for(model: LoadedModel) -> None:
    told = {name: open_data(DATA + name, model, 6, 3).origin for name in ("dataset", "loader", "stream")}
    call = "(global_batch=6, input_shape=(4, 5), seed=3)"
    assert told["dataset"].startswith(f"{DATA}dataset{call} gave a Dataset of 19 samples")
    assert told["loader"] == f"{DATA}loader{call} gave batches in epochs (DataLoader)"
    assert told["stream"] == f"{DATA}stream{call} gave an iterator of batches"


GIVEN = {"global_batch": 8, "input_shape": (3, 4), "seed": 7}


@pytest.mark.parametrize(
    ("factory", "expected", "text"),
    [
        (lambda: (), (), ""),
        (lambda batch: (batch,), (8,), "batch=8"),
        (lambda seed: (seed,), (7,), "seed=7"),
        (lambda batch, seed: (batch, seed), (8, 7), "batch=8, seed=7"),
        (lambda seed, size: (seed, size), (7, 8), "seed=7, size=8"),
        (lambda b, s, r: (b, s, r), (8, (3, 4), 7), "b=8, s=(3, 4), r=7"),
        (lambda root="here": (root,), ("here",), ""),
        (lambda root="here", batch_size=1: (root, batch_size), ("here", 8), "batch_size=8"),
        (lambda *rest: rest, (8, (3, 4), 7), "global_batch=8, input_shape=(3, 4), seed=7"),
        (lambda batch, *rest: (batch, *rest), (8, (3, 4), 7), "batch=8, input_shape=(3, 4), seed=7"),
        (lambda *, seed=1, **rest: (seed, rest), (7, {}), "seed=7"),
    ],
)
def test_a_factory_is_given_what_it_takes(factory: Callable[..., object], expected: object, text: str) -> None:
    call = call_of("d.py:f", factory, GIVEN)
    assert (call.make(), call.text) == (expected, f"d.py:f({text})")


@pytest.mark.parametrize("factory", [lambda a, b, c, d: 0, lambda *, root: 0, lambda seed, a, b, c: 0])
def test_a_factory_that_wants_more_is_told_what_there_is(factory: Callable[..., object]) -> None:
    with pytest.raises(FactoryError, match="which nobody gives it") as caught:
        call_of("d.py:f", factory, GIVEN)
    assert "global_batch, input_shape, seed" in caught.value.remedies[0]


@pytest.mark.exhaustive("imports scikit-learn")
def test_digits_are_scikit_learns_own() -> None:
    from sklearn.datasets import load_digits

    own = load_digits()
    pixels, labels = digits._read_digits()
    assert torch.equal(pixels.double(), torch.as_tensor(own.data))
    assert torch.equal(labels, torch.as_tensor(own.target))


def test_digits_come_in_the_shape_of_the_input_by_a_seed() -> None:
    shape = (4, 3, 16, 24)
    (images, labels), again, other = (next(digits.digits(8, shape, seed)) for seed in (0, 0, 1))
    assert (images.shape, labels.shape) == ((8, 3, 16, 24), (8,))
    assert (images.dtype, labels.dtype) == (torch.get_default_dtype(), torch.int64)
    assert torch.equal(images[:, 0], images[:, 2])
    assert torch.equal(images, again[0])
    assert not torch.equal(labels, other[1])
    with pytest.raises(UsageError, match="has 2 dims"):
        next(digits.digits(4, (4, 10), seed=0))


def test_a_pass_shows_every_digit_once_and_then_goes_on() -> None:
    found = list(itertools.islice(digits.digits(599, (1, 1, 8, 8), seed=0), 6))
    labels = torch.cat([labels for _, labels in found])
    first = labels[:1797]
    second = labels[1797:]
    assert first.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # UCI's table
    assert torch.equal(first.bincount(), second.bincount())
    assert not torch.equal(first, second)
    images = torch.cat([images for images, _ in found[:3]])
    assert images.mean().item() == pytest.approx(0, abs=1e-5)
    assert images.std().item() == pytest.approx(1, abs=1e-3)


def test_a_missing_scikit_learn_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UsageError) as caught:
        next(digits.digits(4, (4, 3, 16, 24), seed=0))
    assert caught.value.remedies == ("pip install 'halopipe[demo]'",)


def test_synthetic_labels_follow_from_the_inputs() -> None:
    stream = digits.synthetic(64, (8, 5), seed=0)
    x, y = next(stream)
    other, _ = next(stream)
    assert x.shape == (64, 5)
    assert not torch.equal(x, other)
    assert len(y.unique()) > 3
    again = next(digits.synthetic(64, (8, 5), seed=0))
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])


def graph_of(source: ModelSource) -> Graph:
    return capture(load_model(source)).graph


def test_a_rank_needs_the_rows_of_the_inputs_that_its_stages_read() -> None:
    graph = graph_of(RESNET)
    decision = decide(graph, [0.3, 0.6], (5, 2), [(0, 1), (2,), (3, 4)], [(3, 2), (1,), (1, 1)])
    assert needs(decision, graph, 1, (5, 2)) == (Need("inputs", 0, 3, 2), Need("inputs", 1, 1, 1))
    assert needs(decision, graph, 2, (5, 2)) == ()
    last = needs(decision, graph, 4, (5, 2))
    assert [need.name for need in last] == ["targets", "targets"]
    assert portion(decision, 2, 4, 5) == (last[0].start, last[0].count)
    assert [need.microbatch for need in needs(decision, graph, 0, (5, 0))] == [0]


def test_a_rank_needs_what_any_of_its_stages_reads_and_reads_it_once() -> None:
    graph = graph_of(learners.plan().inputs.model)
    decision = decide(graph, [graph.layers[-1].name], (4,))
    assert [[need.name for need in needs(decision, graph, rank, (4,))] for rank in range(2)] == [
        ["inputs", "targets"],  # it makes what the loss reads
        ["targets"],
    ]
    graph = graph_of(RESNET)
    ring = decide(graph, [0.3, 0.6], (4,), [(0,), (1,), (0,)], schedule=folded)
    assert sorted(need.name for need in needs(ring, graph, 0, (4,))) == ["inputs", "targets"]


def test_every_rank_needs_all_clouds_that_its_maps_are_made_of() -> None:
    names = ("coordinates", "features", "counts")
    assert whole_needs(names, (2, 0, 1)) == tuple(
        Need(name, m, 0, count) for m, count in ((0, 2), (2, 1)) for name in names
    )
