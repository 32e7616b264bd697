from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.extras.baselines.piper.format import PiperInstance, PiperNode, PiperOption, parse, read
from planner.ir.errors import FormatError

RESNET = Path(__file__).parents[4] / "data" / "profiles" / "piper" / "resnet.json"


def option(name: str = "vanilla", reads: dict[str, Any] | None = None, readers: dict[str, Any] | None = None) -> Any:
    return {
        "id": name,
        "timePerSample": 2,
        "parameterSize": 3.0,
        "memoryUsageA": 4.0,
        "memoryUsageB": 5.0,
        "syncTimeFw": reads or {},
        "syncTimeBw": readers or {},
    }


def small() -> dict[str, Any]:
    """Layer 5 feeds layers 9 and -1."""
    return {
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


def fault(change: Any) -> str:
    found = small()
    change(found)
    with pytest.raises(FormatError) as error:
        parse(json.dumps(found), "some.json")
    return error.value.render()


def test_the_published_file_is_read() -> None:
    found = read(RESNET)
    assert (len(found.nodes), len(found.edges), found.devices, found.micro_batches) == (177, 193, 10, 7680)
    assert (found.memory_bytes, found.bandwidth_bytes_per_s) == (8e10, 2.5e10)
    first = found.nodes[0]
    assert (first.number, first.name, [each.name for each in first.options[1]]) == (
        0,
        "node77",
        ["vanilla", "activation recomp"],
    )
    assert first.options[1][0] == PiperOption("vanilla", 2.678, 4096.0, 205520896.0, 8192.0, {1: 0.0}, {9: 0.0})
    assert sum(len(node.options[1]) for node in found.nodes) == 354


def test_each_field_is_read() -> None:
    found = parse(json.dumps(small()), "x.json")
    a = PiperNode(5, "ä b", {1: (PiperOption("vanilla", 2.0, 3.0, 4.0, 5.0, {}, {1: 0.5, 2: 0.0}),)})
    b = (
        PiperOption("vanilla", 2.0, 3.0, 4.0, 5.0, {0: 1.0}, {}),
        PiperOption("other", 2.0, 3.0, 4.0, 5.0, {0: 2.0}, {}),
    )
    c = (PiperOption("vanilla", 2.0, 3.0, 4.0, 5.0, {0: 0.0}, {}),)
    nodes = (a, PiperNode(9, "node9", {1: b}), PiperNode(-1, "node-1", {2: c}))
    assert found == PiperInstance("x.json", 8, 1e9, 25.0, 64, nodes, ((0, 1, 7.0), (0, 2, 0.0)))


def test_blanks_marks_and_other_spellings_do_no_harm() -> None:
    odd = small()
    odd["maxBatchSize"] = odd.pop("mbsInBatch")
    odd["maxDevices"] = "8"
    odd["nodes"][0]["id"] = 5.0
    odd["nodes"][1]["TMPCs"]["1"][0]["timePerSample"] = "2.0"
    odd["nodes"][1]["anything"] = [1]
    assert parse("\ufeff\n " + json.dumps(odd, indent=3) + "\n") == parse(json.dumps(small()))


def test_one_layer_needs_no_edges() -> None:
    lone = small() | {"nodes": [{"id": 1, "TMPCs": {"1": [option()]}}], "edges": []}
    assert len(parse(json.dumps(lone)).nodes) == 1


def test_what_is_wrong_is_named_with_its_place() -> None:
    assert "some.json, nodes[2]: id 5 appears twice" in fault(lambda f: f["nodes"][2].update(id=5))
    assert "edges[0]: 'destId' 77 is no node's id" in fault(lambda f: f["edges"][0].update(destId=77))
    assert "edges[2]: an edge that is there already" in fault(lambda f: f["edges"].append(f["edges"][0]))
    assert "edges[0]: an edge from a node to itself" in fault(lambda f: f["edges"][0].update(destId=5))
    assert "'communicationCost' is not a number from 0" in fault(lambda f: f["edges"][0].update(communicationCost=-1))
    assert "'maxDevices' is not a whole number from 1" in fault(lambda f: f.update(maxDevices=0))
    assert "10001 devices" in fault(lambda f: f.update(maxDevices=10001))
    assert "'bandwidth' is not a number" in fault(lambda f: f.update(bandwidth=0))
    assert "'mbsInBatch' is missing" in fault(lambda f: f.pop("mbsInBatch"))
    assert "no nodes" in fault(lambda f: f.update(nodes=[]))
    assert "'edges' is missing" in fault(lambda f: f.pop("edges"))


def test_wrong_options_are_named_with_their_layer() -> None:
    def first(found: Any) -> Any:
        return found["nodes"][0]["TMPCs"]

    place = "some.json, nodes[0] (ä b).TMPCs"
    assert f"{place}: 'two' is no tensor degree" in fault(lambda f: first(f).update(two=[]))
    assert f"{place}: '0' is no tensor degree" in fault(lambda f: first(f).update({"0": []}))
    assert f"{place}: no options" in fault(lambda f: first(f).update({"1": []}))
    assert "two options of degree 1 have one id" in fault(lambda f: first(f)["1"].append(first(f)["1"][0]))
    assert f"{place}.1[0]: 'timePerSample' is missing" in fault(lambda f: first(f)["1"][0].pop("timePerSample"))
    assert "'memoryUsageA' is not a number from 0" in fault(lambda f: first(f)["1"][0].update(memoryUsageA=-1))
    missing = fault(lambda f: first(f)["1"][0]["syncTimeBw"].pop("9"))
    assert f"{place}.1[0].syncTimeBw: a layer that this one is read by is missing" in missing
    assert "edges lead to 9" in missing
    assert "'5' is no layer that this one reads" in fault(lambda f: first(f)["1"][0]["syncTimeFw"].update({"5": 0}))


def test_a_cycle_is_named() -> None:
    def turn(found: Any) -> None:
        found["edges"].append({"sourceId": 9, "destId": 5, "communicationCost": 1})
        found["nodes"][0]["TMPCs"]["1"][0]["syncTimeFw"]["9"] = 0
        for each in found["nodes"][1]["TMPCs"]["1"]:
            each["syncTimeBw"]["5"] = 0

    assert "the edges make a cycle" in fault(turn)
