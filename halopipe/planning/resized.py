"""A profile for another height, width or length than it was measured at: of a network whose sizes vary.

An image that is too large to be profiled is planned for from a smaller one.  The graph is that of the large image, as
the runtime finds it on tensors without data.  Of each layer

    at the size measured     is a part of the large one, and counts as measured at its own shape, as parts do
    whole                    as many times the seconds and bytes as it does of the work: interpolated
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from halopipe.terminal.units import parse_pairs, require_known, whole
from planner.ir.cluster import INTERPOLATED
from planner.ir.errors import UsageError
from planner.ir.graph import SAMPLE, Graph, Layer
from planner.ir.profile import Measurement, ModelSource, Profile
from planner.layers.sized import SizedLayer


def require_sizes(source: ModelSource, text: str) -> None:
    """Looks before anything is measured whether ``text`` names sizes that vary in the model.

    Raises:
        UsageError: it is no list of sizes.
        UnknownNameError: no such size varies.
        ModelNotFoundError, FactoryError: there is no such model.
    """
    from profiler import load_model

    require_known("size that varies", list(parse_sizes(text)), sorted(load_model(source).varying))


def at_sizes(profile: Profile, sizes: Mapping[str, int]) -> Profile:
    """``profile`` for inputs of these sizes; loads and captures its model.

    Args:
        sizes: by name of a size that the model's factory says varies (``height``).

    Raises:
        UnknownNameError: no such size varies.
        UnsupportedModelError: the model cannot be run with these sizes.
    """
    from profiler import load_model
    from profiler.capture.graph import capture
    from runtime.stage.shapes import graph_of_sizes

    model = load_model(profile.model)
    require_known("size that varies", list(sizes), sorted(model.varying))
    graph = graph_of_sizes(capture(model), sizes)
    return resized(replace(profile, model=replace(profile.model, sizes=dict(sizes))), graph)


def parse_sizes(text: str) -> dict[str, int]:
    """``height=8192,width=8192``.

    Raises:
        UsageError: it is none of that.
    """
    return parse_pairs(text, lambda _, value: whole(value), "names no size", "--size height=8192,width=8192")


def resized(profile: Profile, graph: Graph) -> Profile:
    """``profile`` with the graph of other sizes, whose layers do more, or less, work.

    Raises:
        UsageError: it is not the same network.
    """
    before = profile.graph
    if [layer.name for layer in graph.layers] != [layer.name for layer in before.layers]:
        raise UsageError("a graph of other sizes has other layers", [f"{len(graph.layers)} layers", before.loss])
    old = _sized(before)
    new = _sized(graph)
    times = {name: prod(new[name].work.shape) / max(1, prod(old[name].work.shape)) for name in old}
    parts = {
        kind: (
            *profile.parts.get(kind, ()),
            *(_as_part(one, old[one.layer]) for one in measured if times[one.layer] != 1),
        )
        for kind, measured in profile.measurements.items()
    }
    return replace(
        profile,
        graph=graph,
        measurements={
            kind: tuple(_scaled(one, times[one.layer]) for one in measured)
            for kind, measured in profile.measurements.items()
        },
        parts={kind: of_kind for kind, of_kind in parts.items() if of_kind},
        provenance=replace(profile.provenance, iteration_s={}),
    )


def _sized(graph: Graph) -> dict[str, SizedLayer]:
    values = graph.values()

    def of(layer: Layer) -> SizedLayer:
        return SizedLayer.of(graph, layer, values, graph.samples, mixes_samples=False)

    return {layer.name: of(layer) for layer in graph.layers}


def _as_part(one: Measurement, sized: SizedLayer) -> Measurement:
    """What was measured whole, as a part of a larger layer."""
    dims = zip(sized.work.dims, sized.work.shape, strict=True)
    return replace(one, part=tuple(extent for dim, extent in dims if dim != SAMPLE), raw_s=(), levels=None)


def _scaled(one: Measurement, times: float) -> Measurement:
    if times == 1:
        return one
    return replace(
        one,
        forward_s=one.forward_s * times,
        backward_s=one.backward_s * times,
        backward_input_s=one.backward_input_s * times,
        backward_weight_s=one.backward_weight_s * times,
        saved_bytes=round(one.saved_bytes * times),
        workspace_bytes=round(one.workspace_bytes * times),
        evidence=INTERPOLATED,
        raw_s=(),
        levels=None if one.levels is None else one.levels.scaled(times),
    )
