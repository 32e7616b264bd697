"""The operators of the compiled library, which take and give what the reference's do.

The tensors fit together: the operators have looked.  Dtypes that the library does not compute go to the reference.

Calls into the compiled library: plain C functions of pointers and numbers.

The library knows nothing of torch but its loop over threads, a function of torch's stable C interface, which it is
handed when it is loaded; so its sources include no header of torch, and compile in a tenth of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cuda_ops._torch import library_path
from cuda_ops.sparse import reference
from cuda_ops.sparse.keys import AxisInts


class Library:
    """The functions of the library at ``path``; calls release the interpreter's lock.

    Raises:
        OSError: it cannot be loaded.
    """

    def __init__(self, path: Path) -> None:
        self._functions: dict[str, Callable[..., int]] = {}
        self._loaded = ctypes.CDLL(str(path))
        self.call("use_threads", _parallel_for())

    def call(self, name: str, *arguments: Tensor | int) -> int:
        """What the function answers; of a tensor it gets the address of the first element.

        Raises:
            ValueError: a tensor that is not contiguous.
            MemoryError: not enough for what the function computes with.
        """
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._prototype(name, len(arguments))
        answer = function(*[each if isinstance(each, int) else _address(each) for each in arguments])
        if answer < 0:
            raise MemoryError(f"{name}: not enough memory for the sparse operators in C++")
        return answer

    def _prototype(self, name: str, count: int) -> Callable[..., int]:
        """Every parameter of every function is a pointer or an int64."""
        function = getattr(self._loaded, name)
        function.argtypes = (ctypes.c_int64,) * count
        function.restype = ctypes.c_int64
        prototype: Callable[..., int] = function
        return prototype


def _address(tensor: Tensor) -> int:
    if not tensor.is_contiguous():
        raise ValueError("tensors for the sparse operators in C++ are contiguous")
    return tensor.data_ptr()


def _parallel_for() -> int:
    """The address of torch's loop over threads, found among what torch's own module is linked with."""
    symbol = ctypes.CDLL(library_path()).torch_parallel_for
    return ctypes.cast(symbol, ctypes.c_void_p).value or 0


_COMPUTED = (torch.float32, torch.float64)


class NativeOperators:
    """By their names; N inputs, M outputs, K offsets, C channels, B segments."""

    def __init__(self, library: Library) -> None:
        self._call = library.call

    def sorted_sites(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Sorted keys int64 [N] of coordinates int32 [N, 4] and the order int64 [N] that sorts them.

        Raises:
            SparseInputError: out of range, or a coordinate that occurs twice.
        """
        if coordinates.dtype == torch.int32 and coordinates.ndim == 2 and coordinates.shape[1] == 4:
            count = coordinates.shape[0]
            keys = _empty(count)
            order = _empty(count)
            if self._call("sorted_sites", coordinates.contiguous(), count, keys, order):
                return keys, order
        return reference.sorted_sites(coordinates)  # which says what is wrong

    def strided_sites(self, keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
        """Every site whose field of a strided kernel holds one of keys [N]."""
        return self._moved_sites(keys, kernel, stride, dilation, generated=False)

    def generated_sites(self, keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts) -> Tensor:
        """Every site that a transposed kernel writes to from keys [N]."""
        return self._moved_sites(keys, kernel, stride, dilation, generated=True)

    def _moved_sites(
        self, keys: Tensor, kernel: AxisInts, stride: AxisInts, dilation: AxisInts, generated: bool
    ) -> Tensor:
        """Axis after axis; tensors take no more memory than what is written to them."""
        for axis in range(3):
            room = _empty(keys.shape[0] * kernel[axis])
            how = axis, kernel[axis], stride[axis], dilation[axis], generated
            keys = room[: self._call("moved_sites", keys, keys.shape[0], *how, room)]
        return keys.clone()

    def kernel_map(
        self,
        in_keys: Tensor,
        out_keys: Tensor,
        kernel: AxisInts,
        stride: AxisInts,
        dilation: AxisInts,
        transposed: bool,
    ) -> Tensor:
        """int32 [K, M]: the input row that each output reads through each offset, or -1."""
        inputs = in_keys.shape[0]
        outputs = out_keys.shape[0]
        neighbours = _empty(kernel[0] * kernel[1] * kernel[2], outputs, dtype=torch.int32)
        shape = torch.tensor((*kernel, *stride, *dilation), device="cpu")
        self._call("kernel_map", in_keys, inputs, out_keys, outputs, shape, transposed, neighbours)
        return neighbours

    def reversed_map(self, neighbours: Tensor, num_inputs: int) -> Tensor:
        """int32 [K, N]: the output row that reads each input through each offset, or -1."""
        volume, outputs = neighbours.shape
        reverse = _empty(volume, num_inputs, dtype=torch.int32)
        self._call("reversed_map", neighbours, volume, outputs, reverse, num_inputs)
        return reverse

    def sparse_conv(self, x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        """[M, Cout] of x [N, Cin] and weight [K, Cin, Cout], whose strides are free: a transposed one costs nothing."""
        if x.dtype not in _COMPUTED or weight.dtype != x.dtype:
            return reference.sparse_conv(x, weight, neighbours, reverse)
        rows = neighbours.shape[1]
        y = x.new_empty(rows, weight.shape[2])
        of_weight = weight.data_ptr(), *weight.shape, *weight.stride()
        self._call("sparse_conv", _is_double(x), x, *of_weight, neighbours, rows, y)
        return y

    def sparse_conv_weight(self, x: Tensor, dy: Tensor, neighbours: Tensor) -> Tensor:
        """[K, Cin, Cout] of x [N, Cin] and dy [M, Cout]."""
        if x.dtype not in _COMPUTED or dy.dtype != x.dtype:
            return reference.sparse_conv_weight(x, dy, neighbours)
        gradient = x.new_empty(neighbours.shape[0], x.shape[1], dy.shape[1])
        sizes = *neighbours.shape, x.shape[1], dy.shape[1]
        self._call("sparse_conv_weight", _is_double(x), x, dy, neighbours, *sizes, gradient)
        return gradient

    def sparse_max_pool(self, x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
        """Largest value [M, C] of the neighbours and the row int32 [M, C] that it came from."""
        if x.dtype not in _COMPUTED:
            return reference.sparse_max_pool(x, neighbours, reverse)
        largest = x.new_empty(neighbours.shape[1], x.shape[1])
        origin = torch.empty_like(largest, dtype=torch.int32)
        self._call("sparse_max_pool", _is_double(x), x, neighbours, *neighbours.shape, x.shape[1], largest, origin)
        return largest, origin

    def sparse_max_pool_backward(self, dy: Tensor, argmax: Tensor, reverse: Tensor) -> Tensor:
        """[N, C]: each input's sum of dy [M, C] over the outputs that took it."""
        if dy.dtype not in _COMPUTED:
            return reference.sparse_max_pool_backward(dy, argmax, reverse)
        dx = dy.new_empty(reverse.shape[1], dy.shape[1])
        self._call("sparse_max_pool_backward", _is_double(dy), dy, argmax, reverse, *reverse.shape, dy.shape[1], dx)
        return dx

    def sparse_sum_pool(self, x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        """[M, C]: the sum of the neighbours."""
        if x.dtype not in _COMPUTED:
            return reference.sparse_sum_pool(x, neighbours, reverse)
        sums = x.new_empty(neighbours.shape[1], x.shape[1])
        self._call("sparse_sum_pool", _is_double(x), x, neighbours, *neighbours.shape, x.shape[1], sums)
        return sums

    def segment_sum(self, x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        """[B, C]: sums of runs of rows."""
        if x.dtype not in _COMPUTED:
            return reference.segment_sum(x, starts, lengths)
        sums = x.new_empty(starts.shape[0], x.shape[1])
        self._call("segment_sum", _is_double(x), x, starts, lengths, *sums.shape, sums)
        return sums

    def segment_max(self, x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Largest value [B, C] of runs of rows and its row int32 [B, C]."""
        if x.dtype not in _COMPUTED:
            return reference.segment_max(x, starts, lengths)
        largest = x.new_empty(starts.shape[0], x.shape[1])
        origin = torch.empty_like(largest, dtype=torch.int32)
        self._call("segment_max", _is_double(x), x, starts, lengths, *largest.shape, largest, origin)
        return largest, origin

    def segment_expand(self, y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
        """[num_rows, C]: every row gets its segment's row of y [B, C]."""
        if y.dtype not in _COMPUTED:
            return reference.segment_expand(y, starts, lengths, num_rows)
        spread = y.new_empty(num_rows, y.shape[1])
        self._call("segment_expand", _is_double(y), y, starts, lengths, *y.shape, num_rows, spread)
        return spread

    def interpolate(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        """[P, C]: for every point the weighted sum of the rows of x [N, C] at its index [P, E]."""
        if x.dtype not in _COMPUTED or weight.dtype != x.dtype:
            return reference.interpolate(x, index, weight)
        sums = x.new_empty(index.shape[0], x.shape[1])
        self._call("interpolate", _is_double(x), x, index, weight, *index.shape, x.shape[1], sums)
        return sums


def _empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _is_double(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float64
