"""One rank of a running plan, in a script of one's own: steps, evaluations, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cuda_ops.sparse.nn.tensor import SparseTensor
from cuda_ops.sparse.recipe import PreparedNetwork
from halopipe.data.ahead import Announced, Upcoming
from halopipe.data.batch_sources import COMPARING, Agreement, agreement_of
from halopipe.data.factories import BatchItem, BatchPytree, Pair
from halopipe.data.sources import bound, tensors_of
from halopipe.run_spec.options import RESUME
from halopipe.run_spec.result import Score
from halopipe.terminal.units import require_known
from halopipe.training.checkpointing import save_now
from halopipe.training.evaluate import MakeMetrics, evaluate
from halopipe.training.first_step import FirstStep
from halopipe.training.rank import JobMember
from halopipe.training.resuming import newest_sound, open_saved
from halopipe.training.script_values import ScriptValues
from halopipe.training.single_device import KeptModel
from halopipe.training.steps import RankSteps
from planner.ir.errors import CorruptFileError, HalopipeError, UsageError
from planner.ir.extras import extras
from planner.ir.graph import LOSS_PREFIX
from planner.ir.profile import Profile
from profiler.extra import ProfilerExtra
from profiler.source.clouds import samples_first
from runtime.checkpoint.lock import held
from runtime.engine import Engine, StepResult
from runtime.numerics.compare import NumericsReport, report
from runtime.optim.followed import Followed
from runtime.optim.optimizer_state import give_back, load_followed
from runtime.optim.whole_state import WholeState
from runtime.pipeline.microbatches import Batch, InputSpecs
from runtime.rank import RankContext

_log = logging.getLogger(__name__)

_TAKES_BACK = "run.optimizer_state_dict()"
_NONE_THERE = -1
_NONE_SOUND = -2

TensorOrTuple = Tensor | tuple[Tensor, ...]
UserBatch = Any
"""A global batch as its user has it (:class:`profiler.source.structure.BatchStructure`); or a list of micro-batches.

Of a sparse network the inputs are a SparseTensor, and targets one a sample or one a point in the order that the points
were given in; or all has samples first, padded: coordinates, features and counts, and the targets.  Of a graph network
they are a SampledGraph, or seeds and draws.
"""


def users_module(module: nn.Module) -> nn.Module:
    """The user's own, where a sparse network is given what is prepared of its batches."""
    return module.user_module if isinstance(module, PreparedNetwork) else module


class Execution:
    """One rank of a running plan; use as a context, or call ``close`` at the end.

    Until then it says what it does, so that a rank that waits in vain can tell for whom.

    Attributes:
        rank, num_ranks: in the job.
        plan: that is run.
        profile: that the plan was made from; None where nobody said.
        followed: the user's optimiser, where it is an object.
        activity: what this rank does.
        model: the user's module; parameters of this rank's stages are trained, the others stay as they were until
            :attr:`module` is asked for.
        numerics: how far this rank's part of the first update was from one device's; None before it, and where that was
            not asked for.
        values: that a script may change and the captured graph has as they were; None: nobody can.
    """

    numerics: NumericsReport | None = None
    profile: Profile | None = None
    values: ScriptValues | None = None

    def __init__(self, member: JobMember, kept: KeptModel | None = None) -> None:
        self._member = member
        self._engine = member.engine
        self._context = member.context
        optimizer = member.context.optimizer
        self.followed = optimizer if isinstance(optimizer, Followed) else None
        self.plan = member.plan
        self._kept = kept
        self._given = list[UserBatch]()
        self.activity = member.context.activity
        self._form = BatchPytree("the batch", {}, member.model.batch)
        self.model = users_module(member.model.module)
        del member.model  # its example need not stay
        self.rank = member.context.rank
        self.num_ranks = len(member.context.ranks)
        self._locks = contextlib.ExitStack()
        self._claimed = set[Path]()
        self._upcoming = Upcoming(self.looks_ahead, self.rank == 0)
        self._announced = Announced()
        self._is_ahead = False
        self._hook = None if self.followed is None else self.followed.before_state_dict(self._require_back)
        self._trained = agreement_of(member.context, 0, is_script=True)
        self._evaluated = agreement_of(member.context, 0, is_script=True, always=True)
        first = None if kept is None else FirstStep(member, kept.reference, kept.first_batch)
        run = lambda _, batch: self._engine.step_on(batch)  # noqa: E731
        self._steps = RankSteps(self._engine, self._take, run, self._trained, True, self._note, first, self._follow)

    def __enter__(self) -> Execution:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_steps(self) -> int:
        """Training steps done, those before a checkpoint that was loaded included."""
        return self._engine.num_steps

    @property
    def is_updated(self) -> bool:
        """Whether the last step ended with an update; with ``accumulate``, not all do."""
        return self._engine.is_updated

    @property
    def has_updated(self) -> bool:
        """The same, and it was not left out for what is not finite."""
        return self._engine.has_updated

    @property
    def looks_ahead(self) -> bool:
        """Whether what the next batch needs is prepared during a step, if that batch is known (:meth:`ahead`)."""
        return self._engine.looks_ahead

    def ahead(self, batches: Iterable[UserBatch]) -> Iterator[UserBatch]:
        """``batches``, one after another, each asked for a step before its turn; all ranks loop over the same.

        Of sparse and graph networks whose plan says so the next step is prepared during this one: sites, maps, sampled
        neighbours.  For other plans it gives ``batches`` as they come.
        """
        return self._upcoming.ahead(batches)

    def step(self, batch: UserBatch) -> float:
        """One training step, on a batch that every rank is given whole, the same one.

        Args:
            batch: made up as the model's example, ``(inputs, targets)`` or a mapping or nests of them, of as many
                samples as the plan's global batch or fewer.  Or a list of such batches, one a micro-batch, each of its
                own size and shape.

        Returns:
            The loss of the batch, on every rank.

        Raises:
            DifferentDataError: ranks were given different batches: seen before the first 8 steps, later within 64.
            NotFiniteError: the loss or a gradient is NaN or infinite, with ``on_nan="stop"``; see
                :class:`runtime.numerics.finite.OnNan` for what is then as before.
        """
        return cast("float", self.train(batch).loss)  # told to all ranks

    def train(self, batch: UserBatch) -> StepResult:
        """As :meth:`step`, with everything that is known of the step: times, learning rates, norm of the gradients."""
        if self.values is not None:
            self.values.require_same()
        if self.followed is not None:
            self.followed.require_state()
        return self.train_before(batch, *self._upcoming.take())

    def train_before(self, batch: UserBatch, *upcoming: UserBatch) -> StepResult:
        """As :meth:`train`; ``upcoming`` is the batch of the next step, or nothing where nobody knows it."""
        self._given = [batch, *upcoming]
        result = cast("StepResult", self._steps.step(self.num_steps))  # there is a batch
        return replace(result, loss=self._loss_on_all(result.loss))

    def evaluate(self, *batches: UserBatch, metric: str | MakeMetrics = "", outputs: Sequence[str] = ()) -> Score:
        """The mean loss over ``batches``, and the accuracy of a model that classifies, in evaluation mode.

        All ranks call this with the same batches, and get the same answer; nothing is changed by it.

        Args:
            batches: as of :meth:`step`.
            metric: makes metrics of one's own, see :mod:`halopipe.training.evaluate`.
            outputs: names of the module's outputs and of tensors of the batch, ``("logits", "labels")``, which accuracy
                is told of and metrics are given; none: what the loss function is called with.
        """
        bound_batches = (self._bound(self._item(batch), self._evaluated) for batch in batches)
        return evaluate(self._engine, bound_batches, metric, outputs)

    def stream(self, *, learns: bool = False, training: bool = True) -> Any:
        """This rank's part of an endless stream; see :meth:`runtime.engine.Engine.stream`."""
        self._forget_first()
        return self._engine.stream(learns=learns, training=training)

    @property
    def engine(self) -> Engine:
        """What takes this rank's steps."""
        return self._engine

    @property
    def context(self) -> RankContext:
        """What this rank knows."""
        return self._context

    def save(self, folder: str | Path, *, keep: int = 0) -> None:
        """Save a checkpoint, ``folder/step-N``, for whatever plan of the model; all ranks call this, and share a disk.

        Args:
            keep: how many checkpoints are kept, the newest; 0: all.

        Until this run is closed, no other job writes into that folder.

        Raises:
            UsageError: there is one of this step, another job writes there, or gradients wait for the update.
            CheckpointError: it could not be saved; older ones are as before.
        """
        self._claim(Path(folder).absolute())
        self._steps.confirm()
        save_now(folder, self._engine, keep=keep)

    def load(self, folder: str | Path, *, step: int | str | None = None) -> int:
        """Go on from a checkpoint, by default the newest complete one; all ranks call this.

        Args:
            step: of the checkpoint; ``auto``: that of the newest sound one, and where there is none nothing is loaded.

        Returns:
            The number of steps done then; where that is in the data is the caller's to know.

        Raises:
            MissingFileError, CorruptFileError: there is none, or it is damaged.
            StaleFileError: it is another model's.
            UsageError: gradients wait for the update, or random numbers were drawn from another seed.
        """
        self._require_updated()
        if isinstance(step, str):
            require_known("checkpoint", [step], RESUME)
        chosen = self._newest(folder) if isinstance(step, str) else step
        if chosen is None and step is not None:
            return self.num_steps
        saved = open_saved(folder, self._context.graph, chosen)
        seed = self._context.seed
        if (theirs := saved.seed(seed)) != seed:
            raise UsageError(
                f"{saved.checkpoint.path} was drawn from another seed",
                [f"checkpoint: {theirs}", f"here: {seed}"],
                [f"execute(..., seed={theirs})"],
            )
        self.activity.begin("loading a checkpoint")
        self._engine.load_state(saved.checkpoint)
        if self.followed is not None:
            load_followed(self.followed, saved.checkpoint)
        self._is_ahead = True
        if self.rank == 0 and (word := saved.other_micro_batches(self._engine, self.plan.decision)):
            _log.warning("%s", word)
        self._forget_first()
        return self._engine.num_steps

    def _claim(self, folder: Path) -> None:
        """Takes the lock of ``folder``, as rank 0 does for all, until this run is closed.

        Raises:
            HalopipeError: another job holds it, or nothing can be written there.
        """
        if folder in self._claimed:
            return
        failure = cast("HalopipeError | None", None)
        if self.rank == 0:
            try:
                self._locks.enter_context(held(folder))
            except HalopipeError as error:
                failure = error
        if self._said_by_0(float(failure is not None), "asking who writes into the folder"):
            raise failure or UsageError(f"rank 0 cannot write into {folder}", ["it says why"], ["another folder"])
        self._claimed.add(folder)

    def _newest(self, folder: str | Path) -> int | None:
        """The step of the newest sound checkpoint, which rank 0 looks for; None where there is no checkpoint."""
        step = _NONE_THERE
        failure = cast("HalopipeError | None", None)
        if self.rank == 0:
            try:
                checkpoint, skipped = newest_sound(folder)
                step = _NONE_THERE if checkpoint is None else checkpoint.manifest.step
                for line in skipped:
                    _log.warning("%s", line)
            except HalopipeError as error:
                step = _NONE_SOUND
                failure = error
        agreed = self._said_by_0(step, "looking for a checkpoint")
        if agreed == _NONE_SOUND:
            raise failure or CorruptFileError(f"rank 0 finds no sound checkpoint in {folder}")
        return None if agreed == _NONE_THERE else int(agreed)

    def _said_by_0(self, number: float, doing: str) -> float:
        """The number that rank 0 says, on all ranks."""
        with self._engine.between_steps(doing):
            self._context.meet()
            return self._sum(number if self.rank == 0 else 0.0)

    def _sum(self, number: float) -> float:
        """Over all ranks."""
        total = torch.tensor([number], dtype=torch.float64)
        context = self._context
        context.transport.all_reduce(total, context.ranks)
        return total.item()

    def state_dict(self) -> dict[str, Any]:
        """That of the whole module, trained as it is by now: copies, on every rank; all ranks call this together.

        A loss that is trained with the network adds its parameters as ``loss_fn.*``.
        """
        trained = self._engine.whole_state_dict()
        own = self.model.state_dict()
        unused = {name: copy.deepcopy(value) for name, value in own.items() if name not in trained}
        own = {name: trained.pop(name, unused.get(name)) for name in own}
        return {**own, **trained}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these parameters and buffers; optimiser and steps stay.  All ranks are given the same.

        Raises:
            UsageError: they are not the module's, or gradients wait for the update.
        """
        self._require_updated()
        of_loss = {name: value for name, value in state.items() if name.startswith(LOSS_PREFIX)}
        self._engine.unshard()
        try:
            self.model.load_state_dict({name: value for name, value in state.items() if name not in of_loss})
        except RuntimeError as error:  # names and shapes
            raise UsageError("this is not the state of the model", str(error).splitlines()[1:]) from error
        missing = [name for name in self._engine.state_dict() if name.startswith(LOSS_PREFIX) and name not in of_loss]
        if missing:
            raise UsageError("this is not the state of the model and its loss", [f"missing: {', '.join(missing)}"])
        self._engine.load_state_dict(state)
        self._forget_first()

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the optimisers of all ranks keep, by names of parameters: copies, on every rank; all call this together.

        ``state`` and ``param_groups`` are as in ``torch.distributed.checkpoint``, with whole tensors; ``scheduler`` is
        that of the schedules that were given, ``num_steps`` how many were done.  With :meth:`state_dict` it is all
        that training goes on from, under any plan of the model.  An optimiser object of the user's keeps the same then.

        Raises:
            UsageError: gradients wait for the update.
        """
        self._steps.confirm()
        state = self._engine.whole_optimizer_state()
        if self.followed is not None:
            give_back(self.followed, WholeState(state))
            self._is_ahead = False
        return state

    def last_optimizer_state(self) -> dict[str, Any]:
        """As :meth:`optimizer_state_dict`, of the last update, also where gradients wait for the next."""
        return self._engine.whole_optimizer_state(of_last_update=True)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`optimizer_state_dict` gave; all ranks are given the same.

        Raises:
            UsageError: it is not that, lacks something, or gradients wait for the update.
        """
        self._require_updated()
        self._engine.load_optimizer_state(state)
        if self.followed is not None:
            load_followed(self.followed, WholeState(state))
        self._is_ahead = True
        self._forget_first()

    @property
    def module(self) -> nn.Module:
        """The user's module with all that is trained by now, on every rank; all ranks ask for it together."""
        state = self.state_dict()
        self._engine.unshard()
        self.model.load_state_dict({name: value for name, value in state.items() if not name.startswith(LOSS_PREFIX)})
        return self.model

    def close(self) -> None:
        """Leaves the job."""
        if self._hook is not None:
            self._hook.remove()
        if self.followed is not None and self._is_ahead:
            self.followed.leave_with_ranks(f"{_TAKES_BACK} was not called behind its last step")
        self._locks.close()
        self._member.close()

    def _require_back(self) -> None:
        if self.followed is not None and self._is_ahead:
            raise UsageError(
                f"the {type(self.followed.optimizer).__name__} of the script has not what the ranks' keep by now",
                [f"after step {self.num_steps}; each rank keeps what its stages train"],
                [f"{_TAKES_BACK} first, on all ranks: the object keeps the same then"],
            )

    def _require_updated(self) -> None:
        if not self.is_updated:
            raise UsageError(
                "nothing can be loaded between updates",
                [f"after step {self.num_steps} gradients wait for the update"],
                ["load after an update, or before the first step"],
            )

    def _loss_on_all(self, loss: float | None) -> float:
        """The loss, which some ranks know, on all of them."""
        with self._engine.between_steps("telling the loss to all ranks"):
            return self._sum(0.0 if loss is None or self.rank != self._context.loss_rank else loss)

    def _take(self, number: int) -> Batch:
        """The batch that was given, as the engine takes it; the one that was announced, if it is that."""
        batch, *upcoming = self._given
        self._given = []
        item = self._item(batch)
        self._trained.step = number - self._trained.noted
        bound_batch = self._bound(item, self._trained, self._announced.recognised(item))
        for each in upcoming if self.looks_ahead else ():
            with contextlib.suppress(HalopipeError):  # it is refused when its turn comes
                self._engine.expect(self._announced.announce(self._item(each), *self._batch_settings))
        self._is_ahead = True
        if self._steps.first is not None and self._kept is not None and self._kept.model is not None:
            self._kept.items.append(item)
        return bound_batch

    def _bound(self, item: BatchItem, agreement: Agreement, announced: Batch | None = None) -> Batch:
        """The batch, which all ranks were given, as the engine takes it."""
        is_prepared = self._context.preparation is not None
        bound_batch = announced or bound(item, *self._batch_settings, is_prepared=is_prepared)
        with self._engine.between_steps(COMPARING):
            agreement.note(tensors_of(item))
        return bound_batch

    def _note(self, _number: int, _batch: object, result: StepResult, _s: float) -> None:
        if result.left_out:
            self._forget_first()  # there is no first update to compare
            if self.rank == 0:
                _log.warning("no update was made: %s", result.left_out)

    def _follow(self, _: int) -> None:
        if self._steps.comparison is not None:
            reference, compared = self._steps.comparison
            self._steps.comparison = None
            self._forget_first()
            self.numerics = (
                NumericsReport(reference.dtype, 0, 0, {}, skipped=reference.skipped)
                if reference.skipped
                else report(compared, reference.dtype, witness=reference.witness, strict=False)
            )
        if self.followed is not None and self.has_updated:
            self.followed.updated()

    def _forget_first(self) -> None:
        """What was kept of the first step is not what goes on."""
        self._steps.first = self._kept = None

    @property
    def _batch_settings(self) -> tuple[InputSpecs, tuple[int, ...]]:
        return self._context.inputs, self._context.decision.micro_batches

    def _item(self, batch: UserBatch) -> BatchItem:
        return [self._pair(each) for each in batch] if self._form.is_several(batch) else self._pair(batch)

    def _pair(self, batch: Any) -> Pair:
        if not isinstance(batch, (tuple, list)) or not batch:
            return self._form.pair(batch)
        if isinstance(batch[0], SparseTensor):
            inputs, targets = batch
            tensors = samples_first(inputs, _tuple(targets), self._context.per_site)
            return tensors[:_NUM_OF_CLOUDS], tensors[_NUM_OF_CLOUDS:]
        raw = next(filter(None, (extra.raw(batch[0]) for extra in extras(ProfilerExtra))), None)
        return self._form.pair(batch) if raw is None else (raw, _tuple(batch[1]))


_NUM_OF_CLOUDS = 3
"""Coordinates, features and counts."""


def _tuple(value: TensorOrTuple) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
