"""One rank of a job, opened: its device, the other ranks, its model captured and checked, its engine, its batches.

There is no other way to become a rank: workers that were spawned, ranks of torchrun, and scripts of one's own all go
through :func:`open_rank`, so that no check is left out by one of them.  They differ in where the number of the rank,
the store and the options come from.

        open_rank       the device, its cores and allocator; the heartbeat; at the end everything is closed
        Rank.prepare    captures the model, checks that it is the planned one and that the program ends
        Rank.open       checks that all hold the same plan, options and weights, joins the others, makes the stages
        Rank.limited    steps within the memory that the rank may have
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cuda_ops.memory import MemoryMeter, meter_of
from halopipe.data.batch_sources import Consumer, consumer_of
from halopipe.run_spec.job import Job
from halopipe.terminal import units
from halopipe.terminal.units import size
from halopipe.training import rank_device
from halopipe.training.optimizer_spec import makers_of
from planner.check.structure import require_possible
from planner.ir.codec import dumps, fingerprint
from planner.ir.errors import HalopipeError, OutOfMemoryError, StaleFileError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.program import Program
from planner.layers import statistics_text
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler.capture.graph import CapturedModule, capture_for
from profiler.source.model import LoadedModel
from runtime.engine import Engine
from runtime.memory import limit_memory, out_of_memory
from runtime.monitor.activity import Activity, StatusStore
from runtime.monitor.failure import also, read_error, write_error
from runtime.monitor.slow import SlowWatch
from runtime.monitor.waits import RankHeartbeat
from runtime.monitor.watch import SETUP_S
from runtime.numerics.finite import OnNan
from runtime.optim.optimizer import MakeOptimizer, MakeScheduler
from runtime.pipeline.routing import CPU
from runtime.stage.builder import check_layers, groups_of
from runtime.stage.captured import captured_model
from runtime.stage.shapes import graph_of_sizes
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.spatial import Compiler

OpenTransport = Callable[[tuple[tuple[int, ...], ...], Callable[[], Program]], Transport]
"""Joins the ranks, with these groups, for this program."""

Load = Callable[[], LoadedModel]

_HEX = 16
_MOST_NAMED = 5
_OTHER_MODEL = "profile and plan this model again, or run the plan with the model it was made for"


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What all ranks of a job do alike.

    Attributes:
        answers: whether ranks give what the module's output is made of (:meth:`runtime.engine.Engine.stream`).
        spelled: the same as text, where a rank may have been told otherwise than rank 0; compared by name.
    """

    plan: Plan
    optimizer: MakeOptimizer
    scheduler: MakeScheduler | None = None
    seed: int = 0
    clip_norm: float = 0.0
    accumulate: int = 1
    deadline_s: float = 120.0
    compiler: Compiler | None = None
    transport: str = ""
    spelled: Mapping[str, str] = field(default_factory=dict)
    on_nan: OnNan = OnNan.STOP
    answers: bool = False


def job_config_of(job: Job) -> JobConfig:
    """What the ranks of a job do alike."""
    options, inputs = job.options, job.plan.inputs
    optimizer, scheduler = makers_of(options, inputs.optimizer)
    spelled = {
        name: str(getattr(options, name))
        for name in ("optimizer", "scheduler", "data", "data_from", "compiler", "transport", "checkpoint_every")
    }
    return JobConfig(
        job.plan,
        optimizer,
        scheduler,
        options.seed,
        options.clip_norm,
        options.accumulate,
        options.deadline_s,
        options.compiler or None,
        options.transport,
        {**spelled, "steps": str(options.steps), "dtype": job.source.dtype, "autocast": job.source.autocast},
        OnNan(options.on_nan),
    )


@dataclass(frozen=True, slots=True)
class RankContext:
    """Where a rank is, and whom it speaks to.

    Attributes:
        store: of the job, for what ranks tell each other before their first step.
        open_transport: joins the ranks.
        device: where its stages compute; None: on the processor.
        meter: counts the memory there.
        spare_core, gives_way: of the thread that prepares batches, as of :class:`runtime.engine.Engine`.
        others: what the other ranks do, as one line.
        meet: waits for all ranks where others may take long, see :meth:`runtime.monitor.waits.RankHeartbeat.meet`.
    """

    rank: int
    num_ranks: int
    store: Store
    open_transport: OpenTransport
    activity: Activity
    others: Callable[[], str] = str
    meet: Callable[[], object] = str
    device: torch.device | None = None
    meter: MemoryMeter | None = None
    spare_core: int | None = None
    gives_way: bool = False


@dataclass(frozen=True, slots=True)
class OpenedRank:
    """A rank that can take steps.

    Attributes:
        meet: as of :class:`RankContext`.
    """

    engine: Engine
    consumer: Consumer
    activity: Activity
    meet: Callable[[], object] = str

    def gather(self) -> None:
        """Waits for all ranks, of which some may take long, but for none that is gone.

        Raises:
            DeadlineError, TransportError: one is.
        """
        self.meet()
        self.consumer.transport.barrier()


@dataclass(frozen=True, slots=True)
class RankModel:
    """The model of a rank, which is that of the plan.

    Attributes:
        model: its module is the user's own.
    """

    model: LoadedModel
    captured: CapturedModule


@contextlib.contextmanager
def open_rank(
    config: JobConfig,
    rank: int,
    store: Store,
    board: Store | StatusStore,
    *,
    device: str | torch.device = rank_device.AS_PLANNED,
    local_rank: int | None = None,
    is_metered: bool = True,
    open_transport: OpenTransport | None = None,
) -> Iterator[Rank]:
    """A rank with its device; while the context lasts, it tells the others what it does.

    Args:
        store: shared by all ranks of this job.
        board: a client of its own of the same store, for the heartbeat.
        device: where its stages compute: as planned, on the processor, or on a device that is there already.
        local_rank: among the ranks of this host; the process is bound to the cores of its device.  None: it stays as it
            is, since it is a program of the user's.
        is_metered: whether its memory is counted.
        open_transport: joins the ranks; None: by what the config says, or else their devices and hosts allow.

    Raises:
        MissingDeviceError: the device that the plan names for this rank is not there.
    """
    decision = config.plan.decision
    assignment = rank_device.device_assignment_of(
        decision, rank, device if isinstance(device, str) else rank_device.AS_PLANNED
    )
    core, gives_way = None, False
    if local_rank is not None:
        core, gives_way = rank_device.beside(assignment, local_rank, decision)
        rank_device.prepare(assignment, local_rank)
    where = rank_device.device_of(assignment, config.plan.prediction.ranks) if isinstance(device, str) else device

    def join(groups: tuple[tuple[int, ...], ...], program: Callable[[], Program]) -> Transport:
        hosts = rank_device.hosts_of(decision)
        rest = (groups, program, SETUP_S, config.transport)
        return rank_device.opened(assignment, where, hosts, store, *rest, sleeps=gives_way)

    with contextlib.ExitStack() as stack:
        slow = _watch(config) if rank == 0 and decision.num_ranks > 1 else None
        rank_heartbeat = stack.enter_context(RankHeartbeat(board, decision, rank, config.deadline_s, SETUP_S, slow))
        meter = meter_of(where or CPU) if is_metered else None
        joins = open_transport or join
        context = RankContext(
            rank,
            decision.num_ranks,
            store,
            joins,
            rank_heartbeat.activity,
            rank_heartbeat.others,
            rank_heartbeat.meet,
            where,
            meter,
        )
        context = replace(context, spare_core=core, gives_way=gives_way)
        yield Rank(config, context, stack)


def _watch(config: JobConfig) -> SlowWatch:
    """What finds slow ranks; where the job computes otherwise than the profile measured, by their first steps."""
    plan, planned = config.plan, config.plan.inputs.model.dtype
    alike = not config.compiler and config.spelled.get("dtype", planned) == planned
    return SlowWatch(plan.decision, plan.prediction if alike else replace(plan.prediction, ranks=()))


def _require_planned(plan: Plan, graph: Graph) -> None:
    """Raises :class:`StaleFileError` where the graph is not the plan's; the text says in which layers they differ."""
    fingerprint_here = fingerprint(graph)
    if fingerprint_here == plan.inputs.model_fingerprint:
        return
    planned, here = plan.decision.layers, graph.by_name()
    gone, new = [name for name in planned if name not in here], [name for name in here if name not in planned]
    details = [f"plan: {plan.inputs.model_fingerprint}, of {units.count(len(planned), 'layer')}"]
    details += [f"here: {fingerprint_here}, of {units.count(len(here), 'layer')}; {plan.inputs.model.factory}"]
    details += [f"only in the plan: {_some(gone)}"] if gone else []
    details += [f"only here: {_some(new)}"] if new else []
    if not gone and not new:
        details += [
            f"their names are the same: sizes differ, or what layers do, or the example ({graph.samples} samples here)"
        ]
    raise StaleFileError("the plan was made for another model", details, [_OTHER_MODEL])


def _some(names: list[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:_MOST_NAMED]) + (
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    )


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank with a device, whom the others hear; made by :func:`open_rank`."""

    config: JobConfig
    context: RankContext
    _stack: contextlib.ExitStack

    def prepare(
        self, load: Callable[[], LoadedModel], load_to_run: Callable[[], LoadedModel] | None = None
    ) -> RankModel:
        """Its model, which is the planned one.

        Args:
            load: gives the model as it was planned.
            load_to_run: the same in the dtype that is run; None: it is that of the plan.

        Raises:
            StaleFileError: the plan was made for another model.
            CorruptFileError: the plan was edited and divides a layer as it cannot be.
            IllegalProgramError: the plan's program was edited and does not end.
        """
        plan, activity, device = self.config.plan, self.context.activity, self.context.device or CPU
        activity.begin("loading the model")
        model = load()
        activity.begin("capturing the model")
        model, captured = _of_sizes(*capture_for(model, device, whole=False), plan.inputs.model.sizes)
        _require_planned(plan, captured.graph)
        if load_to_run is not None:
            loaded = capture_for(load_to_run(), device, whole=False)
            model, captured = _of_sizes(*loaded, plan.inputs.model.sizes)
        check_layers(plan.decision, captured.graph)
        require_possible(plan.decision, captured.graph)
        validate(Boundaries.of_decision(captured.graph, plan.decision).program(plan.decision))
        return RankModel(model, captured)

    def open(self, prepared: RankModel, seed: Callable[[], int] | None = None) -> OpenedRank:
        """Joins the others; left when the rank is closed.

        Args:
            seed: gives that of what layers draw, where a checkpoint says another; asked when the ranks agree.

        Raises:
            StaleFileError: the ranks hold different plans or models.
            UsageError: they were told different things, or begin with different weights.
        """
        config, context, decision = self.config, self.context, self.config.plan.decision
        graph, captured = prepared.captured.graph, captured_model(prepared.captured)
        context.activity.begin("comparing plans with the others")
        _agree(config, context, prepared.captured)
        drawn = config.seed if seed is None else seed()
        context.activity.begin("meeting the others")
        transport = context.open_transport(
            groups_of(decision, graph), lambda: Boundaries.of_decision(graph, decision).program(decision)
        )
        self._stack.callback(transport.close)
        transport.deadline_s = config.deadline_s
        consumer = consumer_of(decision, captured, transport)
        if transport.rank == 0 and not config.answers and (text := statistics_text(decision, graph)):
            context.activity.tell(f"{text}; a plan with batch statistics 'whole' sees all of it")
        context.activity.begin("building the stages")
        engine = Engine(
            decision,
            captured,
            prepared.model.module,
            transport,
            config.optimizer,
            scheduler=config.scheduler,
            seed=drawn,
            clip_norm=config.clip_norm,
            accumulate=config.accumulate,
            on_nan=config.on_nan,
            compiler=config.compiler,
            device=context.device,
            meter=context.meter,
            activity=context.activity,
            others=context.others,
            answers=config.answers,
            spare_core=context.spare_core,
            gives_way=context.gives_way,
        )
        return OpenedRank(engine, consumer, context.activity, context.meet)

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """Within the memory that a rank may have (0: no limit); where it runs out, what was predicted is told.

        Raises:
            OutOfMemoryError: it needs more.
        """
        plan, rank = self.config.plan, self.context.rank
        limit_memory(self.context.meter, limit_bytes)
        try:
            yield
        except (torch.OutOfMemoryError, OutOfMemoryError) as error:
            limit_memory(self.context.meter, 0)
            memory_error = error if isinstance(error, OutOfMemoryError) else self._between_actions(error)
            ranks = {each.rank: each.peak_bytes for each in plan.prediction.ranks}
            predicted = f"predicted for rank {rank}: {size(ranks.get(rank, 0))}"
            if limit_bytes:
                memory_error.remedies = ("leave out --memory-limit", *(memory_error.remedies or memory_error.usual))
            raise also(
                memory_error, [f"{predicted}, limit: {size(limit_bytes)}" if limit_bytes else predicted]
            ) from error
        limit_memory(self.context.meter, 0)

    def _between_actions(self, error: torch.OutOfMemoryError) -> HalopipeError:
        noted, device = out_of_memory(error), self.config.plan.decision.device_of(self.context.rank)
        title = f"rank {self.context.rank} ({device}) ran out of memory between two actions"
        return OutOfMemoryError(title, noted.details if noted else (), noted.remedies if noted else ())


def _of_sizes(
    model: LoadedModel, captured: CapturedModule, sizes: Mapping[str, int]
) -> tuple[LoadedModel, CapturedModule]:
    """What was captured on a small example, for the sizes that the plan is made for."""
    if not sizes:
        return model, captured
    graph = graph_of_sizes(captured_model(captured), sizes)
    return replace(model, sizes=sizes), replace(captured, graph=graph)


def _agree(config: JobConfig, context: RankContext, captured: CapturedModule) -> None:
    """All ranks were given one plan, told the same, and begin with the same weights: else all of them raise why."""
    mine = {
        "plan": _hashed(dumps(config.plan).encode()),
        "model": fingerprint(captured.graph),
        "options": {
            "seed": str(config.seed),
            "clip_norm": f"{config.clip_norm:g}",
            "accumulate": str(config.accumulate),
            "on_nan": config.on_nan.value,
            **config.spelled,
        },
        "weights": {name: _digest(tensor) for name, tensor in _state(captured).items()},
    }
    context.store.set(f"terms/{context.rank}", json.dumps(mine))
    error = _difference(context.rank, json.loads(context.store.get("terms/0").decode()), mine)
    context.store.set(f"agreed/{context.rank}", "" if error is None else write_error(error))
    if error is not None:
        raise error
    for rank in range(context.num_ranks):
        text = context.store.get(f"agreed/{rank}").decode()
        if text:
            raise read_error(text)


def _difference(rank: int, first: Mapping[str, Any], mine: Mapping[str, Any]) -> HalopipeError | None:
    """What this rank was given otherwise than rank 0, as the error to raise; None: nothing."""

    def both(name: str, key: str = "") -> list[str]:
        values = (each[key].get(name) if key else each[name] for each in (first, mine))
        return [f"{who}: {value}" for who, value in zip(("rank 0", f"rank {rank}"), values, strict=True)]

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


def _state(captured: CapturedModule) -> dict[str, Tensor]:
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
