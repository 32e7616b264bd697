"""What a user may give by mistake, and others by intent: a row a class, each with the word that halopipe has for it.

    python -m benchmarks.robustness --part hostile --only WORD

A row is a command line in a folder of files.  It is good if it ends soon, with the exit code of its class (2 usage, 3 a
bad file), a typed error that names the place, and no traceback; and if it wrote nothing.  Rows run in this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.robustness.fuzzing import OverrunError, watched
from benchmarks.robustness.hostile_files import USAGE, Hostile, files, plan_text, profile_text
from halopipe.cli.app import _Loaded, app

LIMIT_S = 6.0
"""Processor time of a row; what takes most is reading a file of a million keys."""


def verdict(row: Hostile, folder: Path) -> str:
    """What is wrong with how halopipe takes the row; empty if it is good.  ``folder`` is empty, and the row's own."""
    (folder / "profile.json").write_text(profile_text(), "utf-8")
    (folder / "plan.json").write_text(plan_text(), "utf-8")
    if row.prepare is not None:
        row.prepare(folder)
    before = _contents(folder)
    home = os.getcwd()
    environment = dict(os.environ)
    os.chdir(folder)
    os.environ.update(row.environment)
    try:
        with watched(LIMIT_S):
            result = CliRunner().invoke(app, list(row.arguments))
    except OverrunError:
        return f"more than {LIMIT_S} s"
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(home)
    shown = " ".join(result.stderr.replace("│", " ").split())
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return f"an exception: {result.exception!r}"
    if result.exit_code != row.exit_code or "Traceback" in shown:
        return f"exit code {result.exit_code} instead of {row.exit_code}: {shown[:400]}"
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in result.output):
        return f"control characters: {result.output[:200]!r}"
    if " ".join(row.says.split()) not in shown:
        return f"{row.says!r} is not said: {shown[:400]}"
    if _contents(folder) != before:
        return f"files were made or changed: {sorted(set(_contents(folder)) ^ set(before))}"
    return ""


def rows() -> tuple[Hostile, ...]:
    """All classes."""
    return (*files(), *_options(), *_numbers(), *_environments(), *_outputs(), *_checkpoints())


def _contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def _options() -> Iterator[Hostile]:
    """Command lines; exit code 2 throughout."""
    plan = ("plan", "profile.json")
    run = ("run", "plan.json")
    explain = ("explain", "plan.json")
    found: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
        ((), ("fly",), "No such command 'fly'"),
        ((), ("--fly",), "No such option: --fly"),
        ((), ("plan",), "Missing argument 'PROFILE'"),
        ((), ("check",), "Missing argument 'PLAN'"),
        ((), ("compare",), "Missing argument 'PLAN...'"),
        (plan, ("--fly",), "No such option: --fly"),
        (plan, ("another.json",), "unexpected extra argument(s) (another.json)"),
        (plan, ("--global-batch", "-1"), "--global-batch"),
        (plan, ("--global-batch", "many"), "--global-batch"),
        (plan, ("--global-batch", str(2**40)), "--global-batch"),
        (plan, ("--micro-batch", "0"), "--micro-batch"),
        (plan, ("--micro-batch", "-1"), "--micro-batch"),
        (plan, ("--micro-batch", "x"), "--micro-batch"),
        (plan, ("--micro-batch", "99999"), "micro-batch 99999 is larger"),
        (plan, ("--schedule", "2f2b"), "no schedule '2f2b'"),
        (plan, ("--schedule", ""), "no schedule ''"),
        (plan, ("--solver", "oracle"), "no solver 'oracle'"),
        (plan, ("--objective", "fun"), "no objective 'fun'"),
        (plan, ("--allow", "time"), "no input has a dim of tokens (time)"),
        (plan, ("--recompute", "often"), "no way to recompute 'often'"),
        (plan, ("--shard", "often"), "no way to shard 'often'"),
        (plan, ("--ranks", "-1"), "--ranks"),
        (plan, ("--ranks", "99"), "99 ranks are asked for"),
        (plan, ("--max-stages", "-1"), "--max-stages"),
        (plan, ("--halo-depth", "-1"), "--halo-depth"),
        (plan, ("--memory", "much"), "'much' is not a size"),
        (plan, ("--memory", "0GB"), "'0GB' is not a size"),
        (plan, ("--memory", "-1GB"), "'-1GB' is not a size"),
        (plan, ("--memory", "9" * 5000 + "GB"), "is not a size"),
        (plan, ("--memory", "999TiB"), "--memory is more than the devices have"),
        (plan, ("--gap", "-0.1"), "--gap"),
        (plan, ("--gap", "nan"), "--gap"),
        (plan, ("--gap", "inf"), "--gap"),
        (plan, ("--time-limit", "-1"), "--time-limit"),
        (plan, ("--time-limit", "nan"), "--time-limit"),
        (plan, ("--time-limit", "soon"), "--time-limit"),
        (plan, ("--pareto", "-1"), "--pareto"),
        (plan, ("--token-slices", "9" * 5000 + "+1"), "--token-slices"),
        (plan, ("--fix", "*=stage:" + "9" * 5000), "stage is a whole number"),
        (plan, ("--solver", "\udcff"), "is not UTF-8"),
        (plan, ("--ways", f"pipeline={10**17}"), "a way of pipeline"),
        (plan, ("--micro-batch", str(10**23)), "--micro-batch"),
        (plan, ("--fix", "features"), "is not a rule"),
        (plan, ("--fix", "*=stage:x"), "stage is a whole number"),
        (plan, ("--fix", "*=colour:red"), "no rule is about 'colour'"),
        (plan, ("--fix", "nothing=stage:0"), "matches no layer"),
        (plan, ("--fix", "*=device:n9"), "n9"),
        (plan, ("--forbid", "*=recompute:maybe"), "recompute is yes or no"),
        (plan, ("--forbid", "\x1b[31m"), "is not a rule"),
        (plan, ("-o", "profile.json"), "profile.json is read, and would be replaced"),
        (explain, ("--layer", "nothing"), "nothing"),
        (explain, ("--why-not", "x=1"), "x"),
        (explain, ("--what-if", "n0/cpu0.colour=red"), "colour"),
        (explain, ("--what-if", "devices=-1"), "devices"),
        (explain, ("--what-if", "devices=1000000"), "devices"),
        (explain, ("--what-if", f"global-batch={10**17}"), "global-batch"),
        (explain, ("--why-not", f"micro-batch={10**17}"), "micro-batch"),
        (explain, ("--what-if", "n0/cpu0.memory=much"), "much"),
        (explain, ("--why-not", "dp=4", "--what-if", "devices=4"), "are asked at once"),
        (explain, ("profile.json", "--profile", "profile.json"), "two profiles are given"),
        (explain, ("--prices", "--time-limit", "0"), "--time-limit"),
        (("compare", "plan.json", "plan.json"), (), "plan.json is given twice"),
        (("export", "plan.json"), (), "Missing option '--to'"),
        (("export", "plan.json", "--to", "pdf"), (), "no export format 'pdf'"),
        (("schema", "novel"), (), "no file format 'novel'"),
        (("cluster", "-o", "x.json"), (), "--output needs a cluster file"),
        (("checkpoint",), (), "Missing argument 'VERB|FOLDER'"),
        (run, ("--steps", "0"), "--steps"),
        (run, ("--steps", "many"), "--steps"),
        (run, ("--accumulate", "0"), "--accumulate"),
        (run, ("--keep", "-1"), "--keep"),
        (run, ("--seed", "-1"), "--seed"),
        (run, ("--deadline", "0"), "--deadline"),
        (run, ("--deadline", "nan"), "--deadline"),
        (run, ("--memory-limit", "much"), "'much' is not a size"),
        (run, ("--clip-norm", "-1"), "--clip-norm"),
        (run, ("--clip-norm", "nan"), "--clip-norm"),
        (run, ("--data-from", "nobody"), "no way to read data 'nobody'"),
        (run, ("--data-from", "share"), "--data-from share needs --data"),
        (run, ("--optimizer", "Magic"), "Magic"),
        (run, ("--optimizer", "SGD:lr=fast"), "SGD"),
        (run, ("--optimizer", "SGD:lr"), "SGD"),
        (run, ("--scheduler", "Magic"), "Magic"),
        (run, ("--compile", "magic"), "no compiler 'magic'"),
        (run, ("--eval-every", "2"), "--eval-every needs --eval-data"),
        (run, ("--checkpoint-every", "2"), "--checkpoint-every needs --checkpoint"),
        (run, ("--keep", "2"), "--keep needs --checkpoint"),
        (run, ("--resume",), "--resume needs --checkpoint"),
        (run, ("--hosts", "plan.json"), "torchrun starts the ranks of several hosts"),
        (run, ("--hosts", "nowhere"), "torchrun starts the ranks of several hosts"),
        (run, ("-o", "plan.json"), "plan.json is read, and would be replaced"),
        (("profile", "x:y"), ("--input", "8,x"), "--input '8,x'"),
        (("profile", "x:y"), ("--input", "0,3"), "--input '0,3'"),
        (("profile", "x:y"), ("--input", "8,-3"), "--input '8,-3'"),
        (("profile", "x:y"), ("--arg", "a"), "--arg 'a' is not key=value"),
        (("profile", "x:y"), ("--arg", "a=1", "--arg", "a=2"), "--arg a is given twice"),
        (("profile", "x:y"), ("--arg", "a-b=1"), "is not key=value"),
        (("profile", "x:y"), ("--local-loss", "9" * 5000), "--local-loss"),
        (("profile", "x:y"), ("--workers", "-1"), "--workers"),
        (("profile", "x:y"), ("--processes", "-1"), "--processes"),
    )  # fmt: skip
    for command, options, says in found:
        words = (*command, *options)
        name = " ".join(word if len(word) < 40 else f"{word[:9]}..." for word in words)
        yield Hostile(f"command: {name!r}", words, says, USAGE)


_NEEDED: Mapping[str, tuple[str, ...]] = {
    "plan": ("profile.json",),
    "explain": ("plan.json",),
    "compare": ("plan.json", "profile.json"),
    "run": ("plan.json",),
    "serve": ("plan.json",),
    "profile": ("x:y",),
    "checkpoint": ("saved",),
    "import": ("graph.txt",),
    "report": ("plan.json",),
    "ways": ("llama2-7b", "--on", "a100-dgx", "--gpus", "8", "--global-batch", "8"),
}
"""What a command line needs beside a number, by verb; a verb that takes numbers and is not here is missed."""


def _numbers() -> Iterator[Hostile]:
    """Every option of every verb that takes a number, with one that none has use for; exit code 2 throughout."""
    for verb, command in sorted(_Loaded().items()):
        numeric = [each for each in command.params if each.type_descriptor.annotation in (int, float, list[int])]
        for param in numeric:
            name = max(param.opts, key=len)
            needed = list(_NEEDED[verb])
            if name in needed:
                del needed[needed.index(name) : needed.index(name) + 2]
            for what, value in (("23 digits", 10**23), ("-23 digits", -(10**23)), ("5,000 digits", "9" * 5000)):
                yield Hostile(f"number: {verb} {name} of {what}", (verb, *needed, f"{name}={value}"), name, USAGE)


def _environments() -> Iterator[Hostile]:
    """What launchers leave in the environment."""
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"}
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, variables, says in (
        ("Slurm: several tasks", slurm, "srun --ntasks-per-node 1 torchrun"),
        ("Slurm: a number of tasks that is none", {**slurm, "SLURM_NTASKS": "x"}, "one of x tasks"),
        ("torchrun: a rank that is no number", {**torchrun, "RANK": "x"}, "RANK"),
        ("torchrun: a negative rank", {**torchrun, "RANK": "-1"}, "RANK"),
        ("torchrun: a rank beyond the world", {**torchrun, "RANK": "7"}, "RANK"),
        ("torchrun: a world that is no number", {**torchrun, "WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ("torchrun: another number of ranks", {**torchrun, "WORLD_SIZE": "5"}, "2 ranks"),
        ("torchrun: no port", {**torchrun, "MASTER_PORT": "x"}, "MASTER_PORT"),
        ("torchrun: a port beyond all", {**torchrun, "MASTER_PORT": "99999"}, "MASTER_PORT"),
    ):
        yield Hostile(f"environment: {name}", ("run", "plan.json"), says, USAGE, environment=variables)


def _outputs() -> Iterator[Hostile]:
    plan = ("plan", "profile.json", "--time-limit", "0.1", "-o")
    yield Hostile("output: a folder", (*plan, "there"), "it is a folder", prepare=lambda f: (f / "there").mkdir())
    yield Hostile("output: in a folder that is not there", (*plan, "nowhere/x.json"), "cannot write nowhere/x.json")
    yield Hostile("output: in a file", (*plan, "plan.json/x.json"), "cannot write plan.json/x.json")
    yield Hostile("output: a name too long", (*plan, "x" * 300), "File name too long")
    yield Hostile(
        "output: nobody reads the pipe", (*plan, "pipe"), "cannot write pipe", prepare=lambda f: os.mkfifo(f / "pipe")
    )
    yield Hostile(
        "output: a link to itself",
        (*plan, "loop"),
        "cannot write loop",
        prepare=lambda f: (f / "loop").symlink_to("loop"),
    )
    yield Hostile(
        "output: a link to its input", (*plan, "link"), "would be replaced", USAGE,
        prepare=lambda f: (f / "link").symlink_to("profile.json"),
    )  # fmt: skip
    yield Hostile("output: empty", (*plan, ""), "cannot write")
    run = ("run", "plan.json")
    yield Hostile("output: a trace in no folder", (*run, "--trace", "no/x"), "/no/x")
    yield Hostile("output: metrics onto the plan", (*run, "--metrics", "plan.json"), "would be replaced", USAGE)
    yield Hostile("output: a timeline in no folder", (*run, "-o", "no/x"), "/no/x")
    yield Hostile("output: checkpoints in a file", (*run, "--checkpoint", "plan.json"), "is no folder", USAGE)
    onto_itself = ("merge", "profile.json", "-o", "profile.json")
    yield Hostile("output: a merge onto its input", onto_itself, "would be replaced", USAGE)
    trace = ("export", "plan.json", "--to", "chrome-trace", "--profile", "profile.json", "-o", "plan.json")
    yield Hostile("output: a trace onto the plan", trace, "would be replaced", USAGE)


def _checkpoints() -> Iterator[Hostile]:
    yield Hostile("checkpoint: no folder", ("checkpoint", "nowhere"), "has no complete checkpoint")
    yield Hostile("checkpoint: a file", ("checkpoint", "plan.json"), "checkpoint")
    yield Hostile("checkpoint: an empty folder", ("checkpoint", "saved"), "has no complete checkpoint",
                  prepare=lambda folder: (folder / "saved").mkdir())  # fmt: skip
    yield Hostile("checkpoint: a step that there is not", ("checkpoint", ".", "--step", "7"), "checkpoint of step 7")
    yield Hostile("checkpoint: a step as text", ("checkpoint", ".", "--step", "x"), "--step", USAGE)
