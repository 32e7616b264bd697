"""What data draw is the same on every rank; where it is not, the run ends before it trains on it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from halopipe.data.batch_sources import Agreement
from halopipe.data.sources import Position, digest, open_data, read
from planner.ir.errors import DifferentDataError, UsageError
from planner.ir.plan import Plan
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.transport import Hub, InProcessTransport
from tests.halopipe import learners
from tests.halopipe.ranks import run_job

HERE = __name__
Batch = tuple[Tensor, Tensor]
SHAPE = learners.WIDTH


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(learners.plan().inputs.model)


def drawn() -> Tensor:
    """Of all three generators."""
    return torch.rand(SHAPE) + float(np.random.rand()) + random.random()  # noqa: NPY002


def labelled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.tensor(int(x.sum() * 100) % learners.NUM_CLASSES)


class Augmented(Dataset[Batch]):
    def __init__(self, samples: int = 12) -> None:
        self.base = torch.stack([drawn() for _ in range(samples)])  # drawn while the factory runs

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Batch:
        return labelled(self.base[index] + drawn())


class Streamed(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return (labelled(drawn()) for _ in range(12))


class Shuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())  # noqa: NPY002

    def __len__(self) -> int:
        return 12


def generator(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Batch]:
    for _ in range(9):
        x = torch.stack([drawn() for _ in range(global_batch)])
        yield x, x[:, : learners.NUM_CLASSES].argmax(1)


def augmented(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Augmented:
    return Augmented()


def iterable(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Streamed:
    return Streamed()


def shuffling(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[Batch]:
    return DataLoader(Augmented(), batch_size=global_batch, shuffle=True)


def sampled(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[Batch]:
    return DataLoader(Augmented(), batch_size=global_batch, sampler=Shuffled())


def batch_sampled(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[Batch]:
    dataset = Augmented()
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(random.randrange(100)))
    return DataLoader(dataset, batch_sampler=BatchSampler(order, global_batch, drop_last=False))


def with_workers(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[Batch]:
    return DataLoader(Augmented(), batch_size=global_batch, shuffle=True, num_workers=2, multiprocessing_context="fork")


def staying_workers(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[Batch]:
    dataset = Augmented()
    return DataLoader(
        dataset, batch_size=global_batch, num_workers=1, multiprocessing_context="fork", persistent_workers=True
    )


DRAWING = [generator, augmented, iterable, shuffling, sampled, batch_sampled]
WITH_WORKERS = [with_workers, staying_workers]


def disturb(seed: int) -> None:
    """As a rank whose process has drawn other numbers before."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)


def digests(model: LoadedModel, factory: Callable[..., object], number: int, start: Position) -> list[tuple[int, ...]]:
    data = read(open_data(f"{HERE}:{factory.__name__}", model, 6, 0), start)
    return [(epoch, digest(x), digest(y)) for epoch, ((x,), (y,)) in islice(data, number)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("factory", DRAWING + WITH_WORKERS, ids=lambda each: each.__name__)
def test_what_is_drawn_follows_from_seed_and_place_alone(model: LoadedModel, factory: Callable[..., object]) -> None:
    number = 5
    disturb(1)
    found = digests(model, factory, number, Position())
    disturb(2)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert digests(model, factory, number, Position()) == found
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
    assert after == before
    assert len(set(found)) == number
    done = Position(0, 3, 18) if factory is generator else Position(1, 1, 6)  # epochs have two batches
    assert digests(model, factory, 2, done) == found[3:5]


RANDOM = count()


def unseeded(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Batch]:
    own = np.random.default_rng(next(RANDOM))  # as from the entropy of the system: another one on each rank
    while True:
        x = torch.from_numpy(own.random((global_batch, SHAPE)))
        yield x, torch.zeros(global_batch, dtype=torch.int64)


def by_rank(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Batch]:
    """As a DistributedSampler: labels that differ from rank to rank from the third batch on."""
    rank = next(RANDOM)
    for number in count():
        yield torch.ones(global_batch, SHAPE), torch.full((global_batch,), rank % 2 if number >= 2 else 0)


def shorter(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Batch]:
    """Ends after one batch on one of two ranks."""
    return iter(
        [(torch.ones(global_batch, SHAPE), torch.zeros(global_batch, dtype=torch.int64))] * (1 + next(RANDOM) % 2)
    )


def test_ranks_that_read_other_data_end_before_they_train_on_it(tmp_path: Path) -> None:
    with pytest.raises(DifferentDataError, match="different data at step 0: inputs") as caught:
        run_job(learners.plan(), tmp_path, data=f"{HERE}:unseeded")
    (detail,) = caught.value.details
    assert detail.startswith("step 0 (batch 0 of epoch 0), inputs: rank 0 read ")
    assert ", rank 1 read " in detail
    assert caught.value.remedies[0].startswith("--data-from first")
    assert len(run_job(learners.plan(), tmp_path, data=f"{HERE}:unseeded", data_from="first").losses) == 6


def test_the_step_and_the_tensor_that_differ_are_named(tmp_path: Path) -> None:
    with pytest.raises(DifferentDataError, match="different data at step 2: targets"):
        run_job(learners.plan(), tmp_path, data=f"{HERE}:by_rank")


def test_data_that_end_on_one_rank_alone_are_told(tmp_path: Path) -> None:
    with pytest.raises(DifferentDataError, match="at step 1") as caught:
        run_job(learners.plan(), tmp_path, data=f"{HERE}:shorter")
    assert "had no batch any more" in caught.value.details[0]
    with pytest.raises(DifferentDataError, match="at step 1"):
        run_job(learners.plan(), tmp_path, steps=2, eval_data=f"{HERE}:shorter")


class Mislabelled(Augmented):
    def __getitem__(self, index: int) -> Batch:
        return self.base[index], torch.tensor(learners.NUM_CLASSES if index == 6 else 0)


def mislabelled(global_batch: int, input_shape: tuple[int, ...], seed: int) -> DataLoader[Batch]:
    return DataLoader(Mislabelled(), batch_size=4)


@pytest.mark.parametrize("data_from", ["each", "first"])
def test_a_class_that_the_model_does_not_have_is_named_with_its_sample(tmp_path: Path, data_from: str) -> None:
    pattern = r"targets holds 3, and layer loss has 3 classes: 0 \.\.\. 2[\s\S]*sample 2, of the 4 that are given"
    with pytest.raises(UsageError, match=pattern):
        run_job(learners.plan(), tmp_path, data=f"{HERE}:mislabelled", data_from=data_from)


class Remembering(Augmented):
    """Its generator goes on from sample to sample."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Batch:
        return labelled(self.base[index] + float(self.own.random()))


def remembering(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Remembering:
    return Remembering()


def test_a_dataset_that_goes_on_drawing_is_read_once_through_alone(tmp_path: Path) -> None:
    data = f"{HERE}:remembering"
    with pytest.raises(DifferentDataError, match=r"sample \d+ of .*remembering is another one when it is read again"):
        run_job(learners.plan(), tmp_path, data=data, data_from="share")
    saved = {"data": data, "checkpoint": str(tmp_path / "saved")}
    run_job(learners.plan(), tmp_path, steps=1, **saved)
    with pytest.raises(DifferentDataError, match="read again"):
        run_job(learners.plan(), tmp_path, steps=2, resume=True, **saved)


@pytest.mark.parametrize("plan_of", [learners.plan, learners.replicas], ids=["pipeline", "replicas"])
def test_every_way_to_read_random_data_trains_alike(tmp_path: Path, plan_of: Callable[[], Plan]) -> None:
    plan = plan_of()
    losses = {
        way: run_job(plan, tmp_path, data=f"{HERE}:augmented", data_from=way).losses
        for way in ("each", "first", "share")
    }
    assert losses["first"] == pytest.approx(losses["each"], rel=1e-12)
    assert losses["share"] == pytest.approx(losses["each"], rel=1e-12)


def compare(rows: list[list[Tensor]], number: int, wrong: dict[int, int]) -> tuple[list[int], list[BaseException]]:
    """What ``number`` batches bring on ranks that all read ``rows``, but for rank r from batch ``wrong[r]`` on."""
    hub, steps, errors = Hub(len(wrong) + 2), [0] * (len(wrong) + 2), []

    def one(rank: int) -> None:
        agreement = Agreement(InProcessTransport(hub, rank), ("inputs", "targets"))
        try:
            for step in range(number):
                tensors = [[each + (step >= wrong.get(rank, number)) for each in row] for row in rows]
                agreement.note(tensors)
                steps[rank] += 1
            agreement.confirm()
        except DifferentDataError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(steps))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return steps, errors


def test_every_batch_is_compared_at_last() -> None:
    rows = [[torch.ones(3)], [torch.zeros(2), torch.ones(2)]]
    steps, errors = compare(rows, 150, {})
    assert (steps, errors) == ([150, 150], [])
    for first, seen in ((3, 3), (20, 31), (99, 127), (140, 150)):
        steps, errors = compare(rows, 150, {1: first})
        assert steps == [seen] * 3  # it is seen at the exchange after
        assert len(errors) == 3
        assert {str(each) for each in errors} == {str(errors[0])}
        assert errors[0].title == f"ranks read different data at step {first}: inputs, targets"
        assert "ranks 0, 2 read" in errors[0].details[0]


def test_a_digest_tells_bytes_shapes_and_dtypes_apart() -> None:
    x = torch.arange(24, dtype=torch.float32)
    others = [x, x + 0.5, x.flip(0), x.view(2, 12), x.view(12, 2), x.view(torch.int32), x.double(), x[:23], x[:0]]
    assert len({digest(each) for each in others}) == len(others)
    strided = x.view(4, 6).t()
    assert digest(strided) == digest(strided.contiguous()) == digest(strided.clone().requires_grad_())
    assert len({digest(torch.tensor(each)) for each in (True, False, 1, 1.0, 1j)}) == 5


def test_one_rank_compares_nothing() -> None:
    agreement = Agreement(InProcessTransport(Hub(1), 0), ("inputs",))
    agreement.note([[torch.ones(1)]])
    assert agreement.noted == 0
    assert replace(agreement, slots=3).slots == 3
