"""The rows, by subject: what is planned, explained, read, profiled, run, saved, served and called from Python."""

from __future__ import annotations

import io
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.folders import PYTHON
from benchmarks.robustness.refusals.following import Refusal


def of_planning() -> Iterator[Refusal]:
    """All that ``plan`` and ``ways`` refuse."""
    plan = ("plan", "profile.json", "--global-batch", "8")
    here = {"profile ": "of a model that the row has not, on more devices than there are"}
    asked: tuple[tuple[str, Mapping[str, str], Mapping[str, str]], ...] = (
        ("--zero 3 --shard never", {}, {}),
        ("--zero 7", {}, {}),
        ("--micro-batch 16", {}, {}),
        ("--rate 10 --schedule 1f1b", {}, {}),
        ("--recompute selective", {}, {}),
        ("--ranks 9", {}, here),
        ("--memory 99TiB", {}, {}),
        ("--memory 1KiB", {}, {}),
        ("--gap 2", {}, {}),
        ("--gap nan", {}, {}),
        ("--confidence 2", {}, {}),
        ("--rate nan", {}, {}),
        ("--rate inf", {}, {}),
        ("--quick", {}, {"add --measure-missing": "the devices of the profile are not here"}),
        ("--halo-depth 2", {}, {}),
        ("--proof x.json --ways data=1", {}, {}),
        ("--proof plan.json -o plan.json", {"another name": "proof.json"}, {}),
        ("--proof profile.json", {"-o another name": "--proof proof.json"}, {}),
        ("--fix *=sample:2 --allow spatial", {}, {}),
        ("--solver span-ilp --schedule chimera", {}, {}),
        ("--fix *=recompute:yes --recompute never", {}, {}),
        ("--fix loss=stage:30", {}, {}),
        ("--rate 10 --objective memory", {}, {}),
        ("--rate 10 --solver one-device", {}, {}),
        ("--rate 1e9", {}, {}),
        ("--objective latency --schedule 1f1b", {}, {}),
        ("--shard always --zero 2 --schedule zb-h1", {}, {}),
        ("--ways tensor=2 --schedule 1f1b", {}, {}),
        ("--ways data=2,micro_batch=2 --micro-batch 8", {}, {"micro_batch=...": "a part of a way is no option"}),
        ("--solver span-ilp --objective latency", {}, {}),
        ("--time-limit nan", {}, {}),
        ("--token-slices 4+4", {}, {}),
        ("--allow time", {}, {}),
        ("--measure-missing", {}, {}),
        ("--fly", {}, {}),
        ("-o profile.json", {"another name": "other.json"}, {}),
    )
    for text, fill, elsewhere in asked:
        yield Refusal(f"plan {text}", (*plan, *shlex.split(text)), fill, folders.cluster, plan, elsewhere)
    for text, of, fill in (
        ("--recompute selective --allow time", "attention", {}),
        ("--token-slices 8+8 --schedule chimera", "attention", {}),
        ("--zero 2 --shard always", "with_terms", {}),
        ("--ranks 2", "unlinked", {"FILE": "cluster.yaml"}),
        ("--recompute never", "small_devices", {"FILE": "large.yaml"}),
        ("--batch-statistics whole --micro-batch 2", "batch_norm", {}),
        ("--batch-statistics whole --global-batch 4096", "batch_norm", {}),
        ("--global-batch 5 --micro-batch 4", "batch_norm_of_rows", {}),
        ("--global-batch 1", "batch_norm_of_rows", {}),
        ("--micro-batch 3", "of_one_size", {}),
        ("--micro-batch 4", "of_whole_batches", {}),
        ("--global-batch 4096", "of_whole_batches", {}),
        ("--time-limit 0 --memory 7MiB --solver span-ilp", "", {}),
        ("--schedule chimera --ranks 1", "", {}),
        ("--fix loss=replicas:2", "keeping", {}),
        ("--token-slices 4+4 --objective latency", "attention", {}),
    ):
        made = folders.having(of) if of else folders.cluster
        name = f"plan {text} ({of})" if of else f"plan {text}"
        elsewhere = {"torchrun": "it is another launcher's, on two hosts"}
        yield Refusal(name, ("plan", "profile.json", *shlex.split(text)), fill, made, plan, elsewhere)
    too_many = ("plan", "profile.json", "--global-batch", "16", "--ways", "data=16")
    yield Refusal("plan --ways data=16", too_many, {"FILE": "cluster.yaml"}, folders.cluster, too_many, here)
    ways = "ways llama2-7b --on a100-dgx --global-batch 64"
    for text, fill in (
        (f"{ways} --gpus 8 --tensor 3", {}),
        (f"{ways} --gpus 8 --recompute-modules moe", {}),
        ("ways mixtral-8x7b --on a100-dgx --global-batch 64 --gpus 64 --recompute-modules moe,moe_act", {}),
        ("ways gpt3-175b --on a100-dgx --global-batch 64 --gpus 64 --recompute operators", {}),
        (f"{ways} --gpus 1", {}),
        ("ways llama2-7b --on a100-dgx --gpus 8", {}),
        (f"{ways} --gpus 16 --for torchtitan --zero 1", {"another launcher": "megatron"}),
        (f"{ways} --gpus 16 --version 0.2", {"LAUNCHER": "torchtitan"}),
        (f"{ways} --gpus 8 --precision fp8", {"another cluster": "h100-dgx"}),
        (f"{ways} --gpus 8 --context 3", {"another --context, or seq=...": "--context 2"}),
        (f"{ways} --gpus 8 --offload activations --recompute full", {}),
        ("ways llama2-7b --on g4dn.12xlarge --global-batch 64 --gpus 128 --offload optimizer", {}),
    ):
        yield Refusal(text, tuple(text.split()), fill)
    for text in ("plan", "plan profile.json other", "plan profile.json --global-batch 99999999"):
        yield Refusal(text, tuple(text.split()))


_OF = "name a file that 'halopipe {}' wrote"
_OF_PLAN = _OF.format("plan")


def of_plans() -> Iterator[Refusal]:
    """Plans explained, compared, drawn, reported, exported."""
    seen = {"PROFILE": "profile.json"}
    timeline = {**seen, "TIMELINE": "timeline.json"}
    for words, fill, prepare in (
        ("explain apart/plan.json --what-if devices=2", {**seen, "...": "--what-if devices=2"}, None),
        ("explain apart/plan.json --prices", {**seen, "...": "--prices --time-limit 1"}, None),
        ("explain apart/plan.json --receptive-field l1", {**seen, "...": "--layer l1"}, None),
        ("explain plan.json --why-not one-devise", {}, None),
        ("explain plan.json --box feature=0:4", {}, None),
        ("explain profile.json --why-not one-device", {_OF_PLAN: "halopipe explain plan.json"}, None),
        ("compare profile.json", {_OF_PLAN: "halopipe compare plan.json"}, None),
        ("check profile.json", {_OF_PLAN: "halopipe check plan.json"}, folders.proved),
        (
            "check plan.json --proof profile.json",
            {_OF.format("plan --proof"): "halopipe check plan.json --proof proof.json"},
            folders.proved,
        ),
        (
            "check plan.json --profile plan.json",
            {_OF.format("profile"): "halopipe check plan.json --profile profile.json"},
            folders.proved,
        ),
        ("explain apart/plan.json --why-not one-device", seen, None),
        (
            "export plan.json --to chrome-trace --timeline plan.json",
            {_OF.format("run"): "halopipe export plan.json --to chrome-trace --timeline timeline.json"},
            folders.timeline,
        ),
        ("compare apart/plan.json --baselines", seen, None),
        ("draw plan.json -o figure.svg", {}, None),
        ("draw plan.json -o step.pdf", {}, None),
        ("draw apart/plan.json -o step.svg", seen, folders.timeline),
        ("report apart/plan.json --pareto 2", seen, None),
        ("report plan.json -o report.pdf", {}, None),
        ("report profile.json", {"...": ""}, None),
        ("notebook profile.json --no-run -o strategies.pdf", {}, None),
        ("export apart/plan.json --to chrome-trace", timeline, folders.timeline),
        ("export apart/plan.json --to torch-pipelining", seen, None),
        ("export plan.json --to torch-pipelining -o pipe.csv", {}, None),
        ("export plan.json --to megatron", {}, None),
        ("export plan.json --to chrome-trace --version 2 --profile profile.json", {}, None),
        (
            "export ways.json --to torchtitan",
            {"...": "llama2-7b --on a100-dgx --gpus 16 --global-batch 64"},
            folders.ways_in_stages,
        ),
        ("export plan.json", {}, None),
    ):
        yield Refusal(words, tuple(shlex.split(words)), fill, prepare)
    two = ("plan", "profile.json", "--global-batch", "8", "--micro-batch", "2")
    yield Refusal(
        "export a stage of two ranks --to torch-pipelining",
        ("export", "plan.json", "--to", "torch-pipelining"), {}, folders.data_parallel, two,
    )  # fmt: skip
    for words, fill, prepare in (
        ("explain plan.json --what-if hosts=2", {"FILE": "cluster.yaml"}, folders.cluster),
        ("explain plan.json --profile other.json --why-not one-device", {}, folders.two_profiles),
        ("explain plan.json --why-not one-device", {}, folders.faulty),
        ("check plan.json --proof proof.json", {"PROFILE": "apart/profile.json"}, folders.proved_apart),
        ("check plan.json --proof proof.json --json", {}, folders.badly_proved),
        ("check plan.json --profile profile.json --json", {"FILE": "cluster.yaml"}, folders.of_machines),
        ("draw plan.json -o .", {}, None),
    ):
        yield Refusal(words, tuple(words.split()), fill, prepare)
    for words, name in (("report plan.json", "jinja2"), ("notebook profile.json", "nbclient")):
        elsewhere = {"pip install": "it asks another machine"}
        around = partial(folders.lacking, name)
        yield Refusal(f"{words}, without {name}", tuple(words.split()), elsewhere=elsewhere, around=around)
    writes = ("plan", "profile.json", "-o", "taken.json")
    yield Refusal("plan -o taken.json", writes, {"another name": "new.json"}, around=folders.written_by_another)


def of_files() -> Iterator[Refusal]:
    """Files that are another kind's, spoilt, or not there."""
    for words, fill in (
        ("check broken.json", {}),
        ("merge profile.json -o profile.json", {"another name": "other.json"}),
        ("cluster -o out.json", {"FILE": "cluster.yaml", "PROFILE": "profile.json"}),
        ("import graph.txt --device abacus", {}),
        ("devices x", {}),
        ("schema", {}),
        ("run plan.json --write-job job.txt", {}),
        ("fly", {}),
    ):
        yield Refusal(words, tuple(words.split()), fill, folders.others)
    for words, fill in (
        ("import layers.csv --from sailor --device V100-16GB", {"NAME": "OPT-350"}),
        ("import vgg16.graph.txt --device EPYC-7763", {}),
        ("ways opt-350m --on unlike.yaml --gpus 8 --global-batch 256 --zero 0", {}),
        ("ways opt-350m --on a100-dgx --gpus 8 --global-batch 64 --layers layers.csv", {"cluster.yaml": "alike.yaml"}),
        ("ways opt-350m --on alike.yaml --gpus 8 --global-batch 64 --layers layers.csv --precision fp8", {}),
        ("ways opt-350m --on mixed.yaml --gpus 8 --global-batch 64", {}),
        ("profile model.py:model --tables a40.csv", {"--on h100-dgx": "--on h100-dgx --tables a40.csv"}),
        ("profile model.py:model --on a100-dgx --local-loss stage", {}),
        ("profile model.py:model --on T4.yaml --dtype float64", {"another --dtype": "--dtype float32"}),
        ("profile model.py:model --input 16,1,8,8 --workers 1 --arg x", {}),
        ("run job.yaml", {"FILE": "new.yaml"}),
    ):
        yield Refusal(words, tuple(words.split()), fill, folders.elsewhere)


def of_profiling() -> Iterator[Refusal]:
    """All that ``profile`` refuses."""
    for words in ("--workers 1 --quick --device cuda", "--workers 1 --quick --dtype bfloat16 --autocast bfloat16",
                  "--on a100-dgx --workers 9", "--on cluster.yaml --workers 9"):  # fmt: skip
        profile = ("profile", "model.py:model", *words.split())
        yield Refusal(f"profile {words}", profile, {}, folders.modelled, is_dear=True)
    for words, fill in (
        ("of_one_size --sizes 1,2", {}),
        ("reading --on a100-dgx", {}),
        ("model --local-loss 5", {}),
        ("without_values", {}),
        ("rotated --dtype bfloat16", {}),
        ("alone", {"8,3,64,64": "16,1,8,8"}),
        ("spoilt", {}),
    ):
        factory, *options = words.split()
        quick = [] if factory in ("reading", "without_values") else ["--workers", "1", "--quick"]
        arguments = ("profile", f"model.py:{factory}", *options, *quick)
        yield Refusal(f"profile model.py:{words}", arguments, fill, folders.after(), is_dear=True)
    clouds = ("profile", "model.py:cloudy", "--on", "a100-dgx")
    yield Refusal("profile model.py:cloudy --on a100-dgx", clouds, {}, folders.after(), is_dear=True)
    of_one_size = folders.after(("profile", "model.py:wide", "--quick", "--workers", "2", "--sizes", "4"))
    arguments = ("plan", "profile.json", "--global-batch", "4", "--ranks", "2", "--solver", "data-parallel")
    fill = {"...": "model.py:wide --quick --workers 2"}
    yield Refusal("plan --solver data-parallel, of one size", arguments, fill, of_one_size, is_dear=True)
    fill = {"MODEL": "model.py:model --quick"}
    arguments = ("plan", "profile.json", "--global-batch", "8", "--cluster", "alike.yaml")
    yield Refusal("plan --cluster alike.yaml, unmeasured", arguments, fill, folders.unmeasured, is_dear=True)
    one = folders.after(("profile", "model.py:model", "--quick", "--workers", "1"))
    fill = {"...": "model.py:model --quick"}
    for words in ("--ranks 2", "--ways data=2"):
        elsewhere = {"cluster": "it is of no such cluster", "--ranks": "another row follows it"}
        arguments = ("plan", "profile.json", "--global-batch", "16", *words.split())
        yield Refusal(f"plan {words}, profiled by 1", arguments, fill, one, elsewhere=elsewhere, is_dear=True)


def of_running() -> Iterator[Refusal]:
    """All that ``run`` refuses."""
    within = folders.planned("--schedule", "pipedream", "--micro-batch", "4")
    forward = folders.planned("--schedule", "forward")
    runs: tuple[tuple[str, Callable[[Path], None], Mapping[str, str]], ...] = (
        ("--keep 2", folders.trains, {}),
        ("--eval-every 2", folders.trains, {}),
        ("--restarts 2", folders.trains, {}),
        ("--profile-folder traces", folders.trains, {}),
        ("--profile-steps 30:50", folders.trains, {}),
        ("--checkpoint saved --accumulate 3 --steps 10", folders.trains, {}),
        ("--check-numerics --accumulate 30 --steps 10", folders.trains, {}),
        ("--steps 0", folders.trains, {}),
        ("--data-from share", folders.trains, {"FACTORY": "model.py:data"}),
        ("--check-numerics", within, {}),
        ("--on-nan skip", within, {}),
        ("--optimizer SGD", forward, {}),
        ("--checkpoint saved", folders.saved, {"another": ""}),
        ("--resume", folders.saved, {"--checkpoint checkpoints": "--checkpoint saved"}),
        ("--replan", folders.trains, {}),
        ("-o plan.json", folders.trains, {"another name": "other.json"}),
        ("--profile-steps 5:2", folders.trains, {}),
        (
            "--resume --checkpoint nowhere",
            folders.saved,
            {"name the folder of 'halopipe run --checkpoint FOLDER'": "--checkpoint saved"},
        ),
        (
            "--resume --checkpoint wrong",
            folders.beside_a_plan,
            {"name the folder of 'halopipe run --checkpoint FOLDER'": "--checkpoint saved"},
        ),
        ("--resume --checkpoint saved --steps 4", folders.saved, {}),
        ("--transport mpi", folders.trains, {}),
        ("--optimizer SGD:lr=1e10 --steps 5", folders.trains, {}),
    )
    for words, prepare, fill in runs:
        arguments = ("run", "plan.json", "--no-learn", *words.split())
        elsewhere = {"torchrun": "it is another launcher's", "pip install": "it asks another machine"}
        yield Refusal(f"run {words}", arguments, fill, prepare, folders.PLANNED, elsewhere, is_dear=True)
    vectors = {"MODEL": "model.py:any_shape --quick", "8,3,64,64": "16,3,64,64"}
    smaller = {"SIZE": "40KiB", "a smaller --global-batch or --micro-batch": "--micro-batch 2"}
    runs = (
        ("--steps 10 --data model.py:four_batches", folders.trains, {}),
        ("--steps 3 --data model.py:twice_as_large", folders.trains, {}),
        ("--steps 3 --data model.py:four_batches --data-from share", folders.trains, {}),
        ("--steps 3 --data model.py:of_this_process --no-check-first-step", folders.replicas, {}),
        (
            "--steps 3 --replan --restarts 3 --checkpoint new",
            folders.without_profile,
            {"PROFILE": "apart/profile.json"},
        ),
        (
            "--steps 3 --eval-data model.py:nothing --eval-every 2",
            folders.trains,
            {"with samples in it": "model.py:data"},
        ),
        ("--steps 5 --optimizer SGD:lr=1e10 --on-nan ignore", folders.trains, {}),
        ("--steps 1 --optimizer SGD:lr=1e36 --data model.py:bright --checkpoint saved", folders.trains, {}),
        (
            "--steps 1 --optimizer SGD:lr=1e36 --data model.py:bright --checkpoint saved --no-check-first-step",
            folders.trains,
            {},
        ),
        ("--steps 3 --memory-limit 64KiB --no-check-first-step", folders.trains, smaller),
        ("--steps 3 --clip-norm 1", within, {}),
        ("--steps 4 --accumulate 2", within, {}),
        (
            "--steps 3 --data model.py:smaller",
            within,
            {"another halopipe plan --global-batch": "halopipe plan --global-batch 12"},
        ),
        ("--steps 3 --optimizer model.py:joined", folders.two_stages, {}),
        ("--steps 3 --no-check-first-step", folders.disordered, {}),
        (
            "--steps 3 --data model.py:one_too_many --data-from share",
            folders.of("normed"),
            {"of another number than 16": "11"},
        ),
        ("--steps 3 --data halopipe.data.demo_data:digits", folders.of_vectors, vectors),
    )
    for words, prepare, fill in runs:
        arguments = ("run", "plan.json", "--no-learn", *words.split())
        elsewhere = {"clip_norm": "its own code clips"}
        yield Refusal(f"run {words}", arguments, fill, prepare, folders.PLANNED, elsewhere, is_dear=True)
    evaluates = (
        "--data model.py:pictures --data-from share"
        " --eval-data model.py:pictures --eval-metric model.py:MeanError --eval-outputs output,targets"
    )
    clouds = {"8,4000,4": "16,40,4", "MODEL": "model.py:cloudy --quick"}
    planned = folders.PLANNED
    moody = folders.of("moody")
    for name, words, prepare, plan, fill in (
        ("token slices, compiled", "--compile eager", folders.sliced, folders.SLICED, {}),
        ("spans, compiled", "--compile eager", folders.spans, folders.SPANS, {}),
        ("slices of gradients, compiled", "--compile eager", folders.slices, folders.SLICES, {}),
        ("parts of pictures", evaluates, folders.high, folders.HIGH, {}),
        ("no mean", "--check-numerics", folders.in_four, planned, {}),
        ("cancelling", "--check-numerics --data model.py:cancelling", folders.of_sums, planned, {}),
        ("moody", "", moody, planned, {}),
        ("moody, checked", "--check-numerics", moody, planned, {}),
        (
            "scaled", "--data model.py:with_scales --data-from share",
            folders.of("scaled"), planned, {"FACTORY": "model.py:whole_batches"},
        ),
        ("vectors", "--data halopipe.data:shapes", folders.of_vectors, planned, clouds),
    ):  # fmt: skip
        arguments = ("run", "plan.json", "--no-learn", "--steps", "2", *words.split())
        yield Refusal(f"run --steps 2 ({name})", arguments, fill, prepare, plan, is_dear=True)
    inverse = folders.of("inverse")
    for name, prepare in (
        ("dies_once", folders.trains),
        ("is_asked_to_end_once", folders.trains),
        ("is_singular_once", inverse),
    ):
        words = f"run plan.json --no-learn --steps 8 --data model.py:{name} --checkpoint saved --checkpoint-every 2"
        elsewhere = {"mend the module": "it was a step's data", "look at": "nothing killed it"}
        arguments = tuple(words.split())
        yield Refusal(f"run --data {name}", arguments, {}, prepare, elsewhere=elsewhere, is_dear=True, is_there=True)
    metrics = ("run", "plan.json", "--no-learn", "--steps", "3", "--metrics", "folder/")
    around = partial(folders.lacking, "tensorboard")
    elsewhere = {"pip install": "it asks another machine"}
    yield Refusal(
        "run --metrics folder/", metrics, {}, folders.trains, elsewhere=elsewhere, is_dear=True, around=around
    )
    report = ("report", "plan.json", "timeline.json")
    yield Refusal("report plan.json timeline.json", report, {}, folders.of_another_run, is_dear=True)


_SAVED = {"FOLDER": "saved", "another": "another-folder"}


def of_checkpoints() -> Iterator[Refusal]:
    """All that are refused over a folder of checkpoints."""
    for words in (
        "checkpoint list", "checkpoint walk saved", "checkpoint export saved", "checkpoint saved --step 7",
    ):  # fmt: skip
        fill = {**_SAVED, "...": "weights.pt"}
        yield Refusal(words, tuple(words.split()), fill, folders.saved, is_dear=True)
    for words, prepare, fill in (
        ("--resume --accumulate 3 --steps 12", folders.saved, {"as it was": "1"}),
        ("--resume --steps 9", folders.of_another_model, {}),
        ("--resume --steps 8 --metrics bad.jsonl", folders.unreadable, {"another name": "good.jsonl"}),
    ):
        arguments = ("run", "plan.json", "--no-learn", "--checkpoint", "saved", *words.split())
        yield Refusal(f"run --checkpoint saved {words}", arguments, fill, prepare, is_dear=True)


def of_serving() -> Iterator[Refusal]:
    """All that ``serve`` refuses."""
    fill = {"--to FOLDER": "--to answers", "FOLDER": "folder", "another folder": "answers"}
    elsewhere = {
        "--http": "it answers until it is ended",
        "--stdin json": "this process has no standard input to serve from",
        "leave --to": "the same",
    }
    for words in (
        "serve plan.json",
        "serve plan.json --from folder",
        "serve plan.json --from folder --to folder",
        "serve plan.json --stdin json --to answers",
    ):
        yield Refusal(words, tuple(words.split()), fill, folders.asks, folders.PLANNED, elsewhere, is_dear=True)
    learning = (
        "serve",
        "plan.json",
        "--from",
        "folder",
        "--to",
        "answers",
        "--learn",
        "--reader",
        "model.py:read_both",
    )
    for name, options, prepare in (
        ("serve --learn", (), folders.asks_two_stages),
        ("serve --learn --mode eval", ("--mode", "eval"), folders.learns),
    ):
        yield Refusal(name, (*learning, *options), {}, prepare, folders.PLANNED, is_dear=True)
    line = b'{"inputs": [%s]}' % b",".join([b"[[%s]]" % b",".join([b"[0,0,0,0,0,0,0,0]"] * 8)] * 16)
    array = io.BytesIO()
    np.save(array, np.zeros((16, 1, 8, 8), np.float32))
    for words, asked in (
        ("serve plan.json --stdin npy --max-request 1KiB", array.getvalue()),
        ("serve plan.json --stdin json --max-request 1KiB", line),
        ("serve plan.json, with an input", b""),
    ):
        ways = {"--http": "it answers until it is ended"}
        arguments = tuple(words.partition(",")[0].split())
        fill = {"SIZE": "1MiB", "--to FOLDER": "--to answers", "FOLDER": "folder"}
        yield Refusal(words, arguments, fill, folders.asks, folders.PLANNED, ways, is_dear=True, asked=asked)
    clouds = {"FACTORY": "halopipe.data:shapes"}
    for name, prepare, plan, fill in (
        ("token slices", folders.asks_of_tokens, folders.SLICED, {}),
        ("clouds", folders.asks_of_clouds, folders.PLANNED, clouds),
        ("of its process", folders.asks_of_its_process, folders.PLANNED, {}),
    ):
        arguments = ("serve", "plan.json", "--from", "folder", "--to", "answers")
        yield Refusal(f"serve plan.json ({name})", arguments, fill, prepare, plan, is_dear=True)
    fill = {"an empty folder": "other", "FACTORY": "model.py:read", "FOLDER": "answers"}
    for words, prepare in (
        ("serve plan.json --from folder --to answers --stdin npy", folders.asks),
        ("serve plan.json --from folder --stdin npy", folders.asks),
        ("serve plan.json --from folder --to answers", folders.asks_in_text),
        ("serve plan.json --from folder --to saved", folders.has_answered),
        ("serve plan.json --stdin xml", folders.asks),
    ):
        asked = b"" if "--stdin" in words else None
        yield Refusal(words, tuple(words.split()), fill, prepare, folders.PLANNED, is_dear=True, asked=asked)


def of_scripts() -> Iterator[Refusal]:
    """All that calls of ``hp`` refuse."""
    call = "hp.plan(hp.load('profile.json'), confidence=2)"
    yield Refusal(call, (PYTHON, f"import halopipe as hp\n{call}"))
    call = "hp.execute(hp.load('plan.json'))"
    elsewhere = {"torchrun": "another program starts it"}
    script = f"import halopipe as hp\n{call}"
    yield Refusal(call, (PYTHON, script), prepare=folders.trains, elsewhere=elsewhere, is_dear=True)


def rows() -> tuple[Refusal, ...]:
    """All of them, by subject."""
    subjects = (of_planning, of_plans, of_files, of_profiling, of_running, of_checkpoints, of_serving, of_scripts)
    return tuple(row for subject in subjects for row in subject())
