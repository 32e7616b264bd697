"""Files of published planners: what is in them, spellings that do no harm, and faults, each named with its place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.extras.baselines.pipedream import format as pipedream
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode
from planner.extras.baselines.piper import format as piper
from planner.extras.baselines.piper.format import PiperInstance, PiperNode, PiperOption
from planner.extras.baselines.sailor import read as read_sailor
from planner.extras.baselines.tarnawski import format as tarnawski
from planner.extras.baselines.tarnawski.format import TarnawskiInstance, TarnawskiNode
from planner.ir.errors import FormatError, MissingFileError

PROFILES = Path(__file__).parents[3] / "data" / "profiles"
PARSERS: Mapping[str, Callable[..., object]] = {
    "pipedream": pipedream.parse,
    "piper": piper.parse,
    "tarnawski": tarnawski.parse,
}
READERS: Mapping[str, Callable[[Path], object]] = {
    "pipedream": pipedream.read,
    "piper": piper.read,
    "tarnawski": tarnawski.read,
    "sailor": read_sailor,
}
GONE = object()
COSTS = "forward_compute_time=1.500, backward_compute_time=2.000, activation_size=8.0, parameter_size=16.000"
PLAIN = f"a -- Input0 -- {COSTS}\nb -- Conv2d(3, 64) -- {COSTS}\nc -- ReLU -- {COSTS}\n\ta -- b\n\tb -- c"


def option(name: str = "vanilla", reads: dict[str, Any] | None = None, readers: dict[str, Any] | None = None) -> Any:
    sizes = {"timePerSample": 2, "parameterSize": 3.0, "memoryUsageA": 4.0, "memoryUsageB": 5.0}
    return {"id": name, **sizes, "syncTimeFw": reads or {}, "syncTimeBw": readers or {}}


PIPER = {
    "maxDevices": 8,
    "maxMemoryPerDevice": 1e9,
    "bandwidth": 25.0,
    "mbsInBatch": 64,
    "nodes": [
        {"id": 5, "name": "ä b", "TMPCs": {"1": [option(readers={"9": 0.5, "-1": 0})]}},
        {"id": 9, "TMPCs": {"1": [option(reads={"5": 1}), option("other", {"5": 2})], "2": []}},
        {"id": -1, "TMPCs": {"2": [option(reads={"5": 0.0})]}},
    ],
    "edges": [
        {"sourceId": 5, "destId": 9, "communicationCost": 7.0},
        {"sourceId": 5, "destId": -1, "communicationCost": 0},
    ],
}


def node(number: object, **more: object) -> dict[str, object]:
    return {"id": number, "supportedOnFpga": 1, "cpuLatency": 2.0, "fpgaLatency": 1, "isBackwardNode": 0, **more}


def edge(src: object, dst: object, cost: object = 0.5) -> dict[str, object]:
    return {"sourceId": src, "destId": dst, "cost": cost}


TARNAWSKI = {
    "maxSizePerFPGA": 1e9,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [node(7, name="a", size=4.0, colorClass=3), node(2, isBackwardNode=True, supportedOnFpga=False)],
    "edges": [edge(7, 2, 0.25)],
}
DOCUMENTS: Mapping[str, dict[str, Any]] = {"piper": PIPER, "tarnawski": TARNAWSKI}


def changed(form: str, *changes: tuple[object, ...]) -> str:
    """The format's small document after ``changes``: the keys to a place, and what is there then."""
    document = copy.deepcopy(DOCUMENTS[form])
    for *place, last, value in changes:
        inner: Any = document
        for key in place:
            inner = inner[key]
        if value is GONE:
            del inner[last]
        elif isinstance(inner, list) and last == len(inner):
            inner.append(value)
        else:
            inner[last] = copy.deepcopy(value)
    return json.dumps(document, ensure_ascii=False)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*/*.graph.txt")), ids=lambda path: path.stem)
def test_published_profiles_of_pipedream_and_sparsepipe_are_read(path: Path) -> None:
    graph = pipedream.read(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(graph.nodes) == sum("forward_compute_time" in line for line in lines)
    assert len(graph.edges) == len({line for line in lines if line.startswith("\t")})
    milliseconds = sum(float(line.split("forward_compute_time=")[1].split(",")[0]) for line in lines if "=" in line)
    assert sum(node.forward_s for node in graph.nodes) == pytest.approx(milliseconds / 1000)


def test_the_published_file_of_piper_is_read() -> None:
    found = piper.read(PROFILES / "piper" / "resnet.json")
    assert (len(found.nodes), len(found.edges), found.devices, found.micro_batches) == (177, 193, 10, 7680)
    assert (found.memory_bytes, found.bandwidth_bytes_per_s) == (8e10, 2.5e10)
    first = found.nodes[0]
    assert (first.number, first.name) == (0, "node77")
    assert [each.name for each in first.options[1]] == ["vanilla", "activation recomp"]
    assert first.options[1][0] == PiperOption("vanilla", 2.678, 4096.0, 205520896.0, 8192.0, {1: 0.0}, {9: 0.0})
    assert sum(len(node.options[1]) for node in found.nodes) == 354


@pytest.mark.parametrize(
    ("name", "shape"),  # nodes, edges, backward nodes, accelerators
    [
        ("LayerGraphs_bert24_training", (64, 110, 32, 6)),
        ("LayerGraphs_gnmt_inference", (96, 122, 0, 6)),
        ("LayerGraphs_resnet50_inference", (177, 193, 0, 6)),
        ("OperatorGraphs_bert_l-3_inference", (235, 250, 0, 3)),
    ],
)
def test_published_files_of_dnn_partitioning_are_read(name: str, shape: tuple[int, ...]) -> None:
    found = tarnawski.read(PROFILES / "dnn-partitioning" / f"{name}.json")
    assert (len(found.nodes), len(found.edges), sum(n.backward for n in found.nodes), found.accelerators) == shape
    assert (found.cpus, found.memory_bytes) == (1, 17185374208)
    colours = [node.colour for node in found.nodes]
    shared = sum(colour is not None and colours.count(colour) > 1 for colour in colours)
    assert not name.startswith("Layer") or shared == (64 if name.endswith("training") else 0)
    raw = json.loads((PROFILES / "dnn-partitioning" / f"{name}.json").read_text())
    assert sum(node.accelerator_ms for node in found.nodes) == sum(node["fpgaLatency"] for node in raw["nodes"])
    costs = {edge["sourceId"]: edge["cost"] for edge in raw["edges"]}
    assert all(node.transfer_ms == pytest.approx(costs.get(node.number, 0.0), abs=1e-6) for node in found.nodes)


def test_each_field_is_read() -> None:
    nodes = [
        LayerNode(name, what, 0.0015, 0.002, 8.0, 16.0)
        for name, what in zip("abc", ("Input0", "Conv2d(3, 64)", "ReLU"), strict=True)
    ]
    graph = pipedream.parse(PLAIN)
    assert (graph.nodes, graph.edges) == (tuple(nodes), ((0, 1), (1, 2)))

    a = PiperNode(5, "ä b", {1: (PiperOption("vanilla", 2.0, 3.0, 4.0, 5.0, {}, {1: 0.5, 2: 0.0}),)})
    b, c = (
        tuple(PiperOption(name, 2.0, 3.0, 4.0, 5.0, {0: cost}, {}) for name, cost in options)
        for options in ((("vanilla", 1.0), ("other", 2.0)), (("vanilla", 0.0),))
    )
    options = (a, PiperNode(9, "node9", {1: b}), PiperNode(-1, "node-1", {2: c}))
    expected = PiperInstance("x.json", 8, 1e9, 25.0, 64, options, ((0, 1, 7.0), (0, 2, 0.0)))
    assert piper.parse(changed("piper"), "x.json") == expected

    placed = (
        TarnawskiNode(7, "a", 1.0, 2.0, 0.25, 4.0, True, False, 3),
        TarnawskiNode(2, "node2", 1.0, 2.0, 0.0, 0.0, False, True, None),
    )
    assert tarnawski.parse(changed("tarnawski"), "x.json") == TarnawskiInstance("x.json", 2, 1, 1e9, placed, ((0, 1),))


ODD_PIPER = changed(
    "piper",
    ("mbsInBatch", GONE),
    ("maxBatchSize", 64),
    ("maxDevices", "8"),
    ("nodes", 0, "id", 5.0),
    ("nodes", 1, "TMPCs", "1", 0, "timePerSample", "2.0"),
    ("nodes", 1, "anything", [1]),
)
ODD_TARNAWSKI = changed(
    "tarnawski",
    ("maxFPGAs", 2.0),
    ("maxCPUs", "1"),
    ("comment", "x"),
    ("nodes", 0, node("7", name="a", size="4", colorClass=3, fpgaLatency="1.0", supportedOnFpga="true", layerId=4)),
    ("nodes", 1, "cpuLatency", "2e0"),
    ("nodes", 1, "colorClass", None),
    ("nodes", 1, "isBackwardNode", 1.0),
    ("edges", 0, edge(7.0, "2", "0.25")),
    ("edges", 1, edge(7, 2, 0.25 + 1e-8)),  # there already
)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("form", "text"),
    [
        *(
            ("pipedream", text)
            for text in (
                PLAIN.replace("\n", "\r\n"),
                PLAIN.replace("\n", "\r"),
                "\ufeff" + PLAIN,
                "\n\n  " + PLAIN.replace("\n", "\n\n   ") + "\n\n",
                PLAIN.replace("\t", "    "),
                PLAIN.replace("\t", ""),
                "# a comment\n" + PLAIN + "\n# another",
                PLAIN + "\n\tb -- c",
                "\n".join(sorted(PLAIN.split("\n"), key=lambda line: "=" in line)),
                PLAIN.replace("16.000", "16.000 -- stage_id=0"),
                PLAIN.replace("activation_size=8.0", "activation_size=[6.0; 2.0]"),
                PLAIN.replace("activation_size=8.0", "activation_size=[6.0, 2.0]"),
                PLAIN.replace("activation_size=8.0", "activation_size=[ 8 ]"),
                PLAIN.replace(
                    "activation_size=8.0, parameter_size=16.000", "parameter_size=16.000, activation_size=8.0"
                ),
                PLAIN.replace("8.0", "8e0"),
            )
        ),
        ("piper", "\ufeff\n " + json.dumps(json.loads(ODD_PIPER), indent=3) + "\n"),
        ("tarnawski", "\ufeff\r\n\t" + ODD_TARNAWSKI + "\n \n"),
    ],
)
def test_what_does_no_harm_is_read_alike(form: str, text: str) -> None:
    plain = PLAIN if form == "pipedream" else changed(form)
    assert PARSERS[form](text) == PARSERS[form](plain)


def test_names_may_be_of_any_script_and_hold_blanks() -> None:
    name = "слой 1\u2028層"
    graph = pipedream.parse(f"{name} -- Größe -- x -- {COSTS}\n0 -- b -- {COSTS}\n\t{name} -- 0")
    assert (graph.nodes[0].name, graph.nodes[0].description, graph.edges) == (name, "Größe -- x", ((0, 1),))
    for odd in (name, "", "\N{GREEK SMALL LETTER ALPHA}" * 90):
        assert tarnawski.parse(changed("tarnawski", ("nodes", 0, "name", odd))).nodes[0].name == odd


def test_several_sinks_sources_and_fan_outs_are_read() -> None:
    nodes = "\n".join(f"{name} -- x -- {COSTS}" for name in "abcdef")
    graph = pipedream.parse(nodes + "\n\ta -- c\n\tb -- c\n\tc -- d\n\tc -- e")
    assert graph.edges == ((0, 2), (1, 2), (2, 3), (2, 4))
    edges = [edge(-3, 10), edge(-3, 4), edge(999, 4, 0)]
    found = tarnawski.parse(changed("tarnawski", ("nodes", [node(n) for n in (-3, 10, 4, 999)]), ("edges", edges)))
    assert found.edges == ((0, 1), (0, 2), (3, 2))
    assert [each.transfer_ms for each in found.nodes] == [0.5, 0.0, 0.0, 0.0]
    lone = changed("piper", ("nodes", [{"id": 1, "TMPCs": {"1": [option()]}}]), ("edges", []))
    assert len(piper.parse(lone).nodes) == 1


def test_inputs_and_items_that_nobody_reads_are_not_planned() -> None:
    def kept(edges: tuple[tuple[int, int], ...], *names: str) -> tuple[int, ...]:
        return LayerGraph("x", tuple(LayerNode(name, name, 1.0, 1.0, 1.0, 1.0) for name in names), edges).kept()

    names = ["Input0", "Conv", "__getitem__(0)", "__getitem__(1)", "Input1", "ReLU"]
    assert kept(((0, 1), (1, 2), (1, 3), (2, 5), (4, 5)), *names) == (1, 2, 5)
    assert kept(((1, 2),), "Input0", "a", "InputNorm") == (1, 2)  # an input that nobody reads, and one that is fed


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("hello", 1, "neither a layer nor an edge"),
        (f"a -- x -- {COSTS}\na -- b -- c", 2, "neither a layer nor an edge"),
        (f" -- x -- {COSTS}", 1, "neither a layer nor an edge"),
        (COSTS, 1, "neither a layer nor an edge"),
        (f"a -- x -- {COSTS}\n\na -- y -- {COSTS}", 3, "'a' appears twice"),
        (f"a -- x -- {COSTS}\n\ta -- z", 2, "'z', which is no layer"),
        (f"a -- x -- {COSTS}\n\ta -- a", 2, "cycle"),
        (f"a -- x -- {COSTS}\nb -- x -- {COSTS}\n\ta -- b\n\tb -- a", 3, "cycle"),
        ("a -- x -- forward_compute_time=1.0, backward_compute_time=1.0, activation_size=8.0", 1, "parameter_size"),
        (f"a -- x -- {COSTS.replace('1.500', 'fast')}", 1, "forward_compute_time of layer 'a' is no number"),
        (f"a -- x -- {COSTS.replace('1.500', '')}", 1, "forward_compute_time of layer 'a' is no number"),
        (f"a -- x -- {COSTS.replace('1.500', '-1')}", 1, "forward_compute_time of layer 'a' is -1"),
        (f"a -- x -- {COSTS.replace('1.500', 'nan')}", 1, "forward_compute_time of layer 'a' is nan"),
        (f"a -- x -- {COSTS.replace('8.0', 'inf')}", 1, "activation_size of layer 'a' is inf"),
        (f"a -- x -- {COSTS.replace('8.0', '[1; x]')}", 1, "activation_size of layer 'a' is no number"),
        (f"a -- x -- {COSTS} {COSTS}", 1, "cannot be read"),
        (f"a -- x -- {COSTS}, activation_size=3", 1, "cannot be read"),
    ],
)
def test_a_fault_of_a_text_is_named_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(FormatError, match=f"net.txt, line {line}: ") as error:
        pipedream.parse(text, "net.txt")
    assert words in str(error.value)
    assert error.value.exit_code == 3


OPTIONS = ("nodes", 0, "TMPCs")
FIRST = (*OPTIONS, "1", 0)
CYCLE = (
    ("edges", 2, {"sourceId": 9, "destId": 5, "communicationCost": 1}),
    (*FIRST, "syncTimeFw", "9", 0),
    *(("nodes", 1, "TMPCs", "1", number, "syncTimeBw", "5", 0) for number in (0, 1)),
)
TWO = (("nodes", [node(1, name="conv"), node(2)]), ("edges", [edge(1, 2)]))
FAULTS: list[tuple[str, tuple[tuple[object, ...], ...], str]] = [
    ("piper", (("nodes", 2, "id", 5),), "some.json, nodes[2]: id 5 appears twice"),
    ("piper", (("edges", 0, "destId", 77),), "edges[0]: 'destId' 77 is no node's id"),
    ("piper", (("edges", 2, PIPER["edges"][0]),), "edges[2]: an edge that is there already"),
    ("piper", (("edges", 0, "destId", 5),), "edges[0]: an edge from a node to itself"),
    ("piper", (("edges", 0, "communicationCost", -1),), "'communicationCost' is not a number from 0"),
    ("piper", (("maxDevices", 0),), "'maxDevices' is not a whole number from 1"),
    ("piper", (("maxDevices", 10001),), "10001 devices"),
    ("piper", (("bandwidth", 0),), "'bandwidth' is not a number"),
    ("piper", (("mbsInBatch", GONE),), "'mbsInBatch' is missing"),
    ("piper", (("nodes", []),), "no nodes"),
    ("piper", (("edges", GONE),), "'edges' is missing"),
    ("piper", ((*OPTIONS, "two", []),), "some.json, nodes[0] (ä b).TMPCs: 'two' is no tensor degree"),
    ("piper", ((*OPTIONS, "0", []),), "nodes[0] (ä b).TMPCs: '0' is no tensor degree"),
    ("piper", ((*OPTIONS, "1", []),), "nodes[0] (ä b).TMPCs: no options"),
    ("piper", ((*OPTIONS, "1", 1, PIPER["nodes"][0]["TMPCs"]["1"][0]),), "two options of degree 1 have one id"),
    ("piper", ((*FIRST, "timePerSample", GONE),), "nodes[0] (ä b).TMPCs.1[0]: 'timePerSample' is missing"),
    ("piper", ((*FIRST, "memoryUsageA", -1),), "'memoryUsageA' is not a number from 0"),
    ("piper", ((*FIRST, "syncTimeBw", "9", GONE),), ".1[0].syncTimeBw: a layer that this one is read by is missing"),
    ("piper", ((*FIRST, "syncTimeFw", "5", 0),), "'5' is no layer that this one reads"),
    ("piper", CYCLE, "the edges make a cycle"),
    ("tarnawski", (*TWO, ("nodes", 1, "id", 1)), "some.json, nodes[1]: id 1 appears twice"),
    ("tarnawski", (*TWO, ("edges", 0, "destId", 9)), "some.json, edges[0]: 'destId' 9 is no node's id"),
    ("tarnawski", (*TWO, ("edges", 0, edge(2, 2))), "some.json, edges[0]: an edge from a node to itself"),
    ("tarnawski", (*TWO, ("edges", 1, edge(2, 1))), "some.json: the edges make a cycle"),
    (
        "tarnawski",
        (*TWO, ("nodes", 2, node(3)), ("edges", 1, edge(1, 3, 0.75))),
        "edges[1]: two costs on edges out of node 1",
    ),
    ("tarnawski", (*TWO, ("nodes", 0, node(1, isBackwardNode=1, name="grad"))), "1 (grad) to 2 (node2)"),
    ("tarnawski", (("nodes", []), ("edges", [])), "some.json: no nodes"),
    ("tarnawski", (("nodes", 0, "fpgaLatency", -1),), "'fpgaLatency' is not a number from 0 upwards"),
    ("tarnawski", (("nodes", 0, "fpgaLatency", GONE),), "'fpgaLatency' is missing"),
    ("tarnawski", (("nodes", 0, "cpuLatency", "fast"),), "'cpuLatency' is not a finite number"),
    ("tarnawski", (("nodes", 0, "size", float("nan")),), "'size' is not a finite number"),
    ("tarnawski", (("nodes", 0, "size", [1]),), "'size' is not a finite number"),
    ("tarnawski", (("nodes", 0, "id", 1.5),), "'id' is not a whole number"),
    ("tarnawski", (("nodes", 0, "supportedOnFpga", "maybe"),), "'supportedOnFpga' is not true or false"),
    ("tarnawski", (("nodes", 0, "isBackwardNode", 2),), "'isBackwardNode' is not true or false"),
    ("tarnawski", (("nodes", 0, "colorClass", "red"),), "'colorClass' is not a whole number"),
    ("tarnawski", (("nodes", 0, "name", ["a"]),), "'name' is not text"),
    ("tarnawski", (("maxFPGAs", 1.5),), "'maxFPGAs' is not a whole number"),
    ("tarnawski", (("maxCPUs", -1),), "'maxCPUs' is not a whole number from 0 upwards"),
    ("tarnawski", (("maxSizePerFPGA", GONE),), "'maxSizePerFPGA' is missing"),
    ("tarnawski", (("nodes", {"1": {}}),), "'nodes' is not a list"),
    ("tarnawski", (("nodes", 1, 5),), "nodes[1]: not an object"),
]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("form", "changes", "words"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fault_of_a_document_is_named_with_its_place(form: str, changes: Any, words: str) -> None:
    with pytest.raises(FormatError) as error:
        PARSERS[form](changed(form, *changes), "some.json")
    assert words in error.value.render()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("form", "text", "words"),
    [
        *(("pipedream", text, "no layers") for text in ("", "\n\n", "# nothing", "\ufeff")),
        ("tarnawski", '\n\n{"nodes": [\n1,, 2]}', "some.json, line 4: not JSON"),
        ("tarnawski", "", "empty file"),
        ("piper", "[1]", "not an object"),
        ("piper", "{} x", "not JSON"),
        ("piper", "[" * 100_000, "nested"),
    ],
    ids=lambda value: value[:9],
)
def test_text_that_is_of_no_such_format_is_refused(form: str, text: str, words: str) -> None:
    with pytest.raises(FormatError) as error:
        PARSERS[form](text, "some.json")
    assert words in error.value.render()


@pytest.mark.every_case
@pytest.mark.parametrize("form", READERS)
def test_a_file_that_is_missing_or_no_text_is_refused(form: str, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(MissingFileError):
            READERS[form](path)
    (tmp_path / "binary").write_bytes(b"a -- x\n\xff\xfe")
    with pytest.raises(FormatError, match="not UTF-8"):
        READERS[form](tmp_path / "binary")
