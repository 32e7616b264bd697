"""A network's profile on V100s by rooflines alone: nothing of it is run."""

from __future__ import annotations

from dataclasses import replace

from planner.catalogue.clusters import machines_of
from planner.costs.datasheet import on_cluster
from planner.costs.grids import SPACE
from planner.ir.cluster import DATASHEET
from planner.ir.graph import Graph, TensorSpec
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance
from profiler import capture, load_model

_PER_HOST = 4
_MACHINES = """
halopipe: cluster
version: 1
hosts:
  - {{name: n, count: {hosts}, devices: [{{device: V100-16GB, count: {devices}}}]}}
links:
  within-host: NVLink-2
  across-hosts: {{bandwidth: 25GB/s, latency: 5us}}
"""
"""As Lassen, where Dryden et al. ran: four V100 a host, two rails of InfiniBand EDR between; the latency is ours."""

_UNKNOWN_S = 1.0
"""In place of a measurement; on devices without figures a roof does not ask for it."""


def roofline_profile(source: ModelSource, graph: Graph, num_devices: int) -> Profile:
    """What ``graph`` would cost on ``num_devices``, four a host, if every layer reached its roof."""
    hosts, devices = max(1, num_devices // _PER_HOST), min(num_devices, _PER_HOST)
    cluster = machines_of(_MACHINES.format(hosts=hosts, devices=devices)).cluster
    unknown = "nothing was measured"
    measurements = tuple(
        Measurement(
            layer.name,
            samples,
            _UNKNOWN_S,
            _UNKNOWN_S,
            _UNKNOWN_S,
            _UNKNOWN_S if layer.parameters else 0.0,
            sum(spec.at(samples, graph.samples).num_bytes for spec in layer.outputs),
            0,
            0,
            evidence=DATASHEET,
        )
        for samples in _sizes(graph.samples)
        for layer in graph.layers
    )
    costs = {layer.name: ParameterCost(_UNKNOWN_S, _UNKNOWN_S) for layer in graph.layers if layer.parameters}
    empty = Profile(source, Optimizer(), graph, cluster, {unknown: measurements}, {unknown: costs}, Provenance({}))
    return on_cluster(empty, cluster)


def enlarged_graph(source: ModelSource, times: int) -> Graph:
    """The graph of a fully convolutional network, captured at the source's shape, at ``times`` its height and width.

    A capture computes the network once, which takes minutes at full size.  Every extent of space must be a multiple of
    what the network divides it by, so that all of them grow alike.
    """
    graph = capture(load_model(source)).graph

    def larger(spec: TensorSpec) -> TensorSpec:
        shape = (extent * times if dim in SPACE else extent for dim, extent in zip(spec.dims, spec.shape, strict=True))
        return replace(spec, shape=tuple(shape))

    layers = tuple(replace(layer, outputs=tuple(map(larger, layer.outputs))) for layer in graph.layers)
    return replace(graph, inputs={name: larger(spec) for name, spec in graph.inputs.items()}, layers=layers)


def _sizes(samples: int) -> list[int]:
    return [size for size in range(1, samples + 1) if samples % size == 0]
