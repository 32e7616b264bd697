"""What every layer, device and link costs: the file between ``profile`` and ``plan``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.ir.cluster import MEASURED, Cluster, Evidence
from planner.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the model comes from, so that a worker can build it again.

    Attributes:
        factory: ``pkg.mod:factory`` or ``path/file.py:factory``.
        arguments: keyword arguments of the factory, as JSON text by name.
        input_shape: what ``--input`` gave, samples first; empty if the factory's own example was used.
        dtype: of parameters and activations.
        autocast: dtype in which operators that gain by it compute (``bfloat16``), parameters staying as they are; empty
            for none.
        elementwise: operators (``mylib::op``) of which the user says that they treat every element by itself.
    """

    factory: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    input_shape: tuple[int, ...] = ()
    dtype: str = "float32"
    autocast: str = field(default="", metadata={"added": "0.1"})
    elementwise: tuple[str, ...] = field(default=(), metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Measurement:
    """One layer, or a part of it, at ``samples`` samples on one kind of device.

    Seconds are medians (trimmed means) of ``num_runs`` runs.

    Attributes:
        forward_s, backward_s: forward, and backward for input and weights in one go.
        backward_input_s, backward_weight_s: the two halves, each measured on its own.
        saved_bytes: what autograd keeps between forward and backward beyond parameters and the layer's own inputs
            that an earlier layer already keeps.
        workspace_bytes: the peak inside the forward or backward call beyond what stays.
        spread: interquartile range of forward + backward over its median.
        key: the back end chosen (convolutions); costs are interpolated inside one key only.
        part: of a part: the extents of its work, in the order of the work's dims without the samples; empty for whole.
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


@dataclass(frozen=True, slots=True)
class PartShape:
    """A part of a layer that a rank may do; the same for all of ``layers``, whose shapes and operators are alike.

    Attributes:
        samples, part: as of :class:`Measurement`.
    """

    layers: tuple[str, ...]
    samples: int
    part: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """What a layer's parameters cost a step beside its gradients: adding into ``.grad``, and the optimiser's update."""

    accumulate_s: float
    update_s: float


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The optimiser the updates were measured with.

    Attributes:
        name: a class of ``torch.optim``.
        arguments: its keyword arguments.
        state_bytes_per_parameter_byte: 0 for plain SGD, 1 with momentum, 2 for Adam.
    """

    name: str = "SGD"
    arguments: Mapping[str, float] = field(default_factory=dict)
    state_bytes_per_parameter_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Provenance:
    """What was used to measure, and how quiet the machine was.

    Attributes:
        versions: of halopipe, torch, python and the operating system.
        canary_before_s, canary_after_s: a fixed kernel, timed around the profile.
        run_delay: share of the time in which the profiler waited for a processor.
        contended: run_delay above 1 % or the canaries 5 % apart.
        iteration_s: a whole step on one device (forward, backward, update), measured apart, by samples.
    """

    versions: Mapping[str, str]
    canary_before_s: float = 0.0
    canary_after_s: float = 0.0
    run_delay: float = 0.0
    contended: bool = False
    iteration_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PreparationCost:
    """One thing that a host makes of the coordinates of ``samples`` samples: a site set, or a kernel map.

    Attributes:
        name: unique among those of a device kind and number of samples.
        inputs: the graph inputs that it makes; none if it is for others alone.
        after: names of what it is made from.
        seconds: on one thread of the device's host, without those of ``after``.
        shared_s: what comes on top where several ranks share out the sites: putting sites in order, making a map local.
    """

    name: str
    inputs: tuple[str, ...]
    after: tuple[str, ...]
    seconds: float
    samples: int
    shared_s: float = 0.0


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
class Profile:
    """Graph, cluster and measurements.

    Attributes:
        measurements: by device kind; per layer and number of samples.
        parameters: by device kind, then by layer.
        action_overhead_s: what the executor itself takes per action, by device kind.
        parts: by device kind: parts of layers, as far as they were measured at their own shapes.  (Whole layers alone
            are in ``measurements``.)
        preparations: by device kind: what its host makes of coordinates, each after what it is made from.
        site_halos: how much layers over sites exchange.
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
