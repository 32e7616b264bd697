"""One rank's work: load and capture the model, meet the others, train, measure, compare with one device."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import distributed as dist

from halopipe.checkpoints import Checkpoints, resumed
from halopipe.consistency import trains
from halopipe.datasets import Position
from halopipe.evaluating import loss_rank
from halopipe.feeding import Consumer, consumer_of
from halopipe.job import Job, RankResult
from halopipe.looping import AfterStep, Loop
from halopipe.metrics import Metrics
from halopipe.optimizer import makers_of
from halopipe.reference import Reference, compare_losses, compare_tensors, read_reference
from halopipe.supply import Supply
from halopipe.units import size
from planner.check.layouts import require_possible
from planner.ir.codec import dumps
from planner.ir.errors import HalopipeError, OutOfMemoryError, StaleFileError
from planner.ir.fingerprint import fingerprint, require_match
from planner.ir.graph import Graph
from planner.ir.program import Program
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler.capture import Captured
from profiler.placing import capture_for
from profiler.source import LoadedModel, load_model
from runtime.build import check_layers, groups_of
from runtime.engine import Engine, device_of
from runtime.jobs.activity import Activity
from runtime.jobs.failure import also
from runtime.jobs.launch import SETUP_S
from runtime.jobs.voice import Voice
from runtime.memory import limit_memory, meter_of, out_of_memory, with_peak
from runtime.pieces import CPU
from runtime.stages.captured import captured_model
from runtime.stages.evaluation import cannot_evaluate
from runtime.transport import Transport

OpenTransport = Callable[[tuple[tuple[int, ...], ...], Callable[[], Program]], Transport]
"""Joins the ranks, with these groups, for this program."""


def work(
    job: Job,
    rank: int,
    store: dist.Store,
    board: dist.Store,
    open_transport: OpenTransport,
    after_step: AfterStep = lambda step, result: None,
    *,
    device: torch.device | None = None,
) -> RankResult:
    """Do everything that ``rank`` does in ``job``.

    Args:
        store: shared by all ranks of this job.
        board: a client of its own of the same store, for the heartbeat.
        after_step: told of each step.
        device: where the rank's stages compute; None: on the processor.
    """
    with Voice(board, job.plan.decision, rank, job.options.deadline_s, SETUP_S) as voice:
        return _Work(job, rank, store, voice.activity, voice.others, after_step, device).run(open_transport)


class _Work:
    def __init__(
        self,
        job: Job,
        rank: int,
        store: dist.Store,
        activity: Activity,
        others: Callable[[], str],
        after_step: AfterStep,
        device: torch.device | None,
    ) -> None:
        self._job, self._rank, self._store, self._activity = job, rank, store, activity
        self._others, self._after_step, self._device = others, after_step, device
        self._meter = meter_of(device or torch.device("cpu"))

    def run(self, open_transport: OpenTransport) -> RankResult:
        job = self._job
        decision, options = job.plan.decision, job.options
        reference = read_reference(job.reference_path) if options.check_numerics else None
        model, captured = self._model()
        if captured.evaluation and (options.eval_data or not trains(job.plan)):
            raise cannot_evaluate(captured.evaluation)
        self._agree()
        saved = resumed(options, captured.graph, self._store, self._rank)
        seed = options.seed if saved is None else saved.seed(options.seed)
        position = Position() if saved is None else saved.position
        self._activity.begin("meeting the others")
        graph = captured.graph
        transport = open_transport(
            groups_of(decision, graph), lambda: Boundaries.of_decision(graph, decision).program(decision)
        )
        try:
            consumer = consumer_of(decision, captured_model(captured), transport, options.deadline_s)
            self._activity.begin("opening the data")
            supply = Supply(consumer, options, model, seed)
            self._activity.begin("building the stages")
            engine = self._engine(model, captured, transport, seed)
            del model, captured  # what other ranks train need not stay alive here
            if saved is not None:
                self._activity.begin("reading the checkpoint")
                engine.load_state(saved.checkpoint)
            if options.warmup and self._meter is None:
                with_peak(lambda: None)  # the profiler takes seconds to start
            self._activity.begin("waiting for the others")
            transport.barrier(SETUP_S)
            return self._steps(engine, consumer, supply, position, reference, seed)
        finally:
            transport.close()

    def _engine(self, model: LoadedModel, captured: Captured, transport: Transport, seed: int) -> Engine:
        job = self._job
        optimizer, scheduler = makers_of(job.options, job.plan.inputs.optimizer)
        return Engine(
            job.plan.decision,
            captured_model(captured),
            model.module,
            transport,
            optimizer,
            scheduler=scheduler,
            seed=seed,
            clip_norm=job.options.clip_norm,
            accumulate=job.options.accumulate,
            deadline_s=job.options.deadline_s,
            compiler=job.options.compiler or None,
            device=self._device,
            meter=self._meter,
            activity=self._activity,
            others=self._others,
        )

    def _steps(
        self,
        engine: Engine,
        consumer: Consumer,
        supply: Supply,
        position: Position,
        reference: Reference | None,
        seed: int,
    ) -> RankResult:
        options, teller = self._job.options, loss_rank(consumer)
        metrics = Metrics(options.metrics, self._store, self._rank, teller, engine.num_steps)
        loop = Loop(
            options,
            engine,
            consumer,
            supply,
            supply.training(position, engine.num_steps),
            metrics,
            Checkpoints(options, engine, consumer.graph, consumer.transport, seed),
            self._after_step,
            self._activity,
            lambda: compare_tensors(reference, engine) if reference is not None else (),
            trains(self._job.plan),
        )
        with metrics, self._limited():
            result = loop.run()
        if reference is not None and self._rank == teller:
            compared = compare_losses(reference, result.losses[: len(reference.losses)])
            result = replace(result, compared=result.compared + compared)
        return result

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Within the memory that a rank may have; where it runs out, what was predicted is told."""
        plan, limit = self._job.plan, self._job.options.memory_limit_bytes
        limit_memory(self._meter, limit)
        try:
            yield
        except (torch.OutOfMemoryError, OutOfMemoryError) as error:
            limit_memory(self._meter, 0)
            known = error if isinstance(error, OutOfMemoryError) else self._between_actions(error)
            ranks = {rank.rank: rank.peak_bytes for rank in plan.prediction.ranks}
            predicted = f"predicted for rank {self._rank}: {size(ranks.get(self._rank, 0))}"
            raise also(known, [f"{predicted}, limit: {size(limit)}" if limit else predicted]) from error
        limit_memory(self._meter, 0)

    def _between_actions(self, error: torch.OutOfMemoryError) -> HalopipeError:
        found, device = out_of_memory(error), device_of(self._job.plan.decision, self._rank)
        title = f"rank {self._rank} ({device}) ran out of memory between two actions"
        return OutOfMemoryError(title, found.details if found else (), found.remedies if found else ())

    def _model(self) -> tuple[LoadedModel, Captured]:
        """The model and its graph, which must be the one that was planned."""
        plan, options = self._job.plan, self._job.options
        self._activity.begin("loading the model")
        model = load_model(plan.inputs.model, options.seed)
        self._activity.begin("capturing the model")
        model, captured = self._captured(model)
        require_match(
            "model", plan.inputs.model_fingerprint, fingerprint(captured.graph), "profile and plan this model again"
        )
        if self._job.source != plan.inputs.model:
            model, captured = self._captured(load_model(self._job.source, options.seed))
        _require_legal(self._job, captured.graph)
        return model, captured

    def _captured(self, model: LoadedModel) -> tuple[LoadedModel, Captured]:
        return capture_for(model, self._device or CPU, whole=False)

    def _agree(self) -> None:
        """All ranks must have been given the same plan."""
        mine = hashlib.sha256(dumps(self._job.plan).encode()).hexdigest()[:16]
        self._store.set(f"plan/{self._rank}", mine)
        first = self._store.get("plan/0").decode()
        if first != mine:
            raise StaleFileError(
                f"rank {self._rank} was given another plan than rank 0",
                [f"rank 0: sha256:{first}", f"rank {self._rank}: sha256:{mine}"],
                ["copy one plan file to all hosts"],
            )


def _require_legal(job: Job, graph: Graph) -> None:
    """The program must be one that ends, for the messages that this graph needs."""
    decision = job.plan.decision
    check_layers(decision, graph)
    require_possible(decision, graph)
    validate(Boundaries.of_decision(graph, decision).program(decision))
