"""Plans that are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
        (
            "--resume --checkpoint wrong",
            folders.beside_a_plan,
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
    vectors = {"MODEL": "model.py:any_shape --quick", "8,3,64,64": "16,3,64,64"}
    smaller = {"SIZE": "40KiB", "a smaller --global-batch or --micro-batch": "--micro-batch 2"}
    runs = (
        ("--steps 10 --data model.py:four_batches", folders.trains, {}),
        ("--steps 3 --data model.py:twice_as_large", folders.trains, {}),
        ("--steps 3 --data model.py:four_batches --data-from share", folders.trains, {}),
        ("--steps 3 --data model.py:of_this_process --no-check-first-step", folders.replicas, {}),
        (
            "--steps 3 --replan --restarts 3 --checkpoint new",
            folders.without_profile,
            {"PROFILE": "apart/profile.json"},
        ),
        (
            "--steps 3 --eval-data model.py:nothing --eval-every 2",
            folders.trains,
            {"with samples in it": "model.py:data"},
        ),
        ("--steps 5 --optimizer SGD:lr=1e10 --on-nan ignore", folders.trains, {}),
        ("--steps 1 --optimizer SGD:lr=1e36 --data model.py:bright --checkpoint saved", folders.trains, {}),
        (
            "--steps 1 --optimizer SGD:lr=1e36 --data model.py:bright --checkpoint saved --no-check-first-step",
            folders.trains,
            {},
        ),
        ("--steps 3 --memory-limit 64KiB --no-check-first-step", folders.trains, smaller),
        ("--steps 3 --clip-norm 1", within, {}),
        ("--steps 4 --accumulate 2", within, {}),
        (
            "--steps 3 --data model.py:smaller",
            within,
            {"another halopipe plan --global-batch": "halopipe plan --global-batch 12"},
        ),
        ("--steps 3 --optimizer model.py:joined", folders.two_stages, {}),
        ("--steps 3 --no-check-first-step", folders.disordered, {}),
        (
            "--steps 3 --data model.py:one_too_many --data-from share",
            folders.of("normed"),
            {"of another number than 16": "11"},
        ),
        ("--steps 3 --data halopipe.data.demo_data:digits", folders.of_vectors, vectors),
    )
    for words, prepare, fill in runs:
        arguments = ("run", "plan.json", "--no-learn", *words.split())
        elsewhere = {"clip_norm": "its own code clips"}
        yield Refusal(f"run {words}", arguments, fill, prepare, folders.PLANNED, elsewhere, is_dear=True)
    evaluates = "--data model.py:pictures --eval-data model.py:pictures --eval-metric model.py:MeanError"
    clouds = {"8,4000,4": "16,40,4", "MODEL": "model.py:cloudy --quick"}
    planned, moody = folders.PLANNED, folders.of("moody")
    for name, words, prepare, plan, fill in (
        ("token slices, compiled", "--compile eager", folders.sliced, folders.SLICED, {}),
        ("spans, compiled", "--compile eager", folders.spans, folders.SPANS, {}),
        ("slices of gradients, compiled", "--compile eager", folders.slices, folders.SLICES, {}),
        ("parts of pictures", f"{evaluates} --eval-outputs output,targets", folders.high, folders.HIGH, {}),
        ("no mean", "--check-numerics", folders.in_four, planned, {}),
        ("cancelling", "--check-numerics --data model.py:cancelling", folders.of_sums, planned, {}),
        ("moody", "", moody, planned, {}),
        ("moody, checked", "--check-numerics", moody, planned, {}),
        (
            "scaled", "--data model.py:with_scales --data-from share",
            folders.of("scaled"), planned, {"FACTORY": "model.py:whole_batches"},
        ),
        ("vectors", "--data halopipe.data.demo_data:shapes", folders.of_vectors, planned, clouds),
    ):  # fmt: skip
        arguments = ("run", "plan.json", "--no-learn", "--steps", "2", *words.split())
        yield Refusal(f"run --steps 2 ({name})", arguments, fill, prepare, plan, is_dear=True)
    inverse = folders.of("inverse")
    for name, prepare in (
        ("dies_once", folders.trains),
        ("is_asked_to_end_once", folders.trains),
        ("is_singular_once", inverse),
    ):
        words = f"run plan.json --no-learn --steps 8 --data model.py:{name} --checkpoint saved --checkpoint-every 2"
        elsewhere = {"mend the module": "it was a step's data", "look at": "nothing killed it"}
        arguments = tuple(words.split())
        yield Refusal(f"run --data {name}", arguments, {}, prepare, elsewhere=elsewhere, is_dear=True, is_there=True)
    metrics = ("run", "plan.json", "--no-learn", "--steps", "3", "--metrics", "folder/")
    around, elsewhere = partial(folders.lacking, "tensorboard"), {"pip install": "it asks another machine"}
    yield Refusal(
        "run --metrics folder/", metrics, {}, folders.trains, elsewhere=elsewhere, is_dear=True, around=around
    )
    yield Refusal(
        "report plan.json timeline.json",
        ("report", "plan.json", "timeline.json"),
        {},
        folders.of_another_run,
        is_dear=True,
    )
