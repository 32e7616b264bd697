from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from halopipe.cli.app import app
from halopipe.launch import run
from halopipe.planning import solve
from halopipe.run_spec.options import ASKED, flag_of
from halopipe.terminal import console
from planner.costs.predict import predict
from planner.ir import codec
from planner.ir.codec import dump, load
from planner.ir.errors import InfeasibleError
from planner.ir.plan import Plan
from planner.ir.profile import Correction, CostClass, Profile
from planner.ir.timeline import Span, Timeline, TimelineFile
from tests.planner.costs.calibration.test_machine import passes
from tests.planner.factories import chain_decision, chain_profile, plan_of

HOME = Path(__file__).resolve().parents[3]
PROFILE = chain_profile(6, latency_s=1e-4, parameter_bytes=2**20, activation_bytes=2**14)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a profile and a plan made from it; in ``alone`` the same plan, no profile beside it."""
    monkeypatch.chdir(tmp_path)
    dump(PROFILE, "profile.json")
    (tmp_path / "alone").mkdir()
    plan = plan_of(PROFILE, chain_decision(PROFILE, cuts=(3,), micro_batches=(2, 2, 2, 2)))
    for path in ("by_hand.json", "alone/by_hand.json"):
        dump(plan, path)
    return tmp_path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    command = [sys.executable, "-m", "halopipe", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_a_plan_is_made_explained_checked_and_compared(folder: Path) -> None:
    made = call("plan", "profile.json", "--global-batch", "8")
    assert made.exit_code == 0, made.stderr
    assert "a step" in made.stdout
    assert made.stderr.startswith("wrote plan.json")
    explained = call("explain", "plan.json", "--profile", "profile.json")
    assert explained.exit_code == 0, explained.stderr
    assert "Step (predicted)" in explained.stdout
    assert explained.stdout == call("explain", "plan.json", "profile.json").stdout
    checked = call("check", "plan.json", "--profile", "profile.json")
    assert (checked.exit_code, checked.stdout) == (0, "plan.json is good\n")
    compared = call("compare", "plan.json", "by_hand.json", "--baselines", "--profile", "profile.json")
    assert compared.exit_code == 0, compared.stderr
    assert {"plan.json", "by_hand.json", "one-device", "data-parallel", "even-split"} <= set(compared.stdout.split())


def test_a_tie_is_called_one_by_plan_explain_compare_and_why_not(folder: Path) -> None:
    dump(chain_profile(18, speeds=(1.0, 0.1), parameter_bytes=2**22), "profile.json")
    made = call("plan", "profile.json", "--global-batch", "16")
    assert (made.exit_code, made.stdout.splitlines()[0].split(",")[0]) == (0, "1 stage on 1 device")
    said = "a tie     2 stages on 2 ranks, 1f1b-so, 4 micro-batches, is the fastest at the mean, 816 ms"
    assert said in made.stdout
    assert "this one uses 1 rank rather than 2, and gives up 5.9 % at the mean" in made.stdout
    explained = call("explain", "plan.json").stdout
    assert said in explained
    assert "the fastest at the mean is at the bound" in explained
    assert call("check", "plan.json", "--profile", "profile.json").stdout == "plan.json is good\n"
    fastest = call("plan", "profile.json", "--global-batch", "16", "--confidence", "0", "-o", "fastest.json")
    assert "2 stages on 2 devices" in fastest.stdout
    assert "a tie" not in fastest.stdout
    compared = call("compare", "plan.json", "fastest.json")
    assert "+5.9 %, a tie" in compared.stdout
    assert "a tie: fastest.json is the fastest at the mean, and not surely faster than plan.json (7" in compared.stdout
    assert "of these plan.json is taken: the fastest at the mean of those on the fewest ranks" in compared.stdout
    assert "plan.json uses 1 rank rather than 2, and gives up 5.9 % at the mean: 2 stages on 2 ranks" in compared.stdout
    told = json.loads(call("compare", "plan.json", "fastest.json", "--json").stdout)
    assert (list(told["ties"]), told["taken"]) == (["plan.json"], "plan.json")
    assert "faster, a tie" in call("explain", "plan.json", "--why-not", "stages=2").stdout
    refused = call("plan", "profile.json", "--confidence", "1")
    assert refused.exit_code == 2
    assert "a confidence of 1" in str(refused.stderr) + str(refused.exception)


def test_the_same_profile_gives_the_same_bytes(folder: Path) -> None:
    texts = [call("plan", "profile.json", "--json").stdout for _ in range(2)]
    assert texts[0] == texts[1] == (folder / "plan.json").read_text("utf-8")


def test_what_is_asked_of_a_plan_is_heeded(folder: Path) -> None:
    result = call(
        "plan", "profile.json", "--schedule", "gpipe", "--micro-batch", "4", "--memory", "512MB", "-o", "x.json"
    )
    assert result.exit_code == 0, result.stderr
    plan = load("x.json", Plan)
    assert (plan.decision.schedule, plan.decision.micro_batches) == ("gpipe", (4, 4))
    assert {rank.memory_limit_bytes for rank in plan.prediction.ranks} <= {512_000_000, 511_999_999}
    one = call("plan", "profile.json", "--solver", "one-device", "-o", "one.json")
    assert one.exit_code == 0, one.stderr
    assert len(load("one.json", Plan).decision.stages) == 1


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
        ["devices", "--json"],
        ["cluster", "--json"],
    ],
    ids=" ".join,
)
def test_json_stands_alone_on_stdout(folder: Path, arguments: list[str]) -> None:
    result = call(*arguments)
    assert isinstance(json.loads(result.stdout), dict), result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code", "text"),
    [
        (["plan", "nowhere.json"], 3, "error[H301] cannot read nowhere.json"),
        (["plan", "broken.json"], 3, "error[H302] broken.json is not JSON"),
        (["plan", "by_hand.json"], 3, "it is a halopipe plan file"),
        (["plan", "profile.json", "--schedule", "1b1f"], 2, "1f1b (did you mean that?)"),
        (["plan", "profile.json", "--solver", "best-frst"], 2, "best-first (did you mean that?)"),
        (["plan", "profile.json", "--memory", "2 giga"], 2, "error[H200] '2 giga' is not a size"),
        (["plan", "profile.json", "--memory", "1MiB"], 4, "error[H401]"),
        (["plan", "profile.json", "--ranks", "9"], 2, "error[H205] 9 ranks are asked for"),
        (["plan", "profile.json", "--global-batch", "-1"], 2, "global-batch"),
        (["plan"], 2, "PROFILE"),
        (["plam", "profile.json"], 2, "plam"),
        (["plan", "profile.json", "-o", "no/folder/plan.json"], 3, "error[H301] cannot write no/folder/plan.json"),
        (["explain", "nowhere.json"], 3, "error[H301] cannot read nowhere.json"),
        (["explain", "by_hand.json", "other.json"], 3, "error[H304] the plan was made for another profile"),
        (["explain", "by_hand.json", "profile.json", "--profile", "p.json"], 2, "two profiles are given"),
        (["explain", "by_hand.json", "--layer", "l9"], 2, "error[H206] no layer 'l9'"),
        (["explain", "by_hand.json", "--why-not", "magic"], 2, "nothing is known of 'magic'"),
        (["explain", "by_hand.json", "--what-if", "n9/x.memory=1GiB"], 2, "error[H206] no device 'n9/x'"),
        (["explain", "by_hand.json", "--what-if", "devices=3", "--prices"], 2, "are asked at once"),
        (["explain", "alone/by_hand.json", "--prices"], 2, "--prices searches again, which needs the profile"),
        (["plan", "profile.json", "--objective", "speed"], 2, "error[H206] no objective 'speed'"),
        (["plan", "profile.json", "--allow", "samples"], 2, "sample (did you mean that?)"),
        (["plan", "profile.json", "--recompute", "maybe"], 2, "error[H206] no way to recompute 'maybe'"),
        (["plan", "profile.json", "--fix", "l0"], 2, "error[H200] 'l0' is not a rule"),
        (["plan", "profile.json", "--forbid", "enc.*=replicas:2"], 2, "matches no layer"),
        (["plan", "profile.json", "--cluster", "nowhere.yaml"], 3, "error[H301] cannot read nowhere.yaml"),
        (["plan", "profile.json", "--cluster", "broken.json"], 3, "error[H302] broken.json is not YAML"),
        (["cluster", "broken.json"], 3, "error[H302] broken.json is not YAML"),
        (["cluster", "-o", "x.json"], 2, "--output needs a cluster file and --profile"),
        (["import", "broken.json"], 3, "error[H307]"),
        (["import", "broken.json", "--format", "piper"], 2, "no format to import 'piper'"),
        (["import", "broken.json", "--device", "V101"], 2, "error[H206] no device 'V101' in the catalogue"),
        (["compare", "alone/by_hand.json", "--baselines"], 2, "--baselines are solved from the profile"),
        (["compare", "by_hand.json", "by_hand.json"], 2, "by_hand.json is given twice"),
        (["check", "edited.json", "--profile", "profile.json"], 6, "error[H602] edited.json has"),
        (["schema", "plans"], 2, "plan (did you mean that?)"),
        (["export", "by_hand.json", "--to", "perfetto"], 2, "no export format 'perfetto'"),
        (["export", "alone/by_hand.json", "--to", "chrome-trace"], 2, "a trace needs a timeline"),
        (["run", "nowhere.json"], 3, "error[H301] cannot read nowhere.json"),
        (["run", "by_hand.json", "--hosts", "x"], 2, "torchrun --nproc-per-node"),
        (["profile", "a:b", "--hosts", "x"], 2, "on HOST1: torchrun --nnodes 2 --node-rank 1"),
        (["profile", "nowhere:factory", "-o", "x.json"], 2, "error[H201]"),
        (["profile", "profiler.models.resnet:resnet51", "-o", "x.json"], 2, "error[H201]"),
        (["profile", "profiler.models.resnet:resnet18", "--input", "8x3"], 2, "is not a list of positive integers"),
        (["profile", "profiler.models.resnet:resnet18", "--optimizer", "SDG"], 2, "SGD (did you mean that?)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_goes_wrong_is_said_on_stderr_with_its_exit_code(
    folder: Path, arguments: list[str], exit_code: int, text: str
) -> None:
    (folder / "broken.json").write_text('{"halopipe": ')
    dump(chain_profile(6), "other.json")
    plan = (folder / "by_hand.json").read_text("utf-8")
    (folder / "edited.json").write_text(plan.replace('"1F1", ', "", 1))
    before = sorted(path.name for path in folder.iterdir())
    result = call(*arguments)
    assert (result.exit_code, text in result.stderr, result.stdout) == (exit_code, True, ""), result.stderr
    assert ("error[H" not in result.stderr) or "\n  try: " in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == before


CLUSTER = """
halopipe: cluster
version: 1
hosts: [{name: n, count: 2, devices: [{device: T4, count: 2}]}]
links: {within-host: PCIe-3, across-hosts: Ethernet-10G}
"""


def test_machines_one_does_not_have_are_planned_for(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(CLUSTER)
    machines = ["--cluster", "cluster.yaml"]
    made = call("plan", "profile.json", *machines, "--solver", "even-split", "-o", "t4.json")
    assert made.exit_code == 0, made.stderr
    assert "costs: datasheet" in made.stdout
    assert load("t4.json", Plan).decision.stages[0].devices == ("n0/gpu0",)
    for verb in ("explain", "check"):
        found = call(verb, "t4.json", *machines)
        assert found.exit_code == 0, found.stderr
    assert call("explain", "t4.json", "--profile", "profile.json").exit_code == 3
    forgotten = call("check", "t4.json", "--profile", "profile.json")
    assert (forgotten.exit_code, "with --cluster FILE" in forgotten.stderr) == (6, True)
    written = call("cluster", "cluster.yaml", "--profile", "profile.json", "-o", "scaled.json")
    assert written.exit_code == 0, written.stderr
    assert "across-hosts" in written.stdout
    assert call("check", "t4.json", "--profile", "scaled.json").exit_code == 0


def test_a_published_profile_is_imported(folder: Path) -> None:
    nodes = [
        f"node{n} -- Layer{n}(x) -- forward_compute_time=10.0, backward_compute_time=20.0, "
        "activation_size=4096.0, parameter_size=1024.0"
        for n in (1, 2)
    ]
    (folder / "graph.txt").write_text("\n".join([*nodes, "\tnode1 -- node2"]) + "\n")
    made = call("import", "graph.txt", "--samples", "8", "--device", "V100-16GB", "-o", "imported.json")
    assert made.exit_code == 0, made.stderr
    (device,) = load("imported.json", Profile).cluster.devices
    assert (device.kind, device.memory_bytes) == ("V100-16GB", 2**34)
    (folder / "cluster.yaml").write_text(CLUSTER.replace("T4", "V100-16GB"))
    planned = call("plan", "imported.json", "--cluster", "cluster.yaml", "--solver", "even-split")
    assert planned.exit_code == 0, planned.stderr


def test_a_front_is_a_plan_file_a_point(folder: Path) -> None:
    result = call("plan", "profile.json", "--pareto", "3", "-o", "front.json")
    assert result.exit_code == 0, result.stderr
    written = [line.split()[1] for line in result.stderr.splitlines() if line.startswith("wrote ")]
    assert written[0] == "front.json"
    steps = [load(path, Plan).prediction.step_s for path in written]
    assert steps == sorted(steps)
    assert result.stdout.startswith("Step against memory of the fullest rank")


def test_ctrl_c_in_a_search_writes_the_best_so_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = load("by_hand.json", Plan)
    stopped = replace(best, search=replace(best.search, status="stopped"))
    monkeypatch.setattr(solve, "solve", lambda *_: stopped)
    result = call("plan", "profile.json", "-o", "stopped.json")
    assert result.exit_code == console.INTERRUPTED
    assert load("stopped.json", Plan) == stopped


def test_the_catalogue_and_this_host_are_listed(folder: Path) -> None:
    assert "V100-16GB" in call("devices").stdout
    assert "n0" in call("cluster").stdout


def test_faults_of_a_plan_are_json_too(folder: Path) -> None:
    plan = (folder / "by_hand.json").read_text("utf-8")
    (folder / "edited.json").write_text(plan.replace('"1F1", ', "", 1))
    result = call("check", "edited.json", "--profile", "profile.json", "--json")
    assert result.exit_code == 6
    assert json.loads(result.stdout)["faults"] != []


def test_a_trace_shows_predicted_and_measured(folder: Path) -> None:
    spans = (Span(0, "0F0", 0.0, 1.0),)
    dump(TimelineFile(Timeline("predicted", 1.0, spans), Timeline("measured", 1.1, spans), (1.1,), (2.3,)), "t.json")
    result = call("export", "by_hand.json", "--to", "chrome-trace", "--timeline", "t.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    names = [event["args"] for event in json.loads((folder / "trace.json").read_text())["traceEvents"][:1]]
    assert names == [{"name": "predicted"}]
    assert call("export", "by_hand.json", "--to", "chrome-trace", "--profile", "profile.json").exit_code == 0


def test_a_run_tells_machine_and_model_apart_and_teaches_the_profile_that_its_plan_remembers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a machine that computes 1.3 times as long as its profile, and a tenth longer than the model says."""
    (folder / "plans").mkdir()
    assert call("plan", "profile.json", "--global-batch", "8", "-o", "plans/plan.json").exit_code == 0
    plan = load("plans/plan.json", Plan)
    slow = PROFILE.corrected_by((Correction(CostClass("machine", PROFILE.cluster.devices[0].kind), 1.3, 1),))
    timeline = replace(predict(slow, plan.decision)[1], source="measured")
    timeline = replace(timeline, step_s=1.1 * timeline.step_s)

    def run_plan(plan: Plan, options: run.RunOptions, progress: object, replanner: object) -> run.RunResult:
        lone = tuple(passes(plan.decision, lambda _: 1.3, PROFILE)) if options.lone_passes == "on" else ()
        return run.RunResult((2.3,) * 9, (timeline.step_s,) * 9, 1, timeline, (), (), (), lone=lone)

    monkeypatch.setattr(run, "run_plan", run_plan)
    before = Path("profile.json").read_bytes()
    quiet = call("run", "plans/plan.json", "--no-learn", "--calibrate", "on", "--json")
    assert (quiet.exit_code, Path("profile.json").read_bytes()) == (0, before), quiet.stderr
    assert "the machine is 30 % slower than in its profile" in quiet.stderr
    drift = json.loads(quiet.stdout)["drift"]
    assert drift["model"] == pytest.approx(0.1)
    assert (1 + drift["machine"]) * 1.1 == pytest.approx(timeline.step_s / plan.prediction.step_s)
    assert load("timeline.json", TimelineFile).drift is not None
    taught = call("run", "plans/plan.json", "--calibrate", "on")
    assert taught.exit_code == 0, taught.stderr
    assert "profile.json has learnt from 1 run: machine x1.30" in taught.stderr
    assert "\nmachine: stages alone take " in taught.stdout
    assert "\nmodel: what it missed makes the step 10 % longer\n" in taught.stdout
    assert load("plans/plan.json", Plan) == plan, "it is --update that writes into the plan"
    assert call("report", "plans/plan.json", "timeline.json", "profile.json").exit_code == 0
    assert "machine since the profile" in Path("report.html").read_text("utf-8")
    plain = call("run", "plans/plan.json", "--json")
    assert json.loads(plain.stdout)["drift"] is None


def test_a_run_writes_its_timeline_and_on_request_a_trace_and_the_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[run.RunOptions] = []

    def run_plan(plan: Plan, options: run.RunOptions, progress: object, replanner: object) -> run.RunResult:
        asked.append(options)
        timeline = Timeline("measured", 0.011, (Span(0, "0F0", 0.0, 0.01),))
        return run.RunResult((2.3, 2.2), (0.012, 0.011), 1, timeline, (0.01, 0.0), (0.0, 0.0), (1, 1))

    monkeypatch.setattr(run, "run_plan", run_plan)
    before = load("alone/by_hand.json", Plan)
    assert call("run", "alone/by_hand.json", "--steps", "2").exit_code == 0
    assert load("timeline.json", TimelineFile).predicted.spans == ()
    assert asked[0] == run.RunOptions(2)
    assert load("alone/by_hand.json", Plan) == before
    options = ["--check-numerics", "--dtype", "float64", "--data", "a:b", "--seed", "3", "--deadline", "9"]
    files = ["--update", "--trace", "t.json", "-o", "x.json", "--profile", "profile.json"]
    result = call("run", "by_hand.json", "--steps", "2", *options, *files, "--json")
    assert result.exit_code == 0, result.stderr
    assert asked[1] == run.RunOptions(2, seed=3, data="a:b", check_numerics=True, dtype="float64", deadline_s=9.0)
    assert json.loads(result.stdout)["losses"] == [2.3, 2.2]
    training = "--data-from first --optimizer Adam --scheduler StepLR:step_size=1 --clip-norm 2 --accumulate 3"
    evaluation = "--eval-data c:d --eval-every 4 --eval-batches 5 --metrics m.jsonl"
    checkpoints = "--checkpoint saved --checkpoint-every 6 --keep 7 --resume"
    assert call("run", "by_hand.json", *f"{training} {evaluation} {checkpoints}".split()).exit_code == 0
    assert asked[2] == run.RunOptions(
        data_from="first",
        optimizer="Adam",
        scheduler="StepLR:step_size=1",
        clip_norm=2.0,
        accumulate=3,
        eval_data="c:d",
        eval_every=4,
        eval_batches=5,
        metrics=str(folder / "m.jsonl"),
        checkpoint=str(folder / "saved"),
        checkpoint_every=6,
        keep=7,
        resume=True,
    )
    measured = load("by_hand.json", Plan).measured
    assert measured is not None
    assert measured.step_s == 0.011
    assert load("x.json", TimelineFile).predicted.spans != ()
    assert {event["pid"] for event in json.loads((folder / "t.json").read_text())["traceEvents"]} == {0, 1}


def test_the_profile_beside_a_plan_is_found_if_the_plan_was_made_from_it(folder: Path) -> None:
    assert "Step (predicted)" in call("explain", "by_hand.json").stdout
    dump(chain_profile(6), "profile.json")
    assert "Step (predicted)" not in call("explain", "by_hand.json").stdout
    (folder / "profile.json").write_text("{")
    assert call("explain", "by_hand.json").exit_code == 0


@pytest.mark.parametrize("name", sorted(codec.FORMATS))
def test_each_format_has_a_schema(name: str) -> None:
    assert call("schema", name).stdout == codec.schema(name)


def failing(error: BaseException) -> typer.Typer:
    single = typer.Typer(pretty_exceptions_enable=False)

    def verb() -> None:
        raise error

    single.command()(console.reported(verb))
    return single


def test_ctrl_c_ends_with_130() -> None:
    result = CliRunner().invoke(failing(KeyboardInterrupt()), [])
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_an_error_of_ours_is_rendered_without_a_traceback() -> None:
    result = CliRunner().invoke(failing(InfeasibleError("no plan fits", ["n0/cpu0"], ["--micro-batch 1"])), [])
    assert result.exit_code == 4
    assert result.stderr == "error[H401] no plan fits\n  n0/cpu0\n  try: --micro-batch 1\n"


def test_a_bug_asks_to_be_reported_with_its_traceback() -> None:
    result = CliRunner().invoke(failing(ZeroDivisionError("oops")), [])
    assert result.exit_code == 1
    assert result.stderr.startswith("error[H100] ZeroDivisionError: oops\n  this is a bug in halopipe; please report")
    assert "Traceback" in result.stderr


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    result = process("--version", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("halopipe 0.")


def test_a_file_that_hides_a_package_is_named_before_anything_is_imported(tmp_path: Path) -> None:
    (tmp_path / "planner.py").write_text("raise SystemExit('imported')\n")
    result = process("plan", "profile.json", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error[H203]")


def test_a_reader_that_has_had_enough_is_no_error(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    line = f"'{sys.executable}' -m halopipe schema profile | head -n 1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "{\n", "")


LOADED = """
import sys
from halopipe.cli.app import main
sys.argv[1:] = {arguments}
code = main()
print(code, *sorted({{"torch", "matplotlib", "pandas", "yaml"}} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "profile.json"],
        ["explain", "by_hand.json", "profile.json"],
        ["compare", "by_hand.json", "--baselines", "--profile", "profile.json"],
        ["check", "by_hand.json"],
        ["export", "by_hand.json", "--to", "chrome-trace", "--profile", "profile.json"],
        ["schema", "plan"],
        ["devices"],
        ["cluster"],
        ["explain", "by_hand.json", "profile.json", "--why-not", "one-device"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_verbs_that_need_no_devices_load_no_torch(folder: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-c", LOADED.format(arguments=arguments)]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    code, *loaded = result.stderr.splitlines()[-1].split()
    assert (code in ("0", "6"), loaded) == (True, ["yaml"] if arguments == ["devices"] else []), result.stderr


def test_what_a_hint_says_can_be_pasted_also_with_spaces_in_paths(folder: Path) -> None:
    made = call("plan", "profile.json", "--solver", "one-device", "-o", "my plan.json")
    assert made.exit_code == 0, made.stderr
    assert made.stderr.endswith(
        "next: halopipe explain 'my plan.json' --profile profile.json, or halopipe run 'my plan.json'\n"
    )


@pytest.mark.parametrize(
    "arguments",
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
    ],
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
