"""Capture of what networks may do besides: tied weights, buffers, constants, in-place operators, fixed sizes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from planner.ir.errors import UnsupportedModelError
from planner.layers import check_samples_apart, fixes_samples
from profiler import CapturedModule, LoadedModel, mean_of_squares
from profiler.capture import trace
from profiler.capture.functional import rewrite_in_place
from profiler.capture.graph import capture
from profiler.source import parts
from profiler.source.losses import TrainedLoss


class Module(nn.Module):
    """A module whose forward is a function of itself and its input."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def model_of(function: Callable[[Any, Tensor], Any], x: Tensor, **parts: Any) -> LoadedModel:
    return LoadedModel(Module(function, **parts), (x,), (), TrainedLoss(mean_of_squares))


def checked(model: LoadedModel, samples: int = 3) -> CapturedModule:
    """The capture, after the graph gave the module's loss, gradients and buffers at another number of samples."""
    graph = capture(model)
    x = torch.cat([model.inputs[0].roll(1, -1)] * samples)[:samples]
    reference = copy.deepcopy(model.module)
    expected = model.loss_fn(reference(x), ())
    actual = graph.graph_module(*((samples, x) if graph.polymorphic else (x,)))
    assert torch.equal(actual, expected)
    mine = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    others = [parameter for parameter in reference.parameters() if parameter.requires_grad]
    for a, b in zip(torch.autograd.grad(actual, mine), torch.autograd.grad(expected, others), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(model.module.buffers(), reference.buffers(), strict=True):
        assert torch.equal(a, b)
    return graph


def names(graph: CapturedModule) -> list[str]:
    return [layer.name for layer in graph.graph.layers]


def test_a_tied_parameter_is_one_parameter_of_both_layers() -> None:
    table = nn.Embedding(7, 4)
    head = nn.Linear(4, 7, bias=False)
    head.weight = table.weight
    graph = checked(model_of(lambda m, x: m.head(m.table(x)), torch.arange(6).view(2, 3), table=table, head=head))
    layers = graph.graph.by_name()
    assert layers["table"].parameters == layers["head"].parameters
    assert list(graph.graph.parameters) == list(layers["head"].parameters) == ["table.weight"]
    assert graph.graph.parameter_bytes() == 7 * 4 * 4


def test_a_view_of_a_parameter_belongs_to_its_reader() -> None:
    table = nn.Embedding(7, 4)
    graph = checked(model_of(lambda m, x: m.table(x) @ m.table.weight.t(), torch.arange(6).view(2, 3), table=table))
    layers = graph.graph.by_name()
    assert layers["matmul"].parameters == ("table.weight",)
    assert layers["matmul"].kind == "opaque"
    assert "t" not in layers


def test_constants_belong_to_their_reader_and_parameters_alone_are_a_layer() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0]) + m.positions(torch.arange(3)).sum(-1)

    graph = checked(model_of(forward, torch.randn(2, 3), positions=nn.Embedding(3, 2)))
    assert names(graph) == ["mul", "positions", "sum", "add", "loss.square", "loss"]
    layers = graph.graph.by_name()
    assert layers["positions"].inputs == ()
    assert layers["positions"].kind == "opaque"
    assert layers["mul"].buffer_bytes == 12
    assert not layers["sum"].outputs[0].has_samples


def test_a_frozen_parameter_is_state() -> None:
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad_(False)
    graph = checked(model_of(lambda m, x: m.layer(x), torch.randn(2, 3), layer=layer))
    assert list(graph.graph.parameters) == ["layer.bias"]
    assert graph.graph.by_name()["layer"].buffer_bytes == 36


def test_an_update_of_a_buffer_without_gradients_belongs_to_the_layer_it_watches() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        with torch.no_grad():
            m.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y.relu()

    graph = checked(model_of(forward, torch.randn(2, 3), layer=nn.Linear(3, 4), mean=torch.zeros(4)))
    assert names(graph) == ["layer", "relu", "loss.square", "loss"]
    assert graph.graph.by_name()["layer"].buffer_bytes == 16


def test_in_place_operators_are_rewritten_with_their_later_readers() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        z = y * 2
        y.mul_(2)
        y += z
        return y.view(-1, 2, 2).mul_(3)

    graph = checked(model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 4)))
    ops = {node.target for node in graph.graph_module.graph.nodes if node.op == "call_function"}
    assert not [op for op in ops if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable]


def test_a_later_reader_of_what_was_written_to_reads_the_result() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    before = graph.call_function(torch.ops.aten.mul.Tensor, (x, 1))
    graph.call_function(torch.ops.aten.relu_.default, (before,))
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (before, x)))
    rewrite_in_place(graph, {})
    module = fx.GraphModule({}, graph)
    data = torch.tensor([-1.0, 2.0])
    assert torch.equal(module(data), data.relu() + data)


def test_sizes_come_from_the_number_of_samples_alone() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x).view(x.shape[0] * x.shape[1], 4)
        return torch.cat((y, y.new_zeros(y.shape[0], 1)), 1).view(x.shape[0], -1)

    graph = checked(model_of(forward, torch.randn(2, 3, 4), layer=nn.Linear(4, 4)))
    nodes = {node.name: node for node in graph.graph_module.graph.nodes}
    free = [node for node in nodes.values() if node.op == "call_function" and node.name not in graph.layer_of_node]
    assert free
    for node in free:
        assert {nodes[a.name].target for a in node.all_input_nodes if a.op == "placeholder"} <= {"num_samples"}
        assert all(a.op == "placeholder" or a in free for a in node.all_input_nodes)
    assert graph.graph.by_name()["view"].outputs[0].shape == (6, 4)
    assert graph.graph.by_name()["view"].outputs[0].dims == ("sample", "feature")


def test_a_model_that_fixes_its_number_of_samples_runs_with_that_number_alone() -> None:
    graph = checked(model_of(lambda m, x: m.layer(x).view(2, 12), torch.randn(2, 3, 4), layer=nn.Linear(4, 4)), 2)
    assert not graph.polymorphic
    assert graph.graph.values()["layer"].dims[0] == "sample"
    assert set(graph.mixing) == {"layer", "view", "loss.square", "loss"}
    assert all(layer.attributes["mixes_samples"] is True for layer in graph.graph.layers)


def _by_rows(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.layer(row) for row in x])


def test_a_python_number_of_samples_stays_a_size() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        batch = len(x)
        start = torch.zeros(int(x.shape[0]), 4)
        return (m.layer(x.view(batch, -1)) + start) / math.sqrt(x.size(1))

    graph = checked(model_of(forward, torch.randn(2, 3), layer=nn.Linear(3, 4)), 5)
    assert graph.polymorphic
    assert not graph.mixing
    assert not graph.remarks
    assert list(graph.outputs) == ["output"]


def test_values_of_pairs_of_samples_have_two_sample_dims_and_a_loss_of_pairs_is_not_divided() -> None:
    def pairs(found: Tensor, _: Any) -> Tensor:
        scores = found @ found.t()
        scores = scores - scores.amax(1, keepdim=True)
        return nn.functional.cross_entropy(scores, torch.arange(len(found)))

    module = Module(lambda m, x: m.layer(x), layer=nn.Linear(3, 4))
    graph = capture(LoadedModel(module, (torch.randn(4, 3),), (), TrainedLoss(pairs))).graph
    values = {name: (spec.dims, spec.at(6, 4).shape) for name, spec in graph.values().items()}
    assert values["loss.matmul"] == (("sample", "sample"), (6, 6))
    assert values["loss.amax"][0][0] == "sample"
    assert values["loss.amax"][1] == (6, 1)
    assert {"loss.matmul", "loss"} <= set(check_samples_apart(graph))


@pytest.mark.parametrize("forward", [_by_rows, lambda m, x: m.layer(x) * 2 if x.shape[0] > 1 else m.layer(x)])
def test_code_that_fixes_the_number_of_samples_is_named(forward: Callable[[Any, Tensor], Any]) -> None:
    graph = capture(model_of(forward, torch.randn(4, 3), layer=nn.Linear(3, 4)))
    assert graph.polymorphic is (forward is not _by_rows)  # a branch that all micro-batches take is none
    if forward is _by_rows:
        assert fixes_samples(graph.graph)
        assert re.search(r"have 4 samples, no other number: .* at .*test_trace\.py:\d+ in _by_rows", graph.remarks[0])


def test_a_graph_that_is_read_but_computes_something_else_gives_way_to_one_of_fixed_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(*given: Any) -> trace.TracedModel | None:
        traced = read(*given)
        if traced is not None:
            (node,) = (each for each in traced.module.graph.nodes if each.target is torch.ops.aten.linear.default)
            node.args = node.args[:2]  # the bias is lost
            traced.module.recompile()
        return traced

    read = trace._by_bytecode
    monkeypatch.setattr(trace, "_by_bytecode", wrong)
    graph = checked(model_of(lambda m, x: m.layer(x.view(len(x), -1)), torch.randn(2, 3), layer=nn.Linear(3, 4)), 2)
    assert not graph.polymorphic
    assert re.search(r"at .*test_trace\.py:\d+", graph.fixed)


def test_a_mask_that_loops_fill_is_captured_in_linear_time() -> None:
    """Of 120 writes each makes two views; with all of them made anew each time, the graph would double each time."""

    def forward(m: Any, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1])
        for i in range(x.shape[1]):
            for j in range(i):
                mask[i, j] = 1
        return m.layer(x) @ mask

    graph = checked(model_of(forward, torch.randn(2, 16, 16), layer=nn.Linear(16, 16)))
    writes = [node for node in graph.graph_module.graph.nodes if "select_scatter" in str(node.target)]
    assert len(writes) == 2 * 120


def test_a_branch_on_values_is_refused_with_the_exporters_reason() -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot be captured[\s\S]*data-dependent"):
        capture(model_of(lambda m, x: x * 2 if x.sum() > 0 else x, torch.randn(2, 3)))


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "if": (lambda m, x: m.layer(x) if x.sum() > 0 else x, r"torch\.where"),
    "assert": (lambda m, x: _small(m.layer(x)), r"is_exporting"),
    "rounds": (lambda m, x: _rounds(m.layer(x)), r"a setting of the module"),
    "in place": (lambda m, x: m.layer(x) + m.layer.weight.add_(1).sum(), r"make a new tensor"),
    "data": (lambda m, x: _doubled(m.layer(x)), r"autograd\.Function"),
}


def _small(x: Tensor) -> Tensor:
    assert x.abs().max() < 1e6
    return x


def _rounds(x: Tensor) -> Tensor:
    for _ in range(int(x.detach().abs().max())):
        x = x / 2
    return x


def _doubled(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_users_line_and_what_to_write_there(case: str) -> None:
    function, remedy = REFUSED[case]
    with pytest.raises(UnsupportedModelError) as caught:
        capture(model_of(function, torch.randn(2, 3), layer=nn.Linear(3, 3)))
    assert re.search(remedy, " ".join(caught.value.remedies))
    if case != "data":  # torch tells of it once all is traced
        assert re.search(r"at .*test_trace\.py:\d+ in \S+: \S", " ".join(caught.value.details))


CHOOSES_BY_TEXTS = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 refuses branches on such texts")


def _reads_and_chooses(m: Any, x: Tensor) -> Tensor:
    shown = f"{x.mean():.2f}"
    return m.layer(x) * (1 if shown else 2) + torch.from_numpy(np.abs(x.detach().numpy()))


def _reads(m: Any, x: Tensor) -> Tensor:
    shown = f"{x.mean():.2f}"
    del shown
    return m.layer(x) + torch.from_numpy(np.abs(x.detach().numpy()))


@pytest.mark.parametrize("forward", [_reads, pytest.param(_reads_and_chooses, marks=CHOOSES_BY_TEXTS)])
def test_code_that_reads_values_for_itself_is_read_instead_of_run(forward: Callable[[Any, Tensor], Tensor]) -> None:
    found = capture(model_of(forward, torch.randn(4, 3), layer=nn.Linear(3, 3)))
    assert found.polymorphic
    assert set(found.graph.parameters) == {"layer.weight", "layer.bias"}
    assert "layer" in found.graph.by_name()


def test_the_loss_must_be_one_number_that_depends_on_the_model() -> None:
    module = nn.Linear(3, 2)
    x = torch.randn(2, 3)
    with pytest.raises(UnsupportedModelError, match=r"not a number[\s\S]*shape"):
        capture(LoadedModel(module, (x,), (), TrainedLoss(lambda output, targets: output)))
    with pytest.raises(UnsupportedModelError, match=r"not a sum of numbers[\s\S]*1 is a tensor of 1 dims"):
        capture(LoadedModel(module, (x,), (), TrainedLoss(lambda output, targets: (output.mean(), output[0]))))


def test_a_loss_with_state_of_its_own_and_a_tuple_of_targets() -> None:
    weights = torch.tensor([0.5, 2.0])
    module = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    model = parts.model_of("a test", (module, (x, torch.randint(2, (4,))), nn.CrossEntropyLoss(weight=weights)))
    graph = capture(model)
    assert "loss_fn.weight" in dict(graph.graph_module.named_buffers())
    assert graph.graph.by_name()["loss"].buffer_bytes == 8
    assert graph.reductions == {"loss": "terms"}  # divided by the sum of the weights, not by the number of samples
    several = TrainedLoss(lambda output, targets: ((output - targets[0]) * targets[1]).square().mean())
    graph = capture(LoadedModel(module, (x,), (torch.randn(4, 2), torch.randn(2)), several))
    assert list(graph.graph.inputs) == ["inputs", "targets", "targets_2"]
    assert not graph.graph.inputs["targets_2"].has_samples
    assert graph.mixing == ()


def test_attention_dropout_and_dictionaries_are_ordinary() -> None:
    def forward(m: Any, x: Tensor) -> dict[str, Tensor]:
        y = m.attention(x, x, x, need_weights=False)[0]
        return {"output": m.dropout(y), "aux": y.mean(-1)}

    model = model_of(
        forward, torch.randn(2, 3, 8), attention=nn.MultiheadAttention(8, 2, batch_first=True), dropout=nn.Dropout(0.5)
    )
    graph = capture(model)
    assert graph.polymorphic
    assert graph.mixing == ()
    assert "dropout" in names(graph)
    assert check_samples_apart(graph.graph) == ()  # though torch's own attention merges time and samples to rows


def test_a_constant_made_beside_a_tensor_does_not_read_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        table = y.new_ones(4, 4).tril() + y.new_full((4, 4), 0.5) + torch.zeros_like(m.layer.weight)
        rows = y.new_zeros(y.shape[0], 4)
        return (y + rows) @ table + table.sum()

    graph = checked(model_of(forward, torch.randn(2, 4), layer=nn.Linear(4, 4)))
    made = graph.graph.by_name()
    assert [name for name in made if "new_" in name] == ["new_zeros"]
    assert all(made[name].inputs == () for name in ("ones", "full", "zeros") if name in made)
    assert graph.mixing == ()


def paired(output: Tensor, targets: Tensor) -> Tensor:
    """Each sample against all of the batch; the class of one is its number there."""
    return nn.functional.cross_entropy(output @ output.t(), targets)


@pytest.mark.parametrize("targets", [(0, 1, 2), (0, 2, 1)])
def test_a_model_that_runs_on_whole_batches_alone_is_told_apart(targets: tuple[int, ...]) -> None:
    module = Module(lambda m, x: m.layer(x), layer=nn.Linear(4, 4))
    model = parts.model_of("a test", (module, (torch.randn(3, 4), torch.tensor(targets)), paired))
    if targets == (0, 1, 2):  # two samples run, one does not
        assert "loss" in capture(model).mixing
    else:
        with pytest.raises(UnsupportedModelError, match=r"not run on 2 samples[\s\S]*IndexError[\s\S]*at .*\.py"):
            capture(model)
