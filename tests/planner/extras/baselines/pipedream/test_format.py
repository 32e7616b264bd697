from __future__ import annotations

from pathlib import Path

import pytest

from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode, parse, read
from planner.ir.errors import FormatError, MissingFileError

PROFILES = Path(__file__).parents[4] / "data" / "profiles"
COSTS = "forward_compute_time=1.500, backward_compute_time=2.000, activation_size=8.0, parameter_size=16.000"
PLAIN = f"a -- Input0 -- {COSTS}\nb -- Conv2d(3, 64) -- {COSTS}\nc -- ReLU -- {COSTS}\n\ta -- b\n\tb -- c"


def one(costs: str) -> LayerNode:
    return parse(f"a -- x -- {costs}").nodes[0]


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*/*.graph.txt")), ids=lambda path: path.stem)
def test_published_profiles_are_read(path: Path) -> None:
    graph = read(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(graph.nodes) == sum("forward_compute_time" in line for line in lines)
    assert len(graph.edges) == len({line for line in lines if line.startswith("\t")})
    milliseconds = sum(float(line.split("forward_compute_time=")[1].split(",")[0]) for line in lines if "=" in line)
    assert sum(node.forward_s for node in graph.nodes) == pytest.approx(milliseconds / 1000)


def test_milliseconds_become_seconds_and_bytes_stay() -> None:
    assert one(COSTS) == LayerNode("a", "x", 0.0015, 0.002, 8.0, 16.0)


def test_the_order_is_the_files() -> None:
    graph = parse(PLAIN)
    assert [node.name for node in graph.nodes] == ["a", "b", "c"]
    assert graph.edges == ((0, 1), (1, 2))
    assert graph.nodes[1].description == "Conv2d(3, 64)"


@pytest.mark.parametrize(
    "text",
    [
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
        PLAIN.replace("activation_size=8.0, parameter_size=16.000", "parameter_size=16.000, activation_size=8.0"),
        PLAIN.replace("8.0", "8e0"),
    ],
)
def test_what_does_no_harm_is_read_alike(text: str) -> None:
    assert parse(text) == parse(PLAIN)


def test_names_may_be_of_any_script_and_hold_blanks() -> None:
    name = "слой 1\u2028層"
    graph = parse(f"{name} -- Größe -- x -- {COSTS}\n0 -- b -- {COSTS}\n\t{name} -- 0")
    assert graph.nodes[0].name == name
    assert graph.nodes[0].description == "Größe -- x"
    assert graph.edges == ((0, 1),)


def test_several_sinks_sources_and_fan_outs_are_read() -> None:
    nodes = "\n".join(f"{name} -- x -- {COSTS}" for name in "abcdef")
    graph = parse(nodes + "\n\ta -- c\n\tb -- c\n\tc -- d\n\tc -- e")
    assert graph.edges == ((0, 2), (1, 2), (2, 3), (2, 4))


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
def test_a_fault_is_named_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(FormatError, match=f"net.txt, line {line}: ") as error:
        parse(text, "net.txt")
    assert words in str(error.value)
    assert error.value.exit_code == 3


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", "\ufeff"])
def test_a_file_without_layers_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="no layers"):
        parse(text)


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        read(tmp_path / "nowhere.txt")
    with pytest.raises(MissingFileError):
        read(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"a -- x\n\xff\xfe")
    with pytest.raises(FormatError, match=r"binary.txt, line 2: not UTF-8"):
        read(tmp_path / "binary.txt")


def test_inputs_and_items_that_nobody_reads_are_not_planned() -> None:
    def node(description: str) -> LayerNode:
        return LayerNode(description, description, 1.0, 1.0, 1.0, 1.0)

    names = ["Input0", "Conv", "__getitem__(0)", "__getitem__(1)", "Input1", "ReLU"]
    edges = ((0, 1), (1, 2), (1, 3), (2, 5), (4, 5))
    assert LayerGraph("x", tuple(map(node, names)), edges).kept() == (1, 2, 5)


def test_an_input_that_is_read_by_nobody_or_fed_by_a_layer() -> None:
    nodes = tuple(LayerNode(name, name, 1.0, 1.0, 1.0, 1.0) for name in ("Input0", "a", "InputNorm"))
    assert LayerGraph("x", nodes, ((1, 2),)).kept() == (1, 2)
