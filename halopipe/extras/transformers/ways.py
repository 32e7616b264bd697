"""What ``halopipe ways`` searches and says.  No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from halopipe.extras.transformers.evidence import FRAMEWORKS, KindEvidence, RunKind, kind_of, published, range_of
from halopipe.extras.transformers.networks import Network, network_of
from halopipe.extras.transformers.options import WaysOptions
from halopipe.terminal import tables, units
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.extras.export.launchers import launcher_of, require_network, require_told
from planner.extras.export.launchers.job import HostGroup, TrainingJob, dtype_of, hosts_of, launch_data
from planner.extras.transformers.cluster import GpuCluster, named_cluster
from planner.extras.transformers.host import COPIES, UPDATE
from planner.extras.transformers.layers import CONTEXT_EXCHANGE, EXCHANGE, EXPERT_EXCHANGE
from planner.extras.transformers.memory import Memory
from planner.extras.transformers.passes import HOST, OPTIMISER, timed
from planner.extras.transformers.pools import Pools, pools_of
from planner.extras.transformers.recomputation import CORE
from planner.extras.transformers.search import TIE, BestDegrees, PricedDegrees, search
from planner.extras.transformers.shape import (
    ExpertExchange,
    Module,
    Offload,
    ParallelDegrees,
    Precision,
    Recompute,
    Transformer,
)
from planner.extras.transformers.software import LAUNCHED, Software, named_software
from planner.extras.transformers.space import DegreesSpace
from planner.extras.transformers.step import BUBBLE, GRADIENTS, SENDS, StepPrediction
from planner.ir.codec import from_json
from planner.ir.errors import CorruptFileError, InfeasibleError, StaleFileError, UsageError
from planner.ir.files import parse_json, read_text, write_text
from planner.ir.plan import Plan
from planner.ir.profile import Profile

if TYPE_CHECKING:
    from planner.costs.candidate import Candidate

GIB = 2**30
LAUNCHES = "waiting for the host to launch kernels"
ON_HOST = "copies to the host, and its work"
"""Shares of a step that are the host's."""
T = TypeVar("T")
_MOST_BYTES = 16 * 2**20
ANY_WIDTH = 10_000
"""Of tables whose last column is a way: the screen folds it."""
_FULL = 0.9
"""Of the memory that may be used; a way that fills as much is bound by it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for, as it was typed; file names are as seen from where it was."""

    transformer: str
    on: str
    gpus: int
    global_batch: int
    options: WaysOptions

    def data(self) -> dict[str, Any]:
        """As plain data."""
        options = dataclasses.asdict(self.options)
        options["layers"] = None if self.options.layers is None else str(self.options.layers)
        return dataclasses.asdict(self) | {"options": options}


@dataclass(frozen=True, slots=True)
class WaysReport:
    """What was found, for people and for programs."""

    asked: Asked
    network: Network
    cluster: GpuCluster | Pools
    sweep: BestDegrees

    @property
    def shape(self) -> Transformer:
        """The network's."""
        return self.network.shape

    @property
    def devices(self) -> int:
        """That there are."""
        return self.asked.gpus

    @property
    def global_batch(self) -> int:
        """Samples a step."""
        return self.asked.global_batch

    @property
    def price_per_hour(self) -> float:
        """Of a device; 0: nobody told it."""
        return self.asked.options.price_per_hour

    @property
    def launcher(self) -> str:
        """That can be told all ways; empty: none is named."""
        return self.asked.options.launcher

    @property
    def software(self) -> Software:
        """What runs the step."""
        return software_of(self.asked.options)

    def data(self) -> dict[str, Any]:
        """The answer as plain data; the file that ``-o`` writes."""
        sweep = self.sweep
        return {
            "asked": self.asked.data(),
            "transformer": dataclasses.asdict(self.shape),
            "network": self.network.data(),
            "cluster": self.cluster.name,
            "device": self.cluster.device,
            "gpus": self.devices,
            "global_batch": self.global_batch,
            "software": self.software.name,
            **launch_data(self.cluster, sweep.best.ways),
            "search": {
                "gap": sweep.gap,
                "bound_s": sweep.bound_s,
                "ways": sweep.num_ways,
                "too_large": sweep.num_large,
                "simulated": sweep.num_simulated,
            },
            "best": self._choice(sweep.best),
            "rivals": [self._choice(rival) | {"tie": rival in sweep.ties} for rival in sweep.rivals],
        }

    @property
    def job(self) -> TrainingJob:
        """The best way, as it would be launched."""
        ways = self.sweep.best.ways
        hosts = hosts_of(self.cluster, ways)
        return TrainingJob(self.shape, ways, self.global_batch, dtype_of(self.cluster, ways), hosts)

    def write(self, path: Path) -> None:
        """:meth:`data` as a file."""
        write_text(path, json.dumps(self.data(), indent=1) + "\n")

    def range_s(self, choice: PricedDegrees) -> tuple[float, float]:
        """Seconds between which a step is expected, by the published runs of its kind."""
        return range_of(choice.prediction.step, self._evidence(choice))

    def evidence_text(self, choice: PricedDegrees) -> str:
        """How far off predictions of published runs of its kind were."""
        evidence = self._evidence(choice)
        if evidence is None:
            return f"{self._kind(choice)}: none, the range is that of kernels and links alone"
        return f"{evidence.kind}: {evidence}"

    def _kind(self, choice: PricedDegrees) -> RunKind:
        framework = FRAMEWORKS[self.launcher]
        if self.software.name != LAUNCHED[self.launcher]:
            framework = f"{framework} by {self.software.name}"
        return kind_of(framework, self.shape, self.cluster, choice.ways)

    def _evidence(self, choice: PricedDegrees) -> KindEvidence | None:
        return published().get(self._kind(choice))

    def _choice(self, choice: PricedDegrees) -> dict[str, Any]:
        prediction = choice.prediction
        memory = choice.prediction.memory
        evidence = self._evidence(choice)
        low_s, high_s = range_of(prediction.step, evidence)
        return {
            "ways": dataclasses.asdict(choice.ways),
            "step_s": prediction.step.seconds,
            "low_s": low_s,
            "high_s": high_s,
            "evidence": prediction.step.evidence,
            "published_runs": 0 if evidence is None else evidence.runs,
            "spent_s": dict(prediction.parts),
            "memory_bytes": {"state": memory.state, **memory.parts, "host": memory.host},
            "micro_batches": prediction.micro_batches,
            "model_flop_per_s": prediction.model_flop_per_s(self.shape, self.global_batch, self.devices),
            **({"dollars_per_step": self._dollars(choice)} if self.price_per_hour else {}),
        }

    @property
    def dollars_per_s(self) -> float:
        """Of all devices."""
        return self.price_per_hour * self.devices / 3600

    def _dollars(self, choice: PricedDegrees) -> float:
        return self.dollars_per_s * choice.prediction.step.seconds

    def dollars_text(self, choice: PricedDegrees) -> str:
        """For a billion tokens; empty: no price is told."""
        tokens = self.global_batch * self.shape.seq
        return f"{1e9 * self._dollars(choice) / tokens:.4g} dollars" if self.price_per_hour else ""

    def render(self) -> str:
        """For people."""
        best = self.sweep.best
        step = best.prediction.step
        cluster = self.cluster
        devices = f"{cluster.device} ({cluster.name})"
        if isinstance(cluster, GpuCluster):
            devices = cluster.text(self.devices)
        rate = best.prediction.model_flop_per_s(self.shape, self.global_batch, self.devices) / 1e12
        step_text = units.seconds_within(step.seconds, *self.range_s(best))
        lines = [
            *self.network.lines(cluster, best.ways.precision),
            f"global batch {self.global_batch}, on {devices}",
            "",
            f"  {best.ways}",
            *self._software(),
            f"  step {step_text}, {rate:.3g} TFLOP/s a device without recomputation",
            f"  kernels and links: {step.evidence}",
            f"  published runs, {self.evidence_text(best)}",
            f"  spent on {self._spent()}",
            f"  memory {self._memory(best)}",
            f"  bound by {self._bound()}",
        ]
        if best.ways.devices < self.devices:
            at = lines.index(f"  {best.ways}") + 1
            lines.insert(
                at, f"  {best.ways.devices} of {self.devices} devices used, {self.devices - best.ways.devices} idle"
            )
        is_core = best.ways.recompute is Recompute.SELECTIVE and best.ways.recompute_modules == CORE
        if self.shape.fused_attention and is_core:
            lines.append("  note: fused attention keeps no scores: selective recomputation saves next to nothing")
        if self.price_per_hour:
            lines.append(f"  {self._dollars(best):.4g} dollars a step, {self.dollars_text(best)} for a billion tokens")
        lines += ["", *self._rivals(), f"  {self.proof()}"]
        return "\n".join(lines)

    def _software(self) -> list[str]:
        """What runs the step, and from where that is known; of layers that were measured it is whatever ran them."""
        places = [pool.cluster for pool in self.cluster.pools] if isinstance(self.cluster, Pools) else [self.cluster]
        if any(place.timed for place in places):
            return []
        return [f"  software {self.software.name}: {self.software.about}"]

    def _spent(self) -> str:
        best = self.sweep.best.prediction
        shares = sorted(best.parts.items(), key=lambda item: -item[1])
        texts = [f"{what} {100 * seconds / best.step.seconds:.0f} %" for what, seconds in shares]
        return ", ".join(text for text in texts if not text.endswith(" 0 %"))

    def _memory(self, choice: PricedDegrees) -> str:
        memory = choice.prediction.memory
        return memory_text(memory, self.sweep.usable_bytes)

    def _bound(self) -> str:
        """What another device, link or batch would better."""
        best = self.sweep.best.prediction
        sweep = self.sweep
        shares = shares_s(best)
        reasons = {
            "computing": shares["computing"] + shares["optimiser"],
            "bubbles (a larger batch)": shares["bubble"],
            "links": shares["exposed communication"],
            LAUNCHES: shares[LAUNCHES],
            ON_HOST: shares[ON_HOST],
        }
        limits = [f"{max(reasons, key=lambda reason: reasons[reason])}"]
        if best.memory.total > _FULL * sweep.usable_bytes:
            limits.append("memory")
        return f"{' and '.join(limits)}; {sweep.num_large} of {sweep.num_ways} ways do not fit"

    def _rivals(self) -> list[str]:
        sweep = self.sweep
        if not sweep.rivals:
            return []
        first = sweep.best.prediction.step.seconds
        rows = []
        for rival in sweep.rivals:
            step = rival.prediction.step
            verdict = "tie" if rival in sweep.ties else f"+{100 * (step.seconds / first - 1):.0f} %"
            memory = f"{rival.prediction.memory.total / GIB:.1f} GiB"
            rows.append([units.seconds(step.seconds), verdict, memory, str(rival.ways)])
        tie = f"(tie: within {100 * TIE:.0f} %, which the model cannot tell apart)"
        head = ["step", "beside the best", "memory", "way"]
        return [f"  the best of other divisions {tie}", tables.table(head, rows, width=ANY_WIDTH), ""]

    def proof(self) -> str:
        """How near the best it is proven."""
        sweep = self.sweep
        proof = "no way is better" if sweep.gap <= 0 else f"no way is better by more than {100 * sweep.gap:.2g} %"
        simulated = f"{sweep.num_simulated} simulated; the others cannot be as fast, or do not fit"
        limits = f" that {self.launcher} can be told" if self.launcher else ""
        return f"{proof} by this model, of {sweep.num_ways} ways{limits}: {simulated}"


def shares_s(prediction: StepPrediction) -> dict[str, float]:
    """Seconds of the step by what limits it; of computing and communication what is beside neither is not in it."""

    def spent_s(*what: str) -> float:
        return sum(prediction.parts.get(each, 0.0) for each in what)

    shares = {
        "exposed communication": spent_s(EXCHANGE, EXPERT_EXCHANGE, CONTEXT_EXCHANGE, GRADIENTS, SENDS),
        "bubble": spent_s(BUBBLE),
        "optimiser": spent_s(OPTIMISER),
        LAUNCHES: spent_s(HOST),
        ON_HOST: spent_s(COPIES, UPDATE),
    }
    return {"computing": prediction.step.seconds - sum(shares.values()), **shares}


def plan_by(
    profile: Profile, source: str, global_batch: int = 0, micro_batch: Sequence[int] = (), *, memory_bytes: int = 0
) -> Plan:
    """The plan that a way is, of a profiled network: priced and simulated as any other, and run by ``run``.

    Args:
        source: a file of ``halopipe ways -o``, or names of a way's parts: ``tensor=2,pipeline=2,sequence_parallel=1``.
        global_batch: samples a step; 0: those of the file, else of the profile's example.
        micro_batch: samples of a micro-batch of all replicas, to be held against the way's; empty: they are.
        memory_bytes: most bytes on any device; 0: the device's memory less a margin.

    Raises:
        UsageError: the network or the machines cannot be divided so, or nothing runs that way.
        InfeasibleError: it does not fit.
    """
    from halopipe.planning.problem import make_problem
    from planner.extras.transformers.placement import schedule_of
    from planner.solvers.candidates.choose import heuristic_plan, infeasible
    from planner.solvers.candidates.evaluate import Evaluator

    if "=" in source or not source.endswith(".json"):
        ways = ways_of(source)
        batch = global_batch or profile.graph.samples
    else:
        job = read(Path(source))
        ways = job.ways
        batch = global_batch or job.global_batch
    _require_room(profile, ways, micro_batch)
    candidate = _candidate(profile, ways, ways.micro_batches(batch))
    problem = make_problem(
        profile,
        global_batch=batch,
        micro_batch=[ways.micro_batch * ways.data],
        schedules=[schedule_of(ways)],
        num_ranks=len(profile.cluster.devices) if ways.pools else ways.devices,
        memory=memory_bytes,
        allow=["sample", "channel"] if max(ways.degrees) > 1 else ["sample"],
        recompute={Recompute.FULL: "always", Recompute.SELECTIVE: "selective"}.get(ways.recompute, "never"),
        shard="always" if ways.zero else "never",
        zero=max(1, ways.zero),
    )
    evaluator = Evaluator(problem, CostModel(problem.profile))
    evaluated = evaluator.evaluate(candidate)
    if not evaluated.fits:
        raise infeasible(problem, evaluated)
    return heuristic_plan(evaluator, evaluated, "ways", f"as asked for: {ways}")


def _require_room(profile: Profile, ways: ParallelDegrees, micro_batch: Sequence[int]) -> None:
    """Raises :class:`UsageError` where the cluster has too few devices, or micro-batches of another size are wanted."""
    available = len(profile.cluster.devices)
    if ways.devices > available:
        raise UsageError(
            f"{ways} takes {ways.devices} devices",
            [f"the profile's cluster has {available}"],
            [f"profile --workers {ways.devices}", "plan --cluster FILE, of so many devices", "a way on fewer devices"],
        )
    size = ways.micro_batch * ways.data
    if micro_batch and list(micro_batch) != [size]:
        raise UsageError(
            f"--micro-batch is {', '.join(map(str, micro_batch))}, and {ways} has {size}",
            [f"{ways.data} replicas x micro_batch {ways.micro_batch}"],
            [f"--micro-batch {size}", "micro_batch=... among the parts of the way"],
        )


def _candidate(profile: Profile, ways: ParallelDegrees, count: int) -> Candidate:
    """What the way makes of the network, in ``count`` micro-batches."""
    from planner.costs.candidate import Candidate, Recomputes
    from planner.extras.transformers.placement import degree_of, groups_of, placements, schedule_of

    size = ways.micro_batch * ways.data
    placed = placements(profile.graph, ways)
    groups = groups_of(ways, pools_of("the profile", profile.cluster) if ways.pools else None)
    degrees = [degree_of(ways, chunk) for chunk in range(len(groups))]
    recomputes = {
        Recompute.NONE: Recomputes.NOTHING,
        Recompute.SELECTIVE: Recomputes.CORES,
        Recompute.FULL: Recomputes.ALL,
    }
    return Candidate(
        tuple(placed[layer.name].stage for layer in profile.graph.layers),
        groups,
        tuple((ways.micro_batch,) * ways.data if degree == 1 else (size,) for degree in degrees),
        (size,) * count,
        schedule_of(ways),
        recompute=(recomputes[ways.recompute],) * len(groups),
        options=tuple(
            ShardingSpec.placed(placed[layer.name]) if degrees[placed[layer.name].stage] > 1 else None
            for layer in profile.graph.layers
        )
        if max(degrees) > 1
        else (),
    )


def ways_of(text: str) -> ParallelDegrees:
    """A way by the names of its parts; those that are not given are 1, or none.

    Raises:
        UsageError, UnknownNameError: a part is unknown, or its value cannot be meant.
    """
    kinds: dict[str, Callable[[str], Any]] = {
        **dict.fromkeys(("tensor", "context", "pipeline", "data", "micro_batch", "interleave"), units.whole),
        "zero": int,
        "sequence_parallel": lambda value: {"0": False, "1": True}[value],
        "recompute": Recompute,
        "schedule": str,
    }

    def part(name: str, value: str) -> Any:
        name = name.replace("-", "_")
        units.require_known("part of a way", [name], list(kinds))
        return kinds[name](value)

    pairs = units.parse_pairs(text, part, "is no part of a way", "tensor=2,pipeline=2")
    parts = {name.replace("-", "_"): value for name, value in pairs.items()}
    units.require_known("schedule of a way", [parts.get("schedule", "1f1b")], ["1f1b", "gpipe"])
    return ParallelDegrees(**parts)


def read(path: Path) -> TrainingJob:
    """The best way of a file that :meth:`WaysReport.write` wrote, with its network, batch and hosts.

    Raises:
        MissingFileError, CorruptFileError: it is not there, or no such file.
    """
    remedies = [_WRITTEN_BY]
    try:
        node = parse_json(read_text(path, _MOST_BYTES))
    except ValueError as error:
        raise CorruptFileError(f"{path} is no file of ways", [f"it is not JSON: {error}"], remedies) from None
    if missing := {"best", "transformer", "global_batch"} - (node.keys() if isinstance(node, dict) else set()):
        kind = node.get("halopipe") if isinstance(node, dict) else None
        what = f"it is a halopipe {kind} file" if isinstance(kind, str) else f"it has no {', '.join(sorted(missing))}"
        raise CorruptFileError(f"{path} is no file of ways", [what], remedies)
    try:
        best = node["best"].get("ways") if isinstance(node["best"], dict) else node["best"]
        shape = _part(node["transformer"], Transformer, "transformer")
        ways = _part(best, ParallelDegrees, "best.ways")
        global_batch = _part(node["global_batch"], int, "global_batch")
        dtype = _part(node.get("dtype", ""), str, "dtype")
        hosts = _part(node.get("hosts", []), tuple[HostGroup, ...], "hosts")
        ways.check(shape)
        ways.micro_batches(global_batch)
        return TrainingJob(shape, ways, global_batch, dtype, hosts)
    except UsageError as error:
        raise CorruptFileError(f"{path} is no file of ways", [error.title, *error.details], remedies) from None
    except (ValueError, ArithmeticError) as error:
        raise CorruptFileError(f"{path} is no file of ways", [str(error)], remedies) from None


_WRITTEN_BY = "halopipe ways llama2-7b --on a100-dgx --gpus 8 --global-batch 64 -o ways.json"


def asked_again(path: Path) -> WaysReport | None:
    """The answer that :meth:`WaysReport.write` wrote, asked for once more; None: the file is another kind of file.

    Raises:
        StaleFileError: the answer is another now.
        UsageError, InputFileError: as of :func:`find`.
    """
    try:
        node = parse_json(read_text(path, _MOST_BYTES))
    except ValueError:
        return None
    keys = node.keys() if isinstance(node, dict) else set()
    if {"transformer", "fits"} <= keys:
        raise UsageError(
            f"{path} is an answer of --fits, and pages are of the best way", [], ["halopipe ways ... -o without --fits"]
        )
    if not {"best", "transformer", "asked"} <= keys:
        return None
    try:
        asked = _part(node["asked"], Asked, "asked")
    except ValueError as error:
        raise CorruptFileError(f"{path} is no file of ways", [str(error)], [_WRITTEN_BY]) from None
    report = find(asked.transformer, asked.on, asked.gpus, asked.global_batch, asked.options)
    if json.loads(json.dumps(report.data()["best"])) != node["best"]:
        raise StaleFileError(
            f"{path} holds another answer than the same question has now",
            [f"now: {report.sweep.best.ways}", "the network's file, the cluster's, or halopipe has changed since"],
            ["halopipe ways ... -o again"],
        )
    return report


def _part(value: Any, cls: type[T], place: str) -> T:
    try:
        return from_json(json.dumps(value), cls)
    except ValueError as error:
        raise ValueError(f"{place}: {str(error).removeprefix(': ')}") from None


def cluster_of(on: str, shape: Transformer, layers: Path | None = None) -> GpuCluster | Pools:
    """The cluster of a name, or of a cluster file; pools, where that has unlike GPUs or zones.

    Args:
        layers: a table of Sailor's of what layers of ``shape`` take, in place of kernels: in float32, as it is.

    Raises:
        UnknownNameError: there is none of that name, or no time of the network on a kind of device.
        MissingFileError, CorruptFileError, FormatError: of the files.
        UsageError: a host has devices of several kinds, or a link is missing; or times without a cluster file.
    """
    if not on.endswith((".yaml", ".yml")):
        if layers is not None:
            raise UsageError(f"--layers is of devices of a cluster file, and --on is {on}", [], ["--on cluster.yaml"])
        return named_cluster(on)
    from planner.extras.baselines import sailor
    from planner.extras.catalogue.clusters import read_machines

    machines = read_machines(on).cluster
    if layers is None:
        pools = pools_of(on, machines)
    else:
        kinds = dict.fromkeys(device.kind for device in machines.devices)
        sizes = sailor.SailorNetwork(shape.hidden, shape.heads, shape.vocab, shape.seq)
        times = sailor.layer_times(sailor.read(layers), sizes, kinds)
        pools = pools_of(on, machines, {kind: timed(shape.layers, of) for kind, of in times.items()}, "float32")
    return pools if pools.whole is None or len(pools.pools) > 1 else pools.whole


def memory_text(memory: Memory, usable_bytes: float) -> str:
    """What a rank holds, of what it may, and what that is."""
    breakdown = ", ".join(f"{what.replace('_', ' ')} {size / GIB:.1f}" for what, size in memory.parts.items())
    on_host = f"; {memory.host / GIB:.1f} GiB on its host" if memory.host else ""
    return f"{memory.total / GIB:.1f} of {usable_bytes / GIB:.1f} GiB ({breakdown}){on_host}"


def find(transformer: str, on: str, devices: int, global_batch: int | None, options: WaysOptions) -> WaysReport:
    """The best ways of a transformer's step on ``devices`` of a cluster.

    Raises:
        UnknownNameError: there is no such transformer, cluster or kind of recomputation.
        UsageError: sizes are wrong, or nothing divides network, devices and batch.
        InfeasibleError: nothing fits.
    """
    if global_batch is None:
        raise UsageError(
            "the best way depends on the samples of a step",
            ["no --global-batch was given"],
            [f"--global-batch {8 * devices}", "--fits, which takes a sample a device where none is given"],
        )
    network = network_of(transformer)
    cluster = cluster_of(on, network.shape, options.layers)
    if isinstance(cluster, Pools) and cluster.devices != devices:
        raise UsageError(
            f"{on} has {cluster.devices} devices, and --gpus is {devices}",
            [cluster.device, "which of unlike devices are left out is for the search to say"],
            [f"--gpus {cluster.devices}", "a cluster file of fewer"],
        )
    launcher = launcher_of(options.launcher, options.version) if options.launcher else None
    if launcher is not None:
        require_network(launcher, network.shape)
        cluster = launcher.cluster_of(cluster)
    limit_s = options.time_limit_s
    space = space_of(options)
    space.require(network.shape, cluster)
    try:
        sweep = search(network.shape, cluster, devices, global_batch, space, gap=options.gap, time_limit_s=limit_s)
    except (UsageError, InfeasibleError) as error:
        if launcher is None:
            raise
        limits = f"of the ways that {launcher.name} can be told"
        raise type(error)(error.title, [*error.details, limits], error.remedies) from None
    report = WaysReport(Asked(transformer, on, devices, global_batch, options), network, cluster, sweep)
    if launcher is not None:
        require_told(launcher, report.job)
    return report


def space_of(options: WaysOptions) -> DegreesSpace:
    """The ways that are left by what is fixed, and by the launcher that is to be told.

    Raises:
        UnknownNameError: there is no such kind of recomputation, precision, launcher or version.
        UsageError: what is fixed cannot be told to the launcher.
    """
    if options.recompute:
        units.require_known("recomputation", [options.recompute], [how.value for how in Recompute])
    if options.offload:
        units.require_known("offload", [options.offload], [what.value for what in Offload])
    units.require_known("precision", [options.precision], [each.value for each in Precision])
    units.require_known("expert exchange", [options.expert_exchange], [how.value for how in ExpertExchange])
    precision = Precision(options.precision)
    expert_exchange = ExpertExchange(options.expert_exchange)
    offload = Offload(options.offload or Offload.NONE)
    names = ("tensor", "context", "pipeline", "micro_batch", "interleave", "expert", "expert_tensor", "shards")
    counts = {name: getattr(options, name) for name in names}
    restrictions: dict[str, Any] = {name: (value,) for name, value in counts.items() if value}
    restrictions |= {"recompute": (Recompute(options.recompute),)} if options.recompute else {}
    restrictions |= {"recompute_modules": (_modules(options.recompute_modules),)} if options.recompute_modules else {}
    restrictions |= {"zero": (options.zero,)} if options.zero >= 0 else {}
    base = ParallelDegrees(precision=precision, offload=offload, expert_exchange=expert_exchange)
    if options.launcher:
        limits = launcher_of(options.launcher, options.version).limits
        asked = {"precision": (precision,), "offload": (offload,), "expert_exchange": (expert_exchange,)}
        limits.require(restrictions | asked)
        restrictions["limits"] = limits
    elif options.version:
        raise UsageError("--version is of a launcher, and none is named", [], ["--for LAUNCHER"])
    return DegreesSpace(**restrictions, base=software_of(options).of(base))


def _modules(text: str) -> tuple[Module, ...]:
    names = [name.strip() for name in text.split(",")]
    units.require_known("module of a block", names, [module.value for module in Module])
    return tuple(module for module in Module if module in names)


def software_of(options: WaysOptions) -> Software:
    """What runs the step.

    Raises:
        UnknownNameError: there is no such software.
    """
    return named_software(options.software or LAUNCHED[options.launcher])
