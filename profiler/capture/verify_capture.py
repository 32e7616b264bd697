"""Check of a captured graph: it computes the module's loss and gradients, and values have the dtypes that it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from cuda_ops._torch import BatchNormBase, DropoutBase, at_node
from cuda_ops.dense.evaluation import draws_in_any_mode, evaluated
from planner.ir.errors import UnsupportedModelError
from profiler.capture.first_calls import CALLED_ONCE, FIRST, LATER, FirstCall, change_weights, is_equal
from profiler.capture.trace import TracedModel
from profiler.capture.user_module import (
    drawn_so_far,
    evaluating,
    fresh_gradients,
    kept_state,
)
from profiler.capture.user_state import UserState
from profiler.source.model import LoadedModel, example_of, is_alike
from profiler.source.parts import where

_PAIR = 2


@dataclass(frozen=True, slots=True)
class _Result:
    """What a step is made of.

    Attributes:
        gradients: of trained parameters, by name; None where the loss has none to give, or nobody asked.
        buffers: as forward leaves them, by name.
        leaves: the tensors that gradients of the loss end in, by id.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor] | None
    buffers: Mapping[str, Tensor]
    leaves: frozenset[int] = frozenset()


@torch.enable_grad()
def require_same_loss(traced: TracedModel, model: LoadedModel, state: UserState) -> Set[str]:
    """Raises :class:`UnsupportedModelError` unless the graph gives the module's own loss and gradients.

    Returns the parameters that get no gradient, neither from the module nor from the graph, though they are trained.

    Buffers and gradients are put back.  Sizes that vary are tried at about half the example's extents and at 1 as well,
    where the module runs with these.

    Args:
        state: that ``model.stateful`` is in.
    """
    samples, whole = _example(traced, model)
    graph_loss_of = partial(_graph_loss, traced, model, samples)
    with kept_state(*model.stateful, state=state), fresh_gradients(*model.owners.values()):
        memory = FirstCall(model, partial(_loss_of_copies, model), graph_loss_of, state)
        copies = _copies(whole)
        with kept_state(*model.stateful, state=state):
            expected = _own_result(model, copies, samples)
            memory.note()
        _require_same_inputs(model, whole, copies, expected.loss, state)
        by_graph = _graph_result(traced, model, whole, samples, state, has_gradients=not memory.changed)
        later = memory.later_call(whole, _rest(traced, model, samples))
    if memory.changed:
        is_proven = later is not None and later.is_by_graph and later.gradients == frozenset(expected.gradients or ())
        by_graph = (
            replace(by_graph, gradients=expected.gradients)
            if is_proven
            else _graph_result(traced, model, whole, samples, state)
        )
    _require_alike(traced, expected.loss, by_graph.loss, {})
    _require_same_gradients(model, expected.gradients, by_graph.gradients)
    _require_same_buffers(expected.buffers, by_graph.buffers)
    gradients = frozenset(traced.parameters if by_graph.gradients is None else by_graph.gradients)
    if later is not None and not later.is_by_graph and by_graph.gradients is not None:
        with kept_state(*model.stateful, state=state):
            change_weights(model)
            memory.as_called()
            torch.manual_seed(LATER)
            with _running_graph():
                _require_same_again(later.loss, graph_loss_of(later.tensors).detach())
    if memory.moved:
        _require_no_schedule(model, whole, expected.loss, state)
    if traced.refusal is not None:
        other = {name: _changed(tensor) for name, tensor in whole.items()}
        with kept_state(*model.stateful, state=state):
            own = _own_result(model, _copies(other), samples)
        _require_alike(traced, own.loss, _graph_result(traced, model, other, samples, state).loss, {})
    if not expected.leaves <= {id(each) for each in traced.parameters.values()}:
        _require_known_parameters(traced, model)
    for divisor in (_PAIR, max(model.extents.values())) if traced.varying else ():
        tensors = _shrunk(whole, traced, divisor) if model.clouds is None else _fewer(traced, model, samples, divisor)
        try:
            expected = _module_result(model, tensors, state)
        except Exception:  # noqa: BLE001 - the user's module may refuse such an extent in any way
            continue
        try:
            by_graph = _graph_result(traced, model, tensors, samples, state)
        except UnsupportedModelError:  # a condition under which it was captured
            continue
        _require_alike(traced, expected.loss, by_graph.loss, traced.graph_inputs(tensors, samples))
    return traced.parameters.keys() - gradients


def _rest(traced: TracedModel, model: LoadedModel, samples: int) -> dict[str, Tensor]:
    """Other samples of the example than the first ones, where it has as many; of clouds the first ones."""
    if model.clouds is not None:
        return example_of(traced.inputs, model, samples)
    tensors = example_of(traced.inputs, model, max(samples, model.samples))
    rows = dict(zip(traced.inputs, model.fed_rows, strict=True))
    return {name: each[-samples * rows[name] :] if rows[name] else each for name, each in tensors.items()}


def _changed(tensor: Tensor) -> Tensor:
    """Other values, within the range of the first ones: a constant that was read off those shows."""
    if not tensor.ndim:
        return tensor
    other = tensor.flip(0)
    return torch.lerp(tensor, other, 0.25) if tensor.is_floating_point() else other


def _require_known_parameters(traced: TracedModel, model: LoadedModel) -> None:
    """Raises :class:`UnsupportedModelError` if a gradient flows to a tensor that neither module nor loss registers.

    A parameter that a loss function finds in its closure is a constant of the graph: it would not be trained.  What is
    made anew in each call, as the inputs of wav2vec 2.0 that are told to require gradients, nobody trains.
    """
    _, tensors = _example(traced, model)

    def leaves() -> list[Tensor]:
        with torch.enable_grad():
            return _leaves(module_loss(model, (tensor.detach() for tensor in tensors.values())))

    registered = {id(value) for value in traced.parameters.values()}
    unknown = [leaf for leaf in leaves() if id(leaf) not in registered]
    if unknown:
        lasting = {id(leaf) for leaf in leaves()}  # those of the first call are alive: no id is taken twice
        unknown = [leaf for leaf in unknown if id(leaf) in lasting]
    if unknown:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in unknown[:3])
        raise UnsupportedModelError(
            "a gradient flows to a tensor that is no parameter of the module or of the loss",
            [f"{len(unknown)} of shape {shapes}", "it would not be trained"],
            [
                "give the loss as an nn.Module that has it as a parameter",
                "register layers of the module: nn.ModuleList and nn.ModuleDict instead of a list and a dict",
                "detach it where it is a constant",
            ],
        )


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that gradients of ``loss`` end in."""
    leaves: dict[int, Tensor] = {}
    visited = set()
    waiting = [loss.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in visited:
            continue
        visited.add(function)
        leaf = getattr(function, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        waiting += [each for each, _ in function.next_functions]
    return list(leaves.values())


@torch.no_grad()
def correct_dtypes(traced: TracedModel, model: LoadedModel) -> None:
    """Gives ``node.meta["val"]`` the dtypes that values really have under autocast; buffers are put back.

    torch's shapes of composite operators cast where the operators themselves do not.
    """
    samples, tensors = _example(traced, model)
    graph_inputs = traced.graph_inputs(tensors, samples)
    with kept_state(*model.stateful), model.precision():
        _Correcting(traced.module).run(*graph_inputs.values())


@torch.enable_grad()
def evaluation_fault(traced: TracedModel, model: LoadedModel, state: UserState) -> str:
    """Why the graph, its operators put in evaluation mode, is not the module in evaluation mode; empty if it is.

    Where operators draw random numbers in any mode it is not asked: the runtime refuses them.

    Args:
        state: that ``model.stateful`` is in.
    """
    if any(draws_in_any_mode(node) for node in traced.module.graph.nodes):
        return ""
    samples, tensors = _example(traced, model)
    graph_inputs = traced.graph_inputs(tensors, samples)

    def loss() -> Tensor:
        with model.precision():
            graph_loss: Tensor = _Evaluating(traced.module).run(*graph_inputs.values())
            return graph_loss

    try:
        with evaluating(*model.owners.values()):
            expected = _loss_alone(model, lambda: _loss_of_copies(model, tensors), state)
    except Exception as error:  # noqa: BLE001 - the user's module may refuse this in any way
        return f"the module itself raises in evaluation mode: {type(error).__name__}: {error}"
    of_graph = _loss_alone(model, loss, state)
    if is_alike(expected, of_graph):
        return ""
    return (
        f"its code does something else in evaluation than its operators do: the module gives a loss of "
        f"{expected.item()}, its graph {of_graph.item()}"
    )


def _example(traced: TracedModel, model: LoadedModel) -> tuple[int, dict[str, Tensor]]:
    """How many samples the graph is compared with, and these."""
    samples = _PAIR if traced.is_polymorphic else traced.samples
    return samples, example_of(traced.inputs, model, samples)


class _Evaluating(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        function = evaluated(n) if n.op == "call_function" else None
        if function is None:
            return super().run_node(n)
        with at_node(self, n):
            arguments, keywords = self.fetch_args_kwargs_from_env(n)
            return function(*arguments, **keywords)


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
    quiet = [each for each in model.module.modules() if isinstance(each, (BatchNormBase, DropoutBase))] if calm else []
    with kept_state(*model.stateful), evaluating(*quiet):
        torch.manual_seed(0)
        return model.loss_of_prepared(values[: len(model.inputs)], values[len(model.inputs) :])


def _module_result(model: LoadedModel, tensors: Mapping[str, Tensor], state: UserState | None = None) -> _Result:
    with kept_state(*model.stateful, state=state):
        return _result(model, lambda: _loss_of_copies(model, tensors))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _loss_of_copies(model: LoadedModel, tensors: Mapping[str, Tensor]) -> Tensor:
    return _loss_of(model, [*_copies(tensors).values()])


def _loss_of(model: LoadedModel, values: Sequence[Tensor]) -> Tensor:
    """The module's own loss.

    Raises:
        UnsupportedModelError: it draws from the generators of Python or numpy, which no graph holds and no seed of a
            step reaches; what it computes may be alike by chance.
    """
    before = drawn_so_far()
    loss = model.loss_of_prepared(tuple(values[: len(model.inputs)]), tuple(values[len(model.inputs) :]))
    for who, was, is_now in zip(("the random module", "numpy.random"), before, drawn_so_far(), strict=True):
        if was != is_now:
            raise UnsupportedModelError(
                f"the model draws random numbers from {who} while it computes its loss",
                ["random or data-dependent behaviour in forward is not supported"],
                ["draw by operators of torch, such as torch.rand, or in the data"],
            )
    return loss


def _require_same_inputs(
    model: LoadedModel, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor], first: Tensor, state: UserState
) -> None:
    """Raises :class:`UnsupportedModelError` where forward writes to its inputs so that a second one differs.

    Args:
        copies: the inputs as a first forward on ``tensors`` left them; its loss was ``first``.
        state: that ``model.stateful`` is in.
    """
    written = [name for name, tensor in tensors.items() if not is_alike(copies[name], tensor)]
    if written and not is_alike(first, _loss_alone(model, lambda: _loss_of(model, [*_copies(copies).values()]), state)):
        raise UnsupportedModelError(
            f"forward writes to its own input, {written[0]}, in place",
            ["the next step on the same data would read something else"],
            ["write to a copy: x = x.clone()"],
        )


def _own_result(model: LoadedModel, tensors: Mapping[str, Tensor], samples: int) -> _Result:
    """That of the module for ``samples`` samples, which must have one; it is left as its call leaves it."""
    try:
        return _result(model, lambda: _loss_of(model, [*tensors.values()]))
    except UnsupportedModelError:
        raise
    except Exception as error:
        runs_whole = samples != model.samples and _runs(model, model.tensors)
        what = f"{samples} samples of its example" if runs_whole else "its own example"
        raise UnsupportedModelError(
            f"the model does not run on {what}",
            [f"{type(error).__name__}: {error}", where(error)],
            [_PARTS] if runs_whole else _mended(model),
        ) from error


def _graph_result(
    traced: TracedModel,
    model: LoadedModel,
    tensors: Mapping[str, Tensor],
    samples: int,
    state: UserState,
    *,
    has_gradients: bool = True,
) -> _Result:
    with _running_graph(), kept_state(*model.stateful, state=state):
        return _result(model, lambda: _graph_loss(traced, model, samples, tensors), has_gradients=has_gradients)


def _graph_loss(traced: TracedModel, model: LoadedModel, samples: int, tensors: Mapping[str, Tensor]) -> Tensor:
    with model.precision():
        loss: Tensor = traced.module(*traced.graph_inputs(tensors, samples).values())
        return loss


@contextmanager
def _running_graph() -> Iterator[None]:
    """Within it, what a graph raises that does not run is told."""
    try:
        yield
    except RuntimeError as error:
        raise UnsupportedModelError(
            "the captured graph does not run as the module does",
            [f"{type(error).__name__}: {str(error).splitlines()[0]}"],
            ["write it without operators in place, such as x[:, 0] = y, or without complex numbers"],
        ) from error


_PARTS = "a plan runs it on parts of a batch: targets must be valid for each of them"


def _mended(model: LoadedModel) -> list[str]:
    """What to do about a model that fails on its whole example too."""
    if model.autocast is not None and _runs(replace(model, autocast=None), model.tensors):
        name = str(model.autocast).removeprefix("torch.")
        return [f"leave out --autocast: under autocast to {name} the model does not run on this device"]
    return ["call the model on its example in plain torch, and mend what it raises there"]


def _runs(model: LoadedModel, tensors: Mapping[str, Tensor]) -> bool:
    try:
        _module_result(model, tensors)
    except Exception:  # noqa: BLE001 - the user's module may fail in any way
        return False
    return True


def _result(model: LoadedModel, loss_of: Callable[[], Tensor], *, has_gradients: bool = True) -> _Result:
    modules = model.owners.values()
    with fresh_gradients(*modules):
        torch.manual_seed(FIRST)
        loss = loss_of()
        buffers = {name: b.detach().clone() for module in modules for name, b in module.named_buffers()}
        if not isinstance(loss, Tensor) or not loss.requires_grad or loss.numel() != 1:
            return _Result(loss, None, buffers)
        leaves = frozenset(map(id, _leaves(loss)))
        if not has_gradients:
            return _Result(loss.detach(), None, buffers, leaves)
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        gradients = {name: _dense(name, p.grad) for name, p in _trained(model) if p.grad is not None}
    return _Result(loss.detach(), gradients, buffers, leaves)


def _loss_alone(model: LoadedModel, loss_of: Callable[[], Tensor], state: UserState) -> Tensor:
    with kept_state(*model.stateful, state=state):
        torch.manual_seed(0)
        return loss_of().detach()


def _dense(name: str, gradient: Tensor) -> Tensor:
    if gradient.layout is torch.strided:
        return gradient
    raise UnsupportedModelError(
        f"parameter {name} gets a sparse gradient",
        ["plans add gradients up over micro-batches and ranks as dense tensors"],
        ["sparse=False in its nn.Embedding or nn.EmbeddingBag, with an optimiser that takes dense gradients"],
    )


def _trained(model: LoadedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by the names that the graph has for them; those of the loss function behind those of the module."""
    for prefix, module in model.owners.items():
        yield from ((prefix + name, p) for name, p in module.named_parameters() if p.requires_grad)


def _require_same_gradients(
    model: LoadedModel, expected: Mapping[str, Tensor] | None, captured: Mapping[str, Tensor] | None
) -> None:
    """Names the parameter nearest to the loss whose gradient the graph does not have: what is lost lies behind it."""
    if expected is None or (captured is not None and _are_equal(expected, captured)):
        return
    norms = (_norm(gradient) for gradient in expected.values())
    largest = max((norm for norm in norms if math.isfinite(norm)), default=0.0)
    for name, parameter in reversed(list(_trained(model))):
        own = expected.get(name)
        got = None if captured is None else captured.get(name)
        zeros = torch.zeros_like(parameter)
        own, got = (zeros if each is None else each for each in (own, got))
        if not _is_same_gradient(own, got, largest, model.autocast):
            raise UnsupportedModelError(
                "the captured graph computes other gradients than the module",
                [f"parameter {name}: norm {_norm(own):.6g} in the module, {_norm(got):.6g} in the graph"],
                ["write what changes gradients (a hook, a detach by .data) as a torch.autograd.Function"],
            )


def _are_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(is_equal(each, others[name]) for name, each in some.items())


def _require_same_again(expected: Tensor, captured: Tensor) -> None:
    if not is_alike(expected, captured):
        raise UnsupportedModelError(
            "the module computes something else when it is called again, its captured graph does not",
            [f"second call: {expected.item()} by the module, {captured.item()} by the graph"],
            [CALLED_ONCE, "keep what changes from call to call in buffers, written in place: self.count.add_(1)"],
        )


def _require_no_schedule(model: LoadedModel, tensors: Mapping[str, Tensor], expected: Tensor, state: UserState) -> None:
    """Raises :class:`UnsupportedModelError` where a number that forward counts is one that it computes with.

    Such as the weight of a term that grows over thousands of steps: two calls, one after the other, are alike but for
    rounding.  So what a call has changed is changed by as much as many calls would.

    Args:
        state: that ``model.stateful`` is in.
    """
    with kept_state(*model.stateful, state=state):
        try:
            torch.manual_seed(0)
            _loss_of_copies(model, tensors)
            moved = state.moved()
            state.restore()
            if not moved:
                return
            for each in moved:
                each.write(each.after + _FAR * (each.after - each.before))
            torch.manual_seed(FIRST)
            far = _loss_of_copies(model, tensors).detach()
        except UnsupportedModelError:
            raise
        except Exception:  # noqa: BLE001 - user's code may fail in any way on such a number: it does compute with it
            far = expected.new_full((), math.nan)
    if not is_alike(expected.detach(), far):
        names = ", ".join(f"{each.name}, from {each.before} to {each.after}" for each in moved)
        raise UnsupportedModelError(
            "the module computes with a number that it changes itself from call to call, which no graph holds",
            [f"a call changes {names}"],
            [
                "keep it in a buffer, written in place, and compute with that: self.count.add_(1)",
                "what the step decides as part of the batch: torch.full((len(x),), weight), as an input or a target",
            ],
        )


_FAR = 100_003
"""Calls, about; a prime, so that what goes in circles is elsewhere then."""


def _require_same_buffers(expected: Mapping[str, Tensor], captured: Mapping[str, Tensor]) -> None:
    for name, own in expected.items():
        got = captured.get(name)
        if got is None or not is_alike(own, got):
            raise UnsupportedModelError(
                f"the captured graph leaves the buffer {name} otherwise than the module does",
                ["forward changes it in a way that is not captured"],
                [f"write to it in place: self.{name.rpartition('.')[2]}.copy_(...)"],
            )


def _norm(x: Tensor) -> float:
    return float(x.detach().norm())


def _is_same_gradient(a: Tensor, b: Tensor, largest: float, autocast: torch.dtype | None) -> bool:
    """Whether they differ by no more than rounding does, that of the largest gradient's norm included."""
    if not a.isfinite().all():
        return torch.equal(a.isfinite(), b.isfinite())
    relative = 0.05 if autocast is not None else min(1000 * torch.finfo(a.dtype).eps, 0.05)
    allowed = relative * max(_norm(a), _norm(b)) + 0.01 * relative * largest
    return _norm(a - b) <= allowed


def _require_alike(traced: TracedModel, expected: Tensor, captured: Tensor, graph_inputs: Mapping[str, Any]) -> None:
    if is_alike(expected, captured):
        return
    sizes = [f"where {name} is {size}" for name, size in graph_inputs.items() if name in traced.varying]
    raise UnsupportedModelError(
        "the captured graph computes another loss than the module",
        [f"module: {expected.item()}", f"graph: {captured.item()}", *sizes],
        ["random or data-dependent behaviour in forward is not supported"]
        + ["code that does something else for such a size is not supported"] * bool(sizes),
    )


def _fewer(traced: TracedModel, model: LoadedModel, samples: int, divisor: int) -> dict[str, Tensor]:
    """Of clouds: maps of fewer points, since a part of a map is none."""
    clouds = model.clouds and model.clouds.of_fewer_rows(divisor)
    return example_of(traced.inputs, replace(model, clouds=clouds), samples)


def _shrunk(tensors: Mapping[str, Tensor], traced: TracedModel, divisor: int) -> dict[str, Tensor]:
    result = dict(tensors)
    for places in traced.varying.values():
        for tensor, dim in places:
            extent = -(-result[tensor].shape[dim] // divisor)
            result[tensor] = result[tensor].narrow(dim, 0, extent).contiguous()
    return result
