"""What a profile would say on other devices: a roofline (Williams, Waterman and Patterson, CACM 2009), layer by layer.

    work of a layer at n samples     F = its multiply-adds, counted as two         planner.layers: ``forward_flops``
                                     Q = bytes of its inputs, outputs and parameters
    roof of a device                 t*(F, Q) = max(F / peak, Q / memory bandwidth)
    on another device                t = t measured * t*(F, Q there) / t*(F, Q here)

Each pass of a layer multiplies as much and moves the same tensors, so that one ratio serves them all.  It carries over
what share of its roof a layer reached where it was measured: small layers and awkward shapes stay as inefficient as
they are.  Where no figures of the device measured on are known, the roof itself is the time: too fast, since nothing
reaches it.  Gradients are added and parameters updated at the pace of the memory.  What layers keep is as measured, and
so is what the executor takes per action, which the host does.

A device with more than one memory may have costs under more than one kind (hook ``kinds of a device``), and read part
of Q elsewhere (hook ``read beside``).  Which of them a stage pays is a matter of what else its device holds
(``costs.stages.action_costs``).

Ignored: caches, the start of a kernel, tensor cores for float32 data unless the figure of ``float32`` is overridden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from planner.costs.layers.confidence import DATASHEET_RANGE
from planner.costs.layers.features import Features
from planner.costs.layers.interpolation import LayerCost
from planner.ir.cluster import DATASHEET, Cluster, DeviceSpec
from planner.ir.errors import MissingMeasurementError
from planner.ir.extras import extras
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.planner_extra import PlannerExtra
from planner.ir.profile import Measurement, ParameterCost, Profile
from planner.layers import kind as kind_named

_ADDS = 3
_READS_AND_WRITES = 3
"""Adding a gradient reads two numbers and writes one; an update reads parameter and gradient, and writes one."""


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What a pass of a layer does: floating-point operations and bytes moved, and of these the parameters'."""

    flops: int
    num_bytes: int
    parameter_bytes: int = 0


def on_cluster(profile: Profile, cluster: Cluster, measured_on: Mapping[str, DeviceSpec] | None = None) -> Profile:
    """The profile as it would be on ``cluster``: kinds it measured stay as they are, others get evidence ``datasheet``.

    Args:
        measured_on: figures of the devices that the profile was measured on, by kind; those of the profile's own
            devices where it names none.

    Raises:
        MissingMeasurementError: a figure is missing that a layer needs.
    """
    if not profile.measurements:
        raise MissingMeasurementError("the profile has no measurements", [], ["measure it: halopipe profile MODEL"])
    stated = measured_on or {}
    own = {device.kind: device for device in profile.cluster.devices if _is_known(device)} | dict(stated)
    source = next((kind for kind in profile.measurements if kind in own), next(iter(profile.measurements)))
    here = own.get(source)
    wanted = {device.kind: device for device in cluster.devices}
    new = [device for kind, device in wanted.items() if kind not in profile.measurements]
    kept = [kind for kind in wanted if kind in profile.measurements]
    works = _works(profile) if new else {}
    measurements = {kind: profile.measurements[kind] for kind in kept}
    parameters = {kind: profile.parameters.get(kind, {}) for kind in kept}
    overheads = {kind: profile.action_overhead_s[kind] for kind in kept if kind in profile.action_overhead_s}
    for device in new:
        for kind, there in _kinds(device, cluster.devices).items():
            measurements[kind] = _measurements(profile, source, works, here, there)
            parameters[kind] = _parameters(profile, source, here, there)
            if source in profile.action_overhead_s:
                overheads[kind] = profile.action_overhead_s[source]
    return replace(
        profile,
        cluster=cluster,
        measurements=measurements,
        parameters=parameters,
        action_overhead_s=overheads,
        provenance=replace(profile.provenance, iteration_s={} if new else profile.provenance.iteration_s),
    )


def _kinds(device: DeviceSpec, devices: Sequence[DeviceSpec]) -> dict[str, DeviceSpec]:
    """By kind of costs, the device as it reads its parameters then; ``devices``: all of the cluster."""
    others = (extra.kinds_of(device, devices) for extra in extras(PlannerExtra))
    return {kind: own for kinds in ({device.kind: device}, *others) for kind, own in kinds.items()}


def roof_s(work: LayerWork, device: DeviceSpec, dtype: str, layer: str) -> float:
    """The least time in which ``device`` can do ``work``.

    Raises:
        MissingMeasurementError: no source states a figure that is needed.
    """
    seconds = 0.0
    num_bytes = work.num_bytes
    if work.flops:
        peak = device.peak_flop_per_s.get(dtype)
        if not peak:
            dtypes = ", ".join(device.peak_flop_per_s) or "nothing"
            raise MissingMeasurementError(
                f"nothing says how fast {device.kind} computes in {dtype}",
                [f"needed for {layer}; known: {dtypes}"],
                [f"give it in cluster.yaml: peak: {{{dtype}: 10TFLOP/s}}"],
            )
        seconds = work.flops / peak
    for extra in extras(PlannerExtra):
        bytes_beside, seconds_beside = extra.read_beside(work, device)
        seconds = max(seconds, seconds_beside)
        num_bytes = num_bytes - bytes_beside
    if num_bytes:
        if not device.memory_bytes_per_s:
            raise MissingMeasurementError(
                f"nothing says how fast the memory of {device.kind} is",
                [f"needed for {layer}, which moves {num_bytes} bytes"],
                ["give it in cluster.yaml: memory-bandwidth: 100GB/s"],
            )
        seconds = max(seconds, num_bytes / device.memory_bytes_per_s)
    return seconds


def under_a_roof(
    profile: Profile, kind: str, index: int, samples: float, features: Features, measured: Sequence[Measurement]
) -> tuple[LayerCost, ...]:
    """Layer number ``index`` at ``samples`` samples by the datasheet of devices of ``kind``; nothing without one.

    Args:
        measured: of the layer on that kind: the nearest one is scaled by the ratio of the roofs, and what it keeps by
            that of the samples; without any, passes take as long as the roof, and all that is read and made is kept.
    """
    device = _known_device(profile, kind)
    layer = profile.graph.layers[index]
    dtype = profile.model.dtype
    if device is None or not device.peak_flop_per_s.get(dtype):
        return ()

    parameter_bytes = _num_bytes([profile.graph.parameters[name] for name in layer.parameters])

    def roof(size: float) -> tuple[float, float]:
        _, flops, num_bytes, _ = features.whole(size)[index].tolist()
        return roof_s(LayerWork(round(flops), round(num_bytes), parameter_bytes), device, dtype, layer.name), num_bytes

    seconds, num_bytes = roof(samples)
    low, high = DATASHEET_RANGE
    if not measured:
        return (LayerCost((seconds, 2 * seconds, seconds, seconds, num_bytes, 0.0), DATASHEET, low, high),)
    near = min(measured, key=lambda m: abs(log(m.samples / samples)))
    base, _ = roof(near.samples)
    ratio = seconds / base if base else 1.0
    share = samples / near.samples
    values = (*(ratio * value for value in _passes(near)), share * near.saved_bytes, share * near.workspace_bytes)
    return (LayerCost(values, DATASHEET, low, high),)


def _known_device(profile: Profile, kind: str) -> DeviceSpec | None:
    """As it is where these are its costs; None where no figures are known."""
    devices = profile.cluster.devices
    as_kinds = (own for each in devices for name, own in _kinds(each, devices).items() if name == kind)
    return next(filter(_is_known, as_kinds), None)


def _is_known(device: DeviceSpec) -> bool:
    return bool(device.peak_flop_per_s) and bool(device.memory_bytes_per_s)


def _works(profile: Profile) -> dict[tuple[str, int], LayerWork]:
    sizes = {m.samples for measured in profile.measurements.values() for m in measured}
    values = profile.graph.values()
    return {(x.name, n): work_of(profile.graph, values, x, n) for x in profile.graph.layers for n in sizes}


def _measurements(
    profile: Profile,
    source: str,
    works: Mapping[tuple[str, int], LayerWork],
    here: DeviceSpec | None,
    there: DeviceSpec,
) -> tuple[Measurement, ...]:
    converted = []
    for m in profile.measurements[source]:
        work = works.get((m.layer, m.samples))
        if work is None:  # a layer that the graph does not have
            continue
        roof = roof_s(work, there, profile.model.dtype, m.layer)
        if here is None:
            seconds = tuple(roof if measured else 0.0 for measured in _passes(m))
            seconds = (*seconds[:1], seconds[2] + seconds[3] or (roof if m.backward_s else 0.0), *seconds[2:])
        else:
            base = roof_s(work, here, profile.model.dtype, m.layer)
            seconds = tuple(measured * (roof / base if base else 1.0) for measured in _passes(m))
        forward_s, backward_s, backward_input_s, backward_weight_s = seconds
        converted.append(
            replace(
                m,
                forward_s=forward_s,
                backward_s=backward_s,
                backward_input_s=backward_input_s,
                backward_weight_s=backward_weight_s,
                num_runs=0,
                spread=0.0,
                evidence=DATASHEET,
            )
        )
    return tuple(converted)


def _passes(m: Measurement) -> tuple[float, float, float, float]:
    return m.forward_s, m.backward_s, m.backward_input_s, m.backward_weight_s


def _parameters(profile: Profile, source: str, here: DeviceSpec | None, there: DeviceSpec) -> dict[str, ParameterCost]:
    layers = profile.graph.by_name()
    state = profile.optimizer.state_bytes_per_parameter_byte
    converted = {}
    for name, cost in profile.parameters.get(source, {}).items():
        if name not in layers:
            continue
        num_bytes = _num_bytes([profile.graph.parameters[each] for each in layers[name].parameters])
        sizes = _ADDS * num_bytes, round((_READS_AND_WRITES + 2 * state) * num_bytes)
        add, update = (LayerWork(0, size, size) for size in sizes)
        add_s, update_s = (roof_s(work, there, "", name) for work in (add, update))
        if here is not None:
            bases = [roof_s(work, here, "", name) for work in (add, update)]
            add_s = cost.accumulate_s * (add_s / bases[0] if bases[0] else 1.0)
            update_s = cost.update_s * (update_s / bases[1] if bases[1] else 1.0)
        converted[name] = ParameterCost(add_s, update_s)
    return converted


def _num_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.num_bytes for spec in specs)


def work_of(graph: Graph, values: Mapping[str, TensorSpec], layer: Layer, samples: int) -> LayerWork:
    """What a forward pass of ``layer`` does for ``samples`` samples; ``values`` of the graph."""
    sized, inputs, parameters = graph.layer_at(layer, samples, values)
    flops = kind_named(layer.kind).forward_flops(sized, inputs)
    return LayerWork(flops, _num_bytes((*inputs, *sized.outputs, *parameters)), _num_bytes(parameters))
