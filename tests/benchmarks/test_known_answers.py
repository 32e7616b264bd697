from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.known_answers import known, main

PROFILES = Path(__file__).parents[1] / "data" / "profiles"
VGG16 = str(PROFILES / "pipedream" / "vgg16.graph.txt")
TXP, TV = (str(PROFILES / "sparsepipe" / f"b64_{kind}.graph.txt") for kind in ("txp", "tv"))
COSTS = "forward_compute_time=1000, backward_compute_time=2000, activation_size=1e9, parameter_size=1e9"


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    answer: dict[str, object] = json.loads(captured.out)
    assert set(answer) == {"value", "bound", "status", "cpu_seconds", "plan"}
    return answer


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("", 0.205521),
        ("--machines 4 --no-communication", 0.175733),
        ("--machines 4 --straight", 0.411042),
        ("--machines 8 --bandwidth 10GB/s", 0.089926),
        ("--machines 4,2 --bandwidth 1e10,1.25e9", 0.157821),
        ("--machines 4 --bandwidth 1e10 --memory 16GB", 0.170179),
        ("--machines 4 --data-parallel", 0.583206),
    ],
)
def test_pipedream_by_flags(capsys: pytest.CaptureFixture[str], flags: str, value: float) -> None:
    answer = asked(capsys, VGG16, "--peer", "pipedream", *flags.split())
    assert answer["value"] == answer["bound"] == pytest.approx(value, abs=1e-6)
    assert answer["status"] == "optimal"
    if "4,2" in flags:
        released = asked(capsys, VGG16, "--peer", "pipedream", *flags.split(), "--released")
        assert released["value"] < answer["value"]  # type: ignore[operator]


def test_sparsepipe_takes_one_file_a_type(capsys: pytest.CaptureFixture[str]) -> None:
    counted = asked(capsys, f"{TXP}:3", f"{TV}:4", "--peer", "sparsepipe")
    listed = asked(capsys, TXP, TV, "--peer", "sparsepipe", "--machines", "3,4")
    assert counted["value"] == listed["value"] == pytest.approx(0.1595, abs=5e-5)
    own = asked(capsys, f"{TXP}:3", f"{TV}:4", "--peer", "sparsepipe", "--fixed-order")
    assert own["value"] == pytest.approx(0.2016, abs=5e-5)


def test_a_file_of_several_sinks_sources_and_odd_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "сеть:3"
    names = ["Eingang", "α", "β", "层", "ende 1", "ende 2"]
    descriptions = ["Input0", "Conv — 3×3", "x", "y", "z", "z"]
    lines = [f"  {name} -- {words} -- {COSTS}" for name, words in zip(names, descriptions, strict=True)]
    edges = ["Eingang -- α", "β -- 层", "α -- 层", "层 -- ende 1", "层 -- ende 2"]
    file.write_text("\r\n".join([*lines, "", *(f"\t{edge}" for edge in edges)]), encoding="utf-8")
    answer = asked(capsys, str(file), "--peer", "pipedream", "--machines", "2", "--no-communication")
    assert answer["value"] == pytest.approx(9.0)
    plan = answer["plan"]
    assert isinstance(plan, dict)
    assert sorted(name for stage in plan["stages"] for name in stage["layers"]) == sorted(names[1:])


def test_people_are_told_in_words_and_of_flags_that_are_idle(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([VGG16, "--peer", "pipedream", "--cpus", "2"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("pipedream: 0.205520896 s, bound 0.205520896 s, optimal")
    assert "--cpus has no meaning for pipedream" in printed.err


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([VGG16], 2, "whose planner?"),
        ([VGG16, TXP, "--peer", "pipedream"], 2, "plans one file"),
        ([VGG16, "--peer", "pipedream", "--machines", "4,2", "--bandwidth", "1,2,3"], 2, "do not match"),
        ([VGG16, TXP, TV, "--peer", "sparsepipe", "--machines", "1,2"], 2, "do not match"),
        ([VGG16, TXP, "--peer", "sparsepipe"], 3, "not a profile of the same network"),
        (["nowhere.txt", "--peer", "pipedream"], 3, "cannot be read"),
        (["nowhere.txt", "--peer", "tarnawski"], 3, "nowhere.txt"),
        (["nowhere.txt", "--peer", "piper"], 3, "nowhere.txt"),
        ([VGG16, "--peer", "pipedream", "--straight", "--memory", "1"], 4, "finds no plan (infeasible)"),
        ([VGG16, "--peer", "none"], 2, "--peer"),
        ([VGG16, "--peer", "pipedream", "--machines", "0"], 2, "--machines"),
        ([VGG16, "--peer", "pipedream", "--machines", "4,x"], 2, "--machines"),
        ([VGG16, "--peer", "pipedream", "--bandwidth", "-1"], 2, "--bandwidth"),
        ([VGG16, "--peer", "pipedream", "--bandwidth", "fast"], 2, "--bandwidth"),
        ([VGG16, "--peer", "pipedream", "--memory", "0"], 2, "--memory"),
        ([VGG16, "--peer", "pipedream", "--accelerators", "-1"], 2, "--accelerators"),
        ([VGG16, "--peer", "pipedream", "--cpus", "1.5"], 2, "--cpus"),
    ],
)
def test_what_cannot_be_answered_has_its_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    try:
        ended: object = main([*arguments, "--json"])
    except SystemExit as end:
        ended = end.code
    captured = capsys.readouterr()
    assert ended == code
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert code != 4 or json.loads(captured.out)["value"] is None


@pytest.mark.parametrize("peer", ["pipedream", "sparsepipe"])
def test_every_known_answer_holds(peer: str) -> None:
    rows = [question.row() for question in known(peer, quick=True)]
    assert len(rows) > 5
    assert [row.name for row in rows if not row.holds] == []
