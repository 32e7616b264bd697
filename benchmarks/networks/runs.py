"""One network through profile, plan and run on two workers, its losses and gradients beside one device's.

Everything is what the command line does, but for the processes: they are forked from one that has captured the network,
instead of importing torch and capturing it once more each.  A profile is of one number of samples, its links are given.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from benchmarks.devices import ranks
from cuda_ops.device.host import core_of, prepare_process
from halopipe import api
from halopipe.launch.combine import combine
from halopipe.run_spec.job import REFERENCE, Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training import rank as rank_of_job
from halopipe.training import single_device
from halopipe.training.single_device import make_reference
from halopipe.training.work import work
from planner.ir.cluster import WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.errors import HalopipeError, NumericsError
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource, Optimizer, Profile, Provenance
from planner.ir.scratch import scratch_folder
from planner.layers import batch_wide_layers
from planner.solvers.candidates.feasibility import mixing_layers
from profiler.capture.graph import capture
from profiler.measure import worker
from profiler.measure.job import MeasuringJob as MeasuringJob
from profiler.measure.worker import measure_model
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.monitor.failure import set_text
from runtime.transport.gloo import open_gloo
from tests.zoo.entries import DATA, PIPELINE, Entry
from tests.zoo.packages import ORIGINS

T = TypeVar("T")

STRATEGIES = PIPELINE, DATA
NUM_RANKS = 2
NUM_STEPS = 3
_KIND = "cpu"
_MEMORY_BYTES = 4 << 30
_LINK = Link(2e-5, 1e9)
_LIMIT_S = 900.0
_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to train on two workers.

    Attributes:
        second_stage: its first layer; empty if there is one stage.
        num_microbatches: of a step.
        losses: of each step.
        loss_error, gradient_error, state_error: largest relative differences from one device.
        refusal: why it was not run, a typed error; empty if it was.
        failure: what went wrong otherwise.
    """

    second_stage: str = ""
    num_microbatches: int = 0
    losses: tuple[float, ...] = ()
    loss_error: float = 0.0
    gradient_error: float = 0.0
    state_error: float = 0.0
    refusal: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a network.

    Attributes:
        dtype: that it ran in.
        num_layers: of the captured graph, of which ``num_opaque`` are known by what they computed alone.
        num_parameters: trained ones.
        capture_s: processor time to build and capture it.
        trials: by strategy.
        refusal: why it was not captured; empty if it was.
        failure: what went wrong otherwise.
    """

    name: str
    dtype: str = "float64"
    num_layers: int = 0
    num_opaque: int = 0
    num_parameters: int = 0
    capture_s: float = 0.0
    trials: dict[str, Trial] = field(default_factory=dict)
    refusal: str = ""
    failure: str = ""

    @property
    def is_equal(self) -> bool:
        """Whether it ran in at least one way and nothing failed."""
        ran = [trial for trial in self.trials.values() if trial.losses]
        return bool(ran) and not self.failure and not any(trial.failure for trial in self.trials.values())

    @property
    def is_refused(self) -> bool:
        """Whether it ran in no way, and was told why each time."""
        return not self.is_equal and not self.failure and not any(trial.failure for trial in self.trials.values())


def outcome(name: str) -> Outcome:
    """Of ``tests.zoo.packages:name``, in a process of its own; in float32 where float64 says nothing."""
    source = ModelSource(f"tests.zoo.packages:{name}", dtype="float64")
    try:
        exact = forked([lambda: _outcome(name, source)])[0]
        return exact or forked([lambda: _outcome(name, replace(source, dtype="float32"))])[0] or Outcome(name)
    except RuntimeError as error:
        return Outcome(name, failure=str(error))


def forked(works: list[Callable[[], T]]) -> list[T]:
    """What each of ``works`` returns, all at once in a process each, forked from this one.

    Raises:
        HalopipeError: one raised it.
        RuntimeError: one raised something else, or its process died.
    """

    def answer(rank: int) -> tuple[Exception | None, Any]:
        try:
            return None, works[rank]()
        except HalopipeError as error:
            return error, None
        except Exception as error:  # noqa: BLE001  # told to the parent
            return RuntimeError(f"{type(error).__name__}: {error}"), None

    answers = ranks.forked(len(works), answer, _LIMIT_S)
    for error, _ in answers:
        if error is not None:
            raise error
    return [value for _, value in answers]


def _outcome(name: str, source: ModelSource) -> Outcome | None:
    """None: asked for float64, the module does not run in it, rounds to float32 inside, or magnifies rounding.

    In float32 what is accepted follows from the rounding of one device.
    """
    torch.set_num_threads(1)
    try:
        model = load_model(source)
        if source.dtype == "float64" and not _runs(load_model(source)):
            return None
        start_s = time.process_time()
        captured = capture(model)
        capture_s = time.process_time() - start_s
        for module in (worker, rank_of_job, single_device):  # of the processes forked from this one
            module.capture_for = lambda *_, **__: (model, captured)
        needs_whole = bool(batch_wide_layers(captured.graph)) or not captured.polymorphic
        profile = _profile(source, captured.graph, needs_whole)
    except HalopipeError as error:
        return Outcome(name, source.dtype, refusal=described(error))
    graph = profile.graph
    trials = {strategy: _trial(profile, strategy, needs_whole) for strategy in STRATEGIES}
    rounds = any(spec.dtype == "float32" for layer in graph.layers for spec in layer.outputs)
    inexact = [one.failure for one in trials.values() if NumericsError.code in one.failure]
    magnifies = not any(" at step 0" in failure for failure in inexact)  # the first step is equal, later losses are not
    if source.dtype == "float64" and inexact and (rounds or magnifies):
        return None
    opaque = sum(layer.kind == "opaque" for layer in graph.layers)
    parameters = sum(torch.Size(spec.shape).numel() for spec in graph.parameters.values())
    return Outcome(name, source.dtype, len(graph.layers), opaque, parameters, capture_s, trials)


def _runs(model: LoadedModel) -> bool:
    try:
        return math.isfinite(model.loss(model.inputs, model.targets).item())
    except (RuntimeError, TypeError):
        return False


def described(error: HalopipeError) -> str:
    """An error on one line: code, what and where, files from their package on."""
    found = "; ".join(filter(None, (line.strip() for line in [error.title, *error.details])))
    return re.sub(r'[^ "]*/site-packages/', "", f"{error.code}: {found}")


def _profile(source: ModelSource, graph: Graph, needs_whole: bool) -> Profile:
    """Half the example's samples are measured; all where the loss needs them at once, or the model knows no others."""
    optimizer = Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0)
    share = (graph.samples if needs_whole else graph.samples // NUM_RANKS,)
    measure = partial(measure_model, lambda _: None)
    costs = forked([lambda: measure(MeasuringJob(source, optimizer, share, quick=True))])[0]
    devices = tuple(DeviceSpec(f"n0/cpu{rank}", _KIND, "n0", _MEMORY_BYTES) for rank in range(NUM_RANKS))
    return Profile(
        source,
        optimizer,
        graph,
        Cluster(devices, {WITHIN_HOST: _LINK}),
        {_KIND: tuple(one for size in costs.done.sizes for one in size.measurements)},
        {_KIND: costs.rest.parameters},
        Provenance({}),
    )


def _trial(profile: Profile, strategy: str, needs_whole: bool) -> Trial:
    try:
        plan = _plan(profile, strategy, needs_whole)
        found = _run(plan, RunOptions(NUM_STEPS, warmup=0, check_numerics=True, deadline_s=_DEADLINE_S))
    except HalopipeError as error:
        text = "; ".join([described(error), *_mixing(profile.graph)])
        return Trial(refusal=text) if error.exit_code in (2, 4) else Trial(failure=text)
    except RuntimeError as error:
        return Trial(failure=str(error))
    decision = plan.decision
    report = found.numerics
    second = next((name for name, place in decision.layers.items() if place.stage == 1), "")
    worst = {} if report is None else {kind: difference.error for kind, difference in report.worst.items()}
    return Trial(
        second,
        len(decision.micro_batches),
        found.losses,
        worst.get("loss", 0.0),
        worst.get("gradient", 0.0),
        max(worst.get("parameter", 0.0), worst.get("buffer", 0.0)),
    )


_NAMED = 12


def _mixing(graph: Graph) -> list[str]:
    """Why neither micro-batches nor replicas are possible, if that is why."""
    found = sorted(mixing_layers(graph))
    more = [f"{len(found) - _NAMED} more"] if len(found) > _NAMED else []
    return [f"samples do not stay apart in {', '.join([*found[:_NAMED], *more])}"] if found else []


def _plan(profile: Profile, strategy: str, needs_whole: bool) -> Plan:
    """The best plan of two stages with two micro-batches, or of one stage on two ranks.

    One micro-batch where the loss needs all samples of a step at once.
    """
    layers = profile.graph.layers
    samples = profile.graph.samples
    asked: dict[str, Any] = {"global_batch": samples, "time_limit_s": 20.0}
    if strategy == PIPELINE:
        ends = [f"{layers[0].name}=stage:0", f"{layers[-1].name}=stage:1", "*=replicas:1"]
        size = samples if needs_whole else samples // NUM_RANKS
        asked |= {"max_stages": NUM_RANKS, "micro_batch": [size], "fix": ends}
    else:
        asked |= {"max_stages": 1, "micro_batch": [samples], "fix": [f"*=replicas:{NUM_RANKS}"]}
    return api.plan(profile, **asked)


def _run(plan: Plan, options: RunOptions) -> RunResult:
    """The plan's ranks, after one device."""
    with scratch_folder("job") as folder:
        job = Job(plan, options, folder)
        (reference,) = forked([lambda: make_reference(job).to_text()])
        numbers = range(plan.decision.num_ranks)
        set_text(dist.PrefixStore("job", dist.FileStore(str(folder / "store"), -1)), REFERENCE, reference)
        results = forked([lambda rank=rank: _rank(job, rank, folder / "store") for rank in numbers])
        return combine(plan, options, results, None)


def _rank(job: Job, rank: int, path: Path) -> RankResult:
    prepare_process(core_of(rank))
    num_ranks = job.plan.decision.num_ranks
    store = dist.FileStore(str(path), num_ranks)
    mine = dist.PrefixStore("job", store)
    transports = dist.PrefixStore("gloo", store)
    return work(
        job,
        rank,
        mine,
        dist.PrefixStore("board", store),
        lambda groups, program: open_gloo(rank, num_ranks, transports, _DEADLINE_S, groups),
    )


_BLOCK = re.compile(r"<!-- networks: (?P<what>.*?) -->\n.*?<!-- end of networks -->", re.DOTALL)
_IN_COMMON = 2
"""Parts of a refusal that networks refused alike have in common: its title and the first fact."""


def document(found: Mapping[str, Outcome], text: str) -> str:
    """The document with its blocks as the outcomes are now: ``counts``, ``refusals``, and the table of an origin."""

    def block(match: re.Match[str]) -> str:
        what = match["what"]
        made = {"counts": _counts, "refusals": _refusals}.get(what, lambda _: _folded(found, ORIGINS[what]))(found)
        return f"<!-- networks: {what} -->\n\n{made}\n\n<!-- end of networks -->"

    return _BLOCK.sub(block, text)


def _folded(found: Mapping[str, Outcome], networks: Mapping[str, Entry]) -> str:
    there = [found[name] for name in networks if name in found]
    summary = f'<details markdown="1"><summary>{len(there)} networks</summary>'
    return f"{summary}\n\n{_table(there, networks)}\n</details>"


def _counts(found: Mapping[str, Outcome]) -> str:
    equal = [one for one in found.values() if one.is_equal]
    partly = sum(any(trial.refusal for trial in one.trials.values()) for one in equal)
    refused = sum(one.is_refused for one in found.values())
    single = sum(one.dtype == "float32" for one in equal)
    missing = [f"`{name}`" for networks in ORIGINS.values() for name in networks if name not in found]
    rest = f"\n\nNot run yet with the code of today (`--rest` runs them): {', '.join(missing)}." if missing else ""
    return (
        f"{len(found)} networks were run. {len(equal)} were equal to one device, {single} of these in float32, and "
        f"{partly} in one of the two\nways (the other was refused); {refused} were refused; "
        f"{len(found) - len(equal) - refused} failed.{rest}"
    )


def _table(found: list[Outcome], networks: Mapping[str, Entry]) -> str:
    lines = ["| NAME | network | pipeline | data parallel |", "|---|---|---|---|"]
    for one in found:
        about = networks[one.name].habit + (" (float32)" if one.dtype == "float32" else "")
        cells = [_cell(one, strategy) for strategy in STRATEGIES]
        lines.append(f"| `{one.name}` | {about} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(one: Outcome, strategy: str) -> str:
    trial = one.trials.get(strategy, Trial(refusal=one.refusal, failure=one.failure))
    if trial.losses:
        return f"{max(trial.loss_error, trial.gradient_error):.0e}"
    return "failed" if trial.failure else "refused"


def _refusals(found: Mapping[str, Outcome]) -> str:
    """Each reason once, the most frequent first, with the networks that it was given for and what differs."""
    whose: dict[str, list[str]] = {}
    for one in found.values():
        ways = {"": (one.refusal, one.failure)} | {
            f" in {name}": (trial.refusal, trial.failure) for name, trial in one.trials.items()
        }
        for way, (refusal, failure) in ways.items():
            if refusal or failure:
                parts = " ".join((refusal or f"failed: {failure}").split()).split("; ")
                more = f" ({'; '.join(parts[_IN_COMMON:])})" if parts[_IN_COMMON:] else ""
                whose.setdefault("; ".join(parts[:_IN_COMMON]), []).append(f"`{one.name}`{way}{more}")
    ordered = sorted(whose.items(), key=lambda each: -len(each[1]))
    lines = [f"**{len(names)}: {reason}**\n\n" + "\n".join(f"- {name}" for name in names) for reason, names in ordered]
    return "\n\n".join(lines) or "Nothing."
