"""A module trained on the devices of this host from a plain script or a notebook cell.

    run = hp.parallelize(module, example, loss_fn=loss_fn, devices=2, optimizer=torch.optim.AdamW(module.parameters()))
    for batch in loader:
        loss = run.step(batch)
    run.close()                                  # the trained weights are in ``module``

The script is no rank.  It starts one process for each, as ``halopipe run`` does, and tells them what to do:

    script                                       each rank
    call-N.pt       a function of an       -->   function(execution, batch)
                    Execution, the batch, learning rates, and the next batch, where the loop says
                    ``for batch in run.ahead(loader)``
    store: call/N                          -->
                                           <--   store: answer/N/RANK   loss
                    watches them                 store: result/RANK, error/RANK

Ranks begin with halopipe's own code and not with the script's, so that nothing there needs to be guarded by
``if __name__ == "__main__"``.  An optimiser object and its schedule stay in the script: the ranks have one like it,
which begins with what the object keeps by then, and are told its settings with each batch.  When the run is closed, and
when the script asks for its state dict, the object gets what the ranks' optimisers keep, as after a loop of its own.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from halopipe.data.ahead import Upcoming
from halopipe.launch import script_rank
from halopipe.launch.execute import joined, loaded_of_script, member_of_script, require_optimizer
from halopipe.launch.job_environment import JobRank
from halopipe.launch.job_stores import job_stores
from halopipe.launch.packed_optimizer import Packed
from halopipe.launch.processes import warm_workers, workers_of
from halopipe.launch.script_module import ScriptModule, require_no_autocast
from halopipe.launch.script_rank import CLOSE, SCRIPT, STATE, Script, ScriptCall, until, write
from halopipe.launch.spawn import supervisor_of
from halopipe.planning.measure import no_model
from halopipe.run_spec.options import ScriptOptions
from halopipe.run_spec.result import Score
from halopipe.terminal import console
from halopipe.training.rank_device import device_assignments_of, on_gpus, require_devices
from halopipe.training.resuming import said_by_rank_0
from halopipe.training.script_values import ScriptValues
from halopipe.training.session import Execution
from planner.ir.codec import dumps, loads
from planner.ir.errors import HalopipeError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.ir.scratch import scratch_folder
from profiler import load_model
from profiler.source.model import load_state, named_parameters, owners, state_of
from runtime.monitor.failure import read_error, write_error
from runtime.optim.followed import Followed, KeptSettings
from runtime.optim.optimizer_state import give_back
from runtime.optim.schedules import SteppedElsewhere
from runtime.optim.whole_state import WholeState
from runtime.timeouts import SETUP_S

if TYPE_CHECKING:
    from cuda_ops._torch import Store

SCRIPT_RANK = "halopipe.launch.worker:script"
_PLAN = "script/plan"
_BUSY_S = 2e-3
"""Between two looks at the store while ranks are busy."""

_log = logging.getLogger(__name__)


class Parallel:
    """A plan that ranks of this host train by, as a script calls them; use as a context, or call ``close`` at the end.

    Attributes:
        plan: that is run.
        profile: that it was made from; None where only a plan was given.
        num_steps: training steps done.
        ranks: that do it.

    All calls raise what a rank failed by, of its own type; a batch that does not fit leaves the run as it was (clouds
    whose sites cannot be found end it).  What the script does to its module, which the ranks do not see, is refused
    (:mod:`halopipe.launch.script_module`).
    """

    _values: ScriptValues | None = None
    _is_quiet: bool = False
    _hook: RemovableHandle | None = None

    def __init__(
        self,
        module: nn.Module | None,
        plan: Plan,
        profile: Profile | None,
        loss_fn: Any = None,
        optimizer: Any = None,
        options: ScriptOptions | None = None,
        *,
        has_state: bool = False,
        answers: bool = False,
        quiet: bool = False,
    ) -> None:
        """Starts the ranks, and returns when all of them are ready.

        Args:
            quiet: whether nothing is written to stderr.
            module, loss_fn: of the script, which get the trained weights; None: those that the plan's factory makes.
            has_state: whether the weights of ``module`` are others than those that the plan's model is loaded with.
            answers: whether the ranks are to answer a stream.
        """
        self.plan = plan
        self.profile = profile
        self.num_steps = 0
        self._state_of = -1
        self._kept_of = 0
        self._is_quiet = quiet
        self._own = None if module is None else ScriptModule(module, loss_fn)
        self._values = None if module is None else ScriptValues(owners(module, loss_fn), loss_fn)
        member, _ = member_of_script(plan, optimizer, options or {})
        device = member.device
        made = member.context.optimizer
        self._followed = made if isinstance(made, Followed) else None
        rank_options = {**(options or {}), "device": device}
        if isinstance(device, torch.device):
            raise UsageError(
                f"device {str(device)!r} is one of this process, and ranks have processes of their own",
                [],
                ["leave it out: the devices that the plan names", "cpu"],
            )
        if self._followed is not None:
            if module is None:
                raise UsageError(
                    "an optimiser object is made of the parameters of a module, and none is given",
                    [],
                    ["give the module", "an optimiser by text or function"],
                )
            self._followed.recognise(named_parameters(owners(module, loss_fn)))
            optimizer = Packed.of(optimizer, self._followed.names)
            rank_options["scheduler"] = self._followed.schedules and SteppedElsewhere()
            self._hook = self._followed.before_state_dict(self._fetch_kept)
        state = None if module is None or not has_state else state_of(owners(module, loss_fn))
        settings = None if self._own is None or answers else self._own.settings
        own_options = cast("ScriptOptions", rank_options)
        script = Script(plan, optimizer, own_options, state is not None, answers, settings)
        self.ranks = ScriptRanks(script, state, member.context.deadline_s)
        self._end = weakref.finalize(self, self.ranks.end)
        try:
            ready = self.ranks.answers()
        except BaseException:
            self._end()
            raise
        self._upcoming = Upcoming(ready["looks_ahead"])
        if ready["statistics"] and not quiet:
            console.remark(f"{ready['statistics']}; a plan with batch_statistics='whole' sees all of it")

    def __enter__(self) -> Parallel:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def ahead(self, batches: Iterable[Any]) -> Iterator[Any]:
        """``batches``, each a step before its turn; see :meth:`halopipe.training.session.Execution.ahead`."""
        return self._upcoming.ahead(batches)

    def step(self, batch: Any) -> float:
        """One training step; returns the loss.  See :meth:`halopipe.training.session.Execution.step`."""
        self._require_alike()
        if self._own is not None:
            self._own.require_settings()
        if self._followed is not None:
            self._followed.require_state()
            self._followed.require_values()
        with unbroken():
            answer = self.ranks.call(script_rank.step, batch, *self._upcoming.take(), settings=self._settings)
            self.num_steps = answer["num_steps"]
            if self._followed is not None and answer["has_updated"]:
                self._followed.updated()
        if answer["numerics"] and not self._is_quiet:
            console.remark(f"numerics: {answer['numerics']}")
            self._is_quiet = True  # it is said once
        return float(answer["answer"])

    def evaluate(self, *batches: Any, metric: str | Callable[[], Any] = "", outputs: Sequence[str] = ()) -> Score:
        """The mean loss over ``batches``, and what else :meth:`halopipe.training.session.Execution.evaluate` finds."""
        self._require_alike()
        return Score(**self.ranks.call(Execution.evaluate, *batches, metric=metric, outputs=tuple(outputs))["answer"])

    def state_dict(self) -> dict[str, Any]:
        """That of the whole module, trained as it is by now."""
        return cast("dict[str, Any]", self._written(Execution.state_dict))

    def optimizer_state_dict(self) -> dict[str, Any]:
        """What the ranks' optimisers keep; see :meth:`halopipe.training.session.Execution.optimizer_state_dict`."""
        return cast("dict[str, Any]", self._written(Execution.optimizer_state_dict, self._kept))

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what :meth:`optimizer_state_dict` gave; an optimiser object of the script gets its settings."""
        with unbroken():
            self.num_steps = self.ranks.call(Execution.load_optimizer_state_dict, dict(state))["num_steps"]
            self._take_loaded()

    def _take_loaded(self) -> None:
        """What the ranks have loaded for an optimiser object and its schedules."""
        self._kept_of = -1
        if self._followed is not None:
            self._followed.take(self._written(script_rank.loaded))

    @property
    def _settings(self) -> KeptSettings | None:
        return None if self._followed is None else (self._followed.settings, None)

    @property
    def _kept(self) -> KeptSettings | None:
        """The same with what schedules keep, for ranks that are to say or save it."""
        return None if self._followed is None else self._followed.kept

    def _require_alike(self) -> None:
        """Raises :class:`UsageError` where the script's module or modes are others than the ranks'."""
        require_no_autocast(self.plan.inputs.model.autocast)
        if self._own is not None:
            self._own.require_known()
        if self._values is not None:
            self._values.require_same()

    def _written(self, do: Callable[[Execution], Any], settings: KeptSettings | None = None) -> Any:
        """What rank 0 writes to a file."""
        path = self.ranks.folder / STATE
        self.ranks.call(do, settings=settings, is_written=True)
        written = torch.load(path, weights_only=False)
        path.unlink()
        return written

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these parameters and buffers; optimiser and steps stay."""
        with unbroken():
            self.ranks.call(Execution.load_state_dict, dict(state))
            self._state_of = -1
            if self._own is not None:
                self._own.known()

    @property
    def module(self) -> nn.Module:
        """The script's own module, with the weights as they are trained by now."""
        if self._own is None:
            self._own = ScriptModule(load_model(self.plan.inputs.model).module, None)
        self._own.require_known()
        self._fetch(self._own)
        return self._own.module

    def _fetch(self, own: ScriptModule) -> None:
        """Puts the trained weights into the script's module, where it has not got them."""
        if self._state_of != self.num_steps and self.ranks.is_alive:
            load_state(own.owned, self.state_dict(), whole_loss=False)
            self._state_of = self.num_steps
            own.known()

    def _fetch_kept(self) -> None:
        """Puts what the ranks' optimisers keep into the script's object, where that has not got it."""
        if self._followed is None or self._kept_of == self.num_steps or not self.ranks.is_alive:
            return
        try:
            kept = self._written(Execution.last_optimizer_state, self._settings)
        except UsageError as error:  # one of the user's own, that keeps what only its process can have
            self._followed.leave_with_ranks(f"{error.title}: {', '.join(error.details)}")
        else:
            give_back(self._followed, WholeState(kept))
        self._kept_of = self.num_steps

    def save(self, folder: str | Path, *, keep: int = 0) -> None:
        """Save a checkpoint; see :meth:`halopipe.training.session.Execution.save`."""
        self._require_alike()
        self.ranks.call(Execution.save, str(Path(folder).absolute()), keep=keep, settings=self._kept)

    def load(self, folder: str | Path, *, step: int | str | None = None) -> int:
        """Go on from a checkpoint; see :meth:`halopipe.training.session.Execution.load`."""
        with unbroken():
            answer = self.ranks.call(Execution.load, str(Path(folder).absolute()), step=step)
            self.num_steps = answer["num_steps"]
            self._state_of = -1
            self._take_loaded()
            if self._own is not None:
                self._own.known()
        return self.num_steps

    def close(self) -> None:
        """Puts the trained weights into the script's module and ends the ranks; they are gone afterwards.

        An optimiser object gets what the ranks' optimisers keep: a loop of the script, or another run, goes on with it.

        A module that the script has loaded other weights into since the last step, the best ones say, keeps these.
        """
        try:
            own = self._own
            if self.ranks.is_alive and own is not None and not own.is_replaced:
                if own.changed and self._state_of != self.num_steps:
                    _log.warning("the trained weights take the place of what the script wrote: %s", own.changed)
                self._fetch(own)
            self._fetch_kept()
            self.ranks.close()
        finally:
            if self._hook is not None:
                self._hook.remove()
            self._end()


class ScriptRanks:
    """The ranks as the script sees them: a folder, a store, and a thread that watches their processes.

    Attributes:
        folder: for what is too large for the store.
    """

    def __init__(self, script: Script, state: Mapping[str, Any] | None, deadline_s: float) -> None:
        plan = script.plan
        self._num_ranks = plan.decision.num_ranks
        self._number = 0
        self._do = cast("Callable[..., Any] | None", None)
        self._failure: HalopipeError | None = None
        self._is_over = threading.Event()
        assignments = device_assignments_of(plan.decision, script.options["device"])
        require_devices(assignments, plan.prediction.ranks)
        if not on_gpus(assignments):
            warm_workers()  # by this thread: what another one starts would end with it
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(scratch_folder("job"))
        write(self.folder / SCRIPT, script)
        if state is not None:
            write(self.folder / STATE, state)
        is_afresh = on_gpus(assignments)
        workers, self._store = workers_of(self.folder, self._num_ranks, call=SCRIPT_RANK, afresh=is_afresh)
        self._workers = workers

        def stop(_: object) -> None:
            if self._is_over.is_set():
                raise UsageError("this run is over", ["it was ended"])

        def watch() -> None:
            try:
                supervisor_of(plan.decision, self._store, deadline_s, stop).run(workers)
            except HalopipeError as error:
                self._failure = error
            except Exception as error:  # noqa: BLE001  # whoever waits for the ranks must hear of it
                self._failure = read_error(write_error(error))

        self._thread = threading.Thread(target=watch, name="ranks", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the ranks can be called."""
        return self._thread.is_alive() and self._failure is None

    @property
    def processes(self) -> Mapping[int, int]:
        """The id of each rank's process."""
        return self._workers.pids

    def wait_for_failure(self) -> HalopipeError:
        """What the ranks ended by, which are known to be ending."""
        self._thread.join(SETUP_S)
        return self._failure or UsageError("this run is over", ["its ranks have ended"])

    def call(self, do: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        """Has all ranks do something, and returns what rank 0 says of it.

        Args:
            do: called with a rank's :class:`Execution`, ``arguments`` and ``options``; people see its name.

        Raises:
            UsageError: the run is over; or the ranks refuse what they were told, and wait for the next call.
            HalopipeError: what a rank failed by.
        """
        self.begin(do, *arguments, **options)
        return self.end_of_call()

    @property
    def have_answered(self) -> bool:
        """Whether the call that was begun is over, or will never be."""
        return self._store.check(self._keys) or not self._thread.is_alive()

    @property
    def _keys(self) -> list[str]:
        return [f"answer/{self._number}/{rank}" for rank in range(self._num_ranks)]

    def end_of_call(self) -> dict[str, Any]:
        """What rank 0 says of the call that was begun; raises as :meth:`call`."""
        answer = self.answers()
        (self.folder / f"call-{self._number}.pt").unlink()
        self._store.delete_key(f"call/{self._number}")
        return answer

    def begin(
        self,
        do: Callable[..., Any],
        *arguments: Any,
        settings: KeptSettings | None = None,
        is_written: bool = False,
        **options: Any,
    ) -> None:
        """Has all ranks do something, and does not wait for it; see :meth:`call` and :class:`ScriptCall`."""
        if not self.is_alive:
            why = [self._failure.title] if self._failure is not None else ["it was closed"]
            raise UsageError("this run is over", why, ["hp.parallelize(...) again, and run.load(folder)"])
        self._number = self._number + 1
        self._do = do
        write(self.folder / f"call-{self._number}.pt", ScriptCall(do, arguments, options, settings, is_written))
        self._store.set(f"call/{self._number}", do.__name__)

    def answers(self) -> dict[str, Any]:
        """Waits for all ranks' answers to the last call; the first call is to be ready."""
        keys = self._keys
        until(lambda: self.have_answered, _BUSY_S)
        if not self._store.check(keys):
            raise self._failure or UsageError("this run is over", ["its ranks have ended"])
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        errors = [read_error(answer["error"]) for answer in answers if "error" in answer]
        if errors and len(errors) < len(answers) and self._do is Execution.load:  # the others have other weights now
            self._failure = errors[0]
            self._is_over.set()
        for error in errors:
            raise error
        verdicts = dict.fromkeys(answer.get("numerics", "") for answer in answers)
        return {**answers[0], "numerics": "; ".join(filter(None, verdicts))}

    def close(self) -> None:
        """Has the ranks end by themselves."""
        if self.is_alive:
            self._store.set(f"call/{self._number + 1}", CLOSE)
            self._thread.join(SETUP_S)

    def end(self) -> None:
        """Nothing of the ranks is left, however it comes."""
        self._is_over.set()
        self._thread.join(SETUP_S)
        self._stack.close()


@contextmanager
def unbroken() -> Iterator[None]:
    """Within it Ctrl-C waits for the end: what ranks have done is noted in the script too.  A second one does not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # the script hears it in its own way
        yield
        return
    is_asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal is_asked
        is_asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if is_asked:
        raise KeyboardInterrupt


def parallelize(
    module: nn.Module | str,
    example: Any,
    loss_fn: Callable[..., Any] | None,
    optimizer: Any,
    plan: Plan | None,
    profile: Profile | None,
    make_plan: Callable[[], tuple[Profile, Plan]],
    options: ScriptOptions,
    job: JobRank | None,
    *,
    quiet: bool = False,
) -> Parallel | Execution:
    """See :func:`halopipe.api.parallelize`.

    Args:
        make_plan: profiles and plans.
        job: of torchrun, of which this process is a rank; None: it is none.
    """
    own = module if isinstance(module, nn.Module) else None
    if own is None and (isinstance(module, type) or not (isinstance(module, str) or callable(module))):
        raise no_model(module)
    require_optimizer(optimizer)
    if job is not None:
        if plan is None and job.num_hosts > 1:
            raise UsageError(
                "a job on several hosts needs a plan that is there before",
                [f"the job has {job.num_hosts} hosts"],
                ["torchrun ... -m halopipe profile, and halopipe plan, first; then plan='plan.json'"],
            )
        store, board = job_stores(job.rank, job.num_ranks)
        if plan is None:
            made, plan = _plan_of_rank_0(job.rank, store, make_plan)
            profile = made or profile
        job.require_size(plan.decision)
        member, check = member_of_script(plan, optimizer, options, job.planned_rank(plan.decision))
        load = partial(loaded_of_script, plan, own, loss_fn, example)
        run = joined(member, store, board, load, check=check)
        run.profile = profile
        return run
    is_given = plan is not None or profile is not None  # then the module may have been trained since
    if plan is None:
        profile, plan = make_plan()
    return Parallel(
        own, plan, profile, loss_fn, optimizer, options, has_state=is_given and own is not None, quiet=quiet
    )


def _plan_of_rank_0(
    rank: int, store: Store, make_plan: Callable[[], tuple[Profile, Plan]]
) -> tuple[Profile | None, Plan]:
    """The plan that rank 0 makes for all, and on rank 0 its profile."""
    made = list[Profile]()

    def make() -> str:
        profile, plan = make_plan()
        made.append(profile)
        return dumps(plan)

    plan = loads(said_by_rank_0(store, _PLAN, rank, make), Plan)
    return (made[0] if made else None), plan
