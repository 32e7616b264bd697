"""Steps with NaN or infinity: where it began is named on every rank, and nothing is made of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import NotFiniteError, UsageError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.engine import Engine, StepResult
from runtime.numerics.finite import INFINITE, NAN, OnNan, Origin, all_finite, first_of, kind_of
from tests.captures import capture
from tests.runtime.divided import divided
from tests.runtime.plans import batch_of, decide, run_ranks
from tests.runtime.training import adamw, cosine, sharded

MICRO_BATCHES = (2, 2)
SHAPE = (4, 3, 6, 6)


class Network(nn.Module):
    """Statistics that are written, scores under a mask of -inf, and a root whose gradient at 0 is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4, 5)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf, 0.0]))
        self.shift = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.norm(self.first(x)).relu()).relu().mean((2, 3))
        y = functional.softmax(y + self.mask, 1)
        return self.last(y * (self.shift * self.shift).sqrt())


def network(*, input_shape: tuple[int, ...] = SHAPE) -> tuple[nn.Module, tuple[Tensor, Tensor], object]:
    torch.manual_seed(0)
    return Network(), (torch.randn(input_shape), torch.arange(input_shape[0]) % 5), nn.CrossEntropyLoss()


@cache
def model() -> LoadedModel:
    return load_model(ModelSource(f"{__name__}:network", {}, SHAPE, "float64"))


DIVIDED = ("divided optimisers", "divided gradients", "divided parameters")


@cache
def plans() -> dict[str, Decision]:
    graph = capture(model()).graph
    micro_batches = MICRO_BATCHES
    two = {"ranks": [(0, 1), (2, 3)], "shares": [(1, 1), (1, 1)]}
    return {
        "pipeline": decide(graph, ["second"], micro_batches),
        "replicas": decide(graph, [], micro_batches, ranks=[(0, 1)], shares=[(1, 1)]),
        "replicas of both": decide(graph, ["second"], micro_batches, **two),
        "divided optimisers": sharded(decide(graph, ["second"], micro_batches, **two)),
        "divided gradients": sharded(decide(graph, ["second"], micro_batches, **two), 2),
        "divided parameters": sharded(decide(graph, ["second"], micro_batches, **two), 3),
        "height": divided(graph, {"height": (0, 3, 6)}, micro_batches),
        "versions": decide(graph, ["second"], micro_batches, schedule="pipedream"),
    }


Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def batches(count: int) -> list[Batch]:
    return [batch_of(model(), sum(MICRO_BATCHES), step) for step in range(count)]


def spoilt(batch: Batch, value: float = math.nan) -> Batch:
    """The same; one pixel of the last sample is no number."""
    image = batch[0][0].clone()
    image[-1, 0, 0, 0] = value
    return (image,), batch[1]


def with_weight(name: str, value: float) -> LoadedModel:
    changed = copy.deepcopy(model())
    with torch.no_grad():
        changed.module.get_parameter(name).view(-1)[0] = value
    return changed


def refused(changed: LoadedModel, plan: str, given: Sequence[Batch], **options: object) -> NotFiniteError:
    """What all ranks raise; it is the same."""
    errors: list[BaseException] = []
    with pytest.raises(NotFiniteError):
        run_ranks(changed, plans()[plan], [*given, *batches(1)], errors=errors, **{"on_nan": OnNan.STOP, **options})
    assert len(errors) == plans()[plan].num_ranks
    assert len({error.render() for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize("plan", ["pipeline", "replicas", "height", *DIVIDED, "versions"])
def test_an_infinite_weight_is_found_in_its_layer(plan: str) -> None:
    error = refused(with_weight("second.weight", math.inf), plan, batches(1))
    assert "step 1: " in error.title
    assert "first in layer second (aten.conv2d" in error.title
    assert "forward of micro-batch 0, rank " in error.title
    rank = {"pipeline": 1, **dict.fromkeys(DIVIDED, 2), "versions": 1}.get(plan, 0)
    assert f"rank {rank} (n0/cpu{rank}, stage " in error.title
    assert any("second.weight: infinity" in line for line in error.details)
    assert error.exit_code == 6


@pytest.mark.parametrize("plan", ["pipeline", "replicas of both", *DIVIDED, "versions"])
def test_a_gradient_that_alone_is_not_finite_is_found_too(plan: str) -> None:
    error = refused(with_weight("shift", 0.0), plan, batches(1))
    assert "backward of micro-batch 0" in error.title
    assert "(aten.sqrt" in error.title or "shift" in error.title
    assert any(line.startswith("the loss is ") and "nan" not in line for line in error.details)
    assert any("no finite gradients of shift" in line for line in error.details)


def test_a_batch_with_nan_is_said_to_have_it() -> None:
    error = refused(model(), "pipeline", [*batches(1), spoilt(batches(2)[1])])
    assert error.title.startswith("step 2: the batch has NaN in ")
    assert error.title.endswith("micro-batch 1")
    assert error.remedies[0] == "mend the data"


def test_where_gradients_are_clipped_no_rank_updates() -> None:
    before = copy.deepcopy(model().module.state_dict())
    changed = with_weight("shift", 0.0)
    made: list[Kept] = []
    kept: list[Kept] = []

    class Kept(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            kept.append(self)

    def optimizer(given: list[nn.Parameter]) -> Kept:
        made.append(Kept(given, lr=1.0))
        return made[-1]

    error = refused(changed, "pipeline", batches(1), clip_norm=1.0, optimizer=optimizer)
    assert "step 1: " in error.title
    assert made
    assert not any(each is own for each in kept for own in made)  # others try what such an optimiser does
    assert before.keys() == changed.module.state_dict().keys()


def state_after(
    plan: str, given: Sequence[Batch], **options: object
) -> tuple[dict[str, Tensor], list[list[StepResult]]]:
    engines, results = run_ranks(model(), plans()[plan], given, optimizer=adamw, scheduler=cosine, **options)
    state: dict[str, Tensor] = {}
    for engine in engines:
        found = engine.state()
        state |= {f"{plan} {key}": tensor.clone() for key, tensor in found.tensors.items()}
        state |= {key: torch.tensor(value) for key, value in found.numbers.items() if isinstance(value, float)}
    return state, results


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        ("pipeline", {}),
        ("pipeline", {"clip_norm": 0.5}),
        ("replicas of both", {}),
        *((plan, {}) for plan in DIVIDED),
        ("height", {}),
    ],
)
def test_a_step_that_is_skipped_leaves_all_as_if_its_batch_had_not_been(plan: str, options: dict[str, object]) -> None:
    given = batches(4)
    bad = [given[0], spoilt(given[1]), given[2], spoilt(given[3], math.inf)]
    found, results = state_after(plan, bad, on_nan=OnNan.SKIP, **options)
    expected, _ = state_after(plan, [given[0], given[2]], **options)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    for each in results:
        assert [bool(result.left_out) for result in each] == [False, True, False, True]
    assert "step 2: the batch has NaN" in results[0][1].left_out


def test_of_several_steps_the_whole_update_is_skipped() -> None:
    given = batches(6)
    bad = [*given[:2], spoilt(given[2]), *given[3:]]
    found, results = state_after("pipeline", bad, on_nan=OnNan.SKIP, accumulate=2)
    expected, _ = state_after("pipeline", [*given[:2], *given[4:]], accumulate=2)
    assert [bool(result.left_out) for result in results[0]] == [False, False, True, False, False, False]
    parameters = [key for key in expected if "norm.r" not in key and "norm.n" not in key]
    assert parameters
    for key in parameters:  # statistics are those of the other batch of that update too
        assert torch.equal(found[key], expected[key]), key


def test_ignoring_is_what_it_says() -> None:
    _, results = state_after("pipeline", [spoilt(batches(1)[0])], on_nan=OnNan.IGNORE)
    assert math.isnan(results[1][0].loss)


def test_an_update_within_a_step_cannot_be_skipped() -> None:
    with pytest.raises(UsageError, match="--on-nan skip"):
        run_ranks(model(), plans()["versions"], batches(1), on_nan=OnNan.SKIP)


def test_a_state_that_is_not_finite_is_not_saved() -> None:
    def spoil(engine: Engine) -> None:
        for tensor in engine.state_dict().values():
            if tensor.shape == (5, 4):
                tensor[0, 0] = math.nan

    engines, _ = run_ranks(model(), plans()["replicas"], batches(1), on_nan=OnNan.STOP)
    assert engines[0].state().tensors  # the mask of -inf is nobody's fault
    spoil(engines[0])
    with pytest.raises(NotFiniteError, match="after step 1 the state has NaN") as caught:
        engines[0].state()
    assert "model/last.weight" in caught.value.details[0]
    ignoring, _ = run_ranks(model(), plans()["replicas"], batches(1), on_nan=OnNan.IGNORE)
    spoil(ignoring[0])
    assert ignoring[0].state().tensors


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [3, 1 << 15])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_one_element_that_is_not_finite_is_seen(dtype: torch.dtype, count: int, value: float) -> None:
    others = [torch.full((5,), 6e4), torch.full((count,), 100.0, dtype=dtype), torch.ones(3, dtype=torch.int64)]
    assert all_finite(others)
    others[1][-1] = value
    assert not all_finite(others)
    assert kind_of(others) == (NAN if math.isnan(value) else INFINITE)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11, which is told to check them
def test_gradients_that_cancel_or_are_sparse_are_seen() -> None:
    assert not all_finite([torch.tensor([math.inf, -math.inf])])
    assert all_finite([])
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    assert all_finite([sparse])
    assert not all_finite([sparse * math.nan])


ORDER = {name: place for place, name in enumerate("abcd")}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([Origin(1, 0, "loss", NAN, "c"), Origin(0, 0, "loss", NAN, "d")], (1, 0, "c")),
        ([Origin(1, 1, "loss", NAN, "c"), Origin(1, 2, "loss", NAN, "a")], (1, 1, "c")),
        ([Origin(1, 0, "loss", NAN, via="x"), Origin(0, 0, "x", NAN, "a"), Origin(0, 0, "y", NAN, "b")], (0, 0, "a")),
        ([Origin(0, 0, "mask", INFINITE, "a"), Origin(1, 1, "", NAN, "d"), Origin(0, 1, "", NAN, "b")], (1, 1, "d")),
        ([Origin(0, 0, "mask", INFINITE, "a")], None),
    ],
)
def test_the_first_place_is_that_which_the_loss_leads_back_to(
    found: list[Origin], expected: tuple[int, int, str] | None
) -> None:
    first = first_of(found, "loss", ORDER)
    assert (first and (first.rank, first.microbatch, first.layer)) == expected
