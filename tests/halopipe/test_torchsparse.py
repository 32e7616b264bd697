"""Code of torchsparse's users with its imports changed: names, places, a program, and what a plan cannot keep."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import halopipe.sparse
from cuda_ops.sparse.errors import SparseInputError
from halopipe.sparse import PointTensor, SparseTensor, point_to_voxel, voxel_to_point
from halopipe.sparse import nn as spnn
from planner.ir.errors import UnsupportedModelError
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.source import load_model
from tests.halopipe import cloudy

torch.set_num_threads(1)
PROGRAM = Path(__file__).with_name("torchsparse_program.py")
DOCUMENT = Path(halopipe.sparse.__file__).parents[2] / "docs" / "sparse.md"


def with_imports_changed(path: Path) -> ModuleType:
    """The program as a module: ``torchsparse`` in its import lines is ``halopipe.sparse``."""
    lines = []
    for line in path.read_text("utf-8").splitlines():
        if line == "import torchsparse":
            line = "import halopipe.sparse as torchsparse"
        elif re.match(r"(from|import) torchsparse", line):
            line = line.replace("torchsparse", "halopipe.sparse", 1)
        lines.append(line)
    module = ModuleType("program")
    exec(compile("\n".join(lines), str(path), "exec"), module.__dict__)
    return module


def test_a_program_for_torchsparse_learns_with_its_imports_changed() -> None:
    losses = with_imports_changed(PROGRAM).main("cpu")
    assert len(losses) == 8
    assert losses[0] > 0.5
    assert losses[-1] < 0.5 * losses[0]


def test_the_table_of_names_is_true() -> None:
    rows = re.findall(r"^\| (`torchsparse[^|]*`) \| ([^|]*) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    told = set()
    for theirs, ours in rows:
        place, *names = (name.strip(" `") for name in re.split(r"[:,]", theirs))
        module = import_module(place.replace("torchsparse", "halopipe.sparse", 1))
        for name in names:
            assert hasattr(module, name) == (ours == "the same"), f"{place}.{name}"
        told |= {(place, name) for name in names}
    assert len(told) > 50
    assert all(
        ("torchsparse.nn", name) in told
        for name in dir(spnn)
        if name.startswith(("To", "SparseCrop")) and name != "ToDense"
    )


def test_modules_are_reached_as_attributes_and_do_not_come_with_a_star() -> None:
    for place in ("nn.functional", "nn.utils", "utils.collate", "utils.quantize", "backbones.modules", "tensor"):
        found: Any = halopipe.sparse
        for name in place.split("."):
            found = getattr(found, name)
        assert found is import_module(f"halopipe.sparse.{place}")
    assert "nn" not in halopipe.sparse.__all__
    public = {name for name, value in vars(spnn).items() if isinstance(value, type)}
    assert public == {name for name in spnn.__all__ if isinstance(getattr(spnn, name), type)}
    assert public <= {*halopipe.sparse.__all__}


def test_settings_of_its_kernels_are_taken_where_they_change_nothing() -> None:
    spnn.functional.set_downsample_mode("spconv")
    with pytest.raises(SparseInputError, match="downsample mode: found minkowski, expected spconv"):
        spnn.functional.set_downsample_mode("minkowski")
    with pytest.raises(SparseInputError, match="kmap mode: found grid"):
        spnn.functional.set_kmap_mode("grid")


def test_offsets_are_in_the_order_of_the_weights() -> None:
    assert spnn.utils.get_kernel_offsets((1, 2, 3), dilation=(1, 1, 2)).tolist() == [
        [0, y, z] for y in (0, 1) for z in (-2, 0, 2)
    ]
    with pytest.raises(ValueError, match="is 2 numbers, not 3"):
        halopipe.sparse.utils.make_ntuple([1, 2], 3)


def test_labels_go_with_coordinates_but_into_no_layer() -> None:
    coords = torch.tensor([[2, 0, 0], [0, 0, 1]], dtype=torch.int32)
    labels = SparseTensor(coords=coords.numpy(), feats=torch.tensor([7, 8]))
    assert (labels.feats.tolist(), labels.coords.tolist()) == ([8, 7], [[0, 0, 0, 1], [0, 2, 0, 0]])
    for layer in (spnn.Conv3d(1, 2, 3), spnn.BatchNorm(1), spnn.Linear(1, 1)):
        with pytest.raises(SparseInputError, match=r"found torch.int64 \[2\], expected floating-point numbers"):
            layer(labels)
    with pytest.raises(SparseInputError, match="rows of features: found 3, expected 2"):
        labels.F = torch.zeros(3, 1)


class Points(nn.Module):
    """Goes to points and back on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spnn.Conv3d(cloudy.CHANNELS, 4, 3)
        self.down = spnn.Conv3d(4, 4, 2, 2)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x = self.first(x)
        return point_to_voxel(x, voxel_to_point(self.down(x), PointTensor(x.F, x.C.double())))


def points() -> Any:
    """A point-voxel network."""
    return Points(), cloudy.segmenter()[1], spnn.SiteCrossEntropy()


def reduced() -> Any:
    """A view from above of columns as long as the clouds at hand have them."""
    network = nn.Sequential(spnn.Conv3d(cloudy.CHANNELS, 4, 3), spnn.ToBEVReduction(), spnn.GlobalAvgPool())
    return network, cloudy.classifier()[1], nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("factory", "remedy"),
    [("points", "make features of coordinates, and voxels of points, before"), ("reduced", "extent=")],
)
def test_what_reads_coordinates_on_the_way_runs_alone_and_is_refused_with_a_remedy(factory: str, remedy: str) -> None:
    network, (x, _), _ = globals()[factory]()
    assert (network(x).feats if factory == "points" else network(x)).isfinite().all()
    with pytest.raises(UnsupportedModelError, match="cannot be planned: coordinates in a prepared network") as caught:
        capture(load_model(ModelSource(f"{__name__}:{factory}", {}, (), "float64")))
    assert remedy in caught.value.remedies[0]
