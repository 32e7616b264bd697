from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.extras.baselines.tarnawski import format as dnn_partitioning
from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode, parse, read
from planner.ir.errors import FormatError, MissingFileError

PROFILES = Path(__file__).parents[4] / "data" / "profiles" / "dnn-partitioning"
SHAPES = {  # nodes, edges, backward nodes, nodes of a shared colour, accelerators
    "LayerGraphs_bert24_training": (64, 110, 32, 64, 6),
    "LayerGraphs_gnmt_inference": (96, 122, 0, 0, 6),
    "LayerGraphs_resnet50_inference": (177, 193, 0, 0, 6),
    "OperatorGraphs_bert_l-3_inference": (235, 250, 0, 0, 3),
}


def node(number: object, **more: object) -> dict[str, object]:
    return {"id": number, "supportedOnFpga": 1, "cpuLatency": 2.0, "fpgaLatency": 1, "isBackwardNode": 0, **more}


def edge(src: object, dst: object, cost: object = 0.5) -> dict[str, object]:
    return {"sourceId": src, "destId": dst, "cost": cost}


def text(nodes: list[dict[str, object]], edges: list[dict[str, object]], **more: object) -> str:
    head = {"maxSizePerFPGA": 1e9, "maxFPGAs": 2, "maxCPUs": 1}
    return json.dumps({**head, **more, "nodes": nodes, "edges": edges}, ensure_ascii=False)


def fault(nodes: list[dict[str, object]], edges: list[dict[str, object]], **more: object) -> str:
    with pytest.raises(FormatError) as error:
        parse(text(nodes, edges, **more), "some.json")
    return error.value.render()


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_published_files_are_read(name: str) -> None:
    found = read(PROFILES / f"{name}.json")
    colours = [node.colour for node in found.nodes]
    shared = sum(colour is not None and colours.count(colour) > 1 for colour in colours)
    backward = sum(node.backward for node in found.nodes)
    if name.startswith("Layer"):
        assert (len(found.nodes), len(found.edges), backward, shared, found.accelerators) == SHAPES[name]
    else:
        assert (len(found.nodes), len(found.edges), backward, found.accelerators) == (235, 250, 0, 3)
    assert found.cpus == 1
    assert found.memory_bytes == 17185374208
    raw = json.loads((PROFILES / f"{name}.json").read_text())
    assert sum(node.accelerator_ms for node in found.nodes) == sum(node["fpgaLatency"] for node in raw["nodes"])
    costs = {edge["sourceId"]: edge["cost"] for edge in raw["edges"]}
    assert all(node.transfer_ms == pytest.approx(costs.get(node.number, 0.0), abs=1e-6) for node in found.nodes)


def test_each_field_is_read() -> None:
    nodes = [node(7, name="a", size=4.0, colorClass=3), node(2, isBackwardNode=True, supportedOnFpga=False)]
    found = parse(text(nodes, [edge(7, 2, 0.25)]), "x.json")
    a = TarnawskiNode(7, "a", 1.0, 2.0, 0.25, 4.0, True, False, 3)
    b = TarnawskiNode(2, "node2", 1.0, 2.0, 0.0, 0.0, False, True, None)
    assert found == TarnawskiInstance("x.json", 2, 1, 1e9, (a, b), ((0, 1),))


def test_numbers_may_be_written_in_any_way() -> None:
    plain = parse(text([node(1), node(2)], [edge(1, 2)]))
    odd = [node("1", fpgaLatency="1.0", supportedOnFpga="true"), node(2.0, isBackwardNode=0.0, cpuLatency="2e0")]
    assert parse(text(odd, [edge(1.0, "2", "0.5")], maxFPGAs=2.0, maxCPUs="1")) == plain


@pytest.mark.parametrize("before", ["", "\ufeff", "\n\n  ", "\ufeff\r\n\t"])
def test_blanks_and_a_byte_order_mark_do_no_harm(before: str) -> None:
    plain = text([node(1)], [])
    assert parse(before + plain + "\n \n") == parse(plain)


def test_names_may_hold_anything() -> None:
    names = ["слой/β ①", "a\u2028b", "", "\N{GREEK SMALL LETTER ALPHA}" * 90]
    found = parse(text([node(k, name=name) for k, name in enumerate(names)], []))
    assert [each.name for each in found.nodes] == names


def test_sources_sinks_fan_outs_and_doubled_edges() -> None:
    nodes = [node(number) for number in (-3, 10, 4, 999)]
    edges = [edge(-3, 10), edge(-3, 4), edge(-3, 10, 0.5 + 1e-8), edge(999, 4, 0)]
    found = parse(text(nodes, edges))
    assert found.edges == ((0, 1), (0, 2), (3, 2))
    assert [each.transfer_ms for each in found.nodes] == [0.5, 0.0, 0.0, 0.0]


def test_optional_and_unknown_keys() -> None:
    lone = node(1, layerId=4, anything={"a": [1]}, colorClass=None)
    del lone["isBackwardNode"]
    found = parse(text([lone], [], comment="x"))
    assert found.nodes[0] == TarnawskiNode(1, "node1", 1.0, 2.0, 0.0, 0.0, True, False, None)


def test_what_is_wrong_is_named_with_its_place() -> None:
    two = [node(1, name="conv"), node(2)]
    assert "some.json, nodes[1]: id 1 appears twice" in fault([node(1), node(1)], [])
    assert "some.json, edges[0]: 'destId' 9 is no node's id" in fault(two, [edge(1, 9)])
    assert "some.json, edges[0]: an edge from a node to itself" in fault(two, [edge(2, 2)])
    assert "some.json: the edges make a cycle" in fault(two, [edge(1, 2), edge(2, 1)])
    costs = fault([*two, node(3)], [edge(1, 2), edge(1, 3, 0.75)])
    assert "some.json, edges[1]: two costs on edges out of node 1" in costs
    assert "0.5 before, 0.75 here" in costs
    reverse = fault([node(1, isBackwardNode=1, name="grad"), node(2)], [edge(1, 2)])
    assert "an edge from a backward to a forward node" in reverse
    assert "1 (grad) to 2 (node2)" in reverse
    assert "some.json: no nodes" in fault([], [])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("fpgaLatency", -1, "'fpgaLatency' is not a number from 0 upwards"),
        ("fpgaLatency", None, "'fpgaLatency' is missing"),
        ("cpuLatency", "fast", "'cpuLatency' is not a finite number"),
        ("size", float("nan"), "'size' is not a finite number"),
        ("size", [1], "'size' is not a finite number"),
        ("id", 1.5, "'id' is not a whole number"),
        ("supportedOnFpga", "maybe", "'supportedOnFpga' is not true or false"),
        ("isBackwardNode", 2, "'isBackwardNode' is not true or false"),
        ("colorClass", "red", "'colorClass' is not a whole number"),
        ("name", ["a"], "'name' is not text"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, words: str) -> None:
    found = fault([node(3) | {field: value}], [])
    assert "some.json, nodes[0]" in found
    assert words in found


def test_the_head_is_checked() -> None:
    assert "'maxFPGAs' is not a whole number" in fault([node(1)], [], maxFPGAs=1.5)
    assert "'maxCPUs' is not a whole number from 0 upwards" in fault([node(1)], [], maxCPUs=-1)
    with pytest.raises(FormatError, match="'maxSizePerFPGA' is missing"):
        parse(json.dumps({"nodes": [node(1)], "edges": [], "maxFPGAs": 1, "maxCPUs": 1}))
    with pytest.raises(FormatError, match="'nodes' is not a list"):
        parse(json.dumps({"nodes": {"1": {}}, "edges": []}))
    with pytest.raises(FormatError, match=r"nodes\[1\]: not an object"):
        parse(json.dumps({"nodes": [node(1), 5], "edges": []}))


def test_text_that_is_no_json_is_named_with_its_line() -> None:
    with pytest.raises(FormatError) as error:
        parse('\n\n{"nodes": [\n1,, 2]}', "some.json")
    assert "some.json, line 4: not JSON" in error.value.render()
    for wrong, words in (("", "empty file"), ("[1]", "not an object"), ("{} x", "not JSON"), ("[" * 100_000, "nested")):
        with pytest.raises(FormatError, match=words):
            parse(wrong)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="cannot be read"):
        read(tmp_path / "none.json")
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(FormatError, match="not UTF-8"):
        dnn_partitioning.read(tmp_path / "latin.json")
