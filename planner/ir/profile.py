"""What every layer, device and link costs: the file between ``profile`` and ``plan``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, TypeVar

from planner.ir.cluster import MEASURED, Cluster, Evidence
from planner.ir.graph import Graph

Costs = TypeVar("Costs")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model comes from, so that a worker can build it again.

    Attributes:
        factory: ``pkg.mod:factory`` or ``path/file.py:factory``; or a file that holds a module, ``path/file.pt``.
        arguments: keyword arguments of the factory, as JSON text by name.
        input_shape: what ``--input`` gave, samples first; empty if the factory's own example was used.
        dtype: of parameters and activations.
        autocast: dtype in which operators that gain by it compute (``bfloat16``), parameters staying as they are; empty
            for none.
        elementwise: operators (``mylib::op``) of which the user says that they treat every element by itself.
        digest: SHA-256 of the file that holds the module; empty of a factory.
        local_losses: blocks that the model is trained as, each by a loss of its own; 0: as it is.
        sizes: by name, extents of dims that vary, which plans are made for in place of the example's.
    """

    factory: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    input_shape: tuple[int, ...] = ()
    dtype: str = "float32"
    autocast: str = field(default="", metadata={"added": "0.1"})
    elementwise: tuple[str, ...] = field(default=(), metadata={"added": "0.1"})
    digest: str = field(default="", metadata={"added": "0.1"})
    local_losses: int = field(default=0, metadata={"added": "0.1"})
    sizes: Mapping[str, int] = field(default_factory=dict, metadata={"added": "0.1"})

    @property
    def is_file(self) -> bool:
        """Whether it is a file of ``torch.save`` or ``torch.export.save``, not the name of a factory."""
        return self.factory.endswith((".pt", ".pt2"))


@dataclass(frozen=True, slots=True)
class Levels:
    """How high memory rises while a layer runs, in bytes; gradients of parameters are apart.

    Attributes:
        forward: above what earlier layers save: what it saves, makes and needs, and values that later layers still
            read and nobody saves.
        backward: above what it and earlier layers save: gradients under way, and what it needs.
        backward_input: the same while the gradients of its inputs are computed alone.
        backward_weight: above what is left for the weight gradients, while its own are computed.
        left: of what it saves, and of the gradients of its outputs: what some weight gradient needs later.
        outputs_saved: of its outputs, those that it saves itself.
        inputs_saved: of what earlier layers made, what it is the first to save.
        gradients_left: of the gradients of its outputs, those that some weight gradient needs later.
        inputs_kept: of what earlier layers made, all that it saves, be it the first to do so or not.
        gradients_made: of the gradients of values that its backward makes: for each the last layer whose backward is
            given it, and its bytes.
        inputs_left: of what its weight gradients need later and earlier layers made: who made it, and bytes.
        gradients_left_from: of ``left``, the gradients that other layers' backward made: whose, and bytes.
    """

    forward: int
    backward: int
    backward_input: int
    backward_weight: int
    left: int
    outputs_saved: int = 0
    inputs_saved: int = field(default=0, metadata={"added": "0.1"})
    gradients_left: int = field(default=0, metadata={"added": "0.1"})
    inputs_kept: int = field(default=0, metadata={"added": "0.1"})
    gradients_made: tuple[tuple[str, int], ...] = field(default=(), metadata={"added": "0.1"})
    inputs_left: tuple[tuple[str, int], ...] = field(default=(), metadata={"added": "0.1"})
    gradients_left_from: tuple[tuple[str, int], ...] = field(default=(), metadata={"added": "0.1"})

    def scaled(self, times: float) -> Levels:
        """``times`` as many bytes of everything."""
        sizes: dict[str, Any] = {name: round(times * getattr(self, name)) for name in LEVEL_NAMES}
        for name in LEVEL_PAIRS:
            sizes[name] = tuple((layer, round(times * size)) for layer, size in getattr(self, name))
        return replace(self, **sizes)


LEVEL_NAMES = tuple(each.name for each in fields(Levels) if each.type == "int")
LEVEL_PAIRS = tuple(each.name for each in fields(Levels) if each.type != "int")
"""Fields of :class:`Levels`: those that are one number, and those that are bytes by layer."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One layer, or a part of it, at ``samples`` samples on one kind of device.

    Seconds are medians over the measuring processes of trimmed means; ``num_runs`` runs all told.

    Attributes:
        forward_s, backward_s: forward, and backward for input and weights in one go.
        backward_input_s, backward_weight_s: the two halves, each measured on its own.
        saved_bytes: what autograd keeps between forward and backward beyond parameters and the layer's own inputs
            that an earlier layer already keeps.
        workspace_bytes: the peak inside the forward or backward call beyond what stays.
        spread: interquartile range of forward + backward over its median.
        key: the back end chosen (convolutions); costs are interpolated inside one key only.
        part: of a part: the extents of its work, in the order of the work's dims without the samples; empty for whole.
        before: of a token slice: tokens before it, of which it reads what the layer reads of earlier ones.
        raw_s: forward + backward of every run kept, in the order of the passes, process after process: the same
            position is the same pass for all layers of a size.  Rounded to 4 significant digits.
        levels: how high memory rises; None if only ``workspace_bytes`` is known.
        alike: the layer whose seconds these are, which does the same work on the same shapes; empty: its own.
        low, high: where no run said it (evidence ``kernels``, ``datasheet``): factors on the seconds between which
            eight of ten are expected; 0: as the evidence has them.
    """

    layer: str
    samples: int
    forward_s: float
    backward_s: float
    backward_input_s: float
    backward_weight_s: float
    saved_bytes: int
    workspace_bytes: int
    num_runs: int
    spread: float = 0.0
    key: str = ""
    evidence: Evidence = MEASURED
    part: tuple[int, ...] = field(default=(), metadata={"added": "0.1"})
    raw_s: tuple[float, ...] = field(default=(), metadata={"added": "0.1"})
    levels: Levels | None = field(default=None, metadata={"added": "0.1"})
    alike: str = field(default="", metadata={"added": "0.1"})
    low: float = field(default=0.0, metadata={"added": "0.1"})
    high: float = field(default=0.0, metadata={"added": "0.1"})
    before: int = field(default=0, metadata={"added": "0.1"})

    @property
    def passes_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class PartShape:
    """A part of a layer that a rank may do; the same for all of ``layers``, whose shapes and operators are alike.

    Attributes:
        samples, part, before: as of :class:`Measurement`.
    """

    layers: tuple[str, ...]
    samples: int
    part: tuple[int, ...]
    before: int = 0


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """What a layer's parameters cost a step beside its gradients: adding into ``.grad``, and the optimiser's update."""

    accumulate_s: float
    update_s: float


Argument = bool | int | float | tuple[float, ...]
"""Of an optimiser: a switch, a number, or several such as ``betas``."""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimiser the updates were measured with.

    Attributes:
        name: a class of ``torch.optim``.
        arguments: its keyword arguments.
        state_bytes_per_parameter_byte: 0 for plain SGD, 1 with momentum, 2 for Adam.
    """

    name: str = "SGD"
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    state_bytes_per_parameter_byte: float = 0.0

    def __str__(self) -> str:
        """As people write it: ``AdamW:lr=0.001,betas=(0.9,0.95)``."""
        return ":".join([self.name, *([spelled(self.arguments)] if self.arguments else [])])


_BELOW_0 = ("lr", "weight_decay", "momentum", "eps")


def argument_faults(arguments: Mapping[str, Any]) -> Iterator[str]:
    """What no optimiser of ``torch.optim`` can be meant to have; torch itself takes some of it, and trains to NaN."""
    for name, value in arguments.items():
        numbers = value if isinstance(value, tuple | list) else (value,)
        if not all(map(_is_number, numbers)):
            continue
        shown = spelled({name: tuple(map(float, numbers)) if isinstance(value, tuple | list) else float(value)})
        if not all(map(isfinite, numbers)):
            yield f"{shown}: a number that is finite is needed"
        elif name in _BELOW_0 and min(numbers) < 0:
            yield f"{shown}: it cannot be below 0"
        elif name == "betas" and not all(0 <= each < 1 for each in numbers):
            yield f"{shown}: each is at least 0 and below 1"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def spelled(arguments: Mapping[str, Argument]) -> str:
    """``lr=0.1,nesterov=true,betas=(0.9,0.95)``."""
    return ",".join(f"{name}={_spelled(value)}" for name, value in arguments.items())


def _spelled(value: Argument) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_spelled, value))})"
    return str(value).lower() if isinstance(value, bool) else f"{value:.12g}"


@dataclass(frozen=True, slots=True)
class MeasuringProcess:
    """How quiet the machine was while one process measured.

    Attributes:
        host: where it ran; empty for the one host of a profile.
        canary_before_s, canary_after_s, run_delay, contended: as of :class:`Provenance`, during this process.
        step_s: forward + backward of all layers, by samples.
        repeated: it is the quieter of two, of which the first was contended.
    """

    canary_before_s: float
    canary_after_s: float
    run_delay: float
    contended: bool
    step_s: Mapping[str, float] = field(default_factory=dict)
    repeated: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What was used to measure, and how quiet the machine was.

    Attributes:
        versions: of halopipe, torch, python and the operating system.
        canary_before_s, canary_after_s: a fixed kernel, timed before the first process and after the last.
        run_delay: share of the time in which the profiler waited for a processor: of the process with most of it.
        contended: run_delay above 1 % or two canaries of a process 5 % apart, in any process.
        iteration_s: a whole step on one device (forward, backward, update), measured apart, by samples.
        processes: those that measured, each as often as the others; the costs are medians over them.
        process_spread: by samples: the longest ``step_s`` of a process less the shortest, over the median.
        clocks: hertz by name, where readable: of the processor ``now``, ``least`` and ``most``; of a GPU at work, right
            after the canaries, ``sm_before``, ``sm_after``, ``memory_before`` and ``memory_after``.
        governor: what chooses the processor's clock, where readable.
        measured_at: when, in UTC: ``2026-11-23T20:15Z``; empty if not known.
        kernels: of a profile that no device ran: by ``kind of device: evidence`` the share of a step that rests on it.
        links_measured_at: when an earlier profile of this machine measured the links, where they are its; else empty.
    """

    versions: Mapping[str, str]
    canary_before_s: float = 0.0
    canary_after_s: float = 0.0
    run_delay: float = 0.0
    contended: bool = False
    iteration_s: Mapping[str, float] = field(default_factory=dict)
    processes: tuple[MeasuringProcess, ...] = field(default=(), metadata={"added": "0.1"})
    process_spread: Mapping[str, float] = field(default_factory=dict, metadata={"added": "0.1"})
    clocks: Mapping[str, float] = field(default_factory=dict, metadata={"added": "0.1"})
    governor: str = field(default="", metadata={"added": "0.1"})
    measured_at: str = field(default="", metadata={"added": "0.1"})
    kernels: Mapping[str, float] = field(default_factory=dict, metadata={"added": "0.1"})
    links_measured_at: str = field(default="", metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class PreparationCost:
    """One thing that a host makes of the coordinates of ``samples`` samples: a site set, or a kernel map.

    Attributes:
        name: unique among those of a device kind and number of samples.
        inputs: the graph inputs that it makes; none if it is for others alone.
        after: names of what it is made from.
        seconds: on one thread of the device's host, without those of ``after``.
        shared_s: what comes on top where several ranks share out the sites: putting sites in order, making a map local.
        is_beside: a thread of the rank makes it, a step ahead, also on a core; each rank what its own samples need.
    """

    name: str
    inputs: tuple[str, ...]
    after: tuple[str, ...]
    seconds: float
    samples: int
    shared_s: float = 0.0
    is_beside: bool = field(default=False, metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class SiteHalo:
    """Rows that a rank receives for a layer over sites, where ``parts`` ranks share the sites of ``samples`` samples.

    Attributes:
        rows: the most that any of the ranks receives.
    """

    layer: str
    parts: int
    samples: int
    rows: int


@dataclass(frozen=True, slots=True)
class Slowdown:
    """By how much a layer takes longer while the other devices of its host compute, too: they share its memory.

    Each device ran the whole network, so that all came to a layer at about the same time.

    Attributes:
        samples: of each device.
        num_devices: that computed at once, this one included.
        forward, backward: seconds together over seconds alone, at least 1; backward of both its halves, too.
        spread: interquartile range of such ratios of whole passes, by turns, over their median.
    """

    layer: str
    samples: int
    num_devices: int
    forward: float
    backward: float
    spread: float = 0.0


FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
OVERHEAD = "overhead"
MESSAGES = "messages"
ALL_REDUCES = "all-reduces"
STATISTIC_SUMS = "statistics"
MACHINE = "machine"
STEP_RANGE = "range"
ONE_DEVICE = "one device"
PIPELINE = "pipeline"
SHARING = "shared stages"
"""Kinds of plans: on one rank, of several stages of one rank each, with a stage of several ranks."""


@dataclass(frozen=True, slots=True)
class CostClass:
    """Costs that are corrected by one factor.

    Attributes:
        what: on a kind of device ``forward``, ``backward`` (with its halves, and adding into ``.grad``), ``update`` or
            the ``overhead`` of waiting for a message; on a class of links ``messages``, ``all-reduces`` or
            ``statistics``.
        where: the kind of device, or the class of links.
        shared: of forward and backward: whether several ranks share the stage's layers, so that what moves messages
            takes from the same cores.

    ``machine`` on a kind of device is how fast its layers run now against the profile, as stages run alone showed
    (:mod:`planner.costs.calibration.machine`): a factor of forward, backward and update that comes before theirs.
    ``range`` of a kind of plans is no cost: its factor is e to the standard deviation of log(measured / predicted).
    """

    what: str
    where: str
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """Costs of one class in one run, as predicted without any correction and as measured.

    Attributes:
        of: the class.
        predicted_s, measured_s: sums over the actions that are mostly of this class (medians over steps); 0 if there
            are none, and nothing is known of the class.
        step_s: its part of the predicted step: by how much the step grows with the factor of the class, at 1.
        corrected_step_s: the same where every class of the plan has its own ratio as factor.
    """

    of: CostClass
    predicted_s: float
    measured_s: float
    step_s: float
    corrected_step_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 if nothing is known."""
        return self.measured_s / self.predicted_s if self.predicted_s > 0 and self.measured_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Observation:
    """What one run of a plan says of the costs.

    Attributes:
        plan: fingerprint of the plan's decision.
        num_steps: that were timed.
        spread: interquartile range of these steps over their median.
        predicted_s, measured_s: the step, predicted without any correction; the median measured.
        explained_s: the step predicted with the ratio of every class as its factor.
        kind: of the plan.
        machine: by what the step was longer than by the profile, as far as the machine has changed (a factor).

    Where the run showed how fast the machine is, "without any correction" is but for that.
    """

    plan: str
    num_steps: int
    spread: float
    predicted_s: float
    measured_s: float
    explained_s: float
    seen: tuple[Seen, ...]
    kind: str = field(default="", metadata={"added": "0.1"})
    machine: float = field(default=1.0, metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Correction:
    """Costs of the class ``of`` count ``factor`` times as much; ``num_plans`` plans were run to know."""

    of: CostClass
    factor: float
    num_plans: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What runs of plans say of the profile's costs.

    Attributes:
        profile: fingerprint of the profile without this; of another profile this says nothing.  Empty: corrections
            that were given, whatever the profile.
        observations: a few of each plan, the newest last.
        corrections: what follows from them (:mod:`planner.costs.calibration.fit`), and counts; and how fast the machine
            was at the last run that told.
    """

    profile: str = ""
    observations: tuple[Observation, ...] = ()
    corrections: tuple[Correction, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Profile:
    """Graph, cluster and measurements.

    Attributes:
        measurements: by device kind; per layer and number of samples.
        parameters: by device kind, then by layer.
        action_overhead_s: by how much an action is longer that follows a wait for a message, by device kind: code and
            data have left the caches meanwhile.
        parts: by device kind: parts of layers, as far as they were measured at their own shapes.  (Whole layers alone
            are in ``measurements``.)
        preparations: by device kind: what its host makes of coordinates, each after what it is made from.
        site_halos: how much layers over sites exchange.
        slowdowns: by device kind: what devices of one host take from one another while they compute; of layers that are
            not in it, and of profiles without, nothing is known and nothing counts.
        calibration: what runs of plans say of all these; it is no part of the profile's fingerprint (``bare``).
    """

    model: ModelSource
    optimizer: Optimizer
    graph: Graph
    cluster: Cluster
    measurements: Mapping[str, tuple[Measurement, ...]]
    parameters: Mapping[str, Mapping[str, ParameterCost]]
    provenance: Provenance
    action_overhead_s: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict, metadata={"added": "0.1"})
    preparations: Mapping[str, tuple[PreparationCost, ...]] = field(default_factory=dict, metadata={"added": "0.1"})
    site_halos: tuple[SiteHalo, ...] = field(default=(), metadata={"added": "0.1"})
    slowdowns: Mapping[str, tuple[Slowdown, ...]] = field(default_factory=dict, metadata={"added": "0.1"})
    calibration: Calibration = field(default_factory=Calibration, metadata={"added": "0.1"})

    def __repr__(self) -> str:
        """What was profiled where, in a line."""
        devices = len(self.cluster.devices)
        measured = sum(map(len, self.measurements.values()))
        return f"Profile({self.model.factory}: {len(self.graph.layers)} layers, {devices} devices, {measured} costs)"

    @property
    def bare(self) -> Profile:
        """The profile as it was measured: what plans name by its fingerprint."""
        return self.corrected_by(())

    def corrected_by(self, corrections: tuple[Correction, ...]) -> Profile:
        """The profile under these corrections, without what they were found from."""
        return replace(self, calibration=Calibration(corrections=corrections))

    def standing(self, speeds: Mapping[str, float]) -> Profile:
        """The profile on the machines as they stand: devices that are gone left out, others at another speed.

        A device of another speed is of a kind of its own, with the costs of its kind and a correction (``machine``) on
        top.  A profile that stands so already stays as it is; of another one, observations are left out.

        Args:
            speeds: by device, beside what was measured of its kind: 0.5 takes twice as long, 0 is gone.
        """
        cluster = self.cluster.without({name for name, speed in speeds.items() if speed <= 0})
        devices = tuple(
            replace(device, kind=kind_at(device.kind, speeds.get(device.name, 1.0))) for device in cluster.devices
        )
        like = {now.kind: was.kind for was, now in zip(cluster.devices, devices, strict=True) if now != was}
        if not like and cluster == self.cluster:
            return self
        speed_of = {now.kind: speeds.get(now.name, 1.0) for now in devices}
        corrections = list(self.calibration.corrections)
        for kind, of in like.items():
            own = {one.of: one for one in self.calibration.corrections if one.of.where == of}
            machine = own.pop(CostClass(MACHINE, of), Correction(CostClass(MACHINE, of), 1.0, 1))
            corrections += [replace(one, of=replace(one.of, where=kind)) for one in own.values()]
            corrections.append(replace(machine, of=CostClass(MACHINE, kind), factor=machine.factor / speed_of[kind]))
        return replace(
            self,
            cluster=replace(cluster, devices=devices),
            measurements=_as_of(self.measurements, like),
            parameters=_as_of(self.parameters, like),
            action_overhead_s=_as_of(self.action_overhead_s, like),
            parts=_as_of(self.parts, like),
            preparations=_as_of(self.preparations, like),
            slowdowns=_as_of(self.slowdowns, like),
            calibration=Calibration(corrections=tuple(corrections)),
        )


def kind_at(kind: str, speed: float) -> str:
    """What a kind of device is called where one runs at another speed; ``kind`` itself if it is called so already."""
    mark = "" if speed <= 0 or speed == 1 else f" x{speed:.3g}"
    return kind if kind.endswith(mark) else kind + mark


def _as_of(tables: Mapping[str, Costs], like: Mapping[str, str]) -> dict[str, Costs]:
    """Tables by kind of device, with those of further kinds that cost as known ones do."""
    return {**tables, **{kind: tables[of] for kind, of in like.items() if of in tables}}
