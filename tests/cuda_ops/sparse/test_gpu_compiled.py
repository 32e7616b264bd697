from __future__ import annotations

import functools
import importlib
import os
import pkgutil

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted, not compiled", allow_module_level=True)

from triton.runtime.jit import JITFunction

import cuda_ops.sparse.gpu
from tests.cuda_ops.sparse.gpu_launches import SHARED_BYTES, launches

CALLED_BY_KERNELS = {"lowest", "read_through", "bounds"}
LAUNCHES = {str(launch): launch for launch in launches()}
MULTIPLY = [name for name, launch in LAUNCHES.items() if launch.kernel.__name__ in ("convolve", "products")]
NARROW = [name for name in MULTIPLY if LAUNCHES[name].bits == 16]


@functools.cache
def compiled(name, capability):
    return LAUNCHES[name].compiled(capability)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", LAUNCHES)
def test_every_kernel_compiles_within_shared_memory(name, capability):
    found = compiled(name, capability)
    assert found.asm["cubin"]
    assert found.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.parametrize("name", NARROW)
def test_narrow_products_use_the_matrix_units_of_each_generation(name):
    assert "mma.sync.aligned.m16n8k16" in compiled(name, 80).asm["ptx"]
    assert "wgmma.mma_async" in compiled(name, 90).asm["ptx"]
    assert "tcgen05.mma" in compiled(name, 100).asm["ptx"]


@pytest.mark.parametrize("name", sorted(set(MULTIPLY) - set(NARROW)))
def test_float32_is_not_rounded_to_tf32(name):
    assert "tf32" not in compiled(name, 90).asm["ptx"]


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("name", NARROW)
def test_loads_run_ahead_sixteen_bytes_at_a_time(name, capability):
    loops = compiled(name, capability).asm["ttgir"].split("scf.for")[-1]
    assert loops.count("ttg.async_copy_global_to_local") >= 3  # indices and both operands, inside the innermost loop
    assert "], 0x10, " in compiled(name, capability).asm["ptx"]


@pytest.mark.parametrize("name", LAUNCHES)
def test_sizes_of_a_batch_are_not_compiled_in(name):
    launch = LAUNCHES[name]
    vary = {"num_rows", "num_inputs", "num_outputs", "num_segments", "num_points", "num_shares", "rounds"}
    open_ = {parameter.name for parameter in launch.kernel.params if parameter.do_not_specialize}
    assert vary & set(launch.arguments) <= open_


def test_every_kernel_of_the_package_is_among_them():
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.iter_modules(cuda_ops.sparse.gpu.__path__, "cuda_ops.sparse.gpu.")
    ]
    kernels = {
        value.__name__ for module in modules for value in vars(module).values() if isinstance(value, JITFunction)
    }
    assert kernels - CALLED_BY_KERNELS == {launch.kernel.__name__ for launch in LAUNCHES.values()}
