"""Plans that are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.following import Refusal


def rows() -> Iterator[Refusal]:
    """All that ``run`` refuses."""
    within = folders.planned("--schedule", "pipedream", "--micro-batch", "4")
    forward = folders.planned("--schedule", "forward")
    runs: tuple[tuple[str, Callable[[Path], None], Mapping[str, str]], ...] = (
        ("--keep 2", folders.trains, {}),
        ("--eval-every 2", folders.trains, {}),
        ("--restarts 2", folders.trains, {}),
        ("--profile-folder traces", folders.trains, {}),
        ("--profile-steps 30:50", folders.trains, {}),
        ("--checkpoint saved --accumulate 3 --steps 10", folders.trains, {}),
        ("--check-numerics --accumulate 30 --steps 10", folders.trains, {}),
        ("--steps 0", folders.trains, {}),
        ("--data-from share", folders.trains, {"FACTORY": "model.py:data"}),
        ("--check-numerics", within, {}),
        ("--on-nan skip", within, {}),
        ("--optimizer SGD", forward, {}),
        ("--checkpoint saved", folders.saved, {"another": ""}),
        ("--resume", folders.saved, {"--checkpoint checkpoints": "--checkpoint saved"}),
        ("--replan", folders.trains, {}),
        ("-o plan.json", folders.trains, {"another name": "other.json"}),
        ("--profile-steps 5:2", folders.trains, {}),
        (
            "--resume --checkpoint nowhere",
            folders.saved,
            {"name the folder of 'halopipe run --checkpoint FOLDER'": "--checkpoint saved"},
        ),
        ("--resume --checkpoint saved --steps 4", folders.saved, {}),
        ("--transport mpi", folders.trains, {}),
        ("--optimizer SGD:lr=1e10 --steps 5", folders.trains, {}),
    )
    for words, prepare, fill in runs:
        arguments = ("run", "plan.json", "--no-learn", *words.split())
        elsewhere = {"torchrun": "it is another launcher's", "pip install": "it asks another machine"}
        yield Refusal(f"run {words}", arguments, fill, prepare, folders.PLANNED, elsewhere, is_dear=True)
