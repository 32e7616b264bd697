"""Networks of layers in a row whose costs are given, for planning without measurements.

Time is linear in samples and everything can be given per layer, so that expected values are found by hand:

    profile = chain_profile(3, num_devices=2, forward_s=(1e-3, 2e-3, 1e-3))
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.cluster import ACROSS_HOSTS, MEASURED, WITHIN_HOST, Cluster, Collective, DeviceSpec, Link
from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.profile import Measurement, ModelSource, Optimizer, ParameterCost, Profile, Provenance

SIZES = (1, 2, 4, 8)
MESSAGE_BYTES = tuple(1024 * 4**k for k in range(8))  # 1 KiB to 16 MiB

Each = float | Sequence[float]
"""One number for all layers (or devices), or one for each."""


def chain_profile(
    num_layers: int,
    num_devices: int = 2,
    *,
    forward_s: Each = 1e-3,
    backward_s: Each | None = None,
    backward_input_s: Each | None = None,
    backward_weight_s: Each | None = None,
    parameter_bytes: Each = 4096,
    activation_bytes: Each = 4096,
    saved_bytes: Each | None = None,
    workspace_bytes: Each = 0,
    accumulate_s: Each = 0.0,
    update_s: Each = 0.0,
    loss_s: float = 0.0,
    speeds: Each = 1.0,
    hosts: Sequence[str] | None = None,
    memory_bytes: Each = 2**30,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float = 1e9,
    duplex: bool = True,
    all_reduce_latency_s: float = 0.0,
    sizes: tuple[int, ...] = SIZES,
    action_overhead_s: float = 0.0,
    optimizer: Optimizer | None = None,
    skips: Sequence[tuple[int, int]] = (),
) -> Profile:
    """``num_layers`` layers ``l0, l1, ...`` in a row and their ``loss``, on ``num_devices`` devices.

    Args:
        forward_s, backward_s, backward_input_s, backward_weight_s, saved_bytes, workspace_bytes, activation_bytes:
            per sample, on a device of speed 1.  A backward is two forwards, its halves one each, unless given; saved is
            the activation.  A layer with parameters is ``linear``, one without is ``pointwise``.
        speeds: devices of one speed are of one kind.
        hosts: by device; one host if not given.
        loss_s: forward of the loss per sample, its backward the same.
        skips: pairs (i, j): layer j also reads the output of layer i.
    """
    forward = _each(forward_s, num_layers)
    backward = _each(backward_s, num_layers) if backward_s is not None else tuple(2 * f for f in forward)
    inputs = _each(backward_input_s, num_layers) if backward_input_s is not None else tuple(b / 2 for b in backward)
    weights = _each(backward_weight_s, num_layers) if backward_weight_s is not None else tuple(b / 2 for b in backward)
    activation = _each(activation_bytes, num_layers)
    saved = _each(saved_bytes, num_layers) if saved_bytes is not None else activation
    workspace = _each(workspace_bytes, num_layers)
    graph = chain_graph(num_layers, parameter_bytes, activation_bytes, max(sizes), skips)
    speed_of = _each(speeds, num_devices)

    def measurements(speed: float) -> tuple[Measurement, ...]:
        layers = tuple(
            Measurement(
                layer=f"l{i}",
                samples=n,
                forward_s=forward[i] * n / speed,
                backward_s=backward[i] * n / speed,
                backward_input_s=inputs[i] * n / speed,
                backward_weight_s=weights[i] * n / speed,
                saved_bytes=int(saved[i]) * n,
                workspace_bytes=int(workspace[i]) * n,
                num_runs=10,
            )
            for i in range(num_layers)
            for n in sizes
        )
        loss = tuple(
            Measurement("loss", n, loss_s * n / speed, loss_s * n / speed, loss_s * n / speed, 0.0, 0, 0, 10)
            for n in sizes
        )
        return layers + loss

    costs = {
        f"l{i}": ParameterCost(accumulate, update)
        for i, (accumulate, update) in enumerate(
            zip(_each(accumulate_s, num_layers), _each(update_s, num_layers), strict=True)
        )
        if graph.layers[i].parameters
    }
    kinds = {f"kind-{speed:g}": speed for speed in speed_of}
    return Profile(
        model=ModelSource("tests.models:chain"),
        optimizer=optimizer or Optimizer("SGD", {"lr": 0.01}, 0.0),
        graph=graph,
        cluster=cluster(speed_of, hosts, memory_bytes, latency_s, bandwidth_bytes_per_s, duplex, all_reduce_latency_s),
        measurements={kind: measurements(speed) for kind, speed in kinds.items()},
        parameters=dict.fromkeys(kinds, costs),
        provenance=Provenance({"halopipe": "0", "torch": "0", "python": "0"}),
        action_overhead_s=dict.fromkeys(kinds, action_overhead_s),
    )


def chain_graph(
    num_layers: int,
    parameter_bytes: Each = 4096,
    activation_bytes: Each = 4096,
    samples: int = 8,
    skips: Sequence[tuple[int, int]] = (),
) -> Graph:
    """Layers ``l0, l1, ...`` in a row over ``[sample, feature]``, and a loss that also reads the graph input ``y``."""
    num_parameters = [int(n) // 4 for n in _each(parameter_bytes, num_layers)]
    features = [int(n) // 4 for n in _each(activation_bytes, num_layers)]
    parameters = {
        f"l{i}.weight": TensorSpec(("dim0", "dim1"), (1, n), "float32") for i, n in enumerate(num_parameters) if n
    }
    layers = []
    for i, n in enumerate(features):
        also = tuple(f"l{src}" for src, dst in skips if dst == i)
        layers.append(
            Layer(
                name=f"l{i}",
                kind="linear" if num_parameters[i] and not also else "pointwise",
                inputs=(f"l{i - 1}" if i else "x", *also),
                outputs=(TensorSpec(("sample", "feature"), (samples, n), "float32"),),
                parameters=(f"l{i}.weight",) if num_parameters[i] else (),
                attributes={"op": "aten.linear.default" if num_parameters[i] else "aten.relu.default"},
            )
        )
    attributes = {"op": "aten.cross_entropy_loss.default"}
    loss = Layer("loss", "loss", (f"l{num_layers - 1}", "y"), (TensorSpec((), (), "float32"),), attributes=attributes)
    x = TensorSpec(("sample", "feature"), (samples, features[0]), "float32")
    y = TensorSpec(("sample",), (samples,), "int64")
    return Graph(samples, {"x": x, "y": y}, (*layers, loss), parameters, "loss")


def cluster(
    speeds: Sequence[float],
    hosts: Sequence[str] | None = None,
    memory_bytes: Each = 2**30,
    latency_s: float = 0.0,
    bandwidth_bytes_per_s: float = 1e9,
    duplex: bool = True,
    all_reduce_latency_s: float = 0.0,
) -> Cluster:
    """Devices ``n0/cpu0, ...`` on alike links; an all-reduce of n bytes moves a ring's 2 (r - 1) / r n bytes."""
    where = tuple(hosts) if hosts is not None else ("n0",) * len(speeds)
    devices = tuple(
        DeviceSpec(f"{host}/cpu{rank}", f"kind-{speed:g}", host, int(memory))
        for rank, (speed, host, memory) in enumerate(zip(speeds, where, _each(memory_bytes, len(speeds)), strict=True))
    )
    points = tuple((n, latency_s + n / bandwidth_bytes_per_s) for n in MESSAGE_BYTES)
    names = (WITHIN_HOST,) if len(set(where)) == 1 else (WITHIN_HOST, ACROSS_HOSTS)
    links = {name: Link(latency_s, bandwidth_bytes_per_s, points, duplex, MEASURED) for name in names}
    collectives = tuple(
        Collective(
            "all_reduce",
            ranks,
            name,
            tuple(
                (n, all_reduce_latency_s + 2 * (ranks - 1) / ranks * n / bandwidth_bytes_per_s) for n in MESSAGE_BYTES
            ),
        )
        for name in names
        for ranks in range(2, len(speeds) + 1)
    )
    return Cluster(devices, links, collectives)


def _each(value: Each, count: int) -> tuple[float, ...]:
    if isinstance(value, Sequence):
        if len(value) != count:
            raise ValueError(f"{len(value)} numbers for {count}")
        return tuple(value)
    return (value,) * count
