"""Files that are another kind's, spoilt, or not there."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.following import Refusal


def rows() -> Iterator[Refusal]:
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
        ("ways opt-350m --on mixed.yaml --gpus 8 --global-batch 64", {}),
        ("profile model.py:model --tables a40.csv", {"--on h100-dgx": "--on h100-dgx --tables a40.csv"}),
        ("profile model.py:model --on a100-dgx --local-loss stage", {}),
        ("profile model.py:model --on T4.yaml --dtype float64", {"another --dtype": "--dtype float32"}),
        ("profile model.py:model --input 16,1,8,8 --workers 1 --arg x", {}),
        ("run job.yaml", {"FILE": "new.yaml"}),
    ):
        yield Refusal(words, tuple(words.split()), fill, folders.elsewhere)
