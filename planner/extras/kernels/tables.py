"""Tables of measured kernels: what others published, which ships with the package, and a user's own.

Three kinds of columns are read, told apart by the header (further columns are ignored):

    device, model, hidden, ffn, heads, kv_heads, gated_mlp, tensor_parallel, tokens, op, median_ms [, dtype]
        operators of a transformer's block, forward (microsoft/vidur, data/profiling/compute)
    gpu, dtype, model, micro_batch, tensor_parallel, op, forward_us, backward_us
        operators of Megatron's block in PyTorch, attention not fused (eth-easl/sailor)
    device, dtype, op, median_ms, and the extents that op needs
        gemm: m, n, k [, batch]; grouped_gemm: m rows of each, n, k, batch; any of MEMORY_BOUND: bytes [, launches];
        attention, tuned_attention, and each of them with _backward: batch, heads, kv_heads, queries, keys, head_size,
        causal

``data/LICENSES.md`` has the sources and their licences.
"""

from __future__ import annotations

import csv
import functools
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.ir.errors import CorruptFileError, MissingFileError

DATA = Path(__file__).parent / "data"

GEMM = "gemm"
GROUPED = "grouped_gemm"
"""Products of the rows of each of several experts with matrices of its own, in one kernel."""
ATTENTION = "attention"
ATTENTION_BACKWARD = "attention_backward"
TUNED_ATTENTION = "tuned_attention"
TUNED_ATTENTION_BACKWARD = "tuned_attention_backward"
MEMORY_BOUND = (
    "elementwise",  # residuals; any operator on numbers of its own
    "activation",
    "activation_backward",
    "gated_activation",  # one kernel, of two inputs
    "norm",
    "norm_backward",
    "eager_norm",  # RMSNorm as PyTorch runs its text, a kernel an operator
    "eager_norm_backward",
    "rope",
    "eager_rope",  # likewise, angles in float32
    "eager_rope_backward",
    "embedding",
    "softmax",  # of attention scores, scaled and masked in the same kernel
    "softmax_backward",
    "dropout",
    "dropout_backward",
    "dropout_add",  # bias, dropout and residual
)
"""Kinds of operators that memory bounds; bytes are those read and written, each once."""

ATTENTION_KINDS = (ATTENTION, ATTENTION_BACKWARD, TUNED_ATTENTION, TUNED_ATTENTION_BACKWARD)
_ATTENTION_EXTENTS = ("batch", "heads", "kv_heads", "queries", "keys", "head_size", "causal")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One measured kernel.

    Attributes:
        device: by its name in the catalogue, or as the table calls it.
        dtype: ``float16`` stands for bfloat16 too, which runs alike.
        kind: ``gemm``, ``grouped_gemm``, ``attention``, ``attention_backward`` or one of ``MEMORY_BOUND``.
        extents: (m, n, k, batch); (batch, heads, kv_heads, queries, keys, head_size, causal); (bytes, launches).
        group: the shapes that are held back together: those of one network.
    """

    device: str
    dtype: str
    kind: str
    extents: tuple[int, ...]
    seconds: float
    group: str


_DEVICES = {
    "a100": "A100-80GB",
    "h100": "H100-SXM",
    "a40": "A40",
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "V100-16": "V100-16GB",
    "GH-96": "GH200-96GB",
}
"""What sources call devices of the catalogue."""

_DTYPES = {
    "": "float16", "fp16": "float16", "bf16": "float16", "bfloat16": "float16", "fp32": "float32", "fp8": "float8"
}  # fmt: skip
_TF32 = ("A100", "H100", "GH200", "RTX-3090", "A40")
_LEAST_S = 1e-6
_MOST_S = 1e4


def dtype_of(name: str) -> str:
    """The dtype of a table's rows for a module in ``name``."""
    return _DTYPES.get(name, name)


@functools.cache
def shipped() -> tuple[KernelRow, ...]:
    """The rows that ship with the package."""
    names = ("kernels.csv.xz", "operators.csv.xz", "shapes.csv.xz")
    return tuple(row for name in names for row in read_table(DATA / name))


def read_table(path: str | Path) -> list[KernelRow]:
    """The rows of a table; ``.xz`` is unpacked.

    Raises:
        MissingFileError, CorruptFileError: it cannot be read, or is no table of kernels; lines are named.
    """
    rows: list[KernelRow] = []
    faults: list[str] = []
    header, lines = read_csv(path)
    reader = next((read for columns, read in _READERS if set(columns.split(", ")) <= set(header)), None)
    if reader is None:
        shown = "; or ".join(columns for columns, _ in _READERS)
        raise CorruptFileError(
            f"{path} is no table of kernels", [f"its columns: {', '.join(header)}", f"known: {shown}"]
        )
    for number, line in lines:
        try:
            rows += [row for row in reader(line) if row.seconds > 0]
        except (KeyError, ValueError, ZeroDivisionError, TypeError) as error:
            faults.append(f"line {number}: {type(error).__name__}: {error}")
    if faults or not rows:
        raise CorruptFileError(f"{path} is no table of kernels", faults[:20] or ["it has no rows"])
    return rows


def read_csv(path: str | Path) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """The header of a table, and its lines by number."""
    try:
        raw = Path(path).read_bytes()
        text = (lzma.decompress(raw) if str(path).endswith(".xz") else raw).decode("utf-8")
    except FileNotFoundError:
        raise MissingFileError(f"{path} is not there") from None
    except (OSError, UnicodeDecodeError, lzma.LZMAError) as error:
        raise CorruptFileError(f"{path} cannot be read", [str(error)]) from None
    reader = csv.DictReader(text.splitlines())
    return list(reader.fieldnames or ()), enumerate(reader, start=2)


def _seconds(line: Mapping[str, str], name: str, unit_s: float) -> float:
    """A time of the line.

    Raises:
        ValueError: it is none.
    """
    seconds = unit_s * float(line[name])
    if not 0 <= seconds <= _MOST_S:
        raise ValueError(f"{name} is {line[name]}, which no kernel takes")
    return seconds


def _of_block(line: Mapping[str, str]) -> Iterator[KernelRow]:
    """Of microsoft/vidur: half precision, forward, kernels of vLLM."""
    tokens, hidden, ffn, heads, kv_heads, ways = (
        int(line[name]) for name in ("tokens", "hidden", "ffn", "heads", "kv_heads", "tensor_parallel")
    )
    size = hidden // heads
    ups = 2 if line["gated_mlp"] == "True" else 1
    op = line["op"]
    extents: tuple[int, ...] | None = {
        "attn_pre_proj": (tokens, (heads + 2 * kv_heads) * size // ways, hidden, 1),
        "attn_post_proj": (tokens, hidden, hidden // ways, 1),
        "mlp_up_proj": (tokens, ups * ffn // ways, hidden, 1),
        "mlp_down_proj": (tokens, hidden, ffn // ways, 1),
    }.get(op)
    kind = GEMM
    if extents is None:
        # A block of phi-2 adds what attention and MLP give to its input, in two kernels.
        adds = 2 if line.get("model") == "phi-2" else 1
        kind, num_bytes, launches = {
            "add": ("elementwise", 6 * adds * tokens * hidden, adds),
            "mlp_act": ("gated_activation" if ups > 1 else "activation", 2 * (ups + 1) * tokens * ffn // ways, 1),
            "input_layernorm": ("norm", 4 * tokens * hidden, 1),
            "post_attention_layernorm": ("norm", 4 * tokens * hidden, 1),
            "attn_rope": ("rope", 4 * tokens * (heads + kv_heads) * size // ways, 1),
            "emb": ("embedding", 4 * tokens * hidden, 1),
        }[op]
        extents = (num_bytes, launches)
    seconds = max(_LEAST_S, _seconds(line, "median_ms", 1e-3))
    name = _DEVICES.get(line["device"], line["device"])
    dtype = dtype_of(line.get("dtype", ""))
    yield KernelRow(name, dtype, kind, extents, seconds, f"{hidden}/{ffn}")


_SAILOR_MODELS = {"OPT-350": (1024, 16), "OPT-30": (7168, 56), "GPT-Neo-2.7": (2560, 32)}
_SAILOR_TOKENS = 2048
_FUSED_HEADS = 4
"""Megatron's fused softmax takes numbers of heads, times samples, that this divides; others run several kernels."""


def _of_operator(line: Mapping[str, str]) -> Iterator[KernelRow]:
    """Of eth-easl/sailor.  Backward of products is left out: it is that of one of the two only, judged by its time."""
    if line["model"] not in _SAILOR_MODELS:
        return
    hidden, heads = _SAILOR_MODELS[line["model"]]
    samples = int(line["micro_batch"])
    ways = int(line["tensor_parallel"])
    name = _DEVICES.get(line["gpu"], line["gpu"])
    dtype = dtype_of(line["dtype"])
    width = 2 if dtype == "float16" else 4
    # Products in float32 are five times as fast as float32 can be there.
    of_products = "tfloat32" if dtype == "float32" and name.startswith(_TF32) else dtype
    tokens = samples * _SAILOR_TOKENS
    products = samples * heads // ways
    op = line["op"].removeprefix("enc-")
    extents = {
        "attention-qkv": (tokens, 3 * hidden // ways, hidden, 1),
        "MLP-GEMM-1": (tokens, 4 * hidden // ways, hidden, 1),
        "attention-score": (_SAILOR_TOKENS, _SAILOR_TOKENS, hidden // heads, products),
        "attention-context": (_SAILOR_TOKENS, hidden // heads, _SAILOR_TOKENS, products),
        "attention-dense": (tokens, hidden, hidden, 1),
        "MLP-GEMM-2": (tokens, hidden, 4 * hidden, 1),
    }.get(op)
    if ways > 1 and op in ("attention-dense", "MLP-GEMM-2"):  # a sum over the ranks is in their times
        return
    forward_s, backward_s = (_seconds(line, name, 1e-6) for name in ("forward_us", "backward_us"))
    if extents is not None:
        yield KernelRow(name, of_products, GEMM, extents, forward_s, line["model"])
        return
    scores = products * _SAILOR_TOKENS**2
    is_fused = products % _FUSED_HEADS == 0 and width == 2
    numbers, passes = {
        "1st-layernorm": (tokens * hidden, ("norm", 2 * width, 3 * width)),
        "2nd-layernorm": (tokens * hidden, ("norm", 2 * width, 3 * width)),
        "MLP-gelu": (4 * tokens * hidden // ways, ("activation", 2 * width, 3 * width)),
        "post-attention-dropout": (tokens * hidden, ("dropout_add", 3 * width + 1, 0)),
        "post-MLP-dropout": (tokens * hidden, ("dropout_add", 3 * width + 1, 0)),
        "attention-dropout": (scores, ("dropout", 2 * width + 1, 2 * width + 1)),
        **({"attention-softmax": (scores, ("softmax", 2 * width, 3 * width))} if is_fused else {}),
    }.get(op, (0, ("", 0, 0)))
    kind, forward, backward = passes
    if forward:
        yield KernelRow(name, dtype, kind, (forward * numbers, 1), forward_s, line["model"])
    if backward:
        yield KernelRow(name, dtype, f"{kind}_backward", (backward * numbers, 1), backward_s, line["model"])


def _of_shape(line: Mapping[str, str]) -> Iterator[KernelRow]:
    """A user's own, by shape."""
    kind = line["op"]
    device = _DEVICES.get(line["device"], line["device"])
    dtype = dtype_of(line["dtype"])

    def extent(name: str, default: str = "") -> int:
        value = int(line.get(name) or default)
        if value < (0 if name == "causal" else 1):
            raise ValueError(f"{name} is {value}")
        return value

    extents: tuple[int, ...]
    if kind in (GEMM, GROUPED):
        extents = (extent("m"), extent("n"), extent("k"), extent("batch", "1"))
    elif kind in ATTENTION_KINDS:
        extents = tuple(extent(name, "1" if name == "causal" else "") for name in _ATTENTION_EXTENTS)
    elif kind in MEMORY_BOUND:
        extents = (extent("bytes"), extent("launches", "1"))
    else:
        raise ValueError(f"op {kind!r} is none of {', '.join((GEMM, GROUPED, *ATTENTION_KINDS, *MEMORY_BOUND))}")
    seconds = max(_LEAST_S, _seconds(line, "median_ms", 1e-3))
    yield KernelRow(device, dtype, kind, extents, seconds, line.get("model") or f"{kind} {extents[1:3]}")


_OF_BLOCK = "device, hidden, ffn, heads, kv_heads, gated_mlp, tensor_parallel, tokens, op, median_ms"
_OF_OPERATOR = "gpu, dtype, model, micro_batch, tensor_parallel, op, forward_us, backward_us"
_OF_SHAPE = "device, dtype, op, median_ms"
_READERS: tuple[tuple[str, Callable[[Mapping[str, str]], Iterable[KernelRow]]], ...] = (
    (_OF_BLOCK, _of_block),
    (_OF_OPERATOR, _of_operator),
    (_OF_SHAPE, _of_shape),
)
