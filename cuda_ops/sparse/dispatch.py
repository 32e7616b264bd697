"""Which implementation of an operator runs: by the device of its tensors, or by name.

    CPU       native (C++), where a compiler is to be had, else plain torch
    CUDA      triton, where it is installed, else plain torch
    others    plain torch

The environment variable HALOPIPE_SPARSE=torch|native|triton forces one; with TRITON_INTERPRET=1 triton runs on the
CPU too.  What extras add (``OperatorsExtra.sparse_kernels``) runs on any device, and by name alone.  Operators
that an implementation lacks come from :mod:`cuda_ops.sparse.reference`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cuda_ops.extra import OperatorsExtra
from cuda_ops.sparse import gpu, native, reference
from cuda_ops.sparse.errors import SparseImplementationError
from planner.ir.extras import Additions, extras, joined

VARIABLE = "HALOPIPE_SPARSE"
_LOGGER = logging.getLogger(__name__)
_DEVICES = {"native": "cpu", "triton": "cuda"}
_MODULES: dict[str, Any] = {"native": native, "triton": gpu}


def implementation(name: str, device: str) -> Callable[..., Any]:
    """The function that runs operator ``name`` on a device of this type.

    Raises:
        SparseImplementationError: HALOPIPE_SPARSE asks for what cannot be had.
    """
    return _implementation(name, device, os.environ.get(VARIABLE, ""))


def chosen(device: str) -> str:
    """``torch``, ``native``, ``triton`` or an extra's name: what runs on a device of this type."""
    return _chosen(device, os.environ.get(VARIABLE, ""))[0]


@functools.cache
def _implementation(name: str, device: str, forced: str) -> Callable[..., Any]:
    _, functions = _chosen(device, forced)
    function: Callable[..., Any] | None = getattr(functions, name, None)
    return function or getattr(reference, name)


@functools.cache
def _chosen(device: str, forced: str) -> tuple[str, Any]:
    if forced:
        return forced, _forced(device, forced)
    for name, runs_on in _DEVICES.items():
        if runs_on == device:
            functions = _loaded(name)
            if functions is not None:
                return name, functions
            if name != "native":  # which has said why
                _LOGGER.warning(
                    "sparse operators on %s run in plain torch: %s needs the package %s", device, name, name
                )
    return "torch", reference


def _forced(device: str, name: str) -> Any:
    if name == "torch":
        return reference
    names = ("torch", *_DEVICES, *_added())
    if name not in names:
        raise SparseImplementationError(f"{VARIABLE}={name}: there are {', '.join(names)}")
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device != _DEVICES.get(name, device) and not interpreted:
        raise SparseImplementationError(
            f"{VARIABLE}={name} runs on {_DEVICES[name]}, the tensors are on {device}; unset it, or move them"
        )
    functions = _loaded(name)
    if functions is None:
        needed = "a C++ compiler and torch >= 2.10" if name == "native" else f"the package {name}"
        raise SparseImplementationError(f"{VARIABLE}={name} needs {needed}; install it, or unset {VARIABLE}")
    return functions


@functools.cache
def _added() -> Additions:
    return joined(extra.sparse_kernels for extra in extras(OperatorsExtra))


@functools.cache
def _loaded(name: str) -> SimpleNamespace | None:
    load = _MODULES[name].load if name in _MODULES else _added()[name]
    functions: SimpleNamespace | None = load()
    return functions
