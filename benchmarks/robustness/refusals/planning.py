"""Profiles that are planned."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from benchmarks.robustness.refusals import folders, profiles
from benchmarks.robustness.refusals.following import Refusal


def rows() -> Iterator[Refusal]:
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
    for text, make, fill in (
        ("--recompute selective --allow time", profiles.attention, {}),
        ("--token-slices 8+8 --schedule chimera", profiles.attention, {}),
        ("--zero 2 --shard always", profiles.with_terms, {}),
        ("--ranks 2", profiles.unlinked, {"FILE": "cluster.yaml"}),
        ("--recompute never", profiles.small_devices, {"FILE": "large.yaml"}),
        ("--batch-statistics whole --micro-batch 2", profiles.batch_norm, {}),
        ("--batch-statistics whole --global-batch 4096", profiles.batch_norm, {}),
        ("--global-batch 5 --micro-batch 4", profiles.batch_norm_of_rows, {}),
        ("--global-batch 1", profiles.batch_norm_of_rows, {}),
        ("--micro-batch 3", profiles.of_one_size, {}),
        ("--micro-batch 4", profiles.of_whole_batches, {}),
        ("--global-batch 4096", profiles.of_whole_batches, {}),
        ("--time-limit 0 --memory 7MiB", None, {}),
        ("--schedule chimera --ranks 1", None, {}),
        ("--fix loss=replicas:2", profiles.keeping, {}),
        ("--token-slices 4+4 --objective latency", profiles.attention, {}),
    ):
        made = folders.cluster if make is None else profiles.having(make)
        name = f"plan {text}" if make is None else f"plan {text} ({make.__name__})"
        elsewhere = {"torchrun": "it is another launcher's, on two hosts"}
        yield Refusal(name, ("plan", "profile.json", *shlex.split(text)), fill, made, plan, elsewhere)
    too_many = ("plan", "profile.json", "--global-batch", "16", "--ways", "data=16")
    yield Refusal("plan --ways data=16", too_many, {"FILE": "cluster.yaml"}, folders.cluster, too_many, here)
    ways = "ways llama2-7b --on a100-dgx --global-batch 64"
    for text, fill in (
        (f"{ways} --gpus 8 --tensor 3", {"another --global-batch or --gpus; leave": "leave"}),
        (f"{ways} --gpus 1", {"more --gpus, another --on, or a smaller --global-batch": "--gpus 8"}),
    ):
        yield Refusal(text, tuple(text.split()), fill)
    for text in ("plan", "plan profile.json other", "plan profile.json --global-batch 99999999"):
        yield Refusal(text, tuple(text.split()))
