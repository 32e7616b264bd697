"""One rank's work: load and capture the model, meet the others, train, measure, compare with one device."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator

from torch import distributed as dist

from halopipe.batches import Batch, batches, take
from halopipe.job import NUM_COMPARED, Compared, Job, RankResult
from halopipe.reference import Reference, compare_losses, compare_tensors, read_reference
from planner.ir.codec import dumps
from planner.ir.errors import StaleFileError
from planner.ir.fingerprint import fingerprint, require_match
from planner.ir.graph import Graph, producer
from planner.ir.timeline import Span
from planner.layers.boundary import Boundaries
from planner.passes import validate
from profiler.capture import Captured, capture
from profiler.source import LoadedModel, load_model
from runtime.activity import Activity
from runtime.build import check_layers, groups_of
from runtime.captured import captured_model
from runtime.engine import Engine, StepResult
from runtime.launch import SETUP_S
from runtime.memory import storage_bytes, with_peak
from runtime.optimizer import maker_of
from runtime.transport import Transport
from runtime.voice import Voice

KEPT_STEPS = 64
"""Last steps whose spans are kept."""

OpenTransport = Callable[[tuple[tuple[int, ...], ...]], Transport]
AfterStep = Callable[[int, StepResult], None]


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
        self._loss_layer = ""

    def run(self, open_transport: OpenTransport) -> RankResult:
        job = self._job
        decision, options = job.plan.decision, job.options
        reference = read_reference(job.reference_path) if options.check_numerics else None
        model, captured = self._model()
        stream = batches(options.data, model, decision.global_batch, options.seed)
        self._activity.begin("meeting the others")
        self._agree()
        transport = open_transport(groups_of(decision, captured.graph))
        self._activity.begin("building the stages")
        engine = Engine(
            decision,
            captured_model(captured),
            model.module,
            transport,
            maker_of(job.plan.inputs.optimizer),
            seed=options.seed,
            deadline_s=options.deadline_s,
            activity=self._activity,
            others=self._others,
        )
        del model, captured  # what other ranks train need not stay alive here
        if options.warmup:
            with_peak(lambda: None)  # the profiler takes seconds to start
        self._activity.begin("waiting for the others")
        transport.barrier(SETUP_S)
        try:
            return self._train(engine, stream, reference)
        finally:
            engine.close()

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
        self._loss_layer = producer(captured.graph.loss)
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

    def _train(self, engine: Engine, stream: Iterator[Batch], reference: Reference | None) -> RankResult:
        options = self._job.options
        results: list[StepResult] = []
        compared: tuple[Compared, ...] = ()
        spans: deque[tuple[int, tuple[Span, ...]]] = deque(maxlen=KEPT_STEPS)
        peak_bytes = 0
        for step in range(options.steps):
            batch = take(stream, step)
            if step == options.warmup - 1:
                engine.forget_step()
                held_bytes = storage_bytes(engine.held_tensors())
                result, more_bytes = with_peak(lambda batch=batch: engine.step(*batch))
                peak_bytes = held_bytes + more_bytes
            else:
                result = engine.step(*batch)
            if step == 0 and reference is not None:
                compared = compare_tensors(reference, engine)
            results.append(StepResult(result.loss, result.step_s, (), ()))
            spans.append((step, result.spans))
            self._after_step(step, result)
        losses = tuple(result.loss for result in results if result.loss is not None)
        if reference is not None and losses and self._rank == self._first_loss_rank():
            compared += compare_losses(reference, losses[:NUM_COMPARED])
        seconds = tuple(result.step_s for result in results)
        return RankResult(self._rank, losses, seconds, dict(spans), peak_bytes, compared)

    def _first_loss_rank(self) -> int:
        decision = self._job.plan.decision
        return min(decision.stages[decision.layers[self._loss_layer].stage].ranks)


def _require_legal(job: Job, graph: Graph) -> None:
    """The program must be one that ends, for the messages that this graph needs."""
    decision = job.plan.decision
    check_layers(decision, graph)
    validate(Boundaries.of_decision(graph, decision).program(decision))
