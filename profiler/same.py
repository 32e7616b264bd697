"""Check of a captured graph: it computes the module's loss, and its values have the dtypes that it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from planner.ir.errors import UnsupportedModelError
from profiler.example import example_of, is_alike
from profiler.source import LoadedModel, where
from profiler.trace import Traced

_PAIR = 2


@torch.no_grad()
def require_same_loss(traced: Traced, model: LoadedModel) -> None:
    """Raises :class:`UnsupportedModelError` unless the graph gives the module's own loss; buffers are put back.

    Sizes that vary are tried at about half the example's extents and at 1 as well, where the module runs with these.
    """
    samples = _PAIR if traced.is_polymorphic else traced.samples
    whole = example_of(traced.inputs, model, samples)
    _require_alike(traced, _own_loss(model, whole, samples), _graph_loss(traced, model, whole, samples), {})
    for divisor in (_PAIR, max(model.extents.values())) if traced.varying else ():
        tensors = _shrunk(whole, traced, divisor) if model.clouds is None else _fewer(traced, model, samples, divisor)
        try:
            expected = module_loss(model, tensors.values())
        except Exception:  # noqa: BLE001 - the user's module may refuse such an extent in any way
            continue
        try:
            found = _graph_loss(traced, model, tensors, samples)
        except UnsupportedModelError:  # a condition under which it was captured
            continue
        _require_alike(traced, expected, found, traced.given(tensors, samples))


def require_known_parameters(traced: Traced, model: LoadedModel) -> None:
    """Raises :class:`UnsupportedModelError` if a gradient flows to a tensor that neither module nor loss registers.

    A parameter that a loss function finds in its closure is a constant of the graph: it would not be trained.
    """
    samples = _PAIR if traced.is_polymorphic else traced.samples
    tensors = example_of(traced.inputs, model, samples)
    with torch.enable_grad():
        loss = module_loss(model, (tensor.detach() for tensor in tensors.values()))
    known = {id(value) for value in traced.parameters.values()}
    unknown = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
    if unknown:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in unknown[:3])
        raise UnsupportedModelError(
            "a gradient flows to a tensor that is no parameter of the module or of the loss",
            [f"{len(unknown)} of shape {shapes}", "it would not be trained"],
            ["give the loss as an nn.Module that has it as a parameter", "detach it where it is a constant"],
        )


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that gradients of ``loss`` end in."""
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        leaf = getattr(function, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        waiting += [each for each, _ in function.next_functions]
    return list(found.values())


@torch.no_grad()
def correct_dtypes(traced: Traced, model: LoadedModel) -> None:
    """Gives ``node.meta["val"]`` the dtypes that values really have under autocast; buffers are put back.

    torch's shapes of composite operators cast where the operators themselves do not.
    """
    samples = _PAIR if traced.is_polymorphic else traced.samples
    given = traced.given(example_of(traced.inputs, model, samples), samples)
    with torch.random.fork_rng(devices=[]), _kept_buffers(model), model.precision():
        _Correcting(traced.module).run(*given.values())


class _Correcting(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function":
            n.meta["val"] = _with_dtype(n.meta["val"], value)
        return value


def _with_dtype(meta: Any, value: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(meta, Tensor):
        return meta if meta.dtype == value.dtype else meta.new_empty(meta.shape, dtype=value.dtype)
    if isinstance(value, (tuple, list)) and isinstance(meta, (tuple, list)):
        return type(meta)(_with_dtype(*pair) for pair in zip(meta, value, strict=True))
    return meta


def module_loss(model: LoadedModel, tensors: Iterable[Tensor], *, calm: bool = False) -> Tensor:
    """The module's own loss; buffers and the random state are put back.

    Args:
        calm: batch norms by their running statistics, and nothing dropped.
    """
    values = tuple(tensors)
    with torch.random.fork_rng(devices=[]), _kept_buffers(model), _calm(model) if calm else nullcontext():
        torch.manual_seed(0)
        return model.loss_of_taken(values[: len(model.inputs)], values[len(model.inputs) :])


def _own_loss(model: LoadedModel, tensors: Mapping[str, Tensor], samples: int) -> Tensor:
    """The module's loss of ``samples`` samples, which must have one."""
    try:
        return module_loss(model, tensors.values())
    except Exception as error:
        raise UnsupportedModelError(
            f"the model does not run on {samples} samples of its example",
            [f"{type(error).__name__}: {error}", where(error)],
            ["a plan runs it on parts of a batch: targets must be valid for each of them"],
        ) from error


def _graph_loss(traced: Traced, model: LoadedModel, tensors: Mapping[str, Tensor], samples: int) -> Tensor:
    with torch.random.fork_rng(devices=[]), _kept_buffers(model), model.precision():
        torch.manual_seed(0)
        return traced.module(*traced.given(tensors, samples).values())


def _require_alike(traced: Traced, expected: Tensor, found: Tensor, given: Mapping[str, Any]) -> None:
    if is_alike(expected, found):
        return
    sizes = [f"where {name} is {size}" for name, size in given.items() if name in traced.varying]
    raise UnsupportedModelError(
        "the captured graph computes another loss than the module",
        [f"module: {expected.item()}", f"graph: {found.item()}", *sizes],
        ["random or data-dependent behaviour in forward is not supported"]
        + ["code that does something else for such a size is not supported"] * bool(sizes),
    )


@contextmanager
def _calm(model: LoadedModel) -> Iterator[None]:
    """Modules that join samples, or draw, in training alone are in evaluation mode."""
    quiet = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    changed = [module for module in model.module.modules() if isinstance(module, quiet) and module.training]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


@contextmanager
def _kept_buffers(model: LoadedModel) -> Iterator[None]:
    """Buffers of the module, and of a loss that is one, are put back."""
    loss = getattr(model.loss_fn, "function", model.loss_fn)
    modules = [each for each in (model.module, loss) if isinstance(each, nn.Module)]
    state = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in state:
                buffer.copy_(value)


def _fewer(traced: Traced, model: LoadedModel, samples: int, divisor: int) -> dict[str, Tensor]:
    """Of clouds: maps of fewer points, since a part of a map is none."""
    clouds = model.clouds and model.clouds.of_fewer_points(divisor)
    return example_of(traced.inputs, replace(model, clouds=clouds), samples)


def _shrunk(tensors: Mapping[str, Tensor], traced: Traced, divisor: int) -> dict[str, Tensor]:
    result = dict(tensors)
    for places in traced.varying.values():
        for tensor, dim in places:
            extent = -(-result[tensor].shape[dim] // divisor)
            result[tensor] = result[tensor].narrow(dim, 0, extent).contiguous()
    return result
