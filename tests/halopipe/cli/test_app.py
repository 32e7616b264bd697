"""What all verbs have in common, and the small ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halopipe.run_spec.options import ASKED, flag_of
from planner.ir import codec
from tests.halopipe.commands import HOME, call, present, process


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "profile.json", "--json"],
        ["explain", "by_hand.json", "--json"],
        ["explain", "by_hand.json", "profile.json", "--json"],
        ["explain", "by_hand.json", "--layer", "l1", "--json"],
        ["compare", "by_hand.json", "--json"],
        ["compare", "by_hand.json", "--baselines", "--profile", "profile.json", "--json"],
        ["check", "by_hand.json", "--json"],
        ["schema", "plan"],
        ["explain", "by_hand.json", "--why-not", "one-device", "--json"],
        ["explain", "by_hand.json", "--what-if", "n0/*.memory=8GiB", "--json"],
        ["explain", "by_hand.json", "--prices", "--json"],
        ["plan", "profile.json", "--pareto", "2", "-o", "front.json", "--json"],
    ],
    ids=" ".join,
)
def test_json_stands_alone_on_stdout(folder: Path, arguments: list[str]) -> None:
    result = call(*arguments)
    assert isinstance(json.loads(result.stdout), dict), result.stderr


def test_faults_of_a_plan_are_json_too(folder: Path) -> None:
    plan = (folder / "by_hand.json").read_text("utf-8")
    (folder / "edited.json").write_text(plan.replace('"1F1", ', "", 1))
    result = call("check", "edited.json", "--profile", "profile.json", "--json")
    assert result.exit_code == 6
    assert json.loads(result.stdout)["faults"] != []


@pytest.mark.parametrize("name", sorted(codec.FORMATS))
def test_each_format_has_a_schema(name: str) -> None:
    assert call("schema", name).stdout == codec.schema(name)


def test_the_module_runs_as_a_program_and_names_a_file_that_hides_a_package_before_it_imports(tmp_path: Path) -> None:
    result = process("--version", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("halopipe 0.")
    (tmp_path / "planner.py").write_text("raise SystemExit('imported')\n")
    result = process("plan", "profile.json", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error[H203]")


def test_a_reader_that_has_had_enough_is_no_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    line = f"'{sys.executable}' -m halopipe schema profile | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("{program} schema plan >&-", 3, "error[H301] cannot write to standard output"),
        ("{program} plan nowhere.json 2>&-", 3, ""),
        ("{program} plan nowhere.json <&- >&- 2>&-", 3, ""),
        ("mkdir gone; cd gone; rmdir ../gone; {program} schema plan", 3, "error[H301] the working folder is gone"),
    ],
)
def test_a_shell_that_closes_what_programs_rely_on_is_told(folder: Path, line: str, code: int, said: str) -> None:
    program = f"PYTHONPATH='{HOME}' timeout 60 '{sys.executable}' -m halopipe"
    command = ["bash", "-c", f"cd '{folder}'; {line.format(program=program)}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith(said)
    assert "Traceback" not in result.stderr


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "pipe.pt"],
        ["checkpoint", "import", "x", "--from", "pipe.pt", "--plan", "by_hand.json"],
        ["profile", "pipe.pt"],
    ],
)
def test_a_pipe_that_is_silent_is_no_input(folder: Path, arguments: list[str]) -> None:
    os.mkfifo("pipe.pt")
    result = call(*arguments)
    assert result.exit_code in (2, 3)
    assert "pipe" in result.stderr


LOADED = """
import json, sys
from halopipe.cli.app import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words.split()
    code = main()
    found = sorted({"torch", "matplotlib", "pandas", "yaml"} & set(sys.modules))
    print("loaded", json.dumps([words, code in (0, 6), found]), file=sys.stderr)
"""


def test_verbs_that_need_no_devices_load_no_torch(folder: Path) -> None:
    """One after the other in one process, that of which a catalogue is read last."""
    asked = [
        "plan profile.json",
        "explain by_hand.json profile.json",
        "compare by_hand.json --baselines --profile profile.json",
        "check by_hand.json",
        "export by_hand.json --to chrome-trace --profile profile.json",
        "schema plan",
        "cluster",
        "explain by_hand.json profile.json --why-not one-device",
        "devices",
    ]
    words = [" ".join(row) for row in present([each.split() for each in asked])]
    command = [sys.executable, "-c", LOADED, json.dumps(words)]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line[7:]) for line in result.stderr.splitlines() if line.startswith("loaded ")]
    assert found == [[each, True, ["yaml"] if each == "devices" else []] for each in words], result.stderr


@pytest.mark.every_case
@pytest.mark.parametrize(
    "arguments",
    present(
        [
            ["plan", "profile.json", "-o", "no/x.json"],
            ["merge", "profile.json", "-o", "no/x.json"],
            ["cluster", "-o", "no/x.json"],
            ["import", "graph.txt", "-o", "no/x.json"],
            ["profile", "nowhere.py:f", "-o", "no/x.json"],
            ["export", "by_hand.json", "--to", "chrome-trace", "-o", "no/x.json"],
            ["export", "by_hand.json", "--to", "torch-pipelining", "-o", "no/x.json"],
            ["run", "by_hand.json", "-o", "no/x.json"],
            ["run", "by_hand.json", "--trace", "no/x.json"],
            ["run", "by_hand.json", "--write-job", "no/x.yaml"],
            ["run", "by_hand.json", "--metrics", "profile.json/x.csv"],
            ["run", "by_hand.json", "--metrics", "tb:profile.json/x"],
            ["run", "by_hand.json", "--checkpoint", "profile.json/x"],
            ["run", "by_hand.json", "--profile-steps", "3", "--profile-folder", "profile.json"],
            ["checkpoint", "saved", "--to", "profile.json/x.pt"],
            ["demo", "-o", "profile.json/x"],
        ]
    ),
    ids=" ".join,
)
def test_where_a_result_goes_is_tried_before_work_starts(folder: Path, arguments: list[str]) -> None:
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (3, ""), result.stderr
    assert result.stderr.startswith(("error[H301] cannot write", "error[H301] cannot make the folder")), result.stderr
    assert "\n  try: " in result.stderr


@pytest.mark.parametrize("columns", [40, 60])
def test_a_narrow_terminal_cuts_nothing(folder: Path, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = process("run", "--help", cwd=folder).stdout
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    words = " ".join(shown.split())
    for name in ASKED:
        assert f" {flag_of(name)}" in words
    table = call("compare", "by_hand.json", "--baselines", "--profile", "profile.json").stdout
    assert max(map(len, table.partition("\n\n")[0].splitlines())) <= columns
    assert "peak memory" in table
