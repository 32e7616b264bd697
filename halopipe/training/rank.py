"""One rank of a job, opened: its device, its model captured and checked, the other ranks met, its engine and its feed.

There is no other way to become a rank: workers, ranks of torchrun or Slurm, and scripts of one's own
(:mod:`halopipe.launch.execute`) all go through :func:`prepare_rank`, so that no check is left out by one of them.

        prepare_rank    captures the model, checks that it is the planned one and that the program ends
        Prepared.open   meets the others, checks that all hold the same plan, options and weights, makes the stages
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuda_ops.memory import MemoryMeter
from halopipe.data.feeds import Consumer, consumer_of
from planner.check.structure import require_possible
from planner.ir.codec import dumps
from planner.ir.errors import HalopipeError, StaleFileError, UsageError
from planner.ir.fingerprint import fingerprint, require_match
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler.capture.graph import Captured
from profiler.measure.devices import capture_for
from profiler.source.model import LoadedModel
from runtime.engine import Engine
from runtime.monitor.activity import Activity
from runtime.monitor.failure import read_error, write_error
from runtime.optim.optimizer import MakeOptimizer, MakeScheduler
from runtime.pipeline.messages import CPU
from runtime.spatial.compiling.compiled import Compiler
from runtime.stage.builder import check_layers, groups_of
from runtime.stage.captured import captured_model
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store

OpenTransport = Callable[[tuple[tuple[int, ...], ...], Callable[[], Program]], Transport]
"""Joins the ranks, with these groups, for this program."""

_HEX = 16
_OTHER_MODEL = "profile and plan this model again, or run the plan with the model it was made for"


@dataclass(frozen=True, slots=True)
class Terms:
    """What all ranks of a job do alike.

    Attributes:
        said: the same as text, where a rank may have been told otherwise than rank 0; compared by name.
    """

    plan: Plan
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    seed: int = 0
    clip_norm: float = 0.0
    accumulate: int = 1
    deadline_s: float = 120.0
    compiler: Compiler | None = None
    said: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is, and whom it speaks to.

    Attributes:
        store: of the job, for what ranks tell each other before their first step.
        open_transport: joins the ranks.
        device: where its stages compute; None: on the processor.
        meter: counts the memory there.
        others: what the other ranks do, as one line.
    """

    rank: int
    num_ranks: int
    store: Store
    open_transport: OpenTransport
    activity: Activity
    others: Callable[[], str] = str
    device: torch.device | None = None
    meter: MemoryMeter | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A rank that can take steps."""

    engine: Engine
    consumer: Consumer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rank whose model is that of the plan.

    Attributes:
        model: its module is the user's own.
    """

    terms: Terms
    model: LoadedModel
    captured: Captured

    def open(self, place: Place, seed: Callable[[], int] | None = None) -> Opened:
        """Joins the others.

        Args:
            seed: gives that of what layers draw, where a checkpoint says another; asked when the ranks agree.

        Raises:
            StaleFileError: the ranks hold different plans or models.
            UsageError: they were told different things, or begin with different weights.
        """
        terms, decision = self.terms, self.terms.plan.decision
        graph, captured = self.captured.graph, captured_model(self.captured)
        place.activity.begin("comparing plans with the others")
        _agree(terms, place, self.captured)
        drawn = terms.seed if seed is None else seed()
        place.activity.begin("meeting the others")
        transport = place.open_transport(
            groups_of(decision, graph), lambda: Boundaries.of_decision(graph, decision).program(decision)
        )
        try:
            consumer = consumer_of(decision, captured, transport, terms.deadline_s)
            place.activity.begin("building the stages")
            engine = Engine(
                decision,
                captured,
                self.model.module,
                transport,
                terms.optimizer,
                scheduler=terms.scheduler,
                seed=drawn,
                clip_norm=terms.clip_norm,
                accumulate=terms.accumulate,
                deadline_s=terms.deadline_s,
                compiler=terms.compiler,
                device=place.device,
                meter=place.meter,
                activity=place.activity,
                others=place.others,
            )
        except BaseException:
            transport.close()
            raise
        return Opened(engine, consumer)


def prepare_rank(
    terms: Terms,
    device: torch.device | None,
    activity: Activity,
    load: Callable[[], LoadedModel],
    load_to_run: Callable[[], LoadedModel] | None = None,
) -> Prepared:
    """The rank with its model, which is the planned one.

    Args:
        device: where its stages will compute; None: on the processor.
        load: the model as it was planned.
        load_to_run: the same in the dtype that is run; None: it is that of the plan.

    Raises:
        StaleFileError: the plan was made for another model.
        CorruptFileError: the plan was edited and divides a layer as it cannot be.
        IllegalProgramError: the plan's program was edited and does not end.
    """
    plan = terms.plan
    activity.begin("loading the model")
    model = load()
    activity.begin("capturing the model")
    model, captured = capture_for(model, device or CPU, whole=False)
    require_match("model", plan.inputs.model_fingerprint, fingerprint(captured.graph), _OTHER_MODEL)
    if load_to_run is not None:
        model, captured = capture_for(load_to_run(), device or CPU, whole=False)
    check_layers(plan.decision, captured.graph)
    require_possible(plan.decision, captured.graph)
    validate(Boundaries.of_decision(captured.graph, plan.decision).program(plan.decision))
    return Prepared(terms, model, captured)


def _agree(terms: Terms, place: Place, captured: Captured) -> None:
    """All ranks were given one plan, told the same, and begin with the same weights: else all of them raise why."""
    mine = {
        "plan": _hashed(dumps(terms.plan).encode()),
        "model": fingerprint(captured.graph),
        "options": {
            "seed": str(terms.seed),
            "clip_norm": f"{terms.clip_norm:g}",
            "accumulate": str(terms.accumulate),
            **terms.said,
        },
        "weights": {name: _digest(tensor) for name, tensor in _state(captured).items()},
    }
    place.store.set(f"terms/{place.rank}", json.dumps(mine))
    error = _difference(place.rank, json.loads(place.store.get("terms/0").decode()), mine)
    place.store.set(f"agreed/{place.rank}", "" if error is None else write_error(error))
    if error is not None:
        raise error
    for rank in range(place.num_ranks):
        text = place.store.get(f"agreed/{rank}").decode()
        if text:
            raise read_error(text)


def _difference(rank: int, first: Mapping[str, Any], mine: Mapping[str, Any]) -> HalopipeError | None:
    """What this rank was given otherwise than rank 0, as the error to raise; None: nothing."""

    def both(name: str, key: str = "") -> list[str]:
        found = (each[key].get(name) if key else each[name] for each in (first, mine))
        return [f"{who}: {value}" for who, value in zip(("rank 0", f"rank {rank}"), found, strict=True)]

    if first["plan"] != mine["plan"]:
        title = f"rank {rank} was given another plan than rank 0"
        return StaleFileError(title, both("plan"), ["copy one plan file to all hosts"])
    if first["model"] != mine["model"]:
        title, remedy = (
            f"rank {rank} has another model than rank 0",
            "build the same model, in the same dtype, on all ranks",
        )
        return StaleFileError(title, both("model"), [remedy])
    for name in sorted(first["options"].keys() | mine["options"].keys()):
        if first["options"].get(name) != mine["options"].get(name):
            title = f"rank {rank} was told another {name.replace('_', ' ')} than rank 0"
            return UsageError(title, both(name, "options"), ["give all ranks the same options"])
    for name in sorted(first["weights"].keys() | mine["weights"].keys()):
        if first["weights"].get(name) != mine["weights"].get(name):
            title = f"rank {rank} begins with other values of {name} than rank 0"
            return UsageError(
                title, both(name, "weights"), ["torch.manual_seed(0) before the model is built, on all ranks"]
            )
    return None


def _state(captured: Captured) -> dict[str, Tensor]:
    """Parameters, buffers and constants by the graph's names, each once."""
    module = captured.graph_module
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _digest(tensor: Tensor) -> str:
    """Of the values; with their norm, which a person can read."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().cpu().contiguous().flatten()
    norm = torch.linalg.vector_norm(flat.to(torch.float64 if not flat.is_complex() else torch.complex128)).item()
    numbers: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""  # numpy types its buffer from 3.12 on
    return f"{_hashed(memoryview(numbers))}, norm {norm:.9g}"


def _hashed(data: bytes | memoryview) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()[:_HEX]}"
