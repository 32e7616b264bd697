"""One rank of a job, from its first look at the device to its last step.

There is no other way to become a rank: workers that were spawned, ranks of torchrun, and scripts of one's own all go
through :class:`JobMember`, so that no check is left out by one of them.  They differ in where the number of the rank,
the store and the options come from.

    told       plan, options, optimizer                    the same on all ranks, which :meth:`JobMember.agree` compares
    opened     the device, its cores and allocator; the heartbeat                       :meth:`JobMember.opened`
    prepared   the model captured; it is the planned one, and its program ends          :meth:`JobMember.prepare`
    agreed     one plan, the same options and weights on all ranks                      :meth:`JobMember.agree`
    joined     the others are met, the stages made                                      :meth:`JobMember.join`
    limited    steps within the memory that the rank may have                           :meth:`JobMember.limited`

What it knows, and what follows from that, is its :class:`runtime.rank.RankContext`, which the runtime works by.
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

from cuda_ops.memory import meter_of
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
from planner.passes import validate
from profiler.capture.graph import capture_for
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.engine import Engine
from runtime.memory import limit_memory, out_of_memory
from runtime.monitor.activity import StatusStore
from runtime.monitor.failure import also, read_error, write_error
from runtime.monitor.slow import SlowWatch
from runtime.monitor.waits import RankHeartbeat
from runtime.numerics.finite import OnNan
from runtime.optim.ties import groups_of
from runtime.pipeline.routing import CPU
from runtime.rank import RankContext
from runtime.stage.shapes import graph_of_sizes
from runtime.timeouts import SETUP_S
from runtime.transport import Transport

if TYPE_CHECKING:
    from cuda_ops._torch import Store

OpenTransport = Callable[[tuple[tuple[int, ...], ...], Callable[[], Program]], Transport]
"""Joins the ranks, with these groups, for this program."""

LoadModel = Callable[[], tuple[LoadedModel, CapturedModule | None]]
"""Gives a model, and its capture on the processor if there is one already."""

_HEX = 16
_MOST_NAMED = 5
_OTHER_MODEL = "profile and plan this model again, or run the plan with the model it was made for"


def member_of(job: Job, rank: int) -> JobMember:
    """A member of a job, which nobody hears yet."""
    plan = job.plan
    options = job.options
    optimizer, scheduler = makers_of(options, plan.inputs.optimizer)
    context = RankContext(
        plan.decision,
        optimizer,
        rank,
        scheduler,
        options.seed,
        options.clip_norm,
        options.accumulate,
        OnNan(options.on_nan),
        options.deadline_s,
        compiler=options.compiler or None,
    )
    compared = ("optimizer", "scheduler", "data", "data_from", "compiler", "transport", "checkpoint_every", "steps")
    spelled = {name: str(getattr(options, name)) for name in compared}
    spelled |= {"dtype": job.source.dtype, "autocast": job.source.autocast}
    return JobMember(plan, context, spelled, options.device, options.transport)


@dataclass
class JobMember:
    """One of the ranks of a job, as it comes to take part.

    Attributes:
        plan: that is run.
        context: what the rank knows.
        spelled: options as text, where a rank may have been told otherwise than rank 0; compared by name.
        device: where its stages compute: as planned, on the processor, or on a device that is there already.
        transport: what ranks exchange by; empty: what their devices and hosts allow.
        store: of the job, for what ranks tell each other before their first step; there since it was opened.
        model: the user's, as it is run; there since it was prepared.
        engine: takes its steps; there since the others were met.
    """

    plan: Plan
    context: RankContext
    spelled: Mapping[str, str] = field(default_factory=dict)
    device: str | torch.device = rank_device.AS_PLANNED
    transport: str = ""
    store: Store = field(init=False)
    model: LoadedModel = field(init=False)
    engine: Engine = field(init=False)
    _open_transport: OpenTransport = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @contextlib.contextmanager
    def opened(
        self,
        store: Store,
        board: Store | StatusStore,
        *,
        local_rank: int | None = None,
        is_metered: bool = True,
        open_transport: OpenTransport | None = None,
    ) -> Iterator[JobMember]:
        """Its device and heartbeat; while the context lasts, it tells the others what it does.

        Args:
            store: shared by all ranks of this job.
            board: a client of its own of the same store, for the heartbeat.
            local_rank: among the ranks of this host; the process is bound to the cores of its device.  None: it stays
                as it is, since it is a program of the user's.
            is_metered: whether its memory is counted.
            open_transport: joins the ranks; None: by what the rank was told, or else their devices and hosts allow.

        Raises:
            MissingDeviceError: the device that the plan names for this rank is not there.
        """
        context = self.context
        decision = self.plan.decision
        on = self.device if isinstance(self.device, str) else rank_device.AS_PLANNED
        assignment = rank_device.device_assignment_of(decision, context.rank, on)
        if local_rank is not None:
            context.spare_core, context.gives_way = rank_device.beside(assignment, local_rank, decision)
            rank_device.prepare(assignment, local_rank)
        where: torch.device | None
        if isinstance(self.device, str):
            where = rank_device.device_of(assignment, self.plan.prediction.ranks)
        else:
            where = self.device

        def join(groups: tuple[tuple[int, ...], ...], program: Callable[[], Program]) -> Transport:
            hosts = rank_device.hosts_of(decision)
            rest = (groups, program, SETUP_S, self.transport)
            return rank_device.opened(assignment, where, hosts, store, *rest, sleeps=context.gives_way)

        with self._stack as stack:
            slow = self._slow_watch() if context.rank == 0 and decision.num_ranks > 1 else None
            heartbeat = RankHeartbeat(board, decision, context.rank, context.deadline_s, SETUP_S, slow)
            stack.enter_context(heartbeat)
            context.activity = heartbeat.activity
            context.others = heartbeat.others
            context.meet = heartbeat.meet
            context.device = where
            context.meter = meter_of(where or CPU) if is_metered else None
            self.store = store
            self._open_transport = open_transport or join
            yield self

    def _slow_watch(self) -> SlowWatch:
        """What finds slow ranks; where the job computes otherwise than the profile measured, by their first steps."""
        plan = self.plan
        planned = self.plan.inputs.model.dtype
        is_as_measured = not self.context.compiler and self.spelled.get("dtype", planned) == planned
        return SlowWatch(plan.decision, plan.prediction if is_as_measured else replace(plan.prediction, ranks=()))

    def prepare(self, load: LoadModel, load_to_run: LoadModel | None = None) -> None:
        """Captures its model, which is the planned one.

        Args:
            load: gives the model as it was planned.
            load_to_run: the same in the dtype that is run; None: it is that of the plan.

        Raises:
            StaleFileError: the plan was made for another model.
            CorruptFileError: the plan was edited and divides a layer as it cannot be.
            IllegalProgramError: the plan's program was edited and does not end.
        """
        plan = self.plan
        context = self.context
        context.activity.begin("loading the model")
        model, captured_ahead = load()
        context.activity.begin("capturing the model")
        model, captured = self._captured(model, captured_ahead)
        del captured_ahead
        _require_planned(plan, captured.graph)
        if load_to_run is not None:
            model, captured = self._captured(*load_to_run())
        self.model = model
        context.model = captured
        context.module = model.module
        require_possible(plan.decision, context.graph)
        validate(context.program)

    def _captured(self, model: LoadedModel, captured: CapturedModule | None) -> tuple[LoadedModel, CapturedModule]:
        """What is captured on a small example is for the sizes that the plan is made for."""
        if captured is None:
            model, captured = capture_for(model, self.context.device or CPU, whole=False)
        sizes = self.plan.inputs.model.sizes
        if not sizes:
            return model, captured
        return replace(model, sizes=sizes), replace(captured, graph=graph_of_sizes(captured, sizes))

    def agree(self) -> None:
        """All ranks were given one plan, told the same, and begin with the same weights.

        Raises:
            StaleFileError: the ranks hold different plans or models.
            UsageError: they were told different things, or begin with different weights.
        """
        context = self.context
        store = self.store
        context.activity.begin("comparing plans with the others")
        module = context.model.graph_module  # parameters, buffers and constants by the graph's names, each once
        mine = {
            "plan": _hashed(dumps(self.plan).encode()),
            "model": fingerprint(context.graph),
            "options": {
                "seed": str(context.seed),
                "clip_norm": f"{context.clip_norm:g}",
                "accumulate": str(context.accumulate),
                "on_nan": context.on_nan.value,
                **self.spelled,
            },
            "weights": {
                name: _digest(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())
            },
        }
        store.set(f"terms/{context.rank}", json.dumps(mine))
        error = _difference(context.rank, json.loads(store.get("terms/0").decode()), mine)
        store.set(f"agreed/{context.rank}", "" if error is None else write_error(error))
        if error is not None:
            raise error
        for rank in range(self.plan.decision.num_ranks):
            text = store.get(f"agreed/{rank}").decode()
            if text:
                raise read_error(text)

    def join(self) -> None:
        """Meets the others and makes the stages; the others are left when the rank is closed."""
        context = self.context
        context.activity.begin("meeting the others")
        groups = groups_of(context.decision, context.graph)
        context.transport = self._open_transport(groups, lambda: context.program)
        self._stack.callback(context.transport.close)
        statistics = statistics_text(context.decision, context.graph)
        if context.rank == 0 and not context.answers and statistics:
            context.activity.tell(f"{statistics}; a plan with batch statistics 'whole' sees all of it")
        context.activity.begin("building the stages")
        self.engine = Engine(context)

    def close(self) -> None:
        """Leaves the job, where the rank outlives the block that opened it."""
        self._stack.close()

    def keep_open(self) -> None:
        """Call within :meth:`opened`: the end of its block does not close the rank, but :meth:`close` does."""
        self._stack = self._stack.pop_all()

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        """Within the memory that a rank may have (0: no limit); where it runs out, what was predicted is told.

        Raises:
            OutOfMemoryError: it needs more.
        """
        plan = self.plan
        rank = self.context.rank
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
        noted = out_of_memory(error)
        device = self.context.decision.device_of(self.context.rank)
        title = f"rank {self.context.rank} ({device}) ran out of memory between two actions"
        return OutOfMemoryError(title, noted.details if noted else (), noted.remedies if noted else ())


def _require_planned(plan: Plan, graph: Graph) -> None:
    """Raises :class:`StaleFileError` where the graph is not the plan's; the text says in which layers they differ."""
    fingerprint_here = fingerprint(graph)
    if fingerprint_here == plan.inputs.model_fingerprint:
        return
    planned = plan.decision.layers
    here = graph.by_name()
    gone = [name for name in planned if name not in here]
    new = [name for name in here if name not in planned]
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


def _difference(rank: int, first: Mapping[str, Any], mine: Mapping[str, Any]) -> HalopipeError | None:
    """What this rank was given otherwise than rank 0, as the error to raise; None: nothing."""

    def both(name: str, key: str = "") -> list[str]:
        values = (each[key].get(name) if key else each[name] for each in (first, mine))
        return [f"{who}: {value}" for who, value in zip(("rank 0", f"rank {rank}"), values, strict=True)]

    if first["plan"] != mine["plan"]:
        title = f"rank {rank} was given another plan than rank 0"
        return StaleFileError(title, both("plan"), ["copy one plan file to all hosts"])
    if first["model"] != mine["model"]:
        title = f"rank {rank} has another model than rank 0"
        remedy = "build the same model, in the same dtype, on all ranks"
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
