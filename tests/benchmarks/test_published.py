"""Tables of other people's runs, predicted: what can be stated, what is left out and why; what ``ways`` makes of it."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.published.__main__ import A100, measure
from benchmarks.published.runs import read
from benchmarks.published.settings import Setting, predicted
from benchmarks.published.sources import settings
from halopipe.extras.transformers.evidence import KindEvidence, published
from planner.extras.transformers.shape import Fusion, named_transformer
from planner.ir.codec import from_json

TABLES = Path("tests/data/published")


def test_tables_of_other_people_are_predicted_where_the_model_has_words_for_them(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence.json"
    rows = {row.name: row for row in measure(quick=True, data=TABLES, evidence=evidence)}
    sizes = {name.removesuffix(": runs"): row.value for name, row in rows.items() if name.endswith(": runs")}
    assert {group: sizes[group] for group in ("vTrain, several hosts", "vTrain, one host", "torchtitan")} == {
        "vTrain, several hosts": 5, "vTrain, one host": 5, "torchtitan": 4,
    }  # fmt: skip
    for left_out in (
        "MLPerf, Llama 2 70B, LoRA, adapters or packed samples",
        "Automodel, H100, adapters or packed samples",
        "Automodel, does it fit, its sizes",
        "Megatron-Bridge, H100, experts, recomputation by operator",
        "Megatron-Bridge, H100, experts, its step",
        "InternEvo, zero1_group in its division",
        "InternEvo, its step",
        "DGX Cloud, H100, dense, what is computed again",
        "fms-fsdp, weights that are divided within a host alone",
        "Pax, what is computed again",
        "Primus, its step",
        "Aceso, no cluster of A10G",
        "Mist, no cluster of L4",
    ):
        assert sizes[f"left out, {left_out}"] >= 1
    assert sizes["MLPerf, Llama 3.1 405B"] == 2  # of 8 bits, with context ranks
    alone, beside = (
        rows[f"Megatron-Bridge, H100, experts, Qwen3-30B-A3B, {study}: predicted"].value
        for study in ("moe-comm-overlap", "moe-comm-overlap, expert-parallel overlap")
    )
    assert beside < 0.9 * alone
    assert sizes["SimuMax, B200, dense"] == 2  # nothing of them is in a price: their kernels are another table
    assert rows["SimuMax, B200, dense: mean error"].holds
    assert (sizes["InternEvo"], sizes["DGX Cloud, H100, dense"], sizes["DGX Cloud, H100, experts"]) == (2, 3, 1)
    held = "Megatron-Bridge, H100, dense"
    assert abs(rows[f"{held}: mean of errors with their signs"].value) <= rows[f"{held}: mean error"].value
    assert rows[f"{held}: mean error"].value <= rows[f"{held}: largest error"].value
    assert rows[f"{held}: mean error"].goal == "<= 10"
    written = from_json(evidence.read_text("utf-8"), tuple[KindEvidence, ...])
    assert {f"kind, {each.kind}: runs": each.runs for each in written} == {
        name: row.value for name, row in rows.items() if name.startswith("kind, ") and name.endswith(": runs")
    }
    of_hosts = next(each for each in written if str(each.kind) == "Megatron-LM, A100-80GB, dense, several hosts")
    assert of_hosts.sources == {A100: 2, "vTrain, several hosts": 5}


def test_a_setting_that_the_model_has_no_word_for_is_left_out_under_its_name() -> None:
    shape = named_transformer("llama3-8b")
    stated = Setting("a", "b", "c", "H100-SXM", 16, 1.0, shape, {"data": 8})
    runs, left_out = predicted(
        [
            stated,
            replace(stated, division={"data": 8, "no such part": 2}),
            replace(stated, device="no such device"),
            replace(stated, division={"data": 7}),
            replace(stated, unstated="its sizes"),
        ]
    )
    assert len(runs) == 1
    assert [each.reason for each in left_out] == [
        "no such part in its division",
        "no cluster of no such device",
        "a division that is none of the model's",
        "its sizes",
    ]


def test_software_moves_what_is_held_against_a_run_and_not_what_ways_would_say() -> None:
    shape = named_transformer("llama3-8b")
    plain = Setting("a", "b", "c", "H100-SXM", 16, 1.0, shape, {"data": 8})
    eager = replace(plain, software={"kernels": Fusion.EAGER})
    (one, other), _ = predicted([plain, eager])
    assert other.prediction.step.seconds > one.prediction.step.seconds
    assert one.ways_s == other.ways_s == one.prediction.step.seconds


def test_of_lines_with_the_same_values_the_first_is_a_run(tmp_path: Path) -> None:
    table = "rows2/mlperf_training.csv"
    (line,) = (line for line in read(TABLES / table) if line["same_values_as"])
    twice = [line, {**line, "id": line["same_values_as"], "same_values_as": line["id"]}]
    path = tmp_path / table
    path.parent.mkdir()
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, line)
        writer.writeheader()
        writer.writerows(twice)
    runs, left_out = predicted(list(settings(tmp_path)))
    assert [run.name for run in runs] == [line["id"]]
    assert [each.reason for each in left_out] == ["another part of a run that is here"]


def test_recipes_for_speed_are_held_against_what_their_code_says() -> None:
    """On H100 and H200: exchanges between tensor ranks in parts, and between chunks beside computing."""
    groups = (
        "Megatron-Bridge, H100, dense",
        "MLPerf, Llama 3.1 405B",
        "NeMo, H100, 8 bits",
        "DGX Cloud, H100, dense",
    )
    runs, _ = predicted(
        [each for each in settings(TABLES) if each.group in groups and each.division.get("tensor", 1) > 1]
    )
    assert {run.group for run in runs} == set(groups)
    for run in runs:
        assert run.prediction.step.seconds < 0.95 * run.ways_s
        assert abs(run.error) < 0.1


def test_the_ranges_that_ways_prints_are_those_of_the_committed_results() -> None:
    rows = {row.name: row.value for row in report.read("published") if row.name.startswith("kind, ")}
    for kind, evidence in published().items():
        name = f"kind, {kind}"
        assert rows.pop(f"{name}: runs") == evidence.runs
        assert rows.pop(f"{name}: eight of ten measured from") == pytest.approx(evidence.low)
        assert rows.pop(f"{name}: to") == pytest.approx(evidence.high)
        assert rows.pop(f"{name}: mean error") == pytest.approx(100 * evidence.mean_size)
    assert not [name for name in rows if name.endswith(": runs")]
