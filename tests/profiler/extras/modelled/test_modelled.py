"""Networks on fake tensors beside the same networks with memory: one graph, the same bytes; and what is priced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.extras.kernels.clusters import cluster_of
from planner.extras.kernels.estimates import Estimate
from planner.extras.kernels.models import kernels
from planner.ir.errors import FactoryError, MissingMeasurementError, UnsupportedModelError
from planner.ir.graph import MIXES_SAMPLES, NEEDS_WHOLE_BATCH
from planner.ir.profile import ModelSource, Optimizer
from profiler.capture.graph import capture
from profiler.extras.modelled.networks import FakeNetwork, fake_network
from profiler.extras.modelled.operators import OperatorPrices
from profiler.extras.modelled.session import profile_on
from profiler.extras.modelled.watch import OperatorWatch, WatchClock
from profiler.measure.memory import footprints, watched_passes
from profiler.source.model import example_of
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from tests.zoo import ALL

GPT = ModelSource("profiler.models.gpt:gpt", {"width": "64", "layers": "2", "heads": "4", "vocabulary": "100"}, (4, 32))
RESNET = ModelSource("profiler.models.resnet:resnet18", {"width": "8"}, (4, 3, 32, 32))
NETWORKS = {
    "gpt": GPT,
    "gpt in bfloat16": ModelSource(GPT.factory, GPT.arguments, GPT.input_shape, "bfloat16"),
    "gpt under autocast": ModelSource(GPT.factory, GPT.arguments, GPT.input_shape, autocast="bfloat16"),
    "resnet": RESNET,
}


@pytest.mark.parametrize("source", [pytest.param(source, id=name) for name, source in NETWORKS.items()])
def test_a_network_without_values_has_the_graph_and_saves_the_bytes_of_one_with_them(source: ModelSource) -> None:
    fake = fake_network(source)
    model = load_model(source)
    real = capture(model)
    assert fake.captured.graph == real.graph
    assert fake.captured.reductions == real.reductions
    expected = footprints(real, model.tensors, model.samples)
    found = bytes_of(fake)
    assert {name: each.saved_bytes for name, each in found.items()} == {
        name: each.saved_bytes for name, each in expected.items()
    }
    if source is GPT:  # of matrix products and attention what else is allocated is known too
        for name, each in expected.items():
            assert found[name].workspace_bytes == pytest.approx(each.workspace_bytes, rel=0.08), name


def test_batch_norm_under_autocast_saves_what_it_does_with_values_but_for_the_dtype_of_its_statistics() -> None:
    source = ModelSource(RESNET.factory, RESNET.arguments, RESNET.input_shape, autocast="bfloat16")
    fake = fake_network(source)
    model = load_model(source)
    real = capture(model)
    assert fake.captured.graph == real.graph
    expected = footprints(real, model.tensors, model.samples)
    found = bytes_of(fake)
    sums = [sum(each.saved_bytes for each in footprint.values()) for footprint in (expected, found)]
    assert sums[1] == pytest.approx(sums[0], rel=0.02)


def bytes_of(network: FakeNetwork) -> dict:  # type: ignore[type-arg]  # footprints by layer
    with network.mode:
        tensors = example_of(network.captured.graph.inputs, network.model, network.model.samples)
        watch = OperatorWatch(())
        with watch:
            return watched_passes(network.captured, tensors, network.model.samples, watch.meter, WatchClock(watch))[0]


SOME = [
    *list(ALL)[::12],
    "dtypes:targets_of_dtypes",
    "choices:mean_over_batch",
    "losses:contrastive",
    "losses:hard_examples",
    "inplace:ema_buffer",
    "losses:rolled_labels",
    "tables:selected_samples",
]
"""All of them were compared when the rules were written, which takes a minute and a half."""


@pytest.mark.parametrize("entry", [pytest.param(ALL[name], id=name) for name in dict.fromkeys(SOME)])
def test_operators_never_promise_more_than_a_run_shows(entry) -> None:  # type: ignore[no-untyped-def]  # of the zoo
    source = ModelSource(f"tests.zoo.{entry.name}")
    try:
        real = capture(load_model(source))
        fake = fake_network(source).captured
    except (FactoryError, UnsupportedModelError):
        return
    if len(real.graph.layers) != len(fake.graph.layers):
        return

    def needs(captured: CapturedModule, mark: str) -> set[str]:
        return {layer.name for layer in captured.graph.layers if mark in layer.attributes}

    if needs(real, NEEDS_WHOLE_BATCH):
        assert needs(fake, NEEDS_WHOLE_BATCH)
    else:
        assert needs(real, MIXES_SAMPLES) <= needs(fake, MIXES_SAMPLES)


class Recorder:
    """Kernels that note what they are asked for, and take a second an operation."""

    def __init__(self) -> None:
        self.products: list[tuple[int, ...]] = []
        self.num_bytes: dict[str, float] = {}

    def gemm(self, m: int, n: int, k: int, batch: int = 1) -> Estimate:
        self.products.append((m, n, k, batch))
        return Estimate(2.0 * m * n * k * batch, 0.0, 0.0, "measured table")

    def memory_bound(self, num_bytes: float, launches: int = 1, kind: str = "elementwise") -> Estimate:
        self.num_bytes[kind] = self.num_bytes.get(kind, 0.0) + num_bytes
        return Estimate(0.0, 0.0, 0.0, "measured table")


def priced(network: Callable[[Tensor], Tensor], x: Tensor) -> Recorder:
    recorder = Recorder()
    with OperatorWatch((OperatorPrices(lambda dtype: recorder),)):  # type: ignore[arg-type,return-value]  # it has the methods that are called
        network(x).square().sum().backward()  # type: ignore[no-untyped-call]  # torch does not type it
    return recorder


@pytest.mark.parametrize(
    ("layer", "shape", "forward"),
    [
        (nn.Linear(6, 10), (4, 5, 6), (20, 10, 6, 1)),
        (nn.Conv2d(6, 8, 3, padding=1, groups=2), (4, 6, 9, 9), (4 * 81, 4, 3 * 9, 2)),
        (nn.Conv2d(6, 8, 3, stride=2), (4, 6, 9, 9), (4 * 16, 8, 6 * 9, 1)),
        (nn.ConvTranspose3d(6, 8, 2, stride=2), (2, 6, 3, 3, 3), (2 * 27, 8 * 8, 6, 1)),
    ],
)
def test_a_layer_is_the_product_that_it_is_in_place_and_each_gradient_is_one(
    layer: nn.Module, shape: tuple[int, ...], forward: tuple[int, ...]
) -> None:
    found = priced(layer, torch.randn(shape, requires_grad=True)).products
    assert found[0] == forward
    assert len(found) == 3
    operations = [m * n * k * batch for m, n, k, batch in found]
    assert operations == [operations[0]] * 3
    assert sorted(found[0][:3]) == sorted(found[2][:3])


def test_views_are_free_and_what_memory_bounds_is_told_by_its_kind() -> None:
    norm = nn.LayerNorm(16)
    found = priced(lambda x: nn.functional.gelu(norm(x)), torch.randn(8, 16, requires_grad=True))
    size = 8 * 16 * 4
    assert found.num_bytes["activation"] == 2 * size
    assert found.num_bytes["activation_backward"] == 3 * size
    assert 2 * size <= found.num_bytes["norm"] < 3 * size
    assert not found.products
    assert not priced(lambda x: x.view(16, 8).transpose(0, 1), torch.randn(8, 16, requires_grad=True)).products


def test_a_profile_of_devices_that_are_not_here_is_an_ordinary_one() -> None:
    found = profile_on(
        NETWORKS["gpt in bfloat16"], cluster_of("a100-dgx", 2), Optimizer("AdamW", {"lr": 0.1}, 2.0), (2, 4)
    )
    known = kernels("A100-80GB", "bfloat16")
    (expand,) = (m for m in found.measurements["A100-80GB"] if m.layer == "blocks.0.expand" and m.samples == 4)
    rows = 4 * 32
    assert expand.forward_s == pytest.approx(known.gemm(rows, 256, 64).seconds)
    gradient = known.gemm(rows, 64, 256)
    weight = known.gemm(256, 64, rows)
    assert expand.backward_input_s + expand.backward_weight_s == pytest.approx(expand.backward_s, rel=0.1)
    assert expand.backward_s > gradient.seconds + weight.seconds
    assert expand.evidence == "kernels"
    assert 0 < expand.low < 1 < expand.high
    assert sum(found.provenance.kernels.values()) == pytest.approx(1.0, abs=0.01)
    cost = found.parameters["A100-80GB"]["blocks.0.expand"]
    num_bytes = sum(found.graph.parameters[n].num_bytes for n in ("blocks.0.expand.weight", "blocks.0.expand.bias"))
    assert cost.update_s == pytest.approx(known.memory_bound(7 * num_bytes, 2).seconds)


def test_a_factory_that_reads_values_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads.py").write_text(
        "import torch\n\n\ndef model():\n"
        "    depth = int(torch.linspace(0, 3, 4)[-1])\n"
        "    return torch.nn.Linear(depth, 2), torch.randn(4, depth)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FactoryError, match=r"reads\.py:model reads values, and there are none") as caught:
        fake_network(ModelSource("reads.py:model"))
    assert "leave out --on" in str(caught.value)


@pytest.mark.parametrize(("has_tensor_cores", "of_convolutions"), [(True, "tfloat32"), (False, "float32")])
def test_float32_convolutions_are_in_tensor_cores_where_there_are_some_and_products_are_not(
    has_tensor_cores: bool, of_convolutions: str
) -> None:
    recorders = {dtype: Recorder() for dtype in ("float32", "tfloat32")}

    def kernels(dtype: str) -> Recorder:
        if dtype == "tfloat32" and not has_tensor_cores:
            raise MissingMeasurementError("nothing says how fast it computes in tfloat32")
        return recorders[dtype]

    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with OperatorWatch((OperatorPrices(kernels),)):  # type: ignore[arg-type]  # it has the methods that are called
        nn.Conv2d(3, 4, 3, bias=False)(x).square().sum().backward()
    assert {dtype for dtype, each in recorders.items() if each.products} == {of_convolutions}
    recorders["tfloat32"].products.clear()
    with OperatorWatch((OperatorPrices(kernels),)):  # type: ignore[arg-type]
        nn.Linear(8, 4)(x).square().sum().backward()
    assert recorders["float32"].products
    assert not recorders["tfloat32"].products
