"""Modules that nothing can train, or not as they are: refused by what they are, before they are run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import LOSS_PREFIX
from profiler.source.model import LoadedModel, named_buffers, named_parameters

_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def require_plain_modules(owned: Mapping[str, nn.Module]) -> None:
    """Raises :class:`UnsupportedModelError` for modules whose operators, shapes or gradients are not to be had.

    Args:
        owned: as of :func:`profiler.source.model.owners`.
    """
    for prefix, module in owned.items():
        for name, part in module.named_modules():
            title = f"{prefix}{name}" if name else "the loss" if prefix else "the module"
            _require_plain(title, part)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise UnsupportedModelError(
                    f"{prefix}{name} has no shape yet",
                    ["modules such as nn.LazyLinear find theirs when they are first called"],
                    ["run one batch through the module before it is given: module(inputs)"],
                )
            if tensor.is_inference() and isinstance(tensor, nn.Parameter):
                raise UnsupportedModelError(
                    f"{prefix}{name} is an inference tensor, which has no gradient",
                    ["the module was made within torch.inference_mode()"],
                    ["make it outside of that, or within torch.no_grad()"],
                )

    _require_names_apart(owned)


def _require_names_apart(owned: Mapping[str, nn.Module]) -> None:
    """A module may keep a loss as its ``loss_fn``, which is what the given one's tensors are called after."""
    loss = owned.get(LOSS_PREFIX)
    module = owned[""]
    own = {} if loss is None else {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in () if loss is None else (*loss.named_parameters(), *loss.named_buffers()):
        other = own.get(LOSS_PREFIX + name)
        if other is not None and other is not tensor:
            raise UnsupportedModelError(
                f"{LOSS_PREFIX}{name} of the module and {name} of its loss are two tensors of one name",
                ["tensors of the loss are called as if it were the module's attribute loss_fn"],
                ["call the module's attribute otherwise", "give that very loss: model.loss_fn"],
            )


def _require_plain(name: str, part: nn.Module) -> None:
    kind = type(part).__name__
    if isinstance(part, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"{name} is scripted ({kind}): its code is TorchScript's, which is not captured",
            [f"made of {part.original_name} by torch.jit"],
            ["give the module that torch.jit.script or torch.jit.trace was given, with its state dict"],
        )
    if type(part).__module__.startswith(_QUANTISED):
        raise UnsupportedModelError(
            f"{name} is quantised ({kind}): its weights are integers, which have no gradient",
            [],
            ["give the module as it was before it was converted; prepare_qat of it is trained"],
        )
    is_distributed = type(part).__module__.startswith(("torch.nn.parallel.distributed", "torch.distributed."))
    if is_distributed or (isinstance(part, nn.DataParallel) and part.device_ids):
        raise UnsupportedModelError(
            f"{name} is {kind}, which divides the work itself",
            ["a plan says which rank computes what"],
            ["give the module inside: model.module"],
        )


def require_values(model: LoadedModel) -> None:
    """Raises :class:`UnsupportedModelError` where parameters, buffers or an example are on the ``meta`` device."""
    state = {**named_parameters(model.owners), **named_buffers(model.owners)}
    for name, tensor in (*state.items(), *model.tensors.items()):
        if tensor.is_meta:
            of_module = ["module.to_empty(device='cpu'), then its weights", "--on a100-dgx, which needs no weights"]
            raise UnsupportedModelError(
                f"{name} is on the meta device: it has a shape and no values",
                [],
                of_module if name in state else ["give an example with values: torch.randn(8, 3)"],
            )


def trained_parameters(owned: Mapping[str, nn.Module]) -> Iterable[nn.Parameter]:
    """All parameters of module and loss.

    Raises:
        UnsupportedModelError: none of them is trained, or as of :func:`require_plain_modules`.
    """
    require_plain_modules(owned)
    parameters = [each for module in owned.values() for each in module.parameters()]
    if not any(each.requires_grad for each in parameters):
        frozen = f"all {len(parameters)} parameters are frozen: requires_grad is False"
        raise UnsupportedModelError(
            "the model has nothing to train",
            [frozen if parameters else "neither the module nor its loss has a parameter"],
            ["leave one to be trained: module.head.requires_grad_(True)"],
        )
    return parameters
