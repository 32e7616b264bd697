"""docs/networks.md, from the outcomes of ``benchmarks.networks``."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.networks import zoo
from benchmarks.networks.runs import DATA_PARALLEL, PIPELINE, Outcome, Trial

_HEAD = """# Networks

Networks of other people, with random weights and small sizes, went through `profile`, `plan` and `run` on two workers:
once as a pipeline of two stages with two micro-batches, once in data parallel, three steps of SGD with momentum.
Losses, gradients, parameters and buffers were compared with the module itself on one device as `halopipe run
--check-numerics` does, dropout included: the numbers that it draws are the same under every plan. They were compared
in float64, to 1e-10, or to ten times what one device itself makes of rounding where that is more; in float32, marked
so, where a network's own code does not run in float64, computes in float32
inside and so rounds by more than that, magnifies rounding from step to step, or was last run in float32, two steps.

{counts}

`python -m benchmarks.networks --output benchmarks/results/networks.json` runs them again, about ten seconds each;
`python -m benchmarks.networks --document` writes this file from the results. Every row is a factory,
`benchmarks.networks.zoo:NAME`, which `halopipe profile` takes as MODEL. The packages are those of the extra `networks`.

*layers*: of the captured graph; in brackets those whose operator halopipe has no rule for, which it plans by what they
computed. *capture*: processor seconds to capture it. *pipeline* and *data parallel*: the loss of the last step, and the
largest relative difference of a loss and of a gradient from one device.
"""
_HABITS = """## Habits

What breaks a planner is rarely a well-known network; it is the line that somebody added to one. `tests/zoo` holds
small networks, one a habit, a module a kind of habit:

| module | habits |
|---|---|
| `autograd`, `hooks` | straight-through estimators, reversed and clipped gradients, functions of parameters, \
several outputs, checkpointing, no_grad; hooks on modules, tensors and parameters |
| `frozen`, `reuse` | frozen layers, batch norm and dropout in `eval()`, `train()` overridden, LoRA, unused and \
tied parameters, deep copies; siamese networks, shared LSTMs, loops over one block, triplets |
| `losses` | sums, means, `ignore_index`, class weights, smoothing, masks, contrastive, RMSE, dice, CTC; loss \
modules with parameters and buffers, several heads, penalties |
| `inputs`, `dtypes` | dicts, nesting, keywords, named tuples, dataclasses, lambdas, lazy modules, attributes \
changed in forward; sections in other dtypes, complex numbers |
| `inplace`, `choices`, `drawn` | writes to slices, views, inputs and buffers, queues, counters; branches and \
routing by data, early exits, samples that are mixed; dropout of every kind, noise, stochastic depth, Gumbel, other \
libraries' generators |
| `norms`, `recurrent`, `attention`, `vision` | normalisation of every kind, weight and spectral norm, \
parametrisations; LSTM, GRU, cells, packed sequences; masks, rotary positions, ALiBi, windows; U-Nets, grid \
sampling, shuffles, rolls, kernels by sample |
| `generative`, `science`, `sequences`, `tables`, `pictures`, `wrapped` | what a stranger brings: codebooks, GANs, \
flows, diffusion, penalties on gradients; Fourier operators, neural ODEs, physics-informed losses, forces, ConvLSTMs, \
globes, wavelets, state spaces; translators, packed sequences, random fields, experts with capacities, pointers; \
embeddings, rankings, survival, mixtures, weights of samples; gates, folds, windows of films, unpooling, detectors; \
modules that are wrapped, log and cache |
| `tutorials`, `papers` | as people write them: losses with accuracies beside them, Python numbers of samples, masks \
by nested loops, ensembles; splines, scans, drop path, detectors, hypernetworks, teachers in hooks, messages \
along edges, long convolutions, CTC, equilibria |
| `data` | datasets, loaders and generators that draw from torch, numpy and random without a seed |

Each is trained by a pipeline, a pipeline with a split backward, in data parallel and, where it has space, in \
space, and
compared with the user's own module, called eagerly: the whole batch at once where samples are apart, the plan's
micro-batches one by one where layers mix them ([0001](decisions/0001-one-device-semantics.md)). Random numbers are \
the
plan's, handed to the module in the order in which it asks. It is equal in float64 to 1e-10, or refused before the \
first
step. `python -m benchmarks.robustness` counts both. Refused are, with the reason:

- hooks that cannot be kept, and Python that a graph cannot follow: branches, loops and sizes that depend on values,
  `random` and `numpy.random`, counters and states kept as attributes, lengths that follow from data, lazy \
modules that saw no batch;
- buffers that layers of two stages write, in pipelines, and buffers written from the rows seen, on stages of several
  ranks;
- losses whose value for a batch does not follow from those of its parts, in more than one micro-batch: contrastive,
  RMSE, dice, correlation, the hardest samples.
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
    for origin, networks in zoo.ORIGINS.items():
        there = [found[name] for name in networks if name in found]
        if there:
            parts.append(f"## {_TITLES[origin]}\n\n{_table(there, networks)}")
    parts.append(f"## What was refused, and why\n\n{_WHY}{_refusals(found) or 'Nothing.'}\n")
    parts.append(_HABITS)
    return "\n".join(parts)


def _counts(found: Mapping[str, Outcome]) -> str:
    equal = [one for one in found.values() if one.is_equal]
    partly = sum(any(trial.refusal for trial in one.trials.values()) for one in equal)
    refused = sum(one.is_refused for one in found.values())
    single = sum(one.dtype == "float32" for one in equal)
    missing = [f"`{name}`" for networks in zoo.ORIGINS.values() for name in networks if name not in found]
    rest = f"\n\nNot run yet with the code of today (`--rest` runs them): {', '.join(missing)}." if missing else ""
    return (
        f"{len(found)} networks were run. {len(equal)} were equal to one device, {single} of these in float32, and "
        f"{partly} in one of the two\nways (the other was refused); {refused} were refused; "
        f"{len(found) - len(equal) - refused} failed.{rest}"
    )


def _table(found: list[Outcome], networks: Mapping[str, zoo.Factory]) -> str:
    lines = ["| NAME | network | layers | capture | pipeline | data parallel |", "|---|---|---|---|---|---|"]
    for one in found:
        about = (networks[one.name].__doc__ or "").strip().removesuffix(".")
        about += " (float32)" if one.dtype == "float32" else ""
        layers = f"{one.num_layers} ({one.num_opaque})" if one.num_layers else ""
        capture = f"{one.capture_s:.1f} s" if one.num_layers else ""
        cells = [_cell(one, strategy) for strategy in (PIPELINE, DATA_PARALLEL)]
        lines.append(f"| `{one.name}` | {about} | {layers} | {capture} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(one: Outcome, strategy: str) -> str:
    trial = one.trials.get(strategy, Trial(refusal=one.refusal, failure=one.failure))
    if trial.losses:
        return f"{trial.losses[-1]:.4f}; {trial.loss_error:.0e}, {trial.gradient_error:.0e}"
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
