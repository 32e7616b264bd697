"""From a module and its loss to one clean operator graph, by ``torch.export``.

``torch.export(strict=False)`` takes what symbolic tracing and hooks do not (33 of 33 models tried, gradients equal to
the bit).  It is asked for a graph in which the number of samples is a symbol, and each size that the factory says
varies; where the model's own code fixes the number of samples, the graph holds for the example's number alone.  Guards
are dropped: the callers keep shapes straight (for what stays of them see ``profiler.capture.sizes``).  Under autocast
the model sees the dtypes that its values have then; the graph holds its operators, which cast when they are run under
it.  What the graph is rewritten to: :mod:`profiler.capture.functional`.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from cuda_ops._torch import (
    HigherOrderOperator,
    buffers_of,
    fixed_sizes,
    tree_unflatten,
    wrap_with_set_grad_enabled,
)
from cuda_ops.calls import arguments_of, writes
from cuda_ops.dense.connectionist import ConnectionistLosses
from cuda_ops.dense.data_dependent import Unit, join
from cuda_ops.dense.derivatives import Derivatives, UnknownDerivativeError, differentiate
from cuda_ops.dense.evaluation import is_random
from cuda_ops.dense.packed import packed_as_padded
from cuda_ops.dense.recurrent import recurrence_by_shape
from cuda_ops.dense.running_statistics import averages_in_operators
from cuda_ops.dense.value_checks import ValueChecks, is_value_check, look_at_values
from planner.ir.errors import FactoryError, UnsupportedModelError
from planner.ir.graph import LOSS_PREFIX, is_sites
from profiler.capture.by_sample import BagsOfRows, pick_by_sample
from profiler.capture.functional import (
    detach_constants,
    is_trained,
    is_write,
    keep_indices_home,
    keep_rows_apart,
    rewrite_in_place,
)
from profiler.capture.operators import name_read, node_argument, place
from profiler.capture.refusals import chooses_by_data, refusal_of, refusal_of_sites, takes_sizes_for_numbers
from profiler.capture.rows import rows_of_samples
from profiler.capture.sizes import NUM_SAMPLES, FixedSamplesError, Places, SizeNodes, Symbols, read_symbols, require
from profiler.capture.user_module import (
    StateChanges,
    inference_as_no_grad,
    kept_functions,
    refuse_hooks,
    users_line,
)
from profiler.source.model import LoadedModel
from profiler.source.structure import Nest, TensorSlot, named_tensors
from runtime.captured import attribute

_log = logging.getLogger(__name__)
_PREFIX = "module."
_REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)  # what torch.export raises for a fixed sample dim
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CHECKS = ("_assert_", "sym_constrain_range", "_check")


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The forward pass with its loss.

    Attributes:
        module: placeholders are ``num_samples`` (if that may vary), then ``sizes``, then ``inputs``; the output is the
            loss.
        inputs: names of the placeholders of inputs and targets.
        samples: of the example it was traced with.
        symbols: in the shapes of ``node.meta["val"]``.
        parameters: trained parameters by the user's names, each once; the tensors of the user's module.
        varying: the places of each further size that varies, by its placeholder.
        refusal: why the module's code was read instead of run (``torch.export`` with ``strict``); None: it was run.
        rows: of a sample in its inputs, as of :class:`profiler.source.model.LoadedModel`.
        fixed: of one that is not polymorphic, where the user's code fixes the number of samples, if that is known.
        outputs: the node of each tensor of the module's output, by name and in their order; empty where the loss does
            not depend on it.
        returned: what the module's output is made up of; None where it holds something else than tensors and constants.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    samples: int
    symbols: Symbols
    parameters: Mapping[str, Tensor]
    varying: Mapping[str, Places] = field(default_factory=dict)
    refusal: UnsupportedModelError | None = None
    outputs: Mapping[str, str] = field(default_factory=dict)
    fixed: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    returned: Nest | None = None

    @property
    def sizes(self) -> dict[str, tuple[str, int]]:
        """By placeholder, an input and the dim whose extent it is."""
        return {name: places[0] for name, places in self.varying.items()}

    @property
    def is_polymorphic(self) -> bool:
        """Whether it may be run for other numbers of samples."""
        return self.symbols.samples is not None

    def is_input(self, node: fx.Node) -> bool:
        """Whether it is an input or a target; a parameter may have the name of one."""
        return node.op == "placeholder" and node.target in self.inputs

    def is_parameter(self, node: fx.Node) -> bool:
        """Whether it reads a trained parameter."""
        return node.op == "get_attr" and node.target in self.parameters

    def sample_dims(self, value: Any) -> list[int]:
        """The dims of a value that depend on the number of samples; none of what is no tensor."""
        shape = value.shape if isinstance(value, Tensor) else ()
        return [dim for dim, size in enumerate(shape) if self.symbols.depends_on_samples(size)]

    def site_dims(self, value: Any) -> list[int]:
        """Those that hold sites, or rows of a sampled graph's nodes or edges."""
        names = map(self.symbols.name_of, value.shape if isinstance(value, Tensor) else ())
        return [dim for dim, name in enumerate(names) if name is not None and is_sites(name)]

    def grows(self, value: Any) -> bool:
        """Whether a value has a dim of either."""
        return bool(self.site_dims(value) or self.sample_dims(value))

    def graph_inputs(self, tensors: Mapping[str, Tensor], samples: int) -> dict[str, Any]:
        """What the placeholders stand for, in their order, where ``tensors`` are the inputs for ``samples`` samples."""
        count = {NUM_SAMPLES: samples} if self.is_polymorphic else {}
        sizes = {name: tensors[tensor].shape[dim] for name, (tensor, dim) in self.sizes.items()}
        return {**count, **sizes, **{name: tensors[name] for name in self.inputs}}


class _Returned:
    """What the module's output was made up of when it was called last."""

    def __init__(self) -> None:
        self.nest: Nest | None = None

    def note(self, output: Any) -> None:
        """Of an output with something else in it nothing is known."""
        with suppress(FactoryError):
            self.nest = Nest.of(output, "the output")[0]


class _WithLoss(nn.Module):
    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.training = model.module.training  # alone: each part keeps its own mode
        self.module = model.module
        self.loss = model.loss_fn
        self.call = model.call
        self.num_inputs = len(model.inputs)
        self.returned = _Returned()
        if LOSS_PREFIX in model.owners:
            self.loss_fn = model.owners[LOSS_PREFIX]  # registered, so that its buffers have names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        buffers = [(part, dict(buffers_of(part))) for part in self.module.modules()]
        output = self.call.output(self.module, tensors[: self.num_inputs])
        for part, own in buffers:
            _write_back(part, own)
        outputs: dict[str, Tensor] = {}
        if not torch.compiler.is_dynamo_compiling():
            self.returned.note(output)
            outputs = dict(named_tensors(output))
        elif isinstance(output, Tensor):  # of others it would read how they are named
            outputs = {"output": output}
        return self.loss(output, self.call.aims(tensors[self.num_inputs :])), outputs


def _write_back(part: nn.Module, own: Mapping[str, Tensor | None]) -> None:
    """What ``part`` has put in place of its buffers is written to them, as which it is state of the graph."""
    for name, buffer in own.items():
        value = buffers_of(part).get(name)
        if value is not buffer and buffer is not None and value is not None and value.shape == buffer.shape:
            buffer.copy_(value.detach())
            buffers_of(part)[name] = buffer


def trace(model: LoadedModel) -> TracedModel:
    """The first of :func:`traces`."""
    return next(traces(model))


def traces(model: LoadedModel) -> Iterator[TracedModel]:
    """Graphs of ``model`` in the modes that its parts are in, the better ones first; one sample is repeated to two.

    (1 is special to export.)  Where code that is run makes a Python number of the samples, ``len(x)`` or
    ``int(x.shape[0])``, code that is read keeps a symbol: that graph comes before one of the example's samples alone,
    which is for a caller who finds that the first does something else than the module.

    Raises:
        UnsupportedModelError: ``torch.export`` refuses the model; the text holds its reason.  Or a size that was said
            to vary cannot.
    """
    refuse_hooks(model.module)
    samples = max(2, model.samples)
    wrapper = _WithLoss(model)
    varying = _varying(model)
    tensors = _example(model)
    by_samples = _by_samples(model)
    fixed = (varying,) if model.varying else None
    lines: list[str] = []
    try:
        with fixed_sizes(lambda: lines.append(users_line())):
            by_any_number = _clean(model, wrapper, _export(model, wrapper, tensors, (by_samples,)), samples)
    except (*_REFUSALS, FixedSamplesError) as error:
        line = next(iter(lines), "")
        reads_a_number = takes_sizes_for_numbers(error)
    else:
        yield by_any_number
        return
    of_several_rows = _of_several_rows(model, wrapper)
    if of_several_rows is not None:
        yield of_several_rows
    elif reads_a_number:
        read = _by_bytecode(model, wrapper, tensors, ((by_samples,),)) or _of_several_rows(model, wrapper, strict=True)
        if read is not None and read.is_polymorphic:
            yield replace(read, refusal=UnsupportedModelError("the model fixes the number of samples", [line]))
    try:
        yield replace(_clean(model, wrapper, _export(model, wrapper, tensors, fixed), samples), fixed=line)
        return
    except UnsupportedModelError:
        raise
    except Exception as error:
        if model.clouds is not None and (fault := refusal_of_sites(error)) is not None:
            raise fault from error
        refusal = refusal_of(model, error)
        read = None if chooses_by_data(error) else _by_bytecode(model, wrapper, tensors, ((by_samples,), fixed))
        if read is None:
            raise refusal from error
        yield replace(read, refusal=refusal)


def _example(model: LoadedModel) -> tuple[Tensor, ...]:
    """What it is traced with: the example; one sample is repeated to two."""
    pairs = zip((*model.inputs, *model.targets), _rows(model), strict=True)
    is_one = model.samples == 1
    return _distinct(torch.cat([tensor, tensor]) if rows and is_one else tensor for tensor, rows in pairs)


def _rows(model: LoadedModel) -> tuple[int, ...]:
    """Rows that a sample has in each input and target; 0: it has no samples."""
    if model.clouds is None:
        return model.fed_rows
    samples = model.samples
    whole = model.clouds.inputs_of(model.clouds.preparation.without_samples)
    named = zip(model.names, (*model.inputs, *model.targets), strict=True)
    return tuple(int(tensor.ndim > 0 and len(tensor) == samples and name not in whole) for name, tensor in named)


def _by_samples(model: LoadedModel) -> tuple[dict[int, Any], ...]:
    """The dims that vary, as torch.export is told: those of samples are multiples of one symbol."""
    dim = torch.export.Dim("samples")
    of_samples = ({0: dim if rows == 1 else rows * dim} if rows else {} for rows in _rows(model))
    return tuple({**own, **others} for own, others in zip(of_samples, _varying(model), strict=True))


def _of_several_rows(model: LoadedModel, wrapper: _WithLoss, *, strict: bool = False) -> TracedModel | None:
    """The graph for any number of samples, where these have several rows in some tensor; None: there is none."""
    try:
        with _quiet():
            model = _with_rows(model, wrapper, strict=strict)
            if not model.rows:
                return None
            exported = _export(model, wrapper, _example(model), (_by_samples(model),), strict=strict)
            return _clean(model, wrapper, exported, max(2, model.samples))
    except Exception as error:  # noqa: BLE001 - the first refusal is told, which knows the user's line
        _log.debug("torch.export, for samples of several rows: %s", error)
        return None


def _with_rows(model: LoadedModel, wrapper: _WithLoss, *, strict: bool) -> LoadedModel:
    """``model``, which knows how many rows a sample has in each tensor, if it is more than one in some."""
    if model.clouds is not None or not model.inputs[0].ndim:
        return model
    as_one = replace(model, rows={name: len(tensor) for name, tensor in model.tensors.items() if tensor.ndim})
    if model.samples == 1:
        model = as_one
    tensors = dict(zip(model.names, _example(model), strict=True))
    of_any_length = ({0: torch.export.Dim.AUTO} if tensor.ndim else {} for tensor in tensors.values())
    shapes = tuple({**own, **others} for own, others in zip(of_any_length, _varying(model), strict=True))
    exported = _export(model, wrapper, tuple(tensors.values()), (shapes,), strict=strict).module()
    placeholders = (node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder")
    lengths = {name: len(tensor) for name, tensor in tensors.items() if tensor.ndim}
    by_rows = replace(model, rows=rows_of_samples(lengths, dict(zip(model.names, placeholders, strict=True))))
    if by_rows.rows and by_rows.samples == 1 < model.samples:
        return _with_rows(as_one, wrapper, strict=strict)  # doubled, as torch.export takes 1 for a constant
    return by_rows


def _distinct(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Each an object of its own: torch.export takes one that is given twice, as by an autoencoder, for one input."""
    by_id: dict[int, Tensor] = {}
    for tensor in tensors:
        own = tensor.clone() if id(tensor) in by_id else tensor
        by_id[id(own)] = own
    return tuple(by_id.values())


def _by_bytecode(
    model: LoadedModel, wrapper: _WithLoss, tensors: tuple[Tensor, ...], several: tuple[Any, ...]
) -> TracedModel | None:
    """What ``torch.export`` makes of the module's code without running it, which may read values: numpy, prints."""
    for shapes in several:
        try:
            with _quiet():
                exported = _export(model, wrapper, tensors, shapes, strict=True)
                return _clean(model, wrapper, exported, max(2, model.samples))
        except Exception as error:  # noqa: BLE001 - the first refusal is told, which knows the user's line
            _log.debug("torch.export, strict: %s", error)
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the pages that torch prints on what is only tried."""
    torchs = logging.getLogger("torch._guards")
    level = torchs.level
    torchs.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        torchs.setLevel(level)


def _varying(model: LoadedModel) -> tuple[dict[int, Any], ...]:
    """For each input the dims that vary, as torch.export is told: torch finds their range and how they are related."""
    names = model.names
    dims: dict[str, dict[int, Any]] = {name: {} for name in names}
    for places in model.varying.values():
        for tensor, dim in places:
            dims[tensor][dim] = torch.export.Dim.AUTO
    return tuple(dims.values())


def _export(
    model: LoadedModel, wrapper: nn.Module, tensors: tuple[Tensor, ...], shapes: Any, *, strict: bool = False
) -> ExportedProgram:
    owners = model.owners.values()
    watchers = ValueChecks(), Derivatives(), StateChanges(*owners), BagsOfRows(), ConnectionistLosses()
    substitutes = recurrence_by_shape(), averages_in_operators(), kept_functions(), inference_as_no_grad()
    with warnings.catch_warnings(), ExitStack() as modes:
        for mode in (*substitutes, model.precision(), *watchers, packed_as_padded()):
            modes.enter_context(mode)
        # nn.LSTM assigns its own flat list of weights in forward; the tensors in it are the parameters.  What else
        # forward changes is looked for by StateChanges, and by the check of the graph.
        warnings.filterwarnings("ignore", message="The tensor attributes? |While compiling, we found certain side")
        return torch.export.export(wrapper, tensors, strict=strict, dynamic_shapes=shapes)


def _clean(model: LoadedModel, wrapper: _WithLoss, program: ExportedProgram, samples: int) -> TracedModel:
    names = model.names
    exported = program.module()
    input_nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    placeholders = {name: node.meta["val"] for name, node in zip(names, input_nodes, strict=True)}
    symbols = read_symbols(placeholders, model.varying, model.extents)
    canonical = _canonical_names(model)
    attributes: dict[str, Any] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    sizes = SizeNodes(graph, symbols, tuple(model.varying))
    for node, name in zip(input_nodes, names, strict=True):
        copies[node] = graph.placeholder(name)
        copies[node].meta = dict(node.meta)
    sizes.require_all(placeholders)
    copying = _Copying(graph, sizes, canonical, copies, attributes)
    loss, outputs = _outputs(copying.all_of(exported, ""), program)
    made = graph.output((copies[loss], {name: copies[node] for name, node in outputs.items()}))
    look_at_values(graph, lambda node: id(attributes[name_read(node)]) not in canonical)
    rewrite_in_place(graph, attributes)
    detach_constants(graph)
    keep_rows_apart(graph)
    pick_by_sample(graph)
    _differentiate(graph)
    if model.clouds is not None:
        keep_indices_home(graph, model.clouds.inputs_of(model.clouds.preparation.indices))
    found_loss, found_outputs = cast("tuple[fx.Node, dict[str, fx.Node]]", made.args[0])
    made.args = (found_loss,)
    graph.eliminate_dead_code(_has_effects)  # such as numbers that were read for a check
    _join_data_dependent(graph)
    graph.eliminate_dead_code(_has_effects)
    module = fx.GraphModule(attributes, graph)
    parameters = {name: value for name, value in attributes.items() if is_trained(value)}
    there = {node.name for node in module.graph.nodes}
    kept = {name: node.name if node.name in there else "" for name, node in found_outputs.items()}
    returned = wrapper.returned.nest
    if list(kept) == ["output"] and returned is None:  # of code that was read
        returned = Nest(TensorSlot(0), ((),))
    return TracedModel(
        module, names, samples, symbols, parameters, model.varying, outputs=kept, rows=model.rows, returned=returned
    )


@dataclass(frozen=True, slots=True)
class _Copying:
    """Copies an exported graph into a clean one.

    Attributes:
        canonical: the user's names of parameters and buffers.
        copies: of nodes, those of placeholders to begin with.
        attributes: what the clean graph reads, by name.
    """

    graph: fx.Graph
    sizes: SizeNodes
    canonical: Mapping[int, str]
    copies: dict[fx.Node, fx.Node]
    attributes: dict[str, Any]

    def all_of(self, module: fx.GraphModule, prefix: str) -> fx.Node:
        """Copies the nodes of ``module``, whose own attributes are called ``prefix``...; its output node."""
        node: fx.Node
        for node in module.graph.nodes:
            if node.op in ("placeholder", "call_module"):  # the only module called is that of the guards
                continue
            if node.op == "get_attr":
                self._attribute(module, node, prefix)
            elif node.op == "output":
                return node
            elif node.target is wrap_with_set_grad_enabled and not any(
                writes(each.target) for each in _inner(module, node).graph.nodes
            ):
                self._in_grad_mode(module, node)
            elif _is_size(node):
                self.copies[node] = self.sizes.node(node.meta["val"])
            elif node not in self.copies and not _is_check(node):
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)
        raise AssertionError("a graph has an output")

    def _attribute(self, module: fx.GraphModule, node: fx.Node, prefix: str) -> None:
        name = name_read(node)
        value = attribute(module, name)
        target = self.canonical.get(id(value), prefix + name.removeprefix(_PREFIX))
        if self.attributes.setdefault(target, value) is not value:
            target = f"{target}_constant"
            self.attributes[target] = value
        self.copies[node] = self.graph.get_attr(target)
        self.copies[node].meta = dict(node.meta)

    def _in_grad_mode(self, module: fx.GraphModule, node: fx.Node) -> None:
        """What a ``torch.no_grad()`` in the model's code holds, as operators whose results are detached."""
        is_enabled, inner, *arguments = cast("tuple[Any, ...]", node.args)
        body = _inner(module, node)
        places = [each for each in body.graph.nodes if each.op == "placeholder"]
        for place_, argument in zip(places, arguments, strict=True):
            if isinstance(argument, fx.Node):
                self.copies[place_] = self.copies[argument]
        results: Any
        (results,) = self.all_of(body, f"{inner.target}.").args
        several = results if isinstance(results, (tuple, list)) else (results,)
        made = [each if is_enabled or each is None else self._detached(each) for each in several]
        for user in node.users:
            if user.target is operator.getitem:
                result = made[cast("int", user.args[1])]
                self.copies[user] = self.copies.get(result, result)

    def _detached(self, node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return node
        made = self.graph.call_function(torch.ops.aten.detach.default, (self.copies[node],))
        made.meta = dict(node.meta)
        return made


def _inner(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule:
    """What ``node`` of ``module`` runs in another grad mode."""
    return cast("fx.GraphModule", attribute(module, name_read(node_argument(node, 1))))


def _is_size(node: fx.Node) -> bool:
    """Whether it follows from sizes of the inputs."""
    value = node.meta.get("val")
    is_read = isinstance(value, torch.SymInt) and str(node.target).startswith("aten.sym_")
    return is_read and not free_unbacked_symbols(value)


def _differentiate(graph: fx.Graph) -> None:
    """Calls of ``torch.autograd.grad`` become operators.

    Raises:
        UnsupportedModelError: what is differentiated is run otherwise under a plan than as it is, or is not known.
    """
    try:
        made = differentiate(graph)
    except UnknownDerivativeError as error:
        raise UnsupportedModelError(
            "a call of torch.autograd.grad in forward cannot be captured",
            [str(error)],
            ["a torch.autograd.Function whose forward computes the derivative and whose backward its own"],
        ) from error
    for node in made:
        _require_run_alike(node, "is differentiated by torch.autograd.grad in forward", ["leave it out of what is"])


def _join_data_dependent(graph: fx.Graph) -> None:
    """Operators whose shapes or numbers follow from data become units, with those that read them.

    Raises:
        UnsupportedModelError: there is something among them that is run otherwise under a plan than as it is.
    """
    masks = ["choose with masks instead: compute all rows, and multiply by 0 or 1"]
    for node in join(graph, _is_data_dependent):
        _require_run_alike(node, "is run on rows that the data choose", masks)


def _require_run_alike(node: fx.Node, what: str, remedies: list[str]) -> None:
    """Raises :class:`UnsupportedModelError` if a unit holds an operator that a plan runs otherwise than one device."""
    changed = next((each for each in cast("Unit", node.target).module.graph.nodes if _is_run_otherwise(each)), None)
    if changed is not None:
        where = [f"in {place(node) or 'the module itself'}", user_line_of(node)]
        raise UnsupportedModelError(f"{changed.target} {what}", where, remedies)


def _is_data_dependent(node: fx.Node) -> bool:
    value = node.meta.get("val")
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, (Tensor, *_SYMBOLIC)) and free_unbacked_symbols(each) for each in leaves)


def _is_run_otherwise(node: fx.Node) -> bool:
    """Whether it draws random numbers, or computes statistics: what ranks do together."""
    return is_random(node) or "running_mean" in arguments_of(node) or is_write(node)


def user_line_of(node: fx.Node) -> str:
    """The line of the user's code that ``node`` comes from."""
    lines = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    return f"at {files[-1].removeprefix('File ')}" if files else "at an unknown place"


def _has_effects(node: fx.Node) -> bool:
    if is_value_check(node):
        return False
    return node.is_impure() or node.target is require or isinstance(node.target, HigherOrderOperator)


def _canonical_names(model: LoadedModel) -> dict[int, str]:
    """The user's name of each parameter and buffer, the first one where several are tied."""
    name_of: dict[int, str] = {}
    for prefix, module in model.owners.items():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            name_of.setdefault(id(value), prefix + name)
    return name_of


def _outputs(node: fx.Node, program: ExportedProgram) -> tuple[fx.Node, dict[str, fx.Node]]:
    """The loss, and the module's outputs by name, as :class:`_WithLoss` gives them."""
    loss, outputs = tree_unflatten(list(cast("tuple[Any, ...]", node.args[0])), program.call_spec.out_spec)
    named = {name: each for name, each in outputs.items() if isinstance(each, fx.Node)}
    return _only_tensor(loss), named


def _only_tensor(values: Any) -> fx.Node:
    while isinstance(values, (tuple, list)):
        if len(values) != 1:
            raise UnsupportedModelError("the loss is not one tensor", [f"the loss function gives {len(values)} values"])
        values = values[0]
    if not isinstance(values, fx.Node) or not isinstance(values.meta.get("val"), Tensor):
        raise UnsupportedModelError("the loss does not depend on the model", ["loss_fn returned a constant"])
    if values.meta["val"].ndim:
        shape = tuple(values.meta["val"].shape)
        raise UnsupportedModelError("the loss is not a number", [f"loss_fn returned a tensor of shape {shape}"])
    return values


def _is_check(node: fx.Node) -> bool:
    target: Callable[..., Any] | str = node.target
    name = getattr(target, "__name__", str(target))
    return not node.users and name.startswith(_CHECKS)
