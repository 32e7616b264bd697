"""Files of published costs as profiles of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.extras.baselines.common import as_profile as clusters
from planner.extras.baselines.common.as_profile import as_profile
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, parse, read
from planner.ir import codec
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST
from planner.ir.errors import FormatError, UsageError
from planner.ir.graph import producer
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers.everyday import solve_one_device
from tests.oracles.plans import check

PROFILES = Path(__file__).parents[3] / "data" / "profiles"

NETWORKS = (("pipedream/vgg16", 128), ("pipedream/resnet50", 128), ("pipedream/gnmt", 64), ("sparsepipe/b64_tv", 64))

FOUR = clusters.flat(4, 1.25e9, memory_bytes=2**40)


def node(name: str, seconds: float = 1.0, activation: float = 4.0, parameters: float = 0.0) -> LayerNode:
    return LayerNode(name, "layer", seconds, 2 * seconds, activation, parameters)


def network(name: str) -> LayerGraph:
    return read(PROFILES / f"{name}.graph.txt")


@pytest.mark.parametrize(("name", "samples"), NETWORKS)
def test_one_device_takes_what_the_file_says(name: str, samples: int) -> None:
    graph = network(name)
    profile = as_profile(graph, FOUR, samples)
    plan = solve_one_device(Problem(profile, 2 * samples, micro_batch_sizes=(samples,)))
    seconds = sum(graph.nodes[k].forward_s + graph.nodes[k].backward_s for k in graph.kept())
    assert plan.prediction.step_s == pytest.approx(2 * seconds, rel=1e-9)
    assert check(plan, profile) == ()
    assert codec.loads(codec.dumps(profile), Profile) == profile
    assert {m.evidence for found in profile.measurements.values() for m in found} == {"datasheet"}
    known = set(profile.graph.inputs)
    for layer in profile.graph.layers:  # each stands behind what it reads
        assert {producer(value) for value in layer.inputs} <= known
        known.add(layer.name)


@pytest.mark.parametrize(
    ("given", "edges", "made"),
    [
        (["node10", "node9", "node2", "node1"], ((3, 2), (2, 1), (2, 0), (1, 0)), "node1 node2 node9 node10 loss"),
        (["loss", "a:1", "join", "a_1"], ((0, 1), (1, 2), (1, 3)), "loss_2 a_1 join_2 a_1_2 join loss"),
    ],
)
def test_layers_are_in_the_order_of_their_numbers_and_names_of_ours_are_changed(
    given: list[str], edges: tuple[tuple[int, int], ...], made: str
) -> None:
    graph = LayerGraph("x", tuple(map(node, given)), edges)
    assert [layer.name for layer in as_profile(graph, FOUR, 1).graph.layers] == made.split()


def test_several_sinks_are_joined_at_no_cost() -> None:
    graph = LayerGraph("x", (node("a"), node("b"), node("c")), ((0, 1), (0, 2)))
    profile = as_profile(graph, FOUR, 2)
    join, loss = profile.graph.layers[-2:]
    assert (join.inputs, loss.inputs) == (("b", "c"), ("join", "target"))
    free = [m for m in profile.measurements["gpu"] if m.layer in ("join", "loss")]
    assert free
    assert all(m.forward_s == m.backward_s == m.saved_bytes == 0 for m in free)


def test_several_sources_read_inputs() -> None:
    costs = "forward_compute_time=1, backward_compute_time=1, activation_size=8, parameter_size=0"
    text = "\n".join(f"{name} -- {words} -- {costs}" for name, words in (("x", "Input0"), ("a", "A"), ("b", "B")))
    graph = as_profile(parse(text + "\n\tx -- a\n\ta -- b\n"), FOUR, 2).graph
    assert set(graph.inputs) == {"x", "target"}
    graph = as_profile(parse(text + "\n\tx -- a\n"), FOUR, 2).graph
    assert set(graph.inputs) == {"x", "input", "target"}
    assert [layer.inputs for layer in graph.layers[:2]] == [("x",), ("input",)]


def test_measurements_are_linear_in_samples_and_scaled_by_speed() -> None:
    graph = LayerGraph("x", (node("a", 8.0, 32.0, 4.0), node("b", 1.0)), ((0, 1),))
    cluster = clusters.mixed({"slow": 1, "fast": 2}, 1e9)
    profile = as_profile(graph, cluster, 8, {"fast": 2.0})
    slow = {(m.layer, m.samples): m for m in profile.measurements["slow"]}
    fast = {(m.layer, m.samples): m for m in profile.measurements["fast"]}
    assert slow["a", 8].forward_s == 2 * slow["a", 4].forward_s == 2 * fast["a", 8].forward_s == 8.0
    assert (slow["a", 8].backward_input_s, slow["a", 8].backward_weight_s) == (8.0, 8.0)
    assert (slow["b", 8].backward_input_s, slow["b", 8].backward_weight_s) == (2.0, 0.0)
    assert (slow["a", 8].saved_bytes, slow["a", 2].saved_bytes) == (32, 8)
    assert sorted({m.samples for m in profile.measurements["slow"]}) == [1, 2, 4, 8]


def test_each_kind_may_have_its_own_file() -> None:
    files = {kind: network(f"sparsepipe/b64_{kind}") for kind in ("txp", "tv")}
    profile = as_profile(files, clusters.mixed({"txp": 3, "tv": 4}, 1e9), 64)
    for kind, graph in files.items():
        seconds = sum(m.forward_s for m in profile.measurements[kind] if m.samples == 64)
        assert seconds == pytest.approx(sum(graph.nodes[k].forward_s for k in graph.kept()))


TITANS = network("sparsepipe/b64_txp")
VGG16 = network("pipedream/vgg16")

INPUTS = LayerGraph("x", (LayerNode("a", "Input", 1.0, 1.0, 1.0, 1.0),), ())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("files", "cluster", "samples", "error", "match"),
    [
        ({"txp": TITANS, "tv": VGG16}, clusters.mixed({"txp": 1, "tv": 1}, 1e9), 64, FormatError, "the same network"),
        ({"tv": VGG16}, FOUR, 64, UsageError, "a file for every kind"),
        (VGG16, FOUR, 0, UsageError, "needs samples"),
        (INPUTS, FOUR, 1, FormatError, "no layers besides inputs"),
    ],
)
def test_files_that_are_of_no_such_network_are_refused(files, cluster, samples, error, match) -> None:
    with pytest.raises(error, match=match):
        as_profile(files, cluster, samples)


def test_hosts_have_two_classes_of_links() -> None:
    cluster = clusters.hosts(2, 4, 1e10, 1e9)
    assert len({device.name for device in cluster.devices}) == 8
    assert (cluster.link_class(0, 3), cluster.link_class(3, 4)) == (WITHIN_HOST, ACROSS_HOSTS)
    assert (cluster.link(0, 3).bandwidth_bytes_per_s, cluster.link(3, 4).bandwidth_bytes_per_s) == (1e10, 1e9)
