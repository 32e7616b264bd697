"""Networks under plans of every kind: what they compute, and what ranks send to one another for it.

Those of the zoo, sparse networks whose ranks share sites, transformers in token slices, and what training asks besides.

Of each rank are kept the number, the bytes and a digest of what it sends or sums, in order, with peers; of the step
its losses, and of gradients and state a norm and a projection onto fixed numbers.  A refusal is kept as its text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cuda_ops.sparse import dispatch
from planner.check.structure import require_possible
from planner.extras.token_slices.order import can_slice
from planner.ir.errors import HalopipeError, WorkerError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.schedules import names as schedule_names
from planner.schedules import traits
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.numerics.finite import OnNan
from runtime.rank import check_layers
from runtime.transport import Hub, InProcessTransport
from tests.runtime import plans
from tests.runtime.cases import recomputing
from tests.runtime.divided import divided
from tests.runtime.engines import on_engines
from tests.runtime.training import adamw, sharded
from tests.zoo import ALL
from tests.zoo.entries import DATA, PIPELINE, PLANS, SPATIAL, SPLIT
from tests.zoo.judging import NUM_STEPS, SEED, Ranks, Trained, batch_of, decision_of, space_of, together

Change = Callable[[Decision], Decision]

VARIANTS: Mapping[str, tuple[str, Change]] = {
    **{plan: (plan, lambda decision: decision) for plan in PLANS},
    "recompute": (PIPELINE, recomputing),
    "recompute, split backward": (SPLIT, recomputing),
    **{f"zero {level}": (DATA, partial(sharded, zero=level)) for level in (1, 2, 3)},
    "recompute over space": (SPATIAL, recomputing),
}
"""By name: a plan of the zoo, and what is changed in it; without a dim of space a pipeline takes its place."""


def _file_name(text: str) -> str:
    return text.replace(":", ".").replace("/", ".").replace(",", "").replace(" ", "-")


LATER = frozenset(
    {
        *(f"losses:{what}_of_selected" for what in ("loss", "mean", "means", "sum")),
        *(
            "libraries:library",
            "libraries:library_table",
            "losses:ignored_guesses",
            "losses:rounded_mean",
            "losses:mean_by_class",
            "autograd:inference_mode",
            *(f"hooks:{what}" for what in ("adapters", "forwards_in_contexts", "hooks_read_others")),
            *(f"hooks:{what}" for what in ("loss_reads_module", "wrapped_forward")),
        ),
        *(name for name in ALL if name.split(":")[0] in ("complex_numbers", "distributions", "merged")),
    }
)
"""Networks of the zoo that are judged there alone: they came after the others were paired with changes of a plan."""

PAIRS = {
    _file_name(f"{name}--{variant}"): (name, variant)
    for place, name in enumerate(sorted(ALL.keys() - LATER, key=lambda name: hashlib.sha256(name.encode()).digest()))
    for variant in [list(VARIANTS)[place % len(VARIANTS)]]
}

TOKENS = 12
SLICED = {
    "gpt": {"vocabulary": "11", "width": "8", "layers": "2", "heads": "2", "context": "16"},
    "llama": {"vocabulary": "11", "width": "16", "hidden": "24", "layers": "2", "heads": "4", "kv_heads": "2"},
}
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "three ranks": {"cuts": [], "ranks": [(2, 0, 1)], "shares": [(1, 3, 2)]},
    "two ranks, then one": {"cuts": [0.3], "ranks": [(0, 1), (2,)], "shares": [(2, 1), (1,)]},
    "one rank, then two": {"cuts": [0.2], "ranks": [(0,), (1, 2)], "shares": [(1,), (1, 3)]},
}
"""Of stages that share out sites."""

SPARSE = ("unet", "residual", "mean_pooled", "max_pooled", "averaged", "per_sample", "generated", "above")
ASKED: Mapping[str, Mapping[str, Any]] = {
    "clipped": {"clip_norm": 0.05},
    "clipped, skipping": {"clip_norm": 0.05, "on_nan": OnNan.SKIP},
    "accumulated": {"accumulate": 2},
    "accumulated and clipped": {"accumulate": 2, "clip_norm": 0.05},
}
"""What training asks of an engine."""


IN_TORCH = "sites.residual--in-torch"
"""Where no other operators are there, those of plain torch are run."""

WINDOWS = ModelSource("tests.frozen.networks:windows", {}, (), "float64")
ALONE = "windows--one-device"
"""Without a plan: micro-batches of three and two samples, on one device."""


def _trained_so() -> dict[str, tuple[ModelSource, Mapping[str, Any], Change, Mapping[str, Any]]]:
    """Networks that are no entries of the zoo, by name: the network, its plan, what is changed in it, what is asked."""
    cases: dict[str, tuple[ModelSource, Mapping[str, Any], Change, Mapping[str, Any]]] = {}
    for place, name in enumerate(SPARSE):
        layout = list(LAYOUTS)[place % len(LAYOUTS)]
        source = ModelSource(f"tests.runtime.sparse.networks:{name}", {}, (), "float64")
        plan = {**LAYOUTS[layout], "micro_batches": (1, 3) if place % 2 else (4,)}
        cases[f"sites.{name}--{layout}"] = source, plan, _as_it_is, {}
    source = ModelSource("tests.runtime.sparse.networks:residual", {}, (), "float64")
    cases[IN_TORCH] = source, {**LAYOUTS["two ranks, then one"], "micro_batches": (4,)}, _as_it_is, {}
    transformers = {
        name: ModelSource(f"profiler.models.{name}:{name}", arguments, (4, TOKENS), "float64")
        for name, arguments in SLICED.items()
    }
    for schedule in (name for name in schedule_names() if can_slice(name) and traits(name).trains):
        plan = {"cuts": [0.5], "micro_batches": (2, 2), "schedule": schedule, "token_slices": (5, 4, 3)}
        cases[f"slices.gpt--{schedule}"] = transformers["gpt"], plan, _as_it_is, {}
    plan = {"cuts": [0.25, 0.5, 0.75], "micro_batches": (1, 3), "token_slices": (3, 3, 3, 3)}
    cases["slices.llama--four stages"] = transformers["llama"], plan, _as_it_is, {}
    tied = ModelSource("tests.runtime.training:tied_gpt", {}, (4, 6), "float64")
    groups = {"cuts": [0.5], "ranks": [(0, 1), (2,)], "shares": [(1, 1), (1,)], "micro_batches": (2, 2)}
    alone = {**groups, "cuts": [], "ranks": [(0, 1)], "shares": [(2, 1)]}
    for name, options in ASKED.items():
        cases[f"asked.tied_gpt--{name}"] = tied, groups, _as_it_is, options
        cases[f"asked.tied_gpt--{name}, zero"] = tied, alone, sharded, options
    cases["windows--in space"] = WINDOWS, {"cuts": {"height": (0, 2, 3)}, "micro_batches": (3, 2)}, _as_it_is, {}
    return cases


def _as_it_is(decision: Decision) -> Decision:
    return decision


BESIDE = {_file_name(name): case for name, case in _trained_so().items()}
"""Pairs of networks that are no entries of the zoo."""


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

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self._note("sum", tensor, (), ranks)
        super().all_reduce(tensor, ranks)

    def start_sum(self, tensor: Tensor, ranks: tuple[int, ...]) -> Any:
        self._note("started sum", tensor, (), ranks)
        return super().start_sum(tensor, ranks)

    def reduce_scatter(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        self._note("reduce-scatter", flat, counts, ranks)
        super().reduce_scatter(flat, counts, ranks)

    def all_gather(self, flat: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> None:
        self._note("all-gather", flat, counts, ranks)
        super().all_gather(flat, counts, ranks)

    def all_max(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        self._note("maximum", tensor, (), ranks)
        super().all_max(tensor, ranks)

    def barrier(self, word: int = 0) -> int:
        self._note("barrier", torch.tensor(word, dtype=torch.uint8), (), range(self.world_size))
        return super().barrier(word)

    def _note(self, what: str, tensor: Tensor, counts: Sequence[int], ranks: Sequence[int]) -> None:
        self._log.append([what, [*counts], [*ranks], _described(tensor)])


def frozen(pair: str) -> Any:
    """What becomes of a network under a plan."""
    if pair == ALONE:
        return _on_one_device()
    with patch.dict(os.environ, {dispatch.VARIABLE: "torch"} if pair == IN_TORCH else {}):
        return _beside(pair) if pair in BESIDE else _of_the_zoo(pair)


def _beside(pair: str) -> Any:
    source, plan, change, options = BESIDE[pair]
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    logs: dict[int, list[list[Any]]] = {}
    model = load_model(source, SEED)
    captured = capture(model)
    decision = change((divided if isinstance(plan["cuts"], Mapping) else plans.decide)(captured.graph, **plan))
    batches = [
        plans.batch_of(model, decision.global_batch, step) for step in range(2 * NUM_STEPS if options else NUM_STEPS)
    ]

    def work(engine: Engine) -> tuple[list[float | None], dict[str, Tensor], dict[str, Tensor]]:
        losses = [engine.step(*batch).loss for batch in batches]
        return losses, dict(engine.gradients()), dict(engine.state_dict())

    transport: Any = partial(Recording, logs)
    optimizer: Any = adamw if options else plans.sgd
    trained = together(
        on_engines((model, captured), decision, work, transport=transport, optimizer=optimizer, **options)
    )
    return _described_run(trained, decision, logs)


def _on_one_device() -> dict[str, Any]:
    torch.set_num_threads(1)
    alone = plans.train_serially(load_model(WINDOWS, SEED), (3, 2), NUM_STEPS)
    return {
        "losses": alone.losses,
        "gradients": _projected(alone.gradients),
        "state": _projected(alone.state),
    }


def _of_the_zoo(pair: str) -> Any:
    name, variant = PAIRS[pair]
    entry = ALL[name]
    plan, change = VARIANTS[variant]
    torch.set_num_threads(1)
    logs: dict[int, list[list[Any]]] = {}
    try:
        model = load_model(entry.source, SEED)
        captured = capture(model)
        has_dims = plan != SPATIAL or space_of(captured.graph)
        decision = change(decision_of(entry, plan if has_dims else PIPELINE, captured))
        require_possible(decision, captured.graph)
        check_layers(decision, captured.graph)
        ranks = Ranks(decision, (model, captured), entry.source, partial(Recording, logs))
        trained = ranks.trained([batch_of(model, sum(decision.micro_batches), step) for step in range(NUM_STEPS)])
    except WorkerError:
        raise  # in a step: no refusal
    except HalopipeError as error:
        return {"code": error.code, "title": error.title}
    return _described_run(trained, decision, logs)


def _described_run(trained: Trained, decision: Decision, logs: Mapping[int, list[list[Any]]]) -> dict[str, Any]:
    return {
        "losses": [*trained.losses],
        "gradients": _projected(trained.gradients),
        "state": _projected(trained.state),
        "actions": _digest(decision.program),
        "messages": [_summary(logs[rank]) for rank in sorted(logs)],
    }


def values() -> dict[str, Callable[[], Any]]:
    """What is frozen, by name."""
    return {pair: partial(frozen, pair) for pair in (*PAIRS, *BESIDE, ALONE)}


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
