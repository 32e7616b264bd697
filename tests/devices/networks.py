"""A zoo network under a plan with its stages on a card: a step, a checkpoint and back, another step, and one device."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch

from planner.check.structure import require_possible
from planner.ir.plan import Decision
from profiler.capture.graph import placed
from profiler.source.model import LoadedModel, named_buffers, named_parameters
from runtime.captured import CapturedModule
from runtime.checkpoint.state import RankState
from runtime.engine import Engine
from runtime.numerics.compare import Sketch, Tolerance, sketches, tensor_differences
from runtime.numerics.finite import OnNan
from runtime.numerics.single_device import serial_step_each
from runtime.stage.random.streams import CounterRng
from runtime.stage.random.user_module import Answers
from runtime.transport import InProcessTransport
from tests.devices.card import DEVICE, OURS, ROOT, Card, Crossings, card
from tests.devices.ranks import CardTransport, hosted, on_card
from tests.runtime.saved import Saved
from tests.runtime.training import sharded
from tests.zoo.entries import DATA, PIPELINE, SPATIAL, SPLIT, Entry
from tests.zoo.judging import batch_of, decision_of, rows_between, space_of

Network = tuple[LoadedModel, CapturedModule]
Sketches = Mapping[str, Mapping[str, Sketch]]
"""Of gradients and of parameters and buffers, by name."""

SEED = 0
RECOMPUTED = "recomputed"
BY_HOST = "messages by way of the host"
OPTIMISER = "optimiser in slices"
GRADIENTS = "gradients in slices"
PARAMETERS = "parameters in slices"
PLANS = (PIPELINE, SPLIT, DATA, SPATIAL, RECOMPUTED, BY_HOST, OPTIMISER, GRADIENTS, PARAMETERS)
_LEVELS = {OPTIMISER: 1, GRADIENTS: 2, PARAMETERS: 3}


def plans_of(captured: CapturedModule) -> tuple[str, ...]:
    """Those that the network has dims for."""
    return tuple(plan for plan in PLANS if plan != SPATIAL or space_of(captured.graph))


def decided(entry: Entry, plan: str, captured: CapturedModule) -> Decision:
    """The decision of a plan.

    Raises:
        HalopipeError: the network cannot be run so.
    """
    base = DATA if plan in _LEVELS else PIPELINE if plan in (RECOMPUTED, BY_HOST) else plan
    decision = decision_of(entry, base, captured)
    if plan in _LEVELS:
        decision = sharded(decision, _LEVELS[plan])
    if plan == RECOMPUTED:
        decision = replace(decision, stages=tuple(replace(stage, recompute=True) for stage in decision.stages))
    require_possible(decision, captured.graph)
    return decision


def by_plan(
    network: Network, plan: str, decision: Decision, crossings: Crossings, *, evaluates: bool
) -> Sequence[Sketches]:
    """What each rank has after a step with its stages on a card.

    Raises:
        AssertionError: what stages hold is not on the card.
    """
    batches = [batch_of(network[0], decision.global_batch, step) for step in range(2)]
    saved: list[RankState] = []

    def work(engine: Engine, made: Card, end: InProcessTransport) -> Sketches:
        with made.step():
            engine.step(*batches[0])
        engine.settle()
        _require_there(engine)
        found = {"gradient": sketches(engine.gradients()), "state": sketches(engine.state_dict())}
        state = engine.state()
        saved.append(replace(state, tensors={key: each.cpu() for key, each in state.tensors.items()}))
        end.barrier()
        engine.load_state(Saved(*saved))
        with made.step():
            engine.step(*batches[1])
        _require_there(engine)
        if evaluates:
            engine.evaluate(*batches[1])
        return found

    transport = InProcessTransport if plan == BY_HOST else CardTransport
    options = {"seed": SEED, "on_nan": OnNan.STOP, "clip_norm": 1.0 if plan in (PIPELINE, DATA) else 0.0}
    return on_card(decision, network, work, crossings, transport=transport, optimizer=_optimizer(plan), **options)


def by_one_device(network: Network, decision: Decision) -> Sketches:
    """What the user's own module has after that step, which is on a card as well."""
    batch = batch_of(network[0], decision.global_batch, 0)
    with card() as made:
        own = made(Crossings())
        model, captured = hosted(own, network)
        with own, torch.autograd.set_multithreading_enabled(False):
            model = placed(model, DEVICE)
            parameters = named_parameters(model.owners)
            inputs, targets = (tuple(tensor.to(DEVICE) for tensor in tensors) for tensors in batch)
            parts = list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]()
            for first, count in zip(
                accumulate(decision.micro_batches, initial=0), decision.micro_batches, strict=False
            ):
                part = rows_between((*inputs, *targets), model.fed_rows, first, count)
                parts.append((tuple(part[: len(inputs)]), tuple(part[len(inputs) :])))
            serial_step_each(
                model.loss,
                torch.optim.SGD(list(dict.fromkeys(parameters.values())), lr=0.05),  # tied ones have two names
                parts,
                decision.micro_batches,
                answers=Answers(captured, CounterRng(SEED)),
            )
            gradients = {name: each.grad for name, each in parameters.items() if each.grad is not None}
            return {
                "gradient": sketches(gradients),
                "state": sketches({**parameters, **named_buffers(model.owners)}),
            }


def line_of_user(error: Exception) -> str:
    """The line of the user's own that raised; empty where a line of ours did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if each.filename.startswith(_OURS) and not each.filename.endswith("user_module.py")]
    last = own[-1] if own else frames[-1]
    return f"{last.filename}:{last.lineno}" if last.filename.startswith(_ZOO) else ""


_ZOO = str(ROOT / "tests" / "zoo")
_OURS = (*OURS, _ZOO)


def compare(of_ranks: Sequence[Sketches], expected: Sketches) -> None:
    """Raises :class:`planner.ir.errors.NumericsError` where names or shapes differ; numbers are all the same here."""
    for of_rank in of_ranks:
        for kind, tensors in of_rank.items():
            tensor_differences(kind, tensors, expected[kind], Tolerance(0.0, 0.0, 0.0))


def _optimizer(plan: str) -> Callable[..., torch.optim.Optimizer]:
    """With and without the calls for all parameters at once that torch prefers on a GPU."""
    if plan in (SPLIT, SPATIAL):
        return partial(torch.optim.SGD, lr=0.05, momentum=0.9, foreach=True)
    return partial(torch.optim.AdamW, lr=0.05, foreach=plan in (PIPELINE, OPTIMISER))


def _require_there(engine: Engine) -> None:
    """Parameters, buffers, gradients and what optimisers keep of elements are on the card."""
    held = {**engine.state_dict(), **{f"gradient of {name}": each for name, each in engine.gradients().items()}}
    held |= {f"held tensor {number}": each for number, each in enumerate(engine.held_tensors()) if each.ndim}
    elsewhere = [f"{name} is on {each.device}" for name, each in held.items() if each.device != DEVICE]
    assert not elsewhere, "; ".join(elsewhere)
