"""Plans that are explained, compared, drawn, reported, exported."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.following import Refusal

_OF = "name a file that 'halopipe {}' wrote"
_OF_PLAN = _OF.format("plan")


def rows() -> Iterator[Refusal]:
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
        elsewhere, around = {"pip install": "it asks another machine"}, partial(folders.lacking, name)
        yield Refusal(f"{words}, without {name}", tuple(words.split()), elsewhere=elsewhere, around=around)
    writes = ("plan", "profile.json", "-o", "taken.json")
    yield Refusal("plan -o taken.json", writes, {"another name": "new.json"}, around=folders.written_by_another)
