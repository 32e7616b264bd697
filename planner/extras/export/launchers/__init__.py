"""Ways of a transformer's step as what other programs are launched with: scripts and configurations.

What a launcher can be told stands beside it as data (:class:`LauncherLimits`): a search for it chooses among such ways
alone, and any other is refused here, so that nothing of a way is dropped in silence.  What a launcher leaves to its
user's own code is said.

Modules:

    job         A training job that is to be launched, the script that starts it, and what a launcher is
    network     What launchers are told of a network, from the sizes that a shape has
    megatron    Megatron-LM's ``pretrain_gpt.py``, and recipes of Megatron-Bridge, which runs the same core
    torchtitan  torchtitan: a script with its options
    deepspeed   DeepSpeed: its configuration, and a script that starts a training program of its user's with it
    accelerate  accelerate: a configuration of FSDP2 (or of replicas alone), and a script that launches its user's
                program with it
"""

from __future__ import annotations

from collections.abc import Mapping

from planner.extras.export.launchers.accelerate import ACCELERATE
from planner.extras.export.launchers.deepspeed import DEEPSPEED
from planner.extras.export.launchers.job import Launcher, LauncherFiles, TrainingJob
from planner.extras.export.launchers.megatron import BRIDGE, MEGATRON
from planner.extras.export.launchers.torchtitan import NEWEST, V0_2
from planner.extras.transformers.shape import Transformer
from planner.ir.errors import UnknownNameError, UsageError, nearest

__all__ = [
    "LAUNCHERS",
    "Launcher",
    "LauncherFiles",
    "TrainingJob",
    "launcher_of",
    "require_network",
    "require_told",
    "written",
]

LAUNCHERS: Mapping[str, Mapping[str, Launcher]] = {
    "megatron": {"0.20": MEGATRON},
    "megatron-bridge": {"0.7": BRIDGE},
    "torchtitan": {"2026-08": NEWEST, "0.2": V0_2},
    "deepspeed": {"0.19": DEEPSPEED},
    "accelerate": {"1.15": ACCELERATE},
}
"""By name, then by version, the newest first."""


def launcher_of(name: str, version: str = "") -> Launcher:
    """The launcher of that name and version; of none, the newest.

    Raises:
        UnknownNameError: there is no such.
    """
    versions = LAUNCHERS[_known("launcher", name, list(LAUNCHERS))]
    return versions[_known(f"version of {name}", version, list(versions)) if version else next(iter(versions))]


def written(launcher: Launcher, job: TrainingJob, file: str) -> LauncherFiles:
    """What the launcher is given for the job, in a file of that name.

    Raises:
        UsageError: something of the job cannot be told to it.
    """
    require_told(launcher, job)
    return launcher.write(job, file)


def require_network(launcher: Launcher, shape: Transformer) -> None:
    """Raises :class:`UsageError` where something of the network cannot be told to the launcher."""
    refusals = list(launcher.network_refusals(shape))
    if refusals:
        others = [other.name for other in map(launcher_of, LAUNCHERS) if not any(other.network_refusals(shape))]
        raise UsageError(f"{launcher.name} cannot be told {shape.name}", refusals, [f"--for {name}" for name in others])


def require_told(launcher: Launcher, job: TrainingJob) -> None:
    """Raises :class:`UsageError` where something of the job cannot be told to the launcher."""
    if not (job.hosts and job.dtype):
        raise UsageError(
            "nothing is known of the hosts that start it",
            ["the file of the way has no dtype, or no hosts"],
            ["halopipe ways ... -o FILE, once more"],
        )
    if job.gpus != job.ways.devices:
        raise UsageError(
            f"{job.ways} takes {job.ways.devices} GPUs",
            [f"its hosts have {job.gpus}"],
            ["halopipe ways ... -o FILE, once more: a file that was changed by hand tells other hosts"],
        )
    refusals = list(launcher.refusals(job))
    if not refusals:
        return
    others = [other.name for other in map(launcher_of, LAUNCHERS) if not any(other.refusals(job))]
    raise UsageError(
        f"{launcher.name} cannot be told {job.ways}",
        refusals,
        [
            f"halopipe ways ... --for {launcher.name}: the best of the ways that it can be told",
            *(f"--to {name}, which can be told this one" for name in others),
        ],
    )


def _known(what: str, name: str, names: list[str]) -> str:
    if name in names:
        return name
    whole = next((each for each in names if f"-{name}" in each), name)  # bridge: megatron-bridge
    raise UnknownNameError(f"no {what} {name!r}", [f"known: {', '.join(names)}"], nearest(whole, names))
