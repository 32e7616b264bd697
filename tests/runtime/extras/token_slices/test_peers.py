"""Plans with token slices train as one device does, under every schedule that can order them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner import schedules
from planner.extras.token_slices.order import can_slice
from planner.ir.errors import HalopipeError, UnsupportedModelError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.models.example import Example, indices, token_cross_entropy
from profiler.source.source import load_model
from runtime.extras.token_slices.peers import SlicePeers
from tests.runtime.cases import dropping, trained_alone
from tests.runtime.engines import Network, evaluated, on_engines, trained
from tests.runtime.plans import Trained, batch_of, decide, model_of

TOKENS = 12
CODES = 11
WIDTH = 8
GPT = {"vocabulary": CODES, "width": WIDTH, "layers": 2, "heads": 2, "context": 16}
LLAMA = {"vocabulary": CODES, "width": 16, "hidden": 24, "layers": 2, "heads": 4, "kv_heads": 2, "context": 16}
UNEQUAL = (5, 4, 3)
SLICEABLE = [name for name in schedules.names() if can_slice(name) and schedules.traits(name).trains]


class Dropping(nn.Module):
    """Dropout of attention weights and of what follows, and a mask from the inputs beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(CODES, WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, CODES)
        self.drop = nn.Dropout(0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) * (tokens != 0)[..., None]
        query, key, value = (part[:, None] for part in self.heads(x).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.2)
        return self.out(self.drop(x + seen[:, 0]))


class Reading(nn.Module):
    """Reads more than the tokens before, by ``read`` with layers of that name."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.token = nn.Embedding(CODES, WIDTH)
        self.out = nn.Linear(WIDTH, CODES)
        self.read = read
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.read(self, self.token(tokens)))


def attended(own: nn.Module, x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def windowed(own: nn.Module, x: Tensor) -> Tensor:
    return own.conv(x.transpose(1, 2)).transpose(1, 2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Dropping": Dropping,
    "TwoWays": lambda: Reading(attended),
    "Windowed": lambda: Reading(windowed, conv=nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "Averaged": lambda: Reading(lambda own, x: x + x.mean(1, keepdim=True)),
    "Recurrent": lambda: Reading(lambda own, x: own.lstm(x)[0], lstm=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
}


def made(*, input_shape: tuple[int, ...] = (4, TOKENS), name: str = "Dropping") -> Example:
    tokens = indices(CODES, (input_shape[0], input_shape[1] + 1), 0)
    return MODULES[name](), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), token_cross_entropy


@cache
def network(name: str) -> Network:
    if name in MODULES:
        model = load_model(ModelSource(f"{__name__}:made", {"name": f'"{name}"'}, (4, TOKENS), "float64"))
    else:
        model = model_of(f"{name}:{name}", (4, TOKENS), **{"gpt": GPT, "llama": LLAMA}[name])
    return model, capture(model)


@cache
def alone(name: str, micro_batches: tuple[int, ...]) -> Trained:
    given = network(name)
    batches = [batch_of(given[0], sum(micro_batches), step) for step in range(2)]
    return trained_alone(given, batches, [micro_batches] * 2, dropping if name == "Dropping" else None)


def sliced(
    name: str, schedule: str, slices: tuple[int, ...], stages: int = 2, batches: tuple[int, ...] = (2, 2)
) -> Decision:
    cuts = [number / stages for number in range(1, stages)]
    return decide(network(name)[1].graph, cuts, batches, schedule=schedule, token_slices=slices)


def assert_same(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-10, atol=1e-12 * largest, msg=name)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-10, atol=1e-14, msg=name)


def recomputed(decision: Decision) -> Decision:
    return replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))


TRAINED: dict[str, tuple[str, Callable[[], Decision]]] = {
    **{schedule: ("gpt", partial(sliced, "gpt", schedule, UNEQUAL)) for schedule in SLICEABLE},
    **{
        f"{name} {stages} {slices}": (name, partial(sliced, name, "1f1b", slices, stages))
        for name in ("gpt", "llama")
        for stages in (2, 4)
        for slices in (UNEQUAL, (3, 3, 3, 3), (1, 11), (12,))
    },
    "micro-batches differ in samples": ("gpt", partial(sliced, "gpt", "1f1b", UNEQUAL, 2, (1, 3))),
    "a stage begins between keys and their attention": (
        "gpt",
        lambda: decide(
            network("gpt")[1].graph, ["blocks.1.attention.value"], (2, 2), schedule="gpipe", token_slices=UNEQUAL
        ),
    ),
    "activations are computed again": ("llama", lambda: recomputed(sliced("llama", "1f1b", UNEQUAL))),
    "dropout draws what one device draws": ("Dropping", partial(sliced, "Dropping", "gpipe", UNEQUAL)),
}


@pytest.mark.cases(18)
@pytest.mark.parametrize("case", TRAINED)
def test_slices_train_as_one_device_does(case: str) -> None:
    name, made = TRAINED[case]
    decision = made()
    assert_same(trained(network(name), decision), alone(name, decision.micro_batches))


def test_a_smaller_last_batch_fills_the_first_micro_batches() -> None:
    given = network("gpt")
    inputs, targets = batch_of(given[0], 3, 0)
    whole = on_engines(given, sliced("gpt", "gpipe", (12,)), lambda engine: engine.step(inputs, targets).loss)
    found = on_engines(given, sliced("gpt", "gpipe", UNEQUAL), lambda engine: engine.step(inputs, targets).loss)
    assert found[0] is None
    assert found[1] == pytest.approx(whole[1], rel=1e-12)


def test_evaluation_gives_the_loss_and_the_rows_of_the_whole_batch_in_order() -> None:
    given = network("gpt")
    inputs, targets = batch_of(given[0], 4, 0)
    loss, rows = evaluated(given, sliced("gpt", "gpipe", UNEQUAL), inputs, targets)
    with torch.no_grad():
        logits = given[0].module(*inputs)
    assert loss == pytest.approx(token_cross_entropy(logits, *targets).item(), rel=1e-12)
    torch.testing.assert_close(rows, logits.flatten(0, 1), rtol=1e-12, atol=1e-12)


def test_nothing_of_a_micro_batch_is_kept_after_its_first_slice_went_back() -> None:
    kept: list[SlicePeers] = []
    plain = SlicePeers.__init__

    def noted(self: SlicePeers, slices: int) -> None:
        plain(self, slices)
        kept.append(self)

    given = network("gpt")
    inputs, targets = batch_of(given[0], 4, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlicePeers, "__init__", noted)
        on_engines(given, sliced("gpt", "1f1b", UNEQUAL), lambda engine: engine.step(inputs, targets).loss)
    assert len(kept) == 2
    assert not any(each.values or each.gradients for each in kept)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("TwoWays", "scaled_dot_product_attention"),
        ("Windowed", "conv"),
        ("Averaged", "mean"),
        ("Recurrent", "lstm"),
    ],
)
def test_what_reads_later_tokens_is_refused_with_the_layer_s_name(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        sliced(name, "gpipe", UNEQUAL)
    assert why in refused.value.title


@pytest.mark.parametrize("slices", [(5, 4), (0, 12), (13,)])
def test_slices_that_do_not_make_up_a_sequence_are_refused_with_both_numbers(slices: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedModelError) as refused:
        sliced("gpt", "gpipe", slices)
    assert str(TOKENS) in str(refused.value)


@pytest.mark.parametrize("schedule", [name for name in schedules.names() if not can_slice(name)])
def test_schedules_that_cannot_order_slices_say_so(schedule: str) -> None:
    with pytest.raises(HalopipeError, match="cannot order"):
        sliced("gpt", schedule, UNEQUAL)
