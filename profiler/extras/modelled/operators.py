"""What operators of torch's dispatcher take on a device, by the kernels that they are there.

    products                 mm, addmm, bmm, ...: by shape
    convolutions             as the product that they are in place: m = samples and places, n = output channels,
                             k = input channels and window; their two gradients are products of their own
    attention                fused, by batch, heads and lengths
    norms, softmax,          by bytes read and written once, with the efficiency of their kind
    activations, dropout
    views                    nothing
    all others               by the bytes of their arguments and results, as elementwise operators

Convolutions of float32 are priced as cuDNN computes them by default (``torch.backends.cudnn.allow_tf32``): in tensor
cores, where the device's data sheet states a rate for that (NVIDIA's since A100).  Products are not: there torch's
default is float32 as it is (``torch.backends.cuda.matmul.allow_tf32``).

Ignored: what a compiler would fuse, and the time of the host, which of small kernels is the longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from cuda_ops._torch import OpOverload, schema_of, tree_leaves
from cuda_ops.operator_table import operator_row
from planner.extras.kernels.estimates import NOTHING, Estimate
from planner.extras.kernels.models import AttentionShape, Kernels
from planner.ir.errors import MissingMeasurementError

_BACKWARD = "_backward"

Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OperatorPrices:
    """Prices operators for one kind of device.

    Attributes:
        kernels: by dtype of the operands, ``float32``.
    """

    kernels: Callable[[str], Kernels]

    def __call__(self, func: OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> Estimate:
        """Of one call.

        Raises:
            MissingMeasurementError: no source says how fast the device computes in the dtype of the operands.
        """
        schema: Any = schema_of(func)
        name = schema.name.rpartition("::")[2]
        price = operator_row(func).price
        if price == "free" or _is_view(schema):
            return NOTHING
        arguments = {each.name: value for each, value in zip(schema.arguments, args, strict=False)} | dict(keywords)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        read = [each for each in tree_leaves((args, dict(keywords))) if isinstance(each, Tensor)]
        numbers = [each for each in (*made, *read) if each.is_floating_point()]
        dtype = str(numbers[0].dtype).removeprefix("torch.") if numbers else "float32"
        kernels = self.kernels(dtype)
        if dtype == "float32" and name.startswith("convolution"):
            with suppress(MissingMeasurementError):
                kernels = self.kernels("tfloat32")
        rule = _RULES.get(price)
        if rule is not None:
            return rule(kernels, arguments, made)
        if "attention" in name:
            return _attention(kernels, name, arguments)
        num_bytes = sum({id(each): _touched(each) for each in (*made, *read)}.values())
        return kernels.memory_bound(num_bytes, kind=price or "elementwise")


def _is_view(schema: Any) -> bool:
    """Whether all that it gives lies in the memory of an argument, to which it writes nothing."""
    aliases = [each.alias_info for each in schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _touched(tensor: Tensor) -> int:
    """Bytes that reading a tensor moves: one that is expanded is small."""
    return int(min(tensor.nbytes, tensor.untyped_storage().nbytes()))


def _product(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    """[m, k] by [k, n], or several of them; also ``addmm`` and ``baddbmm``, whose sum the kernel does."""
    names = (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"))
    one, other = next((arguments[a], arguments[b]) for a, b in names if a in arguments)
    return kernels.gemm(one.shape[-2], other.shape[-1], one.shape[-1], *one.shape[:-2])


def _linear(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    rows = arguments["input"]
    weight = arguments["weight"]
    return kernels.gemm(rows.numel() // max(1, rows.shape[-1]), weight.shape[0], rows.shape[-1])


def _convolution(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    transposed = bool(arguments["transposed"])
    source = arguments["input"]
    result = made[0]
    away = _ConvolutionProducts(arguments, source if transposed else result)
    return away.depthwise(kernels, source, result) or (away.spread(kernels) if transposed else away.gather(kernels))


def _convolution_backward(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    transposed = bool(arguments["transposed"])
    gradient = arguments["grad_output"]
    source = arguments["input"]
    of = _ConvolutionProducts(arguments, source if transposed else gradient)
    of_input, of_weight, of_bias = arguments["output_mask"]
    estimate = NOTHING
    if of_input:
        product = of.gather(kernels) if transposed else of.spread(kernels)
        estimate += of.depthwise(kernels, gradient, source) or product
    if of_weight:
        estimate += of.depthwise(kernels, gradient, source) or of.weight(kernels)
    return estimate + kernels.memory_bound(gradient.nbytes) if of_bias else estimate


@dataclass(frozen=True, slots=True)
class _ConvolutionProducts:
    """A convolution as products over the places of its smaller side: its output, or what a transposed one reads.

    The weight is [channels of that side, channels of the other side / groups, *window].
    """

    arguments: Arguments
    smaller: Tensor

    @property
    def _extents(self) -> tuple[int, int, int, int]:
        """Places of all samples, channels of a group of the smaller side, those of the other by window, groups."""
        weight = self.arguments["weight"]
        groups = int(self.arguments["groups"])
        places = self.smaller.numel() // max(1, self.smaller.shape[1])
        return places, weight.shape[0] // groups, weight.shape[1] * prod(weight.shape[2:]), groups

    def gather(self, kernels: Kernels) -> Estimate:
        """Each place of the smaller side from a window of the other."""
        places, own, others, groups = self._extents
        return kernels.gemm(places, own, others, groups)

    def spread(self, kernels: Kernels) -> Estimate:
        """Each place of the smaller side to a window of the other."""
        places, own, others, groups = self._extents
        return kernels.gemm(places, others, own, groups)

    def weight(self, kernels: Kernels) -> Estimate:
        """The gradient of the weight, summed over places."""
        places, own, others, groups = self._extents
        return kernels.gemm(others, own, places, groups)

    def depthwise(self, kernels: Kernels, one: Tensor, other: Tensor) -> Estimate | None:
        """Where a group has one channel on each side, there is no product: memory bounds it."""
        weight = self.arguments["weight"]
        if weight.shape[1] > 1 or weight.shape[0] > self.arguments["groups"]:
            return None
        return kernels.memory_bound(one.nbytes + other.nbytes + weight.nbytes)


def _embedding(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    """The rows that are asked for, read and written."""
    return kernels.memory_bound(2 * made[0].nbytes)


def _embedding_backward(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    """A table of zeros, and rows added into it."""
    return kernels.memory_bound(made[0].nbytes + 3 * arguments["grad_output"].nbytes, 2)


def _attention(kernels: Kernels, name: str, arguments: Arguments) -> Estimate:
    query = arguments["query"]
    key = arguments["key"]
    *outer, heads, queries, size = query.shape
    is_causal = bool(arguments.get("is_causal"))
    shape = AttentionShape(prod(outer), heads, key.shape[-3], queries, key.shape[-2], size, is_causal)
    is_backward = name.endswith(_BACKWARD)
    price = kernels.attention_backward if is_backward else kernels.attention
    estimate: Estimate = price(shape, fused=True)
    return estimate


def _recurrent(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    """A layer of an LSTM: one product for all inputs, and one a step for the state."""
    source = arguments["input"]
    weight = arguments["weight0"]
    state = arguments["weight1"]
    steps = source.shape[0]
    samples = source.shape[1]
    of_inputs = kernels.gemm(steps * samples, weight.shape[0], weight.shape[1])
    of_steps = kernels.gemm(samples, state.shape[0], state.shape[1])
    return of_inputs + of_steps * float(steps)


def _recurrent_backward(kernels: Kernels, arguments: Arguments, made: list[Tensor]) -> Estimate:
    """Each of the forward's products has two."""
    renamed = {"weight0": arguments["weight1"], "weight1": arguments["weight2"], "input": arguments["input"]}
    return 2 * _recurrent(kernels, renamed, made)


_RULES: Mapping[str, Callable[[Kernels, Arguments, list[Tensor]], Estimate]] = {
    "product": _product,
    "linear": _linear,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "recurrent": _recurrent,
    "recurrent_backward": _recurrent_backward,
}
"""By what the row of an operator says; other prices are kinds of memory-bound kernels."""
