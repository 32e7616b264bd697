"""The user's module as it was, whatever a capture made of it: modes, buffers, attributes, gradients, random state."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_CONTAINERS = (list, dict, set, deque)


@contextmanager
def untouched(*modules: nn.Module) -> Iterator[None]:
    """Puts back what is done to ``modules`` within: whatever forward or ``eval()`` changes, and who draws numbers.

    Attributes are the same objects again, and lists, dicts and sets hold what they held; what is inside of other
    objects is theirs.
    """
    parts = [part for module in modules for part in module.modules()]
    attributes = [(part, dict(part.__dict__), _contents(part)) for part in parts]
    gradients = [(p, p.grad, p.requires_grad) for module in modules for p in module.parameters()]
    numpy: Any = sys.modules.get("numpy.random")
    drawn = random.getstate(), None if numpy is None else numpy.get_state()
    with torch.random.fork_rng(devices=[]), kept_buffers(*modules):
        try:
            yield
        finally:
            for part, own, contents in attributes:
                part.__dict__.clear()
                part.__dict__.update(own)
                for container, held in contents:
                    _restore(container, held)
            for parameter, gradient, is_trained in gradients:
                parameter.grad = gradient
                parameter.requires_grad_(is_trained)
            random.setstate(drawn[0])
            if numpy is not None:
                numpy.set_state(drawn[1])


@contextmanager
def kept_buffers(*modules: nn.Module) -> Iterator[None]:
    """Puts back the values of buffers."""
    state = [(buffer, buffer.detach().clone()) for module in modules for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in state:
                buffer.copy_(value)


@contextmanager
def fresh_gradients(*modules: nn.Module) -> Iterator[None]:
    """Within it parameters have no gradients; those that they had come back."""
    kept = [(parameter, parameter.grad) for module in modules for parameter in module.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Within it ``modules`` are in evaluation mode; then each part is in its own again."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _contents(part: nn.Module) -> list[tuple[Any, Any]]:
    """Containers, those of buffers, parts and hooks among them, and what they hold."""
    return [(value, value.copy()) for value in part.__dict__.values() if isinstance(value, _CONTAINERS)]


def _restore(container: Any, held: Any) -> None:
    if isinstance(container, (list, deque)):
        is_same = len(container) == len(held) and all(a is b for a, b in zip(container, held, strict=True))
    elif isinstance(container, dict):
        is_same = list(container) == list(held) and all(container[key] is held[key] for key in held)
    else:
        is_same = container == held
    if is_same:
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(held)
