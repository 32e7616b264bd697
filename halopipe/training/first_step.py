"""The first step of a job beside one device's, before its second begins.

        run on one device ──> rank 0 ──> the store ──> every rank compares its own gradients, parameters, buffers
                                                       rank 0 hears of all differences, judges, and tells its verdict

So all ranks end with one error, which names what differs most, and where values part.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from halopipe.data.factories import BatchItem
from halopipe.data.sources import batches, take
from halopipe.run_spec.job import REFERENCE, Job
from halopipe.training.rank import JobMember
from halopipe.training.reference import Reference, compare_losses, compare_tensors
from planner.ir.codec import plain
from planner.ir.errors import NumericsError
from profiler.capture.graph import capture_for
from profiler.source.source import load_model
from runtime.engine import StepResult
from runtime.monitor.failure import also, read_error, set_text, text_at, write_error
from runtime.numerics.compare import report
from runtime.numerics.difference import Difference
from runtime.pipeline.routing import CPU
from runtime.timeouts import SETUP_S

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from profiler.source.model import LoadedModel
    from runtime.captured import CapturedModule

PATIENCE_S = SETUP_S / 2
"""Longest wait for one device."""

_POLL_S = 0.02


ComparedStep = tuple[Reference, tuple[Difference, ...]]
"""One device's first steps, and this rank's differences from them."""


@dataclass(slots=True)
class FirstStep:
    """What a rank does after each step up to the first update, and after that.

    Attributes:
        read: gives what one device computed; called on rank 0.  None: the launcher leaves that on the store of the job.
        first_batch: the model as it was before that, and what it read first; None: it is not known.  Called on rank 0.
        strict: whether it is an error, too, where rounding hides what is compared.
    """

    member: JobMember
    read: Callable[[], Reference] | None
    first_batch: Callable[[], tuple[LoadedModel, CapturedModule, BatchItem] | None]
    strict: bool = False
    _losses: list[float] = field(default_factory=list)
    _num_done: int = 0
    _left_out: int = 0

    def after(self, result: StepResult) -> ComparedStep | None:
        """Call after each step; as :meth:`compare` after the one that ends with the first update, else None."""
        self._losses += [] if result.loss is None else [result.loss]
        self._num_done += 1
        if result.left_out and not self._left_out:
            self._left_out = self._num_done
        if self._num_done != self.member.context.accumulate:
            return None
        self.member.engine.settle()
        if self._left_out:  # whichever of its steps was the bad one
            return Reference(skipped=f"the update of step {self._left_out} was left out"), ()
        return self.compare(self._losses)

    def compare(self, losses: Sequence[float]) -> ComparedStep:
        """One device's step, and this rank's differences from it.

        Args:
            losses: of the steps so far, where this rank knows them.

        Raises:
            NumericsError: on all ranks, if any of them computes something else.
        """
        context = self.member.context
        store = self.member.store
        context.activity.begin("waiting for the run on one device")
        context.activity.deadline_s = SETUP_S
        if context.rank == 0:
            self._provide(store)
        context.meet()
        reference = Reference.from_text(text_at(store, REFERENCE))
        if reference.error:
            raise read_error(reference.error)
        if reference.skipped:
            return reference, ()
        context.activity.begin("comparing with one device")
        mine, trouble = self._mine(reference, losses)
        store.set(f"compared/{context.rank}", json.dumps(trouble or [plain(each) for each in mine]))
        context.meet()
        if context.rank == 0:
            store.set("verdict", self._verdict(reference))
        context.meet()
        verdict = store.get("verdict").decode()
        if verdict:
            raise read_error(verdict)
        return reference, mine

    def _provide(self, store: Store) -> None:
        """Has the reference on the store."""
        end_s = time.monotonic() + PATIENCE_S
        reference = None if self.read is None else self.read()
        while reference is None and not store.check([REFERENCE]):
            if time.monotonic() > end_s:
                reference = Reference(skipped=f"one device did not come to an end in {PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        if reference is not None:
            set_text(store, REFERENCE, reference.to_text())

    def _mine(self, reference: Reference, losses: Sequence[float]) -> tuple[tuple[Difference, ...], str]:
        try:
            mine = compare_tensors(reference, self.member.engine)
        except NumericsError as error:  # a tensor that one device does not have: the others must not wait
            return (), write_error(error)
        if self.member.context.rank == self.member.context.loss_rank:
            mine += compare_losses(reference, losses)
        return mine, ""

    def _verdict(self, reference: Reference) -> str:
        """The error as text; empty where there is none."""
        differences: list[Difference] = []
        for rank in self.member.context.ranks:
            record = json.loads(self.member.store.get(f"compared/{rank}").decode())
            if isinstance(record, str):
                return record
            differences += (Difference(**each) for each in record)
        try:
            report(differences, reference.dtype, witness=reference.witness, strict=self.strict)
        except NumericsError as error:
            wrong = [each for each in differences if each.is_wrong]
            return write_error(also(error, self._explained(wrong)) if wrong else error)
        return ""

    def _explained(self, wrong: Sequence[Difference]) -> list[str]:
        """Where values part, as lines."""
        self.member.context.activity.begin("looking for the layer at which values part")
        try:
            from halopipe.training.first_divergence import first_divergence  # late: most steps are right

            begun = self.first_batch()
            if begun is None:
                return []
            return first_divergence(self.member.context, *begun, wrong)
        except Exception as error:  # noqa: BLE001 - the verdict is more than its explanation
            return [f"where values part could not be found: {type(error).__name__}: {error}"]


def first_batch_of(job: Job) -> tuple[LoadedModel, CapturedModule, BatchItem]:
    """The model, loaded as it is before the first step of a job, its capture, and what that step reads."""
    model, captured = capture_for(load_model(job.source, job.options.seed), CPU)
    return model, captured, take(batches(job.options.data, model, job.plan.decision.global_batch, job.options.seed), 0)
