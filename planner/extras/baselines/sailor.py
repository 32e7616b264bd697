"""Sailor's profiles (Strati et al., SOSP 2025): seconds of each layer by GPU, micro-batch and tensor degree.

    model,gpu,micro_batch,tensor_parallel,first_layer,last_layer,forward_s,backward_s,update_s

Layer 0 is the embedding, the last one the head, those between are blocks; equal neighbours share a row.  A profile of
unlike GPUs is made of it, so that clusters that mix them are planned exactly: each kind has its own seconds at the
micro-batches that it was measured at.  With a tensor degree above 1 a device of ours is a group of as many GPUs.

What the file does not say is filled in: shapes and parameters of the networks (:data:`NETWORKS`); what a block saves,
by Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) for float32, in which the times are; half of a backward is
for the inputs, half for the weights.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from planner.extras.baselines.common.as_profile import as_profile
from planner.extras.baselines.common.reading import read_text
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode
from planner.ir.cluster import MEASURED, Cluster
from planner.ir.errors import FormatError, UnknownNameError, UsageError
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile

_FLOAT = 4
_GPUS = {"GH-96": "GH200-96GB"}
"""What the catalogue calls otherwise; other names begin its own: A100-40 is A100-40GB."""


@dataclass(frozen=True, slots=True)
class SailorNetwork:
    """Shapes that the file does not state."""

    hidden: int
    heads: int
    vocabulary: int
    length: int = 2048

    @property
    def block_parameters(self) -> int:
        """Of a block's four matrices, their biases and two norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    def saved_bytes(self, samples: int) -> int:
        """Of a block for float32: 34 and 5 of the paper are 2 bytes a number but for masks of 1."""
        return samples * self.length * (66 * self.hidden + 9 * self.heads * self.length)


NETWORKS: Mapping[str, SailorNetwork] = {
    "OPT-350": SailorNetwork(1024, 16, 50272),
    "OPT-30": SailorNetwork(7168, 56, 50272),
    "GPT-Neo-2.7": SailorNetwork(2560, 32, 128256),
}


@dataclass(frozen=True, slots=True)
class SailorRow:
    """A row, by column: layers from one to another, seconds of one micro-batch."""

    model: str
    gpu: str
    micro_batch: int
    tensor_parallel: int
    first_layer: int
    last_layer: int
    forward_s: float
    backward_s: float
    update_s: float


def read(path: str | Path) -> tuple[SailorRow, ...]:
    """All rows of a file.

    Raises:
        MissingFileError: it is not there.
        FormatError: it is no such file; lines are named.
    """
    return parse(read_text(path).text, str(path))


def parse(text: str, source: str) -> tuple[SailorRow, ...]:
    """As :func:`read`, of text."""
    reader = csv.DictReader(text.splitlines())
    columns = get_type_hints(SailorRow)
    if not set(columns) <= set(reader.fieldnames or ()):
        raise FormatError(f"{source} is no table of layers", [f"needed: {', '.join(columns)}"])
    rows: list[SailorRow] = []
    faults: list[str] = []
    for number, line in enumerate(reader, start=2):
        try:
            row = SailorRow(*(read_as(line[name]) for name, read_as in columns.items()))
            times = (row.forward_s, row.backward_s, row.update_s)
            sizes_are_wrong = min(row.micro_batch, row.tensor_parallel) < 1 or row.first_layer > row.last_layer
            if sizes_are_wrong or not all(0 <= each < float("inf") for each in times):
                raise ValueError("a number that cannot be")
            rows.append(row)
        except (TypeError, ValueError) as error:
            faults.append(f"line {number}: {error}")
    if faults or not rows:
        raise FormatError(f"{source} is no table of layers", faults[:20] or ["it has no rows"])
    return tuple(rows)


def profile_of(rows: Iterable[SailorRow], model: str, cluster: Cluster, tensor_parallel: int = 1) -> Profile:
    """The profile of ``model`` on ``cluster``, whose kinds are those of the catalogue.

    Args:
        tensor_parallel: how many GPUs a device of the cluster is.

    Raises:
        UnknownNameError: there is no such model, or no time of it on a kind of the cluster.
        FormatError: layers are missing, or the times are those of a smaller network.
        UsageError: the kinds have no micro-batch in common.
    """
    of_degree = [row for row in rows if row.tensor_parallel == tensor_parallel]
    names = sorted({row.model for row in of_degree} & set(NETWORKS))
    if model not in names:
        raise UnknownNameError(f"no times of {model!r}", [f"there are: {', '.join(names) or 'none'}"], ["--model NAME"])
    kinds = list(dict.fromkeys(device.kind for device in cluster.devices))
    by_kind = {kind: _times(of_degree, model, kind) for kind in kinds}
    sizes = {kind: set(by_size) for kind, by_size in by_kind.items()}
    shared = set.intersection(*sizes.values())
    if not shared:
        shown = [f"{kind}: {', '.join(map(str, sorted(by_size)))}" for kind, by_size in sizes.items()]
        raise UsageError("the kinds of device have no micro-batch in common", shown, ["a cluster of other kinds"])
    network = NETWORKS[model]
    largest = max(shared)
    graphs = {kind: _graph(model, network, by_size[largest], largest) for kind, by_size in by_kind.items()}
    profile = as_profile(graphs, cluster, largest)
    layers = [layer.name for layer in profile.graph.layers]
    measurements = {kind: tuple(_measured(layers, by_size, network)) for kind, by_size in by_kind.items()}
    updates = {
        kind: {name: ParameterCost(0.0, row.update_s) for name, row in zip(layers, by_size[largest], strict=False)}
        for kind, by_size in by_kind.items()
    }
    return replace(
        profile,
        model=ModelSource(f"sailor:{model}"),
        optimizer=Optimizer("Adam", {}, 2.0),
        measurements=measurements,
        parameters=updates,
    )


def _measured(
    layers: Sequence[str], by_size: Mapping[int, Sequence[SailorRow]], network: SailorNetwork
) -> Iterator[Measurement]:
    """Of each layer at each micro-batch; the loss, the last one, takes nothing."""
    for size, of_size in sorted(by_size.items()):
        for index, row in enumerate(of_size):
            yield _measurement(layers[index], size, row, network, is_block=0 < index < len(of_size) - 1)
    for size in sorted(by_size):
        yield Measurement(layers[-1], size, 0.0, 0.0, 0.0, 0.0, 0, 0, 1)


def layer_times(
    rows: Iterable[SailorRow], network: SailorNetwork, kinds: Iterable[str]
) -> dict[str, dict[tuple[int, int], list[tuple[float, float, float]]]]:
    """By kind of the catalogue, then by tensor degree and micro-batch: (forward, backward, update) seconds by layer.

    Raises:
        UnknownNameError: no network of the file has these sizes, or nobody timed it on one of the kinds.
        FormatError: layers are missing, or the times are those of a smaller network.
    """
    listed = list(rows)
    name = next((name for name, sizes in NETWORKS.items() if sizes == network), "")
    if not any(row.model == name for row in listed):
        shown = [f"{name}: {NETWORKS[name]}" for name in sorted({row.model for row in listed} & set(NETWORKS))]
        raise UnknownNameError(f"no times of a network like {network}", shown)
    times: dict[str, dict[tuple[int, int], list[tuple[float, float, float]]]] = {}
    for kind in kinds:
        degrees = {row.tensor_parallel for row in listed if row.model == name and _is_on(row, kind)}
        if not degrees:
            _times(listed, name, kind)  # which says so
        times[kind] = {
            (degree, size): [(row.forward_s, row.backward_s, row.update_s) for row in layers]
            for degree in sorted(degrees)
            for size, layers in _times([row for row in listed if row.tensor_parallel == degree], name, kind).items()
        }
    return times


def _is_on(row: SailorRow, kind: str) -> bool:
    """Whether a row is of that kind of the catalogue."""
    return kind.startswith(_GPUS.get(row.gpu, row.gpu))


def _times(rows: Iterable[SailorRow], model: str, kind: str) -> dict[int, list[SailorRow]]:
    """By micro-batch, a row for each layer on devices of ``kind``."""
    own = [row for row in rows if _is_on(row, kind)]
    gpus = sorted({row.gpu for row in rows if row.model == model})
    if not any(row.model == model for row in own):
        raise UnknownNameError(f"no times of {model} on {kind}", [f"there are those on: {', '.join(gpus)}"])
    by_size: dict[int, dict[int, SailorRow]] = {}
    for row in own:
        if row.model == model:
            by_size.setdefault(row.micro_batch, {}).update(
                dict.fromkeys(range(row.first_layer, row.last_layer + 1), row)
            )
    for size, layers in by_size.items():
        if sorted(layers) != list(range(len(layers))):
            raise FormatError(f"{model} on {kind} at micro-batch {size} has gaps", [f"layers {sorted(layers)}"])
    shown = {(row.micro_batch, row.forward_s, row.backward_s) for row in own if row.model == model}
    for other in sorted({row.model for row in own} - {model}):
        theirs = {(row.micro_batch, row.forward_s, row.backward_s) for row in own if row.model == other}
        is_larger = other in NETWORKS and NETWORKS[model].hidden > NETWORKS[other].hidden
        if is_larger and len(shown & theirs) > len(shown) // 2:
            raise FormatError(
                f"the times of {model} on {kind} are those of {other}",
                [f"{len(shown & theirs)} of {len(shown)} are equal to the last digit, and it is the larger network"],
                ["profile one of them again", "leave this kind of device out of the cluster"],
            )
    return {size: [layers[index] for index in sorted(layers)] for size, layers in by_size.items()}


def _graph(model: str, network: SailorNetwork, rows: list[SailorRow], samples: int) -> LayerGraph:
    hidden_bytes = float(_FLOAT * samples * network.length * network.hidden)
    table = network.vocabulary * network.hidden
    last = len(rows) - 1
    nodes = []
    for index, row in enumerate(rows):
        name = "embedding" if index == 0 else "head" if index == last else f"block{index}"
        parameters = (
            table + network.length * network.hidden
            if index == 0
            else table
            if index == last
            else network.block_parameters
        )
        num_bytes = float(_FLOAT * samples * network.length * network.vocabulary) if index == last else hidden_bytes
        nodes.append(
            LayerNode(name, name.rstrip("0123456789"), row.forward_s, row.backward_s, num_bytes, _FLOAT * parameters)
        )
    return LayerGraph(f"sailor:{model}", tuple(nodes), tuple((index, index + 1) for index in range(last)))


def _measurement(layer: str, samples: int, row: SailorRow, network: SailorNetwork, *, is_block: bool) -> Measurement:
    hidden_bytes = _FLOAT * samples * network.length * network.hidden
    saved = network.saved_bytes(samples) if is_block else hidden_bytes
    half = row.backward_s / 2
    return Measurement(
        layer, samples, row.forward_s, row.backward_s, half, half, saved, 0, num_runs=1, evidence=MEASURED
    )
