"""The launches that the operators make, noted instead of run, and compiled for GPUs that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from cuda_ops.sparse.gpu import load
from tests.cuda_ops.sparse.conformance import (
    Call,
    box_calls,
    conv_calls,
    map_calls,
    pool_calls,
    row_calls,
    segment_calls,
    world,
)

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""What one program may have, by target (CUDA C++ programming guide, technical specifications by compute capability)."""

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: a kernel, its arguments by name (tensors as their types) and its options."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def __str__(self) -> str:
        sizes = [
            str(value)
            for name, value in self.arguments.items()
            if name.isupper() and not isinstance(value, triton.language.dtype)
        ]
        sizes += ["transposed"] if self.arguments.get("weight_in_stride") == 1 else []
        types = [TYPES[value] for value in self.arguments.values() if isinstance(value, torch.dtype)]
        return "-".join([self.kernel.__name__, types[0], *sizes])

    @property
    def bits(self) -> int:
        """Of an element of the first tensor."""
        return 8 * next(value.itemsize for value in self.arguments.values() if isinstance(value, torch.dtype))

    def source(self) -> ASTSource:
        """Specialised as a launch is: 1 is a constant, multiples of 16 are known, sizes that vary are left open."""
        sizes = {parameter.name for parameter in self.kernel.params if parameter.do_not_specialize}
        signature = {}
        constants = {}
        known = {}
        for place, (name, value) in enumerate(self.arguments.items()):
            if isinstance(value, torch.dtype):
                signature[name] = "*" + TYPES[value]
                known[(place,)] = [["tt.divisibility", 16]]
            elif name.isupper() or (value == 1 and name not in sizes):
                signature[name] = "constexpr"
                constants[(place,)] = value
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and name not in sizes:
                    known[(place,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, known)

    def compiled(self, capability: int) -> Any:
        """For an NVIDIA GPU of a compute capability, to its machine code."""
        return triton.compile(self.source(), target=GPUTarget("cuda", capability, 32), options=self.options)


def noted(calls: list[Call]) -> list[Launch]:
    """The launches of calls on CPU tensors; nothing runs."""
    found: list[Launch] = []

    def note(kernel: JITFunction, *values: Any, grid: Any, warmup: bool, **named: Any) -> None:
        given = {**dict(zip(kernel.arg_names, values, strict=False)), **named}
        arguments = {name: given[name] for name in kernel.arg_names}
        types = {name: value.dtype if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
        found.append(Launch(kernel, types, {name: named[name] for name in OPTIONS if name in named}))

    kernels = load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", note)
        for operator, arguments in calls:
            getattr(kernels, operator)(*arguments)
    return found


def launches() -> list[Launch]:
    """Every kernel in bfloat16, and the two that multiply in each of their usual forms."""
    narrow = world(torch.bfloat16, 64, 64)
    calls = [*pool_calls(narrow), *segment_calls(narrow)[:6], *row_calls(narrow), *box_calls(narrow)]
    calls += [*map_calls(narrow), *conv_calls(narrow), *conv_calls(world(torch.bfloat16, 256, 256))]
    calls += conv_calls(world(torch.float32, 128, 128))
    found = {str(launch): launch for launch in noted(calls)}  # the last of several that differ in sizes alone
    return list(found.values())
