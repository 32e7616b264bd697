"""Small sparse networks, clouds for them, and clouds that no network takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from tests.halopipe.plans import plan_of

NUM_CLOUDS = 11
POINTS = 40
CHANNELS = 2
NUM_CLASSES = 3
Sample = tuple[tuple[Tensor, Tensor, int], Tensor]


class Segmenter(nn.Module):
    """A class a site: one step down, and up again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(CHANNELS, 4, 3), spnn.BatchNorm(4), spnn.ReLU())
        self.down = spnn.Conv3d(4, 6, 2, stride=2)
        self.deep = nn.Sequential(spnn.Conv3d(6, 6, 3), spnn.BatchNorm(6), spnn.ReLU())
        self.up = spnn.Conv3d(6, 4, 2, stride=2, transposed=True)
        self.head = spnn.Conv3d(8, NUM_CLASSES, 1)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x = self.stem(x)
        return self.head(spnn.cat([self.up(self.deep(self.down(x))), x]))


def segmenter() -> tuple[nn.Module, tuple[SparseTensor, Tensor], nn.Module]:
    """Clouds of different sizes; a target a point."""
    clouds = [cloud(number) for number in range(4)]
    targets = torch.cat([site_targets(features) for _, features in clouds])
    return Segmenter(), (tensor_of(clouds), targets), spnn.SiteCrossEntropy()


def classifier() -> tuple[nn.Module, tuple[SparseTensor, Tensor], Any]:
    """The same clouds; a target a cloud."""
    stem = spnn.Conv3d(CHANNELS, 4, 3), spnn.BatchNorm(4), spnn.ReLU(), spnn.MaxPool3d(2)
    deep = spnn.Conv3d(4, 6, 3), spnn.ReLU(), spnn.GlobalAvgPool()
    example = tensor_of([cloud(n) for n in range(4)]), torch.arange(4) % 3
    return nn.Sequential(*stem, *deep, nn.Linear(6, NUM_CLASSES)), example, functional.cross_entropy


class Detector(nn.Module):
    """A class a cloud, from a part of it seen from above."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(CHANNELS, 4, 3), spnn.BatchNorm(4), spnn.ReLU())
        self.crop = spnn.SparseCrop((-4, -4, -4), (4, 4, 4))
        self.view = spnn.ToDenseBEVConvolution(4, 5, (8, 8, 8), offset=(-4, 0, -4))
        self.high = spnn.ToBEVHeightCompression(4, (8, 2, 8), offset=(-4, -1, -4))
        self.head = nn.Sequential(nn.Conv2d(13, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, NUM_CLASSES))

    def forward(self, x: SparseTensor) -> Tensor:
        x = spnn.generative_add(self.crop(self.stem(x)), spnn.SparseCrop((0, -4, -4), (4, 4, 4))(self.stem(x)))
        upper = spnn.SparseCrop((-4, 0, -4))(x)
        return self.head(torch.cat([self.view(upper), self.high(x)], 1))


def detector() -> tuple[nn.Module, tuple[SparseTensor, Tensor], Any]:
    """The clouds of a classifier."""
    _, example, loss = classifier()
    return Detector(), example, loss


def dropping() -> tuple[nn.Module, tuple[SparseTensor, Tensor], Any]:
    """A classifier that draws."""
    module, example, loss = classifier()
    return nn.Sequential(*module[:-1], nn.Dropout(0.3), module[-1]), example, loss


def broken(fault: str) -> tuple[nn.Module, tuple[SparseTensor, Tensor], nn.Module]:
    """An example that no network takes."""
    (coordinates, features, count), targets = faulty(cloud_sample(0), fault)
    rows = torch.cat([torch.zeros(count, 1, dtype=torch.int64), coordinates[:count]], 1)
    return Segmenter(), (SparseTensor(features[:count], rows), targets[:count]), spnn.SiteCrossEntropy()


def cloud(number: int) -> tuple[Tensor, Tensor]:
    """Coordinates (points, 3) in no order, and features (points, channels); of another size than the next."""
    generator = torch.Generator().manual_seed(number)
    voxels = torch.randint(-5, 6, (25 + 5 * (number % 4), 3), generator=generator).unique(dim=0)
    voxels = voxels[torch.randperm(len(voxels), generator=generator)]
    return voxels.int(), torch.randn(len(voxels), CHANNELS, generator=generator)


def site_targets(features: Tensor) -> Tensor:
    """What can be learnt: a class that follows from the features; one point of each cloud does not count."""
    found = (features[:, 0] > 0).long() + (features[:, 1] > 0).long()
    found[0] = -100
    return found


def tensor_of(clouds: list[tuple[Tensor, Tensor]]) -> SparseTensor:
    """One batch of them."""
    rows = [torch.cat([torch.full((len(c), 1), b, dtype=torch.int32), c], 1) for b, (c, _) in enumerate(clouds)]
    return SparseTensor(torch.cat([features for _, features in clouds]), torch.cat(rows))


def cloud_sample(number: int, *, per_site: bool = True) -> Sample:
    """As a Dataset gives it: padded to the same number of points."""
    voxels, features = cloud(number)
    count = len(voxels)
    coordinates = torch.zeros(POINTS, 3, dtype=torch.int32)
    values = torch.zeros(POINTS, CHANNELS)
    coordinates[:count] = voxels
    values[:count] = features
    if not per_site:
        return (coordinates, values, count), torch.tensor(number % NUM_CLASSES)
    targets = torch.full((POINTS,), -100)
    targets[:count] = site_targets(features)
    return (coordinates, values, count), targets


class Clouds(Dataset[Sample]):
    """Eleven clouds of fixed size, with a target a point or a cloud."""

    def __init__(self, *, per_site: bool, fault: str = "", faulty_from: int = 0) -> None:
        self._per_site = per_site
        self._fault = fault
        self._faulty_from = faulty_from

    def __len__(self) -> int:
        return NUM_CLOUDS

    def __getitem__(self, index: int) -> Sample:
        found = cloud_sample(index, per_site=self._per_site)
        return faulty(found, self._fault) if self._fault and index >= self._faulty_from else found


def faulty(sample: Sample, fault: str) -> Sample:
    """``sample`` with something wrong in it."""
    (coordinates, features, count), targets = sample
    if fault == "duplicate":
        coordinates[1] = coordinates[0]
    elif fault == "range":
        coordinates = coordinates.long()
        coordinates[2, 1] = 1 << 33
    elif fault == "nan":
        features[3, 0] = torch.nan
    elif fault == "count":
        count = POINTS + 1
    elif fault == "channels":
        features = features[:, :1]
    elif fault == "metres":
        coordinates = coordinates * 0.1
    elif fault == "points":
        coordinates = coordinates[:-1]
    return (coordinates, features, count), targets


def sites(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Clouds:
    """Clouds with a target a point."""
    assert input_shape[2] == CHANNELS
    return Clouds(per_site=True)


def classes(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Clouds:
    """Clouds with a target each."""
    return Clouds(per_site=False)


def stream(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Any]:
    """Batches of clouds, each padded to its largest."""
    for step in range(100):
        samples = [cloud_sample((step + n) % NUM_CLOUDS) for n in range(global_batch)]
        longest = max(count for (_, _, count), _ in samples)
        inputs = [torch.stack([sample[0][place][:longest] for sample in samples]) for place in range(2)]
        counts = torch.tensor([sample[0][2] for sample in samples])
        yield (*inputs, counts), torch.stack([targets[:longest] for _, targets in samples])


def nan(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Clouds:
    """A feature that is no number."""
    return Clouds(per_site=True, fault="nan")


def nan_later(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Clouds:
    """The same, in some of the clouds."""
    return Clouds(per_site=True, fault="nan", faulty_from=7)


def channels(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Clouds:
    """Too few features."""
    return Clouds(per_site=True, fault="channels")


def source(factory: str, dtype: str = "float64", **arguments: str) -> ModelSource:
    """Where workers find one of the networks."""
    return ModelSource(f"{__name__}:{factory}", arguments, (), dtype)


def plan(factory: str = "segmenter", cuts: list[float] | None = None, **options: Any) -> Plan:
    """A plan of one of the networks in float64, of two stages unless said otherwise."""
    micro_batches = options.pop("micro_batches", (2, 2))
    return plan_of(source(factory), [0.4] if cuts is None else cuts, micro_batches, **options)


class Stamped(nn.Module):
    """Features are seconds of an epoch, in float64, of which float32 has no fractions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Segmenter()

    def forward(self, x: SparseTensor) -> SparseTensor:
        weight = next(self.parameters())
        return self.network(x.with_feats(((x.feats - EPOCH_S) / 3600).to(weight.dtype)))


EPOCH_S = 1.7e9


def stamped() -> tuple[nn.Module, tuple[SparseTensor, Tensor], nn.Module]:
    """Clouds whose features are time stamps."""
    module, (x, targets), loss = segmenter()
    module = Stamped()
    return module, (x.with_feats(EPOCH_S + 3600 * x.feats.double()), targets), loss


def stamped_stream(global_batch: int) -> Iterator[Any]:
    """Batches of these."""
    clouds = Clouds(per_site=True)
    while True:
        for start in range(0, NUM_CLOUDS - global_batch, global_batch):
            samples = [clouds[start + row] for row in range(global_batch)]
            coordinates, features = (torch.stack([sample[0][place] for sample in samples]) for place in range(2))
            counts = torch.tensor([sample[0][2] for sample in samples])
            targets = torch.stack([target for _, target in samples])
            yield (coordinates, EPOCH_S + 3600 * features.double(), counts), targets
