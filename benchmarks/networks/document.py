"""docs/networks.md, from the outcomes of ``benchmarks.networks``."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.networks.runs import STRATEGIES, Outcome, Trial
from tests.zoo.entries import Entry
from tests.zoo.packages import ORIGINS

_HEAD = """# Networks

Networks of other people, with random weights and small sizes, went through `profile`, `plan` and `run` on two
workers: as a pipeline of two stages with two micro-batches, and in data parallel, three steps of SGD with
momentum. Losses, gradients, parameters and buffers were compared with the module itself on one device, dropout
included, as `halopipe run --check-numerics` does. The comparison is in float64, to 1e-10, or to ten times one
device's own rounding where that is more. Networks marked float32 were compared in float32: their code does not run
in float64, or rounds as float32 inside.

{counts}

`python -m benchmarks.networks --output benchmarks/results/networks.json` runs them again, about ten seconds each;
the file also has losses, numbers of layers and seconds of capture. `python -m benchmarks.networks --document`
writes this page. Every row is a factory, `tests.zoo.packages:NAME`, which `halopipe profile` takes as MODEL.
`pip install 'halopipe[networks]'` installs their packages.

*pipeline* and *data parallel*: the largest relative difference of a loss or gradient from one device.
"""
_HABITS = """## Habits

What breaks a planner is rarely a well-known network; it is the line that somebody added to one. `tests/zoo` holds
small networks, one a habit: autograd functions, hooks, frozen and shared parts, losses of every kind, nested
inputs, writes in place, branches on data, random numbers, recurrences, attention, what people bring from science,
tables and papers, and data that draw without a seed. Each is trained under four kinds of plan and compared with
the user's own module, called eagerly. It is equal in float64 to 1e-10, or refused before the first step (`python
-m benchmarks.robustness` counts both). Refused are, with the reason:

- hooks that cannot be kept, and Python that a graph cannot follow: branches, loops and sizes that depend on values,
  `random` and `numpy.random`, counters and states kept as attributes, lengths that follow from data, lazy \
modules that saw no batch;
- buffers that layers of two stages write, in pipelines, and buffers written from the rows seen, on stages of several
  ranks;
- losses whose value for a batch does not follow from those of its parts, in more than one micro-batch: contrastive,
  RMSE, dice, correlation, the hardest samples.

[Profiling](profiling.md#what-is-kept-of-a-module) says what to write instead.
"""
_IN_COMMON = 2
"""Parts of a refusal that networks refused alike have in common: its title and the first fact."""
_TITLES = {
    "transformers": "transformers",
    "timm": "timm",
    "torchvision": "torchvision",
    "profiler.models": "The reference networks",
}


_WHY = """\
`GuardOnDataDependentSymNode` is what `torch.export` says where Python branches on what a batch holds: whether anything
is masked, how long the longest sequence is, whether a layer is left out this time. A plan has one order of actions for
all batches. Branches on whether values are finite are the exception: they are captured as for finite ones, and the
graph looks. Layers that do not keep samples apart cannot be divided between replicas, and are trained in pipelines.

"""


def document(found: Mapping[str, Outcome]) -> str:
    """The whole text."""
    parts = [_HEAD.format(counts=_counts(found))]
    for origin, networks in ORIGINS.items():
        there = [found[name] for name in networks if name in found]
        if there:
            summary = f'<details markdown="1"><summary>{len(there)} networks</summary>'
            parts.append(f"## {_TITLES[origin]}\n\n{summary}\n\n{_table(there, networks)}\n</details>\n")
    parts.append(f"## What was refused, and why\n\n{_WHY}{_refusals(found) or 'Nothing.'}\n")
    parts.append(_HABITS)
    return "\n".join(parts)


def _counts(found: Mapping[str, Outcome]) -> str:
    equal = [one for one in found.values() if one.is_equal]
    partly = sum(any(trial.refusal for trial in one.trials.values()) for one in equal)
    refused = sum(one.is_refused for one in found.values())
    single = sum(one.dtype == "float32" for one in equal)
    missing = [f"`{name}`" for networks in ORIGINS.values() for name in networks if name not in found]
    rest = f"\n\nNot run yet with the code of today (`--rest` runs them): {', '.join(missing)}." if missing else ""
    return (
        f"{len(found)} networks were run. {len(equal)} were equal to one device, {single} of these in float32, and "
        f"{partly} in one of the two\nways (the other was refused); {refused} were refused; "
        f"{len(found) - len(equal) - refused} failed.{rest}"
    )


def _table(found: list[Outcome], networks: Mapping[str, Entry]) -> str:
    lines = ["| NAME | network | pipeline | data parallel |", "|---|---|---|---|"]
    for one in found:
        about = networks[one.name].habit + (" (float32)" if one.dtype == "float32" else "")
        cells = [_cell(one, strategy) for strategy in STRATEGIES]
        lines.append(f"| `{one.name}` | {about} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(one: Outcome, strategy: str) -> str:
    trial = one.trials.get(strategy, Trial(refusal=one.refusal, failure=one.failure))
    if trial.losses:
        return f"{max(trial.loss_error, trial.gradient_error):.0e}"
    return "failed" if trial.failure else "refused"


def _refusals(found: Mapping[str, Outcome]) -> str:
    """Each reason once, the most frequent first, with the networks that it was given for and what differs."""
    whose: dict[str, list[str]] = {}
    for one in found.values():
        ways = {"": (one.refusal, one.failure)} | {
            f" in {name}": (trial.refusal, trial.failure) for name, trial in one.trials.items()
        }
        for way, (refusal, failure) in ways.items():
            if refusal or failure:
                parts = " ".join((refusal or f"failed: {failure}").split()).split("; ")
                more = f" ({'; '.join(parts[_IN_COMMON:])})" if parts[_IN_COMMON:] else ""
                whose.setdefault("; ".join(parts[:_IN_COMMON]), []).append(f"`{one.name}`{way}{more}")
    ordered = sorted(whose.items(), key=lambda each: -len(each[1]))
    lines = [f"**{len(names)}: {reason}**\n\n" + "\n".join(f"- {name}" for name in names) for reason, names in ordered]
    return "\n\n".join(lines)
