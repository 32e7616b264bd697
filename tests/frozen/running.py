"""Networks of the zoo under plans of every kind: what they compute, and what ranks send to one another for it.

Of each rank are kept the number, the bytes and a digest of what it sends or sums, in order, with peers; of the step
its losses, and of gradients and state a norm and a projection onto fixed numbers.  A refusal is kept as its text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.check.structure import require_possible
from planner.ir.errors import HalopipeError, WorkerError
from planner.ir.plan import Decision
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.stage.builder import check_layers
from runtime.transport import Hub, InProcessTransport
from tests.runtime.cases import recomputing
from tests.runtime.training import sharded
from tests.zoo import ALL
from tests.zoo.entries import DATA, PIPELINE, PLANS, SPATIAL, SPLIT
from tests.zoo.judging import NUM_STEPS, SEED, Ranks, batch_of, decision_of, source_of, space_of

Change = Callable[[Decision], Decision]

VARIANTS: Mapping[str, tuple[str, Change]] = {
    **{plan: (plan, lambda decision: decision) for plan in PLANS},
    "recompute": (PIPELINE, recomputing),
    "recompute, split backward": (SPLIT, recomputing),
    **{f"zero {level}": (DATA, partial(sharded, zero=level)) for level in (1, 2, 3)},
    "recompute over space": (SPATIAL, recomputing),
}
"""By name: a plan of the zoo, and what is changed in it; without a dim of space a pipeline takes its place."""

PAIRS = {
    f"{name.replace(':', '.').replace('/', '.')}--{variant.replace(',', '').replace(' ', '-')}": (name, variant)
    for place, name in enumerate(sorted(ALL, key=lambda name: hashlib.sha256(name.encode()).digest()))
    for variant in [list(VARIANTS)[place % len(VARIANTS)]]
}


class Recording(InProcessTransport):
    """Keeps what its rank sends, sums and exchanges."""

    def __init__(self, logs: dict[int, list[list[Any]]], hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self._log = logs.setdefault(rank, [])

    def send(self, key: Any, destination: int, tensors: Sequence[Tensor]) -> None:
        self._log.append(["send", str(key), destination, [_described(each) for each in tensors]])
        super().send(key, destination, tensors)

    def start_exchange(self, sent: Mapping[int, Tensor], *rest: Any, **more: Any) -> Any:
        self._log.append(["exchange", [[rank, _described(each)] for rank, each in sent.items()]])
        return super().start_exchange(sent, *rest, **more)

    def _meet(self, what: str, tensor: Tensor, counts: Any, ranks: Any, *rest: Any) -> Any:
        self._log.append([what, [*counts], [*ranks], _described(tensor)])
        return super()._meet(what, tensor, counts, ranks, *rest)


def frozen(pair: str) -> Any:
    """What becomes of a network under a plan."""
    name, variant = PAIRS[pair]
    entry, (plan, change) = ALL[name], VARIANTS[variant]
    torch.set_num_threads(1)
    logs: dict[int, list[list[Any]]] = {}
    try:
        model = load_model(source_of(entry), SEED)
        captured = capture(model)
        has_dims = plan != SPATIAL or space_of(captured.graph)
        decision = change(decision_of(entry, plan if has_dims else PIPELINE, captured))
        require_possible(decision, captured.graph)
        check_layers(decision, captured.graph)
        ranks = Ranks(decision, (model, captured), source_of(entry), partial(Recording, logs))
        trained = ranks.trained([batch_of(model, sum(decision.micro_batches), step) for step in range(NUM_STEPS)])
    except WorkerError:
        raise  # in a step: no refusal
    except HalopipeError as error:
        return {"code": error.code, "title": error.title}
    return {
        "losses": [*trained.losses],
        "gradients": _projected(trained.gradients),
        "state": _projected(trained.state),
        "actions": _digest(decision.program),
        "messages": [_summary(logs[rank]) for rank in sorted(logs)],
    }


def values() -> dict[str, Callable[[], Any]]:
    """What is frozen, by name."""
    return {pair: partial(frozen, pair) for pair in PAIRS}


def _described(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), *tensor.shape]


def _summary(log: Sequence[Sequence[Any]]) -> dict[str, Any]:
    kinds = [str(each[0]) for each in log]
    return {**{kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, "in order": _digest(log)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _projected(tensors: Mapping[str, Tensor]) -> list[float]:
    """The norm of all of them, and the sum of their elements times fixed numbers, by name."""
    norm = projection = 0.0
    for name, tensor in sorted(tensors.items()):
        flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        flat = flat.double().flatten()
        norm += (flat**2).sum().item()
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        projection += torch.dot(flat, 0.5 + torch.rand(flat.numel(), generator=generator, dtype=torch.float64)).item()
    return [norm**0.5, projection]
