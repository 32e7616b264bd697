"""The private names of torch that are leant on (``cuda_ops._torch``): they exist, and do what is relied on.

With a newer torch than was tested this file says first what has changed; then raise ``torch_versions.NEWEST``.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from cuda_ops import _torch
from cuda_ops._torch import (
    BatchNormBase,
    DropoutBase,
    FakeTensor,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
)
from cuda_ops.device import torch_versions
from cuda_ops.device.torch_versions import TorchVersionError

ATEN = torch.ops.aten


def test_torch_is_one_of_those_that_are_tested() -> None:
    release = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    assert torch_versions.OLDEST <= release <= torch_versions.NEWEST, "all else here passes? then raise NEWEST"


def test_a_torch_that_lacks_a_name_is_told_where_the_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    options = (1, 1), (0, 0), (1, 1), False, (0, 0), 1
    monkeypatch.delattr(torch._C, "_select_conv_backend")
    with pytest.raises(TorchVersionError, match=r"torch \d.* lacks .*_select_conv_backend.*tested: torch 2\.11"):
        _torch.conv_backend(torch.ones(1, 2, 9, 9), torch.ones(2, 2, 3, 3), *options)


def test_a_torch_that_lacks_a_name_is_told_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._compile, "_disable_dynamo")
    monkeypatch.delitem(sys.modules, "cuda_ops._torch")
    with pytest.raises(TorchVersionError, match=r"lacks .*_disable_dynamo"):
        importlib.import_module("cuda_ops._torch")


def test_what_fails_inside_of_torch_stays_as_it_is() -> None:
    class Broken:
        @property
        def _overloadname(self) -> str:
            raise AttributeError("of theirs")

    with pytest.raises(AttributeError, match=r"^of theirs$"):
        _torch.overload_name(Broken())


@pytest.mark.parametrize("name", _torch.__all__)
def test_every_name_exists(name: str) -> None:
    assert getattr(_torch, name) is not None


@pytest.mark.parametrize("name", ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"])
def test_stores_are_those_of_the_public_package(name: str) -> None:
    assert getattr(_torch, name) is getattr(dist, name)


def test_a_prefix_keeps_the_keys_of_a_store_apart() -> None:
    store = _torch.HashStore()
    _torch.PrefixStore("a", store).set("key", "1")
    assert _torch.PrefixStore("a", store).get("key") == b"1"
    assert not _torch.PrefixStore("b", store).check(["key"])


def test_fake_tensors_have_the_device_that_they_stand_for() -> None:
    with FakeTensorMode():
        found = torch.empty(2, 3, device="cpu") @ torch.empty(3, 4)
    assert isinstance(found, FakeTensor)
    assert (found.device.type, found.shape) == ("cpu", (2, 4))


class _Sees(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.seen.append(_torch.schema_of(func).name)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_runs_but_not_what_runs_outside_of_all_modes() -> None:
    x = torch.ones(2)
    with _Sees() as mode:
        x.add(1)
        with _torch.disable_current_modes():
            x.mul(2)
    assert mode.seen == ["aten::add"]


def test_operators_have_types_schemas_and_names() -> None:
    add = ATEN.add.Tensor
    write = ATEN.add_.Tensor
    assert isinstance(add, OpOverload)
    for name in ("wrap_with_autocast", "wrap_with_set_grad_enabled"):
        assert isinstance(getattr(torch.ops.higher_order, name), HigherOrderOperator)
        assert getattr(torch.ops.higher_order, name) is getattr(_torch, name)
    assert [argument.name for argument in _torch.schema_of(add).arguments] == ["self", "other", "alpha"]
    writes = [bool(each.alias_info and each.alias_info.is_write) for each in _torch.schema_of(write).arguments]
    assert writes == [True, False, False]
    assert _torch.schema_of(len) is None
    assert _torch.overload_name(add) == "Tensor"


def test_a_size_that_becomes_a_number_is_told_where_it_does() -> None:
    told: list[str] = []

    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told.append("before")
            return x * int(x.shape[0])

    with _torch.fixed_sizes(lambda: told.append("fixed")):
        torch.export.export(Sized(), (torch.ones(4, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    torch.export.export(Sized(), (torch.ones(4, 2),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert (told[0], set(told[1:-1]), told[-1]) == ("before", {"fixed"}, "before")


def test_python_kernels_take_effect_once_the_dispatch_cache_is_cleared() -> None:
    operator = ATEN.gru.input
    calls = []
    before = dict(operator.py_kernels)

    def kernel(*arguments: object, **_: object) -> tuple[object, object]:
        calls.append(len(arguments))
        return arguments[0], arguments[1]

    rnn = nn.GRU(2, 2)
    x = torch.ones(3, 1, 2)
    with FakeTensorMode() as fakes, torch._dispatch.python.enable_python_dispatcher():
        rnn = nn.GRU(2, 2)
        try:
            operator.py_kernels.update(dict.fromkeys(_torch.COMPOSITE_KEYS, kernel))
            _torch.clear_dispatch_cache(operator)
            rnn(fakes.from_tensor(x))
        finally:
            operator.py_kernels.clear()
            operator.py_kernels.update(before)
            _torch.clear_dispatch_cache(operator)
        assert len(calls) == 1
        rnn(fakes.from_tensor(x))
    assert len(calls) == 1


def test_a_weak_reference_keeps_the_number_of_a_storage_and_not_its_memory() -> None:
    tensor = torch.ones(1024)
    kept = _torch.weak_storage(tensor)
    number = _torch.storage_id(tensor)
    assert not kept.expired()
    del tensor
    assert kept.expired()
    assert number not in {_torch.storage_id(torch.ones(1024)) for _ in range(50)}


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": (1, [2, 3])}
    leaves, spec = _torch.tree_flatten(tree)
    assert leaves == _torch.tree_leaves(tree) == [1, 2, 3]
    assert isinstance(spec, _torch.TreeSpec)
    assert _torch.tree_unflatten(leaves, spec) == tree


def test_writes_are_counted_but_not_in_inference_mode() -> None:
    x = torch.zeros(2)
    before = _torch.times_written(x)
    x.add_(1)
    x[:1].mul_(2)
    assert _torch.times_written(x) == before + 2
    with torch.inference_mode():
        assert _torch.times_written(torch.zeros(2)) == 0


@pytest.mark.parametrize("make", [torch.zeros, lambda *shape: torch.zeros(*shape, device="meta")])
def test_a_storage_is_known_without_data(make: Callable[..., Tensor]) -> None:
    x = make(2, 0)
    other = make(2, 0)
    assert _torch.storage_id(x) == _torch.storage_id(x.view(0)) != _torch.storage_id(other)


def test_buffers_that_are_none_are_among_a_modules_own() -> None:
    module = nn.BatchNorm1d(2, track_running_stats=False)
    assert set(_torch.buffers_of(module)) == {"running_mean", "running_var", "num_batches_tracked"}
    assert dict(module.named_buffers()) == {}


def test_batch_norms_and_dropouts_have_one_base() -> None:
    assert isinstance(nn.SyncBatchNorm(2), BatchNormBase)
    assert isinstance(nn.BatchNorm3d(2), BatchNormBase)
    assert isinstance(nn.AlphaDropout(), DropoutBase)


def test_the_kernel_of_a_convolution_is_named() -> None:
    options = (1, 1), (0, 0), (2, 2), False, (0, 0), 1
    x = torch.ones(1, 2, 9, 9).double()
    weight = torch.ones(2, 2, 3, 3).double()  # oneDNN has no float64
    assert _torch.conv_backend(x, weight, *options) == "SlowDilated2d"
    transposed = (2, 2), (1, 1), (1, 1), True, (1, 1), 1
    assert _torch.conv_backend(x, weight, *transposed) == "SlowTranspose2d"


def test_backward_by_edges_adds_to_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    z = x * 3
    _torch.run_backward([get_gradient_edge(y), get_gradient_edge(z)], [torch.ones(2), torch.ones(2)])
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 5.0]


def test_attention_gives_its_weights() -> None:
    query = torch.randn(1, 2, 3, 4)
    key = torch.randn(1, 2, 5, 4)
    _, weights = _torch.attention_with_weights(query, key, key[..., :0], None, 0.0, False, None)
    torch.testing.assert_close(weights, (query @ key.transpose(-1, -2) / 2).softmax(-1))


def test_a_condition_of_a_size_is_checked() -> None:
    _torch.check(True)
    with pytest.raises(RuntimeError):
        _torch.check(False)


def test_formulas_of_sizes_are_evaluated() -> None:
    sympy = pytest.importorskip("sympy")
    interpret, arithmetic = _torch.sympy_interpreter()
    size = sympy.Symbol("s", integer=True)
    assert interpret(arithmetic, {size: 5}, 2 * size + 1) == 11


def test_sums_that_a_compiler_sees_have_shapes_without_data() -> None:
    _, _, wait = _torch.functional_collectives()
    with FakeTensorMode():
        assert wait(torch.empty(3)).shape == (3,)


def test_the_loop_over_threads_is_found_in_torchs_library() -> None:
    assert ctypes.cast(ctypes.CDLL(_torch.library_path()).torch_parallel_for, ctypes.c_void_p).value


def test_a_loader_with_workers_that_last_starts_anew() -> None:
    loader = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
    loader._iterator = object()
    _torch.forget_iterator(loader)
    assert loader._iterator is None


def test_an_optimiser_is_made_like_another_and_schedules_know_of_its_steps() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    given = torch.optim.AdamW(weights, lr=0.5, betas=(0.1, 0.2))
    schedule = torch.optim.lr_scheduler.StepLR(given, 1)
    _torch.note_step(given)
    schedule.step()  # else it warns
    attributes = _torch.optimizer_attributes(given)
    groups = [{**given.param_groups[0], "params": weights[1:]}]
    twin = torch.optim.AdamW.__new__(torch.optim.AdamW)
    _torch.optimizer_like(twin, attributes, groups, defaultdict(dict))
    weights[1].grad = torch.ones(2)
    twin.step()
    assert isinstance(twin, torch.optim.AdamW)
    assert twin.defaults == given.defaults
    assert (len(twin.state), len(given.state)) == (1, 0)
    assert not _torch.has_step_hooks(given)
    given.register_step_post_hook(lambda *_: None)
    assert _torch.has_step_hooks(given)


def test_an_interpreter_says_which_node_it_is_at() -> None:
    graph = torch.fx.symbolic_trace(nn.Linear(1, 1))
    interpreter = torch.fx.Interpreter(graph)
    node, *_ = graph.graph.nodes
    with _torch.at_node(interpreter, node):
        assert torch.fx.traceback.get_current_meta() is not None


def test_functions_of_users_derive_from_one_class() -> None:
    assert issubclass(torch.autograd.Function, _torch.SingleLevelFunction)


def test_no_compiler_looks_into_a_function_that_is_kept_from_it() -> None:
    kept = _torch.disable_dynamo(lambda x: x + 1)
    assert kept(torch.ones(1)).item() == 2


@pytest.mark.parametrize("name", ["in", "None", "a-b", 'a"b', "a\\", "\ufb01", "ключ", "1x1", "plain"])
def test_code_of_a_graph_reads_attributes_of_any_name(name: str) -> None:
    module = nn.Module()
    module.add_module(name, nn.Linear(2, 2))
    graph = torch.fx.Graph()
    weight = graph.get_attr(f"{name}.weight")
    graph.output(weight)
    assert torch.fx.GraphModule(module, graph)() is module.get_submodule(name).weight


@pytest.mark.cuda
def test_a_gpu_that_is_kept_busy_has_not_come_to_what_follows() -> None:
    event = torch.cuda.Event()
    _torch.occupy_gpu(1_000_000_000)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
