"""Training runs that others published, predicted; nothing is fitted to a run.

    python -m benchmarks.published [--json] [--quick] [--data FOLDER] [--public] [--evidence FILE]

What predicts a group is from other sources: kernels and links (planner/extras/kernels), or a profile of its layers.

    Megatron on A100            kernels of vLLM's and Sailor's tables, NVLink of vidur's
    Megatron and Alpa on V100   kernels and NVLink of Sailor's tables, TCP of eight GPUs a host by NCCL's issue 209
    GPT-3 XL, slow networks     kernels of Sailor's tables, in eager PyTorch, over 1 to 10 Gbit/s
    16 T4                       AMP's time of each layer at one sample, kernels by data sheet beyond
    Sailor                      Sailor's times of layers, rates between hosts, memory outside of tensors
    Megatron-LM's tests         memory from the sizes of their configurations; their times as below
    tables of ``sources``       kernels and links of the named cluster of their devices

What each source's software does is read off its code: which operators share a kernel (``SOFTWARE``), what is summed in
which numbers, what overlaps, what is kept.  That was settled after rows had been seen, from no time or size in them:
with PyTorch's own kernels Megatron's four rows on A100 are 9 % off, not 3; with a loss that copies its logits the
peak of Megatron-LM's tests is 7 to 70 % off, not 1 to 12.

``--data``: a folder with published_runs.csv, amp_homogeneous.csv and amp_layer_costs.csv, for the rows whose sources
state no licence, and the tables of :mod:`benchmarks.published.sources`; without it those groups are left out.
``--public`` prints of rows without a licence the errors alone: what results/ holds.  The planner's own choice for a
cluster is beside the best published way, both predicted.

``--evidence``: the file to write of how far off ``halopipe ways`` is by kind of run, which printed ranges are made of
(halopipe/extras/transformers/evidence.json).  There every run is predicted as ``ways`` does, in the
software that its framework's launcher is taken with.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.published import megatron_ci, sailor
from benchmarks.published.runs import BERT_VOCABULARY, Run, clusters, earlier, published, read, t4
from benchmarks.published.settings import LeftOut, predicted
from benchmarks.published.sources import settings
from benchmarks.report import Row, at_least, at_most
from halopipe.extras.transformers.evidence import FEW, KindEvidence, RunKind, summed
from planner.extras.transformers.cluster import named_cluster
from planner.extras.transformers.search import search
from planner.extras.transformers.shape import ParallelDegrees, named_transformer
from planner.extras.transformers.space import DegreesSpace
from planner.ir.codec import plain
from planner.ir.files import write_text

DATA = Path(__file__).parent / "data"
A100 = "Megatron on A100"
T4 = "16 T4"
SLOW = "GPT-3 XL, slow networks"
GOALS: Mapping[str, float] = {
    A100: 3,
    SLOW: 10,
    "Megatron on 64 V100": 12,
    T4: 15,
    "Sailor, GH200": 6,
    "Sailor, unlike GPUs": 7,
    "vTrain, several hosts": 5,
    "vTrain, one host": 8,
    "FSDP, llm-foundry": 8,
    "torchtitan": 8,
    "BigScience": 10,
    "SimuMax, B200, dense": 6,
    "SimuMax, B200, experts": 8,
    **{f"Megatron-Bridge, {gpu}, dense": 10 for gpu in ("H100", "B200", "GB200", "GB300")},
    **{f"Megatron-Bridge, {gpu}, experts": 12 for gpu in ("H100", "B200", "GB200", "B300", "GB300")},
    "MLPerf, Llama 3.1 405B": 10,
    "NeMo, H100, 8 bits": 10,
    "DGX Cloud, H100, dense": 10,
    "DGX Cloud, H100, experts": 12,
}
"""Mean errors, in per cent."""
MOST_SHOWN = 60
"""Runs of a group that have rows of their own."""
MOST_ON_A100 = 8.0
RANKS = 0.95
MEMORY = 5.0
MOST_SECONDS = 60.0
MOST_GIB = 2.0
AMP_OWN = 48.0
AMP_RANKS = 0.935
SAILOR_OWN = {"Sailor, GH200": 8.9, "Sailor, unlike GPUs": 10.3}
"""Mean errors of the sources' own models, on all their rows."""


def measure(quick: bool, data: Path | None = None, public: bool = False, evidence: Path | None = None) -> list[Row]:
    """All rows; ``quick``: without the planner's own choices."""
    folder = data or DATA
    named = folder / "published_runs.csv"
    runs = list(published(read(named if named.exists() else DATA / named.name)))
    runs += sailor.runs()
    if (folder / "amp_homogeneous.csv").exists():
        runs += t4(read(folder / "amp_homogeneous.csv"), read(folder / "amp_layer_costs.csv"))
    stated, left_out = predicted(list(settings(folder)))
    runs += stated
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    rows = [row for group, found in groups.items() for row in _summary(group, found)]
    rows += list(_left_out(left_out, groups))
    kinds = by_kind(runs)
    rows += [row for kind, errors in kinds.items() for row in _kind(kind, errors)]
    if evidence is not None:
        write_text(
            evidence, json.dumps([plain(summed(kind, errors)) for kind, errors in kinds.items()], indent=1) + "\n"
        )
    rows += [row for found in groups.values() if len(found) <= MOST_SHOWN for run in found for row in _row(run, public)]
    rows += megatron_ci.rows()
    return rows if quick else [*rows, *_choices(groups), *sailor.rows(), *_scale()]


def _summary(group: str, runs: Sequence[Run]) -> Iterator[Row]:
    ran = [run for run in runs if run.ran]
    if ran:
        yield Row(f"{group}: runs", len(ran), "")
        yield at_most(f"{group}: mean error", _mean(ran), "%", GOALS.get(group))
        yield Row(f"{group}: mean of errors with their signs", 100 * statistics.mean(run.error for run in ran), "%")
        if any(run.odd for run in runs):
            usual = [run for run in ran if not run.odd]
            yield at_most(
                f"{group}: mean error without {len(ran) - len(usual)} odd rows", _mean(usual), "%", GOALS.get(group)
            )
        long = [run for run in ran if run.kind is None or not run.kind.short]
        if 0 < len(long) < len(ran):
            name = f"{group}: mean error without {len(ran) - len(long)} runs of short kernels"
            yield at_most(name, _mean(long), "%", GOALS.get(group))
        within = sum(_inside(run) for run in ran)
        yield Row(f"{group}: measured within the predicted range", 100 * within / len(ran), "%")
        most = MOST_ON_A100 if group == A100 else None
        yield at_most(f"{group}: largest error", 100 * max(abs(run.error) for run in ran), "%", most)
    if group in SAILOR_OWN:
        yield Row(f"{group}: Sailor's own mean error", SAILOR_OWN[group], "%")
    if group == T4:
        yield from _of_t4(ran, [run for run in runs if not run.ran])
    held = [run for run in runs if run.measured_bytes and run.predicted_bytes]
    usual = [run for run in held if not run.odd_memory]
    if held:
        yield at_most(f"{group}: mean error of memory", _mean_of_memory(held), "%", MEMORY)
    if len(usual) < len(held):
        name = f"{group}: mean error of memory without {len(held) - len(usual)} odd rows"
        yield at_most(name, _mean_of_memory(usual), "%", MEMORY)


def _left_out(left_out: Sequence[LeftOut], groups: Mapping[str, Sequence[Run]]) -> Iterator[Row]:
    """What cannot be stated, by source and reason; a goal of a source none of whose runs can be is missed."""
    for (group, reason), number in sorted(Counter((each.group, each.reason) for each in left_out).items()):
        yield Row(f"left out, {group}, {reason}: runs", number, "")
    for group in sorted({each.group for each in left_out if each.group in GOALS} - groups.keys()):
        yield at_least(f"{group}: runs", 0, "", 1)


def by_kind(runs: Sequence[Run]) -> dict[RunKind, dict[str, list[float]]]:
    """Errors of what ``ways`` predicts of the runs, by kind and source."""
    errors: dict[RunKind, dict[str, list[float]]] = {}
    for run in runs:
        if run.kind is not None and run.ran and run.measured_s:
            errors.setdefault(run.kind, {}).setdefault(run.group, []).append(run.ways_s / run.measured_s - 1)
    return errors


def _kind(kind: RunKind, errors: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    """What the printed range of such runs is made of; and of each source, how many lie within the others' range."""
    of_kind = summed(kind, errors)
    name = f"kind, {kind}"
    yield Row(f"{name}: runs", of_kind.runs, "")
    yield Row(f"{name}: mean error", 100 * of_kind.mean_size, "%")
    yield Row(f"{name}: mean of errors with their signs", 100 * of_kind.mean_error, "%")
    yield Row(f"{name}: largest error", 100 * of_kind.largest, "%")
    yield Row(f"{name}: eight of ten measured from", of_kind.low, "x predicted")
    yield Row(f"{name}: to", of_kind.high, "x predicted")
    for source, of_source in errors.items():
        others = {each: runs for each, runs in errors.items() if each != source}
        if sum(map(len, others.values())) >= FEW:
            within = _within(of_source, summed(kind, others))
            yield Row(f"{name}, {source}: within the range of the other sources", 100 * within / len(of_source), "%")


def _within(errors: Sequence[float], others: KindEvidence) -> int:
    """Runs that lie in the range which others have."""
    low = min(1.0, others.low)
    high = max(1.0, others.high)
    return sum(low <= 1 / (1 + error) <= high for error in errors)


def _of_t4(ran: Sequence[Run], failed: Sequence[Run]) -> Iterator[Row]:
    from scipy.stats import spearmanr  # late: it takes longer to load than the rest

    steps = [run.prediction.step.seconds for run in ran]
    measured = [run.measured_s or 0.0 for run in ran]
    yield at_least(f"{T4}: rank correlation", float(spearmanr(steps, measured).statistic), "", RANKS)
    yield Row(f"{T4}: AMP's own mean error", AMP_OWN, "%")
    yield Row(f"{T4}: AMP's own rank correlation", AMP_RANKS, "")
    refused = sum(not run.fits for run in failed)
    yield at_least(f"{T4}: of {len(failed)} out of memory, predicted so", refused, "runs", len(failed))
    yield at_least(f"{T4}: of {len(ran)} that ran, predicted to fit", sum(run.fits for run in ran), "runs", len(ran))
    chosen = measured[min(range(len(steps)), key=steps.__getitem__)]
    regret = 100 * (chosen / min(measured) - 1)
    yield Row(f"{T4}: measured step of the plan predicted the best, beyond the best", regret, "%")


def _row(run: Run, public: bool) -> Iterator[Row]:
    name = f"{run.group}, {run.name}"
    shown = not (public and run.restricted)
    if run.measured_s is not None and shown:
        yield Row(f"{name}: predicted", run.prediction.step.seconds, "s")
        yield Row(f"{name}: measured", run.measured_s if run.ran else -1.0, "s")
    if run.ran:
        yield Row(f"{name}: error", 100 * run.error, "%")
    if run.predicted_bytes and shown:
        yield Row(f"{name}: predicted memory", run.predicted_bytes / 2**30, "GiB")
        yield Row(f"{name}: measured memory", run.measured_bytes / 2**30, "GiB")


def _choices(groups: Mapping[str, Sequence[Run]]) -> Iterator[Row]:
    """The planner's own way for each cluster, beside the best published one by its prediction, in the same software.

    On V100 the chosen way has a head of as many words; the published runs have none.
    """
    xl = replace(named_transformer("gpt3-xl"), vocab=BERT_VOCABULARY)
    asked = [
        ("22B, 8 A100", A100, named_transformer("megatron-22b"), ParallelDegrees(), 8, 4, "megatron-22B"),
        ("175B, 64 A100", A100, named_transformer("gpt3-175b"), ParallelDegrees(), 64, 64, "gpt3-175B"),
        ("GPT-3 XL, 64 V100", "Megatron on 64 V100", xl, earlier(ParallelDegrees()), 64, 1024, ""),
    ]
    for label, group, network, base, devices, batch, prefix in asked:
        published_s = [r.prediction.step.seconds for r in groups.get(group, ()) if r.ran and r.name.startswith(prefix)]
        if not published_s:
            continue
        found = search(network, clusters()[group], devices, batch, DegreesSpace(base=base))
        step_s = found.best.prediction.step.seconds
        name = f"own choice, {label}, {found.best.ways}"
        yield Row(f"{name}: predicted", step_s, "s")
        yield Row(f"{name}: best published, predicted", min(published_s), "s")
        yield Row(f"{name}: predicted gain", 100 * (min(published_s) / step_s - 1), "%")
        yield Row(f"{name}: proven gap", 100 * found.gap, "%")


def _scale() -> Iterator[Row]:
    """96 blocks on 8 to 3,072 GPUs: how near the proof is, and what the search takes of one core and of memory."""
    for devices, batch, limit in ((64, 64, 1.0), (1024, 1536, 5.0), (3072, 1536, 5.0)):
        start_s = time.process_time()
        found = search(named_transformer("gpt3-175b"), named_cluster("a100-dgx"), devices, batch)
        name = f"search, 175B on {devices:,} A100"
        yield Row(f"{name}: ways", found.num_ways, "")
        yield at_most(f"{name}: proven gap", 100 * found.gap, "%", limit)
        yield at_most(f"{name}: processor time", time.process_time() - start_s, "s", MOST_SECONDS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield at_most("search, all of it: peak memory of the process", peak, "GiB", MOST_GIB)


def _mean(runs: Sequence[Run]) -> float:
    return 100 * statistics.mean(abs(run.error) for run in runs)


def _mean_of_memory(runs: Sequence[Run]) -> float:
    return 100 * statistics.mean(abs(run.predicted_bytes / run.measured_bytes - 1) for run in runs)


def _inside(run: Run) -> bool:
    return run.measured_s is not None and run.prediction.step.low <= run.measured_s <= run.prediction.step.high


OWN: Mapping[str, Mapping[str, Any]] = {
    "--data": {"type": Path, "metavar": "FOLDER", "help": "tables whose sources state no licence"},
    "--public": {"action": "store_true", "help": "of those the errors alone"},
    "--evidence": {"type": Path, "metavar": "FILE", "help": "to write: errors of ways by kind of run"},
}


main = partial(report.run, "Training runs that others published, predicted", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
