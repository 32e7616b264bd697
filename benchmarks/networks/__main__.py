"""Networks of other people through profile, plan and run on two workers, beside one device.

The networks are those of :mod:`tests.zoo.packages`.  A row of a network is the largest relative difference of its
losses, in float64 (float32 where its own code does not run in float64), in a pipeline of two stages with two
micro-batches or in data parallel.  It holds if the losses, all gradients, parameters and buffers are as close to one
device's as ``halopipe run --check-numerics`` asks, or the network is refused by a typed error that its entry of the zoo
expects.

    python -m benchmarks.networks --quick
    python -m benchmarks.networks --output benchmarks/results/networks.json    all, about ten seconds each
    python -m benchmarks.networks --only bert,gpt2 --output FILE               these again, the others stay
    python -m benchmarks.networks --rest --output FILE                         those that the file lacks
    python -m benchmarks.networks --document                                   docs/networks.md from the results

``--output`` writes after each network, and takes what the file already has of others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.networks.runs import Outcome, Trial, outcome
from benchmarks.networks.runs import document as text_of
from benchmarks.report import Row, run
from runtime.numerics.compare import TOLERANCES
from tests.missing_operators import declare_missing
from tests.zoo.entries import of_module
from tests.zoo.packages import ORIGINS

QUICK = ("reference_gpt", "bert", "resnet18")
HOME = Path(__file__).resolve().parents[1]
RESULTS = HOME / "results" / "networks.json"
DOCUMENT = HOME.parent / "docs" / "networks.md"


OWN: Mapping[str, Mapping[str, Any]] = {
    "--only": {"default": "", "metavar": "NAME,...", "help": "these networks"},
    "--rest": {"action": "store_true", "help": "networks that the file of --output lacks"},
    "--output": {"type": Path, "metavar": "FILE", "help": "file that keeps the outcomes"},
    "--document": {"action": "store_true", "help": "write docs/networks.md from the results, run nothing"},
}


def measure(quick: bool, only: str, rest: bool, output: Path | None, document: bool) -> list[Row]:
    """The rows of the networks that are asked for, written to ``output`` one by one."""
    if document:
        DOCUMENT.write_text(text_of(read(RESULTS), DOCUMENT.read_text("utf-8")), encoding="utf-8")
        return []
    names = [name for networks in ORIGINS.values() for name in networks]
    wanted = QUICK if quick else only.split(",") if only else names
    if rest and output is not None:
        wanted = [name for name in wanted if name not in read(output)]
    rows: list[Row] = []
    for one in outcomes(wanted):
        rows += rows_of(one)
        if output is not None:
            write(output, {**read(output), one.name: one}, names)
    return rows


def outcomes(names: Iterable[str]) -> Iterator[Outcome]:
    """Each network's, one after another; all processes are forked from this one, which imports what most need."""
    declare_missing()
    import transformers

    transformers.PreTrainedModel  # noqa: B018  # imported when it is asked for
    for name in names:
        yield outcome(name)


def rows_of(found: Outcome) -> Iterator[Row]:
    """A row for each strategy; one for a network that was not captured."""
    entry = of_module("packages")[found.name]
    if not found.trials:
        holds = not found.failure and entry.is_expected("", found.refusal)
        yield Row(f"{found.name}: {found.failure or found.refusal}", 0.0, "", "", holds)
    for strategy, trial in found.trials.items():
        name = f"{found.name}, {strategy}"
        if trial.losses:
            limit = TOLERANCES[getattr(torch, found.dtype)].loss
            goal = f"<= {limit:g}" if trial.loss_error <= limit else "ten times one device's own rounding"
            yield Row(name, trial.loss_error, "difference of losses", goal)
        else:
            holds = not trial.failure and entry.is_expected(strategy, trial.refusal)
            yield Row(f"{name}: {trial.failure or trial.refusal}", 0.0, "", "", holds)


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


main = partial(run, "Networks trained on two workers, beside one device", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
