"""Measures what ``06_point_clouds.ipynb`` reads: two sparse networks profiled, planned, trained and judged.

    python notebooks/collect_clouds.py [segmentation] [classification]

Run it from the folder that holds ``tests``.  Without an argument both are collected, into ``notebooks/data/clouds``:
the profile, every plan with the step that it was measured at, the curves of the training run, and what the trained
network says of data it has not seen.  A profile that is there is kept.  Some minutes on two cores that do nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from collected import stamp
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

import halopipe as hp
import halopipe.sparse as spnn
from benchmarks.sparse_balance import SCAN
from cuda_ops.sparse.preparation import Preparation
from cuda_ops.sparse.recipe import Recipe
from halopipe.extras.point_clouds.laser_scans import ScanTiles
from halopipe.extras.point_clouds.solids import Shapes
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from runtime.checkpoint import Checkpoint, whole_state_dict

HOME = Path(__file__).resolve().parent.parent
DATA = HOME / "notebooks" / "data" / "clouds"
HERE = "notebooks/collect_clouds.py"

TILES: dict[str, Any] = {
    "voxel_m": 0.2,
    "tile_m": 4.0,
    "least_voxels": 200,
    "validation_share": 0.25,
}
NUM_CLASSES = 8
VOXELS = 3200
NUM_SHAPES = 512
NUM_HELD_BACK = 128
BATCH = 8
SEED = 0
BASELINES = ("one-device", "data-parallel", "sparsepipe")


@dataclass(frozen=True, slots=True)
class Task:
    """What is learnt.

    Attributes:
        steps: of the training run; plans beside it are run for ``short_steps``.
    """

    name: str
    steps: int
    short_steps: int
    eval_every: int
    optimizer: str
    scheduler: str

    @property
    def factory(self) -> str:
        """The network, with an example of its data."""
        return f"{HERE}:{self.name}"

    @property
    def options(self) -> RunOptions:
        """Of the training run."""
        return RunOptions(
            steps=self.steps,
            seed=SEED,
            data=f"{HERE}:{self.name}_data",
            eval_data=f"{HERE}:{self.name}_held_back",
            eval_every=self.eval_every,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
        )

    def short(self, steps: int) -> RunOptions:
        """As many of the same steps, judged by nobody."""
        return replace(self.options, steps=steps, eval_data="", eval_every=0)


TASKS = (
    Task("segmentation", 120, 20, 20, "AdamW:lr=0.01", "OneCycleLR:max_lr=0.01,total_steps=120"),
    Task("classification", 400, 20, 80, "AdamW:lr=0.001", "OneCycleLR:max_lr=0.001,total_steps=400"),
)


def segmentation() -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    """MinkUNet-18 of a quarter of its channels, on a batch of tiles of middling size."""
    module = spnn.MinkUNet(in_channels=2, num_classes=2, channels=(8, 8, 16, 32, 64, 64, 32, 24, 24))
    return module, middling(tiles("train")), spnn.SiteCrossEntropy()


def segmentation_data(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset[Any]:
    """Tiles to train on, turned; which they are does not depend on the seed of the run."""
    return Turned(tiles("train"))


def segmentation_held_back(global_batch: int, input_shape: tuple[int, ...], seed: int) -> ScanTiles:
    """The others."""
    return tiles("validation")


def classification() -> tuple[nn.Module, Any, Callable[..., Tensor]]:
    """SparsePipe's sparse VGG-16 with a quarter of its channels."""
    module = spnn.SparseVGG16(in_channels=4, num_classes=NUM_CLASSES, width=16, hidden=128)
    return module, middling(Shapes(64, voxels=VOXELS, seed=SEED)), nn.functional.cross_entropy


def classification_data(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset[Any]:
    """Shapes to train on."""
    return Kept(Shapes(NUM_SHAPES, voxels=VOXELS, seed=SEED))


def classification_held_back(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Dataset[Any]:
    """Other shapes of the same kinds."""
    return Kept(Shapes(NUM_HELD_BACK, voxels=VOXELS, seed=SEED, first=NUM_SHAPES))


class Turned(Dataset[Any]):
    """Tiles turned by a quarter, a half or three around the vertical, and mirrored or not, anew each time."""

    def __init__(self, samples: ScanTiles) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        (coordinates, features, count), targets = self._samples[index]
        x, y, z = coordinates.unbind(1)
        for axis in torch.randint(2, (3,)).tolist():
            x, y = (y, x) if axis else (_mirrored(x, count), y)
        return (torch.stack([x, y, z], 1), features, count), targets


def _mirrored(places: Tensor, count: Tensor) -> Tensor:
    """Rows behind the first ``count`` stay as they are."""
    mirrored = places.clone()
    mirrored[:count] = places[:count].max() - places[:count]
    return mirrored


class Kept(Dataset[Any]):
    """Samples made once, ahead of all steps."""

    def __init__(self, samples: Dataset[Any]) -> None:
        self._samples = list(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def tiles(part: Any) -> ScanTiles:
    """Of the scan."""
    return ScanTiles(SCAN, part=part, **TILES)


def middling(samples: Dataset[Any]) -> Any:
    """A batch whose voxels are as many as the samples have on the mean, as near as ten thousand drawings come."""
    counts = torch.tensor([float(inputs[2]) for inputs, _ in samples])
    generator = torch.Generator().manual_seed(SEED)
    draws = torch.stack([torch.randperm(len(counts), generator=generator)[:BATCH] for _ in range(10_000)])
    best = (counts[draws].mean(1) - counts.mean()).abs().argmin()
    inputs, targets = default_collate([samples[int(index)] for index in draws[best]])
    return tuple(inputs), targets


def main(wanted: Sequence[str]) -> int:
    """Fills ``notebooks/data/clouds``."""
    DATA.mkdir(parents=True, exist_ok=True)
    os.chdir(HOME)
    for task in TASKS:
        if not wanted or task.name in wanted:
            collect(task)
    stamp("clouds")
    return 0


def collect(task: Task) -> None:
    """All files of a task."""
    before = os.getloadavg()
    profile = profile_of(task)
    plan = hp.plan(profile, global_batch=BATCH)
    others = {each.search.solver: each for each in hp.baselines(profile, global_batch=BATCH)}
    say(f"{task.name}: training by {plan.search.solver}, {plan.prediction.step_s:.2f} s a step predicted")
    with tempfile.TemporaryDirectory() as folder:
        result = ran(plan, replace(task.options, checkpoint=folder))
        weights = whole_state_dict(Checkpoint.open(folder))
    judged = judge(task, weights)
    save(plan, result, task)
    for name in BASELINES:
        if name in others:
            say(f"{task.name}: {task.short_steps} steps by {name}")
            save(others[name], ran(others[name], task.short(task.short_steps)), task)
    say(f"{task.name}: numerics in float64")
    exact = ran(plan, replace(task.short(5), dtype="float64", check_numerics=True))
    found = {
        "machine": machine(before, os.getloadavg()),
        "losses": [round(value, 6) for value in result.losses],
        "step_s": [round(value, 5) for value in result.step_seconds],
        "scores": [asdict(score) for score in result.scores],
        "numerics": numerics(exact),
        "judged": judged,
    }
    (DATA / f"{task.name}.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


def profile_of(task: Task) -> Profile:
    """The one that is there, else a new one."""
    path = DATA / f"{task.name}.profile.json"
    if not path.exists():
        say(f"{task.name}: profiling")
        dump(hp.profile(task.factory, optimizer=task.optimizer, quick=True), path)
    return load(path, Profile)


def ran(plan: Plan, options: RunOptions) -> RunResult:
    """What a run on this machine showed."""
    result = run_plan(plan, options)
    if result is None:
        raise SystemExit("run this outside of any job")
    return result


def save(plan: Plan, result: RunResult, task: Task) -> None:
    """The plan with what was measured."""
    measured = replace(plan, measured=result.measured(plan.prediction))
    dump(measured, DATA / f"{task.name}-{plan.search.solver}.plan.json")


def numerics(result: RunResult) -> dict[str, float]:
    """Largest relative error by kind."""
    report = result.numerics
    return {} if report is None else {kind: worst.error for kind, worst in report.worst.items()}


def judge(task: Task, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the trained network says of data held back, on one device and outside of all plans."""
    module = (segmentation if task.name == "segmentation" else classification)()[0]
    module.load_state_dict(weights)
    module.eval()
    if task.name == "classification":
        data = classification_held_back(BATCH, (), SEED)
        table = confusion(NUM_CLASSES, answers(module, data, per_site=False))
        return {"confusion": table.tolist(), "samples": NUM_HELD_BACK}
    data = tiles("validation")
    table = torch.zeros(2, 2, dtype=torch.int64)
    drawn = []
    for sample, (said, right) in zip(data, answers(module, data, per_site=True), strict=True):
        table += confusion(2, [(said, right)])
        count = int(sample[0][2])
        drawn.append({"xyz": sample[0][0][:count].tolist(), "right": right.tolist(), "said": said.tolist()})
    largest = sorted(drawn, key=lambda each: len(each["right"]))[-2:]
    return {"confusion": table.tolist(), "threshold": threshold(), "tiles": largest}


@torch.no_grad()
def answers(module: nn.Module, data: Dataset[Any], *, per_site: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """What is said and what is right of each sample, in the order that its voxels are given in."""
    for inputs, targets in data:
        raw = [each.unsqueeze(0) for each in (*inputs, targets)]
        clouds = Preparation(Recipe((), ()), (per_site,)).clouds(raw)
        found = module(spnn.SparseTensor.on(clouds.geometry, clouds.tensor("features")))
        said = (found.feats if per_site else found).argmax(1)
        yield said, clouds.tensor("target_0")


def confusion(num_classes: int, answers: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """How often (right class, said class) occurred."""
    table = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for said, right in answers:
        table += torch.bincount(right * num_classes + said, minlength=num_classes**2).view(num_classes, num_classes)
    return table


def threshold() -> dict[str, Any]:
    """The best that one height above the tile's lowest voxel can say: chosen on tiles to train on, held-back judged."""
    (height, right), (other, held_back) = (voxels(tiles(part)) for part in ("train", "validation"))
    heights = torch.linspace(0.05, 3.0, 60)
    best = heights[torch.stack([((height > each).long() == right).float().mean() for each in heights]).argmax()]
    table = confusion(2, [((other > best).long(), held_back)])
    return {"height_m": float(best), "confusion": table.tolist()}


def voxels(data: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Heights and targets of all voxels."""
    samples = [(features[:count, 0], targets[:count]) for (_, features, count), targets in data]
    return torch.cat([height for height, _ in samples]), torch.cat([targets for _, targets in samples])


def machine(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, Any]:
    """Where it was measured, and the load meanwhile."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.machine(),
        "load_before": [round(value, 2) for value in before],
        "load_after": [round(value, 2) for value in after],
    }


def say(text: str) -> None:
    """To a person."""
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
