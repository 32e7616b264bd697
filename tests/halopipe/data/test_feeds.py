"""What ranks read is the same on each, or the run ends before it trains on it; and the next batch, told ahead."""

from __future__ import annotations

import logging
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, default_collate

from halopipe.data.ahead import UNTOLD, AheadSource, Announced, Upcoming
from halopipe.data.batch_sources import Agreement
from halopipe.data.sources import Position, digest, open_data, read
from halopipe.training.session import Execution
from planner.ir.errors import DifferentDataError, StageFailedError, UsageError
from planner.ir.graph import SAMPLE, TensorSpec
from planner.ir.plan import Plan
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.pipeline.microbatches import Batch, InputSpecs
from runtime.sparse.preparing import Preparing
from runtime.transport import Hub, InProcessTransport
from tests.halopipe import cloudy, learners
from tests.halopipe.cloudy import Clouds
from tests.halopipe.ranks import run_job
from tests.halopipe.training.sessions import together

HERE = __name__
Pair = tuple[Tensor, Tensor]
SHAPE = learners.WIDTH


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(learners.plan().inputs.model)


def drawn() -> Tensor:
    """Of all three generators."""
    return torch.rand(SHAPE) + float(np.random.rand()) + random.random()  # noqa: NPY002


def labelled(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.tensor(int(x.sum() * 100) % learners.NUM_CLASSES)


class Augmented(Dataset[Pair]):
    def __init__(self) -> None:
        self.base = torch.stack([drawn() for _ in range(12)])  # drawn while the factory runs

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, index: int) -> Pair:
        return labelled(self.base[index] + drawn())


class Streamed(IterableDataset[Pair]):
    def __iter__(self) -> Iterator[Pair]:
        return (labelled(drawn()) for _ in range(12))


class Shuffled(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(12))
        random.shuffle(order)
        return iter(np.random.permutation(order).tolist())  # noqa: NPY002

    def __len__(self) -> int:
        return 12


def generator(global_batch: int) -> Iterator[Pair]:
    for _ in range(9):
        x = torch.stack([drawn() for _ in range(global_batch)])
        yield x, x[:, : learners.NUM_CLASSES].argmax(1)


def shuffling(global_batch: int) -> DataLoader[Pair]:
    return DataLoader(Augmented(), batch_size=global_batch, shuffle=True)


def sampled(global_batch: int) -> DataLoader[Pair]:
    return DataLoader(Augmented(), batch_size=global_batch, sampler=Shuffled())


def batch_sampled(global_batch: int) -> DataLoader[Pair]:
    dataset = Augmented()
    order = RandomSampler(dataset, generator=torch.Generator().manual_seed(random.randrange(100)))
    return DataLoader(dataset, batch_sampler=BatchSampler(order, global_batch, drop_last=False))


FORKED = {"multiprocessing_context": "fork"}


def with_workers(global_batch: int) -> DataLoader[Pair]:
    return DataLoader(Augmented(), batch_size=global_batch, shuffle=True, num_workers=2, **FORKED)


def staying_workers(global_batch: int) -> DataLoader[Pair]:
    return DataLoader(Augmented(), batch_size=global_batch, num_workers=1, persistent_workers=True, **FORKED)


FACTORIES = [generator, Augmented, Streamed, shuffling, sampled, batch_sampled, with_workers, staying_workers]


def disturbed(seed: int) -> tuple[object, ...]:
    """Draws other numbers, as a rank whose process has drawn before; where the generators are."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    return states()


def states() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def digests(model: LoadedModel, factory: Callable[..., object], number: int, start: Position) -> list[tuple[int, ...]]:
    data = read(open_data(f"{HERE}:{factory.__name__}", model, 6, 0), start)
    return [(epoch, digest(x), digest(y)) for epoch, ((x,), (y,)) in islice(data, number)]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("factory", FACTORIES, ids=lambda each: each.__name__)
def test_what_is_drawn_follows_from_seed_and_place_alone(model: LoadedModel, factory: Callable[..., object]) -> None:
    number = 5
    disturbed(1)
    found = digests(model, factory, number, Position())
    before = disturbed(2)
    assert digests(model, factory, number, Position()) == found
    assert states() == before
    assert len(set(found)) == number
    done = Position(0, 3, 18) if factory is generator else Position(1, 1, 6)  # epochs have two batches
    assert digests(model, factory, 2, done) == found[3:5]


RANDOM = count()


def unseeded(global_batch: int) -> Iterator[Pair]:
    own = np.random.default_rng(next(RANDOM))  # as from the entropy of the system: another one on each rank
    while True:
        yield torch.from_numpy(own.random((global_batch, SHAPE))), torch.zeros(global_batch, dtype=torch.int64)


def by_rank(global_batch: int) -> Iterator[Pair]:
    """As a DistributedSampler: labels that differ from rank to rank from the third batch on."""
    rank = next(RANDOM)
    for number in count():
        yield torch.ones(global_batch, SHAPE), torch.full((global_batch,), rank % 2 if number >= 2 else 0)


def shorter(global_batch: int) -> Iterator[Pair]:
    """Ends after one batch on one of two ranks."""
    pair = torch.ones(global_batch, SHAPE), torch.zeros(global_batch, dtype=torch.int64)
    return iter([pair] * (1 + next(RANDOM) % 2))


class Remembering(Augmented):
    """Its generator goes on from sample to sample."""

    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Pair:
        return labelled(self.base[index] + float(self.own.random()))


@pytest.mark.parametrize(
    ("options", "message", "detail"),
    [
        (
            {"data": f"{HERE}:unseeded"},
            "at step 0: inputs",
            r"^step 0 \(batch 0 of epoch 0\), inputs: rank 0 .*, rank 1 read ",
        ),
        ({"data": f"{HERE}:by_rank"}, "at step 2: targets", "rank 1 read "),
        ({"data": f"{HERE}:shorter"}, "at step 1", "had no batch any more"),
        ({"steps": 2, "eval_data": f"{HERE}:shorter"}, "at step 1", "had no batch any more"),
    ],
)
def test_ranks_that_read_other_data_end_before_they_train_on_it(
    tmp_path: Path, options: dict[str, object], message: str, detail: str
) -> None:
    with pytest.raises(DifferentDataError, match=f"different data {message}") as caught:
        run_job(learners.plan(), tmp_path, **options)
    assert re.search(detail, caught.value.details[0])
    assert caught.value.remedies[0].startswith("--data-from first")


def test_the_first_rank_may_read_for_all_what_each_would_read_otherwise(tmp_path: Path) -> None:
    assert len(run_job(learners.plan(), tmp_path, data=f"{HERE}:unseeded", data_from="first").losses) == 6


class Mislabelled(Augmented):
    def __getitem__(self, index: int) -> Pair:
        return self.base[index], torch.tensor(learners.NUM_CLASSES if index == 6 else 0)


def mislabelled() -> DataLoader[Pair]:
    return DataLoader(Mislabelled(), batch_size=4)


@pytest.mark.parametrize("data_from", ["each", "first"])
def test_a_class_that_the_model_does_not_have_is_named_with_its_sample(tmp_path: Path, data_from: str) -> None:
    pattern = r"targets holds 3, and layer loss has 3 classes: 0 \.\.\. 2[\s\S]*sample 2, of the 4 that are given"
    with pytest.raises(UsageError, match=pattern):
        run_job(learners.plan(), tmp_path, data=f"{HERE}:mislabelled", data_from=data_from)


def test_a_dataset_that_goes_on_drawing_is_read_once_through_alone(tmp_path: Path) -> None:
    data = f"{HERE}:Remembering"
    with pytest.raises(DifferentDataError, match=r"sample \d+ of .*Remembering is another one when it is read again"):
        run_job(learners.plan(), tmp_path, data=data, data_from="share")
    saved = {"data": data, "checkpoint": str(tmp_path / "saved")}
    run_job(learners.plan(), tmp_path, steps=1, **saved)
    with pytest.raises(DifferentDataError, match="read again"):
        run_job(learners.plan(), tmp_path, steps=2, resume=True, **saved)


@pytest.mark.parametrize("plan_of", [learners.plan, learners.replicas], ids=["pipeline", "replicas"])
def test_every_way_to_read_random_data_trains_alike(tmp_path: Path, plan_of: Callable[[], Plan]) -> None:
    each, *others = (
        run_job(plan_of(), tmp_path, data=f"{HERE}:Augmented", data_from=way).losses
        for way in ("each", "first", "share")
    )
    assert others == [pytest.approx(each, rel=1e-12)] * 2


def compare(rows: list[list[Tensor]], number: int, wrong: dict[int, int]) -> tuple[list[int], list[BaseException]]:
    """What ``number`` batches bring on ranks that all read ``rows``, but for rank r from batch ``wrong[r]`` on."""
    hub = Hub(len(wrong) + 2)
    steps = [0] * (len(wrong) + 2)
    errors = []

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


class Numbers:
    """A feed of three batches."""

    agreement = None

    def __init__(self) -> None:
        self.position = Position(0, 0, 0)

    def take(self) -> object | None:
        if self.position.batches == 3:
            return None
        self.position = self.position.after(0, 1)
        return self.position.batches


def test_each_batch_is_told_once_before_it_is_needed_and_the_position_is_that_of_the_one_given() -> None:
    told: list[object] = []
    feed = AheadSource(Numbers(), told.append)  # type: ignore[arg-type]
    seen = []
    while (batch := feed.take()) is not None:
        seen.append((batch, feed.position.batches, list(told)))
    assert seen == [(1, 1, [1, 2]), (2, 2, [1, 2, 3]), (3, 3, [1, 2, 3])]
    assert feed.take() is None


def test_a_loop_is_given_each_batch_when_the_next_one_is_known() -> None:
    upcoming = Upcoming(True)
    asked = list[int]()
    seen = list[object]()

    def batches() -> Iterator[int]:
        for number in range(3):
            asked.append(number)
            yield number

    for batch in upcoming.ahead(batches()):
        seen.append((batch, list(asked), upcoming.take(), upcoming.take()))
    assert seen == [(0, [0, 1], (1,), ()), (1, [0, 1, 2], (2,), ()), (2, [0, 1, 2], (), ())]
    assert list(upcoming.ahead([])) == []
    assert list(upcoming.ahead([None])) == [None]


def test_a_plan_that_prepares_nothing_ahead_is_given_batches_as_they_come() -> None:
    upcoming = Upcoming(False)
    asked = iter(range(3))
    for batch in upcoming.ahead(asked):
        assert upcoming.take() == ()
        if batch == 1:
            break
    assert next(asked) == 2


@pytest.mark.parametrize("warns", [True, False])
def test_a_loop_that_tells_nothing_hears_once_what_it_loses(warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    upcoming = Upcoming(True, warns)
    for _ in range(4):
        assert upcoming.take() == ()
    assert [record[2] for record in caplog.record_tuples] == [UNTOLD] * warns
    told = Upcoming(True)
    for _ in told.ahead("ab"):
        told.take()
        told.take()
    assert len(caplog.records) == warns


INPUTS = InputSpecs(
    {"x": TensorSpec((SAMPLE, "dim1"), (4, 2), "float32"), "y": TensorSpec((SAMPLE,), (4,), "int64")}, 4
)


def pair(first: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    x = torch.arange(8, dtype=dtype).view(4, 2)
    x[0, 0] = first
    return (x,), (torch.arange(4),)


def test_what_was_announced_is_recognised_by_all_its_numbers_and_once() -> None:
    announced = Announced()
    item = pair()
    batch = announced.announce(item, INPUTS, (2, 2))
    assert announced.recognised(pair()) is batch
    assert announced.recognised(pair()) is None
    announced.announce(item, INPUTS, (2, 2))
    item[0][0][0, 0] = 9.0  # what is prepared is a copy
    assert announced.recognised(item) is None
    nan = pair(float("nan"))
    halves = [pair(), pair()]
    for told, came in ((pair(), pair(1.0)), (pair(), pair(dtype=torch.float64)), (pair(), halves), (nan, nan)):
        announced.announce(told, INPUTS, (2, 2))
        assert announced.recognised(came) is None
    batch = announced.announce(halves, INPUTS, (4, 4))
    assert announced.recognised([pair(), pair()]) is batch


def prepares(plan: Plan) -> Plan:
    return replace(plan, decision=replace(plan.decision, prepares_next_step=True))


def clouds_of(first: int, fault: str = "") -> tuple[tuple[Tensor, ...], Tensor]:
    (coordinates, features, counts), targets = default_collate(
        [Clouds(per_site=True, fault=fault)[first + n] for n in range(4)]
    )
    return (coordinates, features.double(), counts), targets


def losses(execution: Execution, is_told: bool, changed: bool = False) -> list[float]:
    """Of a script's own loop over four batches."""
    batches = [clouds_of(first) for first in range(4)]
    found = []
    for batch in execution.ahead(batches) if is_told else batches:
        if changed:
            batch[0][1].mul_(2)
        found.append(execution.step(batch))
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of all ranks: batches that were begun, and those that were told ahead."""
    found: list[str] = []
    own = Preparing._new
    expect = Preparing.expect

    def new(self: Preparing, raw: Batch) -> object:
        found.append("begun")
        return own(self, raw)

    def expected(self: Preparing, raw: Batch, rank: int) -> None:
        found.append("told")
        expect(self, raw, rank)

    monkeypatch.setattr(Preparing, "_new", new)
    monkeypatch.setattr(Preparing, "expect", expected)
    return found


@pytest.mark.parametrize("changed", [False, True])
def test_a_scripts_loop_has_the_next_batch_prepared_and_gets_the_same_bits(
    changed: bool, calls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    plan = cloudy.plan(cuts=[], ranks=[(0, 1)])
    expected = together(plan, lambda execution: losses(execution, True, changed))
    assert "told" not in calls
    calls.clear()
    assert together(prepares(plan), lambda execution: losses(execution, True, changed)) == expected
    begun = 4 + 3 * changed  # by each rank; what was changed since it was told is begun anew
    assert (calls.count("told"), calls.count("begun")) == (2 * 3, 2 * begun)
    assert UNTOLD not in caplog.text
    calls.clear()
    assert together(prepares(plan), lambda execution: losses(execution, False, changed)) == expected
    assert (calls.count("told"), calls.count("begun")) == (0, 2 * 4)
    assert caplog.text.count(UNTOLD) == 1


def test_clouds_that_no_network_takes_are_refused_at_their_own_step() -> None:
    def run(execution: Execution) -> list[object]:
        found: list[object] = []
        for batch in execution.ahead([clouds_of(0), clouds_of(0, "nan")]):
            if found:
                with pytest.raises(StageFailedError, match="NaN or infinite"):
                    execution.step(batch)
            else:
                found.append(execution.step(batch))
        return found

    ((loss,),) = together(prepares(cloudy.plan(cuts=[])), run)
    assert loss > 0
