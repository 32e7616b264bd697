"""Every private name of torch that this project leans on, each with what for and what the public alternative lacks.

It lies at the lowest floor that sees torch, since the profiler, the runtime and the face above them all take names from
here and neither of the first two may import the other.  No other module uses a private name of torch
(``tests/test_architecture.py``); ``tests/cuda_ops/test_torch_privates.py`` says with which torch they were checked, and
that each does what is relied on.  *Private* is what torch's documentation does not promise: names and modules with a
leading underscore, and those of ``torch.distributed.distributed_c10d``.

- ``Store``, ``FileStore``, ``HashStore``, ``PrefixStore``, ``TCPStore``: public as ``torch.distributed.*``, but torch's
  types do not export them there; these are the same classes.
- ``FakeTensor``, ``FakeTensorMode``: shapes and dtypes of operators without computing; the meta device has no devices.
- ``TorchDispatchMode``: sees every operator that runs; ``TorchFunctionMode`` sees only calls from Python.
- ``disable_current_modes``: a call outside of all such modes; nothing public leaves them for a moment.
- ``OpOverload``, ``HigherOrderOperator``: the two types of a captured node's target; ``torch.ops`` has instances alone.
- ``tree_flatten``, ``tree_unflatten``, ``tree_leaves``, ``tree_map``, ``TreeSpec``: nested tuples, lists and mappings
  as export flattens them; torch has no public name for them.
- ``disable_dynamo``: keeps the compiler out of a function; ``torch.compiler.disable`` imports the compiler at once.
- ``wrap_with_autocast``, ``wrap_with_set_grad_enabled``: what export leaves of ``autocast`` and ``no_grad`` blocks,
  recognised in graphs; they have no public names.
- ``SingleLevelFunction``: what a user's ``autograd.Function`` derives from, whose ``apply`` a capture replaces.
- ``COMPOSITE_KEYS``: the dispatch keys for which a Python kernel replaces a recurrent operator's own decomposition;
  ``torch.library`` cannot take its registration back.
- ``BatchNormBase``, ``DropoutBase``: what all batch norms and all dropouts are instances of; their list is not public.
- ``attention_with_weights``: scaled dot-product attention that returns its weights; the public one does not.
- ``optimizer_attributes``, ``optimizer_like``, ``has_step_hooks``, ``note_step``: another optimiser of a class with its
  attributes, whatever its constructor takes; hooks that would be called more than once; and that schedules know of
  updates made elsewhere.
- ``StorageWeakRef``: keeps a storage's number its own after its memory has gone; Python's own weak references are to
  wrappers of storages, which go earlier.
- ``fixed_sizes``: where a size that may vary is taken for a number; torch tells it in a log alone.
- ``readable_attribute``: how the code that fx writes for a graph reads a module's attribute.  Torch's own writes names
  as they are wherever Python could read one, keywords too (``self.in.weight``); from here on it is this one.
- ``occupy_gpu``: a kernel that does nothing for a while, so that what is launched after it waits on the device.
- ``check``: a condition that export takes as known of a size; ``torch._check`` is documented, and private by its name.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.fx import graph as fx_graph
from torch.multiprocessing.reductions import StorageWeakRef

from cuda_ops.device.torch_versions import TorchVersionError, needs_private_names

try:
    from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

    COMPOSITE_KEYS = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
    BatchNormBase = nn.modules.batchnorm._BatchNorm
    DropoutBase = nn.modules.dropout._DropoutNd
    attention_with_weights = torch.ops.aten._scaled_dot_product_attention_math.default
    check: Callable[..., None] = torch._check
except (AttributeError, ImportError) as error:
    raise TorchVersionError(error) from error

__all__ = [
    "COMPOSITE_KEYS",
    "BatchNormBase",
    "DropoutBase",
    "FakeTensor",
    "FakeTensorMode",
    "FileStore",
    "HashStore",
    "HigherOrderOperator",
    "OpOverload",
    "PrefixStore",
    "SingleLevelFunction",
    "StorageWeakRef",
    "Store",
    "TCPStore",
    "TorchDispatchMode",
    "TreeSpec",
    "at_node",
    "attention_with_weights",
    "buffers_of",
    "check",
    "clear_dispatch_cache",
    "conv_backend",
    "default_store",
    "disable_current_modes",
    "disable_dynamo",
    "fixed_sizes",
    "forget_iterator",
    "functional_collectives",
    "has_step_hooks",
    "library_path",
    "note_step",
    "occupy_gpu",
    "optimizer_attributes",
    "optimizer_like",
    "overload_name",
    "pipeline_schedule",
    "readable_attribute",
    "run_backward",
    "schema_of",
    "storage_id",
    "sympy_interpreter",
    "times_written",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "weak_storage",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
]


def schema_of(operator: object) -> Any:
    """Arguments, results and what an operator writes to; None where it has none.  Public types hold no schema."""
    return getattr(operator, "_schema", None)


@needs_private_names
def overload_name(operator: OpOverload) -> str:
    """``Tensor`` of ``aten::add.Tensor``; the public ``name()`` joins it to the rest."""
    return operator._overloadname


@needs_private_names
def clear_dispatch_cache(operator: OpOverload) -> None:
    """After an operator was given other Python kernels, which torch looks up once; nothing public does both."""
    operator._dispatch_cache.clear()


@needs_private_names
def times_written(tensor: Tensor) -> int:
    """How often a tensor was written in place, 0 of inference mode, where nobody counts; autograd alone reads it."""
    return 0 if tensor.is_inference() else tensor._version


@needs_private_names
def storage_id(tensor: Tensor) -> int:
    """Which storage a tensor lies in; the public ``data_ptr`` is 0 of all tensors without data or without elements."""
    handle: int = tensor.untyped_storage()._cdata
    return handle


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A reference to a tensor's storage that keeps its number, and not its memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch has no types for it


@needs_private_names
def buffers_of(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """A module's own buffers, to be put back; ``named_buffers`` leaves out those that are None."""
    return module._buffers


@needs_private_names
def conv_backend(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> str:
    """The kernel that ``aten::convolution`` chooses for such tensors; nothing public says which."""
    options = list(stride), list(padding), list(dilation), transposed, list(output_padding), groups
    return str(torch._C._select_conv_backend(x, weight, None, *options).name)


@needs_private_names
def occupy_gpu(cycles: int) -> None:
    """Keeps the current stream busy for ``cycles`` of the multiprocessors' clock; nothing public does."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch does not type it


@needs_private_names
def run_backward(roots: Sequence[GradientEdge | Tensor], gradients: Sequence[Tensor]) -> None:
    """As ``torch.autograd.backward``, which first compares every gradient with its output: twice the engine's own time.

    What comes here was cut to the outputs' shapes and dtypes by the plan's own boxes.
    """
    engine = Variable._execution_engine
    engine.run_backward(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


@needs_private_names
def functional_collectives() -> tuple[Callable[..., Tensor], Callable[..., Tensor], Callable[..., Tensor]]:
    """All-to-all, sum and wait that a compiler sees; ``torch.distributed`` has only calls that it cannot look into."""
    import torch.distributed._functional_collectives  # says what the operators give, without data

    operators = torch.ops._c10d_functional
    return operators.all_to_all_single.default, operators.all_reduce.default, operators.wait_tensor.default


@needs_private_names
def sympy_interpreter() -> tuple[Callable[..., Any], Any]:
    """Evaluates the formula of a size that export found; torch gives the formulas to its callers, but not this."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp, PythonReferenceAnalysis


@needs_private_names
def _replacing() -> tuple[Any, Callable[..., None]]:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # late: it loads sympy

    return ShapeEnv, ShapeEnv._set_replacement


@contextmanager
def fixed_sizes(note: Callable[[], None]) -> Iterator[None]:
    """Calls ``note`` whenever a symbol of a shape is replaced by a number, from where that happens."""
    ShapeEnv, replace = _replacing()

    def noted(self: object, symbol: Any, target: Any, message: str) -> None:
        if target.is_number:
            note()
        replace(self, symbol, target, message)

    ShapeEnv._set_replacement = noted
    try:
        yield
    finally:
        ShapeEnv._set_replacement = replace


def readable_attribute(base: str, target: str) -> str:
    """The expression for an attribute (``blocks.in.weight``) of what the expression ``base`` is.

    A name goes through ``getattr`` where Python would read something else in its place: keywords, names with letters
    that Python puts into another form (ligatures), and what is no name at all.
    """
    for name in target.split("."):
        is_plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
        base = f"{base}.{name}" if is_plain else f"getattr({base}, {name!r})"
    return base


fx_graph._format_target = readable_attribute  # ``torch.export`` itself cannot load what it captured otherwise


def library_path() -> str:
    """Torch's own library, whose loop over threads is called from C++; torch tells its folder alone."""
    return torch._C.__file__


@needs_private_names
def pipeline_schedule(stages: Sequence[Any], microbatches: int, loss_fn: Any, rows: Sequence[Sequence[str]]) -> Any:
    """Torch's executor of any order of actions, to compare with; its public schedules have orders of their own."""
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    make: Any = _PipelineScheduleRuntime  # torch does not type it
    schedule = make(list(stages), microbatches, loss_fn)
    actions = {rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(rows)}
    schedule._prepare_schedule_with_comms(actions)
    return schedule


@needs_private_names
def default_store() -> Store:
    """The store of ``init_process_group``, which keeps it to itself."""
    return torch.distributed.distributed_c10d._get_default_store()


@needs_private_names
def at_node(interpreter: fx.Interpreter, node: fx.Node) -> AbstractContextManager[None]:
    """Errors inside name ``node``, as those of ``Interpreter.run_node`` do; a node that is run otherwise lacks that."""
    return interpreter._set_current_node(node)


def optimizer_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What it has beside groups and state; a schedule's wrapper of ``step`` and other hooks are left out."""
    left_out = ("step", "zero_grad", "param_groups", "state", "_opt_called")
    own = {key: value for key, value in vars(optimizer).items() if key not in left_out}
    return {key: value for key, value in own.items() if not key.startswith("_optimizer_")}


def optimizer_like(
    twin: torch.optim.Optimizer,
    attributes: Mapping[str, Any],
    groups: list[dict[str, Any]],
    state: MutableMapping[Any, Any],
) -> None:
    """Fills an optimiser that was made without its constructor (``cls.__new__(cls)``), as copying would."""
    vars(twin).update(attributes)
    defaults = dict(attributes.get("defaults", {}))
    twin.__setstate__({"defaults": defaults, "state": state, "param_groups": groups})


@needs_private_names
def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something was registered to be called around its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Tells schedules made on ``optimizer`` that it was stepped, else they warn that they are called too early."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def forget_iterator(loader: Any) -> None:
    """A DataLoader with workers that last starts them anew; nothing public does."""
    loader._iterator = None
