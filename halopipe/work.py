"""One rank's work: load and capture the model, meet the others, train, measure, compare with one device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

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
from planner.check.layouts import require_possible
from planner.ir.codec import dumps
from planner.ir.errors import StaleFileError
from planner.ir.fingerprint import fingerprint, require_match
from planner.ir.graph import Graph
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler.capture import Captured, capture
from profiler.source import LoadedModel, load_model
from runtime.build import check_layers, groups_of
from runtime.engine import Engine
from runtime.jobs.activity import Activity
from runtime.jobs.launch import SETUP_S
from runtime.jobs.voice import Voice
from runtime.memory import with_peak
from runtime.stages.captured import captured_model
from runtime.transport import Transport

OpenTransport = Callable[[tuple[tuple[int, ...], ...]], Transport]


def work(
    job: Job,
    rank: int,
    store: dist.Store,
    board: dist.Store,
    open_transport: OpenTransport,
    after_step: AfterStep = lambda step, result: None,
) -> RankResult:
    """Do everything that ``rank`` does in ``job``.

    Args:
        store: shared by all ranks of this job.
        board: a client of its own of the same store, for the heartbeat.
        open_transport: joins the ranks, with these groups.
        after_step: told of each step.
    """
    with Voice(board, job.plan.decision, rank, job.options.deadline_s, SETUP_S) as voice:
        return _Work(job, rank, store, voice.activity, voice.others, after_step).run(open_transport)


class _Work:
    def __init__(
        self,
        job: Job,
        rank: int,
        store: dist.Store,
        activity: Activity,
        others: Callable[[], str],
        after_step: AfterStep,
    ) -> None:
        self._job, self._rank, self._store, self._activity = job, rank, store, activity
        self._others, self._after_step = others, after_step

    def run(self, open_transport: OpenTransport) -> RankResult:
        job = self._job
        decision, options = job.plan.decision, job.options
        reference = read_reference(job.reference_path) if options.check_numerics else None
        model, captured = self._model()
        self._agree()
        saved = resumed(options, captured.graph, self._store, self._rank)
        seed = options.seed if saved is None else saved.seed(options.seed)
        position = Position() if saved is None else saved.position
        self._activity.begin("meeting the others")
        transport = open_transport(groups_of(decision, captured.graph))
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
            if options.warmup:
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
            supply.training(position),
            metrics,
            Checkpoints(options, engine, consumer.graph, consumer.transport, seed),
            self._after_step,
            self._activity,
            lambda: compare_tensors(reference, engine) if reference is not None else (),
            trains(self._job.plan),
        )
        with metrics:
            result = loop.run()
        if reference is not None and self._rank == teller:
            compared = compare_losses(reference, result.losses[: len(reference.losses)])
            result = replace(result, compared=result.compared + compared)
        return result

    def _model(self) -> tuple[LoadedModel, Captured]:
        """The model and its graph, which must be the one that was planned."""
        plan, options = self._job.plan, self._job.options
        self._activity.begin("loading the model")
        model = load_model(plan.inputs.model, options.seed)
        self._activity.begin("capturing the model")
        captured = capture(model)
        require_match(
            "model", plan.inputs.model_fingerprint, fingerprint(captured.graph), "profile and plan this model again"
        )
        if self._job.source != plan.inputs.model:
            model = load_model(self._job.source, options.seed)
            captured = capture(model)
        _require_legal(self._job, captured.graph)
        return model, captured

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
