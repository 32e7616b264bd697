"""When the data of notebooks was collected, by which code, and whether it is older than the code of today.

    python notebooks/collected.py            say so of every folder; exit code 1 if a stamp is not true
    python notebooks/collected.py --price    predict all plans anew, keep what was measured, and stamp

A stamp (``notebooks/data/collected.json``, an entry a folder) has the date and commit of the measurement, the command
that measures again, the SHA-256 of each file, and ``behind``: what today's code would say otherwise.  Data is behind if
a plan is not of a profile beside it, if today's code predicts another step or memory for it, if its solver is gone, or
if torch is another one than was measured.  Predicting takes seconds; measuring wants a machine that does nothing else.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from halopipe.planning.options import DEFAULT_SOLVER
from halopipe.planning.problem import problem_of
from halopipe.planning.solve import predict_again, solve
from planner.ir.codec import dump, fingerprint, load
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from planner.solvers import current_name, names

HOME = Path(__file__).resolve().parent.parent
DATA = HOME / "notebooks" / "data"
STAMPS = DATA / "collected.json"
FOLDERS = {
    ".": ("collect.py", 3),
    "schedules": ("collect_schedules.py", 5),
    "spatial": ("collect_spatial.py", 15),
    "clouds": ("collect_clouds.py", 10),
}
"""The script that fills each folder of data, and about how many minutes it takes on two quiet cores."""

_RESULTS = ("accuracy", "accuracy/*", "links", "unseen_shapes", "memory", "calibration")
READ = {
    "02_compare_strategies": ["notebooks/data/*.json"],
    "04_schedules": ["notebooks/data/schedules/*.json"],
    "05_spatial_decomposition": ["notebooks/data/spatial/*.json"],
    "06_point_clouds": ["notebooks/data/clouds/*.json"],
    "07_model_accuracy": [f"benchmarks/results/{name}.json" for name in _RESULTS],
}
"""What each notebook reads that was measured before; the others measure or plan themselves."""


def read_by(notebook: str) -> str:
    """A digest of the files that the notebook of that name reads; empty where it reads none.

    Its outputs are of these files only where its metadata has the same digest, which ``execute.py`` writes there.
    """
    paths = [path for pattern in READ.get(notebook, ()) for path in sorted(HOME.glob(pattern))]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path != STAMPS}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] if found else ""


def about(folder: str) -> str:
    """The stamp in words, for the reader of a notebook."""
    stamp = stamps()[folder]
    command = f"python notebooks/{FOLDERS[folder][0]}"
    text = f"Measured on {stamp['collected']} at commit {stamp['commit']}, torch {stamp['torch']}, by {command}."
    if not stamp["behind"]:
        return f"{text}\nPredictions are those of today's code."
    lines = "\n".join(f"  {line}" for line in stamp["behind"])
    return f"{text}\nOlder than the code, until it is collected again:\n{lines}"


def stamps() -> dict[str, Any]:
    """By folder of data."""
    found: dict[str, Any] = json.loads(STAMPS.read_text("utf-8"))
    return found


def stamp(folder: str, *, measured: bool = True) -> None:
    """Writes a folder's stamp; ``measured``: its data is of now, else only its predictions are."""
    found = stamps() if STAMPS.exists() else {}
    if measured:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=HOME, capture_output=True, text=True, check=True
        ).stdout.strip()
        found[folder] = {"collected": f"{datetime.now(UTC):%Y-%m-%d}", "commit": commit}
    versions = {profile.provenance.versions["torch"] for profile in _profiles(folder).values()}
    found[folder] |= {"torch": ", ".join(sorted(versions)), "files": _files(folder), "behind": list(behind(folder))}
    STAMPS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def untrue(folder: str) -> list[str]:
    """What a folder's stamp does not say, and the command that mends it."""
    kept = stamps()[folder]
    files = _files(folder)
    now = list(behind(folder))
    found = [
        f"{name}: changed since it was stamped"
        for name in sorted({*files, *kept["files"]})
        if files.get(name) != kept["files"].get(name)
    ]
    found += [f"{line}: unknown to the stamp" for line in now if line not in kept["behind"]]
    found += [f"{line}: no longer so" for line in kept["behind"] if line not in now]
    if not found:
        return []
    script = FOLDERS[folder][0]
    return [
        *found,
        f"measure again: python notebooks/{script}; or predict again: python notebooks/collected.py --price",
    ]


def price(folder: str) -> None:
    """Predicts every plan of a folder by today's code; what was measured stays, and so does what it is held against."""
    profiles = _profiles(folder)
    for path in sorted((DATA / folder).glob("*.plan.json")):
        plan = load(path, Plan)
        profile = profiles[plan.inputs.profile_fingerprint]
        measured = plan.measured
        prediction, _ = predict_again(plan, profile)
        if measured is not None:
            measured = replace(measured, error=measured.step_s / prediction.step_s - 1)
        search = replace(plan.search, solver=current_name(plan.search.solver))
        plan = replace(plan, prediction=prediction, measured=measured, search=search)
        if search.solver == DEFAULT_SOLVER:  # its bounds and alternatives, where it still chooses this
            again = solve(problem_of(plan, profile))
            plan = replace(again, measured=measured) if again.decision == plan.decision else plan
        dump(plan, path)


def behind(folder: str) -> Iterator[str]:
    """What today's code would say otherwise of a folder's data."""
    pinned = next(
        line for line in (HOME / "constraints.txt").read_text("utf-8").splitlines() if line.startswith("torch=")
    )
    profiles = _profiles(folder)
    for profile in profiles.values():
        version = profile.provenance.versions["torch"].partition("+")[0]
        if version != pinned.rpartition("=")[2]:
            yield f"{profile.model.factory}: measured with torch {version}, now it is {pinned}"
    for path in sorted((DATA / folder).glob("*.plan.json")):
        plan = load(path, Plan)
        profile = profiles.get(plan.inputs.profile_fingerprint)
        if profile is None:
            yield f"{path.name}: of a profile that is not beside it"
            continue
        if plan.search.solver not in (*names(), "notebook"):
            yield f"{path.name}: by {plan.search.solver}, which is no solver"
        now, _ = predict_again(plan, profile)
        if _rounded(now) != _rounded(plan.prediction):
            yield f"{path.name}: {_rounded(plan.prediction)} s and bytes predicted then, {_rounded(now)} now"
    if folder == "spatial":
        yield from _points_behind()


def _points_behind() -> Iterator[str]:
    """Of each network the cheapest plans of two ranks: where they are off, so are the others."""
    from benchmarks.strong_scaling.__main__ import SAMPLES, Ways

    for network in ("mesh", "resnet"):
        profile = load(DATA / "spatial" / f"{network}.profile.json", Profile)
        for point in json.loads((DATA / "spatial" / f"{network}-strong.json").read_text("utf-8"))["data"]:
            if point["role"] in ("one device", "samples") and point["ranks"] <= SAMPLES:
                ways = Ways(profile, SAMPLES, point["ranks"])
                now_s = ways.uniform({"sample": SAMPLES} if point["role"] == "samples" else {}).step_s
                if abs(now_s / point["predicted_s"] - 1) > 1e-6:
                    what = f"{network}, {point['role']} on {point['ranks']}"
                    yield f"{what}: {1e3 * point['predicted_s']:.1f} ms predicted then, {1e3 * now_s:.1f} ms now"


def _rounded(prediction: Any) -> tuple[str, ...]:
    return (f"{prediction.step_s:.6g}", *(str(rank.peak_bytes) for rank in prediction.ranks))


def _profiles(folder: str) -> dict[str, Profile]:
    found = (load(path, Profile) for path in sorted((DATA / folder).glob("*profile.json")))
    return {fingerprint(profile.bare): profile for profile in found}


def _files(folder: str) -> dict[str, str]:
    paths = sorted(path for path in (DATA / folder).glob("*.json") if path != STAMPS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def main(arguments: list[str]) -> int:
    """Says what is behind, or predicts again."""
    for folder in FOLDERS:
        if arguments == ["--price"]:
            price(folder)
            stamp(folder, measured=False)
        sys.stdout.write(f"{folder}: {about(folder)}\n")
    wrong = [line for folder in FOLDERS for line in untrue(folder)]
    sys.stdout.write("".join(f"{line}\n" for line in wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
