"""A rank of a script's job: it does what the script asks for, until the run is closed.

The other side is :mod:`halopipe.launch.parallelize`, whose module says how the two talk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor

from halopipe.launch.execute import joined, member_of_script
from halopipe.launch.job_environment import JobRank
from halopipe.launch.packed_optimizer import Packed
from halopipe.launch.script_module import ModuleSettings, require_planned
from halopipe.run_spec.options import ScriptOptions
from halopipe.training.checkpoint_folders import load_weights
from halopipe.training.session import Execution
from planner.ir.codec import plain
from planner.ir.errors import InputFileError, UsageError
from planner.ir.graph import LOSS_PREFIX
from planner.ir.plan import Plan
from planner.layers import statistics_text
from profiler import load_model
from profiler.source.model import named_parameters
from profiler.source.structure import alone, is_part
from runtime.monitor.failure import write_error
from runtime.optim.followed import KeptSettings as OptimizerSettings
from runtime.timeouts import SETUP_S

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.monitor.activity import StatusStore

SCRIPT = "script.pt"
STATE = "state.pt"
CLOSE = "close"

_FOREVER_S = 1e9
_SHORTEST_S = 1e-4
_IDLE_S = 2e-2
"""Between two looks at the store: at first, and where there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Script:
    """What each rank of a script's job is told first.

    Attributes:
        optimizer: text, a function, or the description of an optimiser object; None: the plan's.
        options: as of ``hp.execute``.
        has_state: whether the ranks begin with other weights than the model is loaded with.
        answers: whether they are to answer a stream.
        settings: of the script's module, which is to be as it was planned; None: there is none.
        default_dtype: of the script, in which torch makes scalars.
    """

    plan: Plan
    optimizer: Any
    options: ScriptOptions
    has_state: bool
    answers: bool = False
    settings: ModuleSettings | None = None
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


def serve(folder: Path, job: JobRank, store: Store, board: StatusStore) -> None:
    """Be a rank until the script closes the run."""
    script: Script = torch.load(folder / SCRIPT, weights_only=False)
    torch.set_default_dtype(script.default_dtype)
    model = load_model(script.plan.inputs.model, script.options.get("seed", 0))
    if script.settings is not None:
        require_planned(ModuleSettings.of(model.owners), script.settings)
    if script.has_state:
        state = torch.load(folder / STATE, weights_only=False)
        is_with_loss = any(name.startswith(LOSS_PREFIX) for name in state)  # else the script left it to the plan
        load_weights(model, state, whole_loss=is_with_loss)
    optimizer = script.optimizer
    if isinstance(optimizer, Packed):
        optimizer = optimizer.made(named_parameters(model.owners))
    member, check = member_of_script(script.plan, optimizer, script.options, job.rank)
    member.context.answers = script.answers
    with joined(member, store, board, [model].pop, check=check, local_rank=job.local_rank) as execution:
        number = 0
        statistics = "" if script.answers else statistics_text(script.plan.decision, execution.context.graph)
        answer: dict[str, Any] = {"looks_ahead": execution.looks_ahead, "statistics": statistics}
        while True:
            store.set(f"answer/{number}/{job.rank}", json.dumps(answer))
            execution.activity.deadline_s = _FOREVER_S
            execution.activity.begin("waiting for the script")
            number += 1
            what = _next(store, number)
            execution.activity.begin(what)
            execution.activity.deadline_s = SETUP_S
            if what == CLOSE:
                return
            call: ScriptCall = torch.load(folder / f"call-{number}.pt", weights_only=False)
            try:
                answer = call.done(execution, folder / STATE)
            except (UsageError, InputFileError) as error:  # a folder that is not there ends no training
                if execution.activity.what != what:  # it has begun to run
                    raise
                answer = {"error": write_error(error)}


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """What a script asks of each rank: ``do(execution, *arguments, **options)``.

    Attributes:
        settings: of the script's optimiser object, which the ranks' own gets before; None: as they are.
        is_written: whether what ``do`` gives on rank 0 is written to a file; else it is in the answer.
    """

    do: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    settings: OptimizerSettings | None
    is_written: bool

    def done(self, execution: Execution, file: Path) -> dict[str, Any]:
        """The answer of a rank that has done it."""
        if self.settings is not None and execution.followed is not None:
            execution.followed.take(self.settings)
        outcome = self.do(execution, *self.arguments, **self.options)
        if self.is_written and execution.rank == 0:
            write(file, outcome)
        answer = None if self.is_written else plain(outcome)
        numerics = "" if execution.numerics is None else execution.numerics.verdict
        done = {"num_steps": execution.num_steps, "has_updated": execution.has_updated, "numerics": numerics}
        return {**done, "answer": answer}


def step(execution: Execution, *batches: Any) -> float | None:
    """The loss of a step on the first batch; the other is that of the step after, if it is known."""
    return execution.train_before(*batches).loss


def loaded(execution: Execution) -> Any:
    """The settings of the script's optimiser object and what its schedules keep, where they were loaded."""
    return None if execution.followed is None else execution.followed.kept


def _next(store: Store, number: int) -> str:
    """The next call; the script may take its time.  This process ends with it."""
    key = f"call/{number}"
    until(lambda: store.check([key]), _IDLE_S)
    return store.get(key).decode()


def until(is_there: Callable[[], bool], longest_s: float) -> None:
    """Looks often at first, then ever more seldom, up to ``longest_s`` apart; torch's own wait logs when it ends."""
    pause_s = _SHORTEST_S
    while not is_there():
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.1, longest_s)


def write(path: Path, value: Any) -> None:
    """All of it at once; what is defined in ``__main__`` or in a notebook goes along."""
    new = path.with_suffix(".new")
    torch.save(value, new, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_BatchPickler))
    new.replace(path)


class _BatchPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Of a tensor its own elements: a batch that is a part of a data set in memory would bring all of that along."""

    def reducer_override(self, obj: Any) -> Any:
        """As cloudpickle's, but for such tensors."""
        if type(obj) is Tensor and is_part(obj):
            return alone(obj).__reduce_ex__(self.proto)
        return super().reducer_override(obj)
