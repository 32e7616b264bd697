"""Networks of other people through profile, plan and run on two workers, beside one device.

A row of a network is the largest relative difference of its losses, in float64 (float32 where its own code does not run
in float64), in a pipeline of two stages with two micro-batches or in data parallel.  It holds if the losses, all
gradients, parameters and buffers are as close to one device's as ``halopipe run --check-numerics`` asks, or the network
is refused by a typed error.

    python -m benchmarks.networks --quick
    python -m benchmarks.networks --output benchmarks/results/networks.json    all, about ten seconds each
    python -m benchmarks.networks --only bert,gpt2 --output FILE               these again, the others stay
    python -m benchmarks.networks --rest --output FILE                         those that the file lacks
    python -m benchmarks.networks --document                                   docs/networks.md from the results

``--output`` writes after each network, and takes what the file already has of others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.networks import zoo
from benchmarks.networks.document import document
from benchmarks.networks.runs import Outcome, Trial, outcome
from benchmarks.networks.zoo.examples import declare_missing
from benchmarks.report import Row, table
from runtime.numerics.compare import TOLERANCES

QUICK = ("reference_gpt", "bert", "resnet18")
HOME = Path(__file__).resolve().parents[1]
RESULTS, DOCUMENT = HOME / "results" / "networks.json", HOME.parent / "docs" / "networks.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, measure, print; the exit code is 0 whether or not the rows hold."""
    parser = argparse.ArgumentParser(description="Networks trained on two workers, beside one device")
    parser.add_argument("--json", action="store_true", help="print only the rows, as JSON")
    parser.add_argument("--quick", action="store_true", help="three networks")
    parser.add_argument("--only", default="", metavar="NAME,...", help="these networks")
    parser.add_argument("--rest", action="store_true", help="networks that the file of --output lacks")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file that keeps the outcomes")
    parser.add_argument("--document", action="store_true", help="write docs/networks.md from the results, run nothing")
    options = parser.parse_args(arguments)
    if options.document:
        DOCUMENT.write_text(document(read(RESULTS)), encoding="utf-8")
        return 0
    names = [name for networks in zoo.ORIGINS.values() for name in networks]
    wanted = QUICK if options.quick else options.only.split(",") if options.only else names
    if options.rest and options.output is not None:
        wanted = [name for name in wanted if name not in read(options.output)]
    found = []
    for one in outcomes(wanted):
        found.append(one)
        if options.output is not None:
            write(options.output, {**read(options.output), one.name: one}, names)
    rows = [row for one in found for row in rows_of(one)]
    text = json.dumps([asdict(row) for row in rows], indent=1) if options.json else table(rows)
    sys.stdout.write(f"{text}\n")
    return 0


def outcomes(names: Iterable[str]) -> Iterator[Outcome]:
    """Each network's, one after another; all processes are forked from this one, which imports what most need."""
    declare_missing()
    import transformers

    transformers.PreTrainedModel  # noqa: B018  # imported when it is asked for
    for name in names:
        yield outcome(name)


def rows_of(found: Outcome) -> Iterator[Row]:
    """A row for each strategy; one for a network that was not captured."""
    if not found.trials:
        yield Row(f"{found.name}: {found.failure or found.refusal}", 0.0, "", "", not found.failure)
    for strategy, trial in found.trials.items():
        name = f"{found.name}, {strategy}"
        if trial.losses:
            limit = TOLERANCES[getattr(torch, found.dtype)].loss
            goal = f"<= {limit:g}" if trial.loss_error <= limit else "ten times one device's own rounding"
            yield Row(name, trial.loss_error, "difference of losses", goal)
        else:
            yield Row(f"{name}: {trial.failure or trial.refusal}", 0.0, "", "", not trial.failure)


def read(path: Path) -> dict[str, Outcome]:
    """The outcomes that a file keeps; none if there is no file."""
    if not path.exists():
        return {}
    return {record["name"]: _outcome(record) for record in json.loads(path.read_text(encoding="utf-8"))}


def write(path: Path, found: Mapping[str, Outcome], order: Sequence[str]) -> None:
    """Keeps outcomes in a file, in ``order``."""
    records = [asdict(found[name]) for name in order if name in found]
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def _outcome(record: dict[str, Any]) -> Outcome:
    trials = {
        name: Trial(**{**trial, "losses": tuple(trial["losses"])}) for name, trial in record.pop("trials").items()
    }
    return Outcome(**record, trials=trials)


if __name__ == "__main__":
    raise SystemExit(main())
