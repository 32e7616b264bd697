"""What is known of torch's operators: one row an operator, read by the profiler's capture, modelled profiles and runs.

A row holds for all overloads of its name.  Names are without namespace and outer underscores, ``to_copy`` for
``aten::_to_copy``.  An operator without a row is an elementwise one where torch tags it so, else nothing is known of
it: it is run whole and on whole samples, and whether it keeps samples apart is seen by running it.

What is no fact of an operator alone stands where it is used: the attributes of a layer kind in
``profiler.capture.kinds``, how a kind runs on a shard in ``runtime.spatial.op_rules``, both by the kind of the row.
What autograd keeps of an operator is measured, never looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from cuda_ops._torch import schema_of
from cuda_ops.calls import writes
from cuda_ops.dense.backward_halves import (
    CallReader,
    read_addmm,
    read_conv,
    read_convolution,
    read_embedding,
    read_linear,
    read_matmul,
    read_mm,
    read_transposed_conv,
)

SAME = "same"
REGROUPED = "regrouped"
EXPANDED = "expanded"
PERMUTED = "permuted"
PART = "part"
PARTS = "parts"
RESHAPED = frozenset({REGROUPED, EXPANDED, PERMUTED})
_NAMESPACES = ("aten", "halopipe")
CLASSES = ("target", "self", 1)
ROWS = ("indices", "weight", 0)


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """What is known of one operator; what a field leaves out holds of most.

    Attributes:
        kinds: of ``planner.layers``, the first of which the call has the form; none: pointwise where torch tags it so.
        elements: where its result has the elements of its first argument: all in their places (``SAME``), along other
            dims (``REGROUPED``), repeated, or in another order; or a part of them, or several parts.
        undo: how a write to the result becomes one to what it is a view of, see ``profiler.capture.functional``.
        linear: ``all`` in all arguments together, ``first`` in the first if others are constants, ``each`` in each.
        sums: whether it adds up what it reduces.
        terms: of a loss, what its mean is over: every element of the prediction, or every place with all its classes.
        samples: how it treats the samples of its arguments, where its kind does not say, see
            ``profiler.extras.modelled.dependence``.
        heavy: takes a substantial share of a step, so that it is not run twice to know a number beforehand.
        fills: what it makes tensors of: ``ones``, ``zeros``, ``full`` (of an argument) or ``empty``.
        model: an argument of which it reads shape or dtype alone.
        draws: what draws its random numbers in parts: ``fill`` is torch's method of its name on a tensor of the
            shape, others are functions of ``runtime.stage.random.layers``; empty: it is drawn whole.
        drops: what it draws for: ``elements``, ``channels`` or ``layers`` (between which it drops).
        entries: (argument that holds numbers of classes or rows, argument that has as many, along which dim).
        statistics: the argument that says whether it writes running statistics, which its schema does not.
        halves: reads a call for a backward in two halves.
        price: the kernels that it is priced as, see ``profiler.extras.modelled.operators``.
        python: (overload, what calls it from Python), where that is a microsecond or two less than by its schema.
        gradient: where its backward is no ordinary one: ``none``, ``each`` of several results' to an argument of its
            own, or ``rows``, which it needs: it fails on tensors without elements.
    """

    name: str
    kinds: tuple[str, ...] = ()
    elements: str = ""
    undo: str = ""
    linear: str = ""
    sums: bool = False
    terms: str = ""
    samples: str = ""
    heavy: bool = False
    fills: str = ""
    model: str = ""
    draws: str = ""
    drops: str = ""
    entries: tuple[str, str, int] | None = None
    statistics: str = ""
    halves: CallReader | None = None
    price: str = ""
    python: tuple[str, Callable[..., Any]] | None = None
    gradient: str = ""

    @property
    def moves(self) -> bool:
        """Whether the result is all elements of the first argument and nothing else, wherever they lie."""
        return self.elements == SAME or self.elements in RESHAPED


def name_of(target: object) -> str:
    """The name under which an operator, or a function of Python, has its row."""
    schema = schema_of(target)
    name = schema.name.rpartition("::")[2] if schema else getattr(target, "__name__", str(target))
    return name.strip("_").replace(":", "_")


def operator_row(target: object) -> OperatorRow:
    """What is known of an operator, or of torch's of a name; nothing of other libraries', whatever their names."""
    name = target.strip("_") if isinstance(target, str) else name_of(target)
    is_ours = getattr(target, "namespace", _NAMESPACES[0]) in _NAMESPACES
    return (OPERATORS.get(name) if is_ours else None) or OperatorRow(name)


def functional_row(target: object) -> OperatorRow:
    """The same of a call that is to be replaced: of an operator that writes to an argument nothing is known."""
    return OperatorRow(name_of(target)) if writes(target) else operator_row(target)


def _rows(names: str, kinds: str = "", **columns: Any) -> Iterator[OperatorRow]:
    """A row for each of several operators of which the same is known."""
    elements = columns.get("elements", "")
    linear = columns.pop("linear", "all" if elements else "")
    return (OperatorRow(name, tuple(kinds.split()), linear=linear, **columns) for name in names.split())


_TABLE: tuple[Iterator[OperatorRow], ...] = (
    # windows over space
    _rows("conv1d conv3d", "conv", heavy=True, halves=CallReader(read_conv)),
    _rows("conv2d", "conv", heavy=True, halves=CallReader(read_conv), python=("default", torch.conv2d)),
    *(
        _rows(f"conv_transpose{space}d", "transposed_conv", heavy=True, halves=CallReader(read_transposed_conv))
        for space in (1, 2, 3)
    ),
    _rows("convolution", heavy=True, halves=CallReader(read_convolution), price="convolution"),
    _rows("convolution_overrideable", heavy=True, price="convolution"),
    _rows("conv_tbc", heavy=True),
    _rows("convolution_backward", price="convolution_backward"),
    _rows("max_pool1d max_pool3d avg_pool1d avg_pool2d avg_pool3d", "pool"),
    _rows("max_pool2d", "pool", python=("default", torch.max_pool2d)),
    _rows("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", "adaptive_pool"),
    _rows("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", "global_pool adaptive_pool"),
    _rows("upsample_nearest1d upsample_nearest2d upsample_nearest3d", "upsample"),
    _rows("upsample_nearest_exact1d upsample_nearest_exact2d upsample_nearest_exact3d", "upsample"),
    _rows("upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d", "upsample"),
    _rows("pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d", "pad"),
    _rows("replication_pad1d replication_pad2d replication_pad3d", "pad"),
    _rows("pixel_shuffle pixel_unshuffle", samples="each", gradient="rows"),
    _rows("affine_grid_generator grid_sampler", samples="each"),
    # sites of sparse networks
    _rows("sparse_conv", "sparse_conv"),
    _rows("sparse_sum_pool sparse_max_pool", "sparse_pool"),
    _rows("segment_sum segment_max segment_grid", "segment"),
    _rows("segment_expand", "segment_expand"),
    # products
    _rows(
        "linear",
        "linear",
        linear="each",
        sums=True,
        heavy=True,
        halves=CallReader(read_linear),
        price="linear",
        python=("default", functional.linear),
    ),
    _rows(
        "matmul",
        linear="each",
        sums=True,
        samples="product",
        heavy=True,
        halves=CallReader(read_matmul, "other", ""),
        python=("default", torch.matmul),
    ),
    _rows(
        "mm",
        linear="each",
        sums=True,
        samples="product",
        heavy=True,
        halves=CallReader(read_mm, "mat2", ""),
        price="product",
    ),
    _rows("addmm", samples="product", heavy=True, halves=CallReader(read_addmm, "mat2", "self"), price="product"),
    _rows("bmm", linear="each", sums=True, samples="product", heavy=True, price="product"),
    _rows("baddbmm", samples="product", heavy=True, price="product"),
    _rows("einsum", linear="each", sums=True, samples="letters", heavy=True),
    _rows("dot vdot mv", linear="each", sums=True),
    _rows(
        "embedding",
        "embedding",
        entries=ROWS,
        halves=CallReader(read_embedding, bias=""),
        price="embedding",
        python=("default", torch.embedding),
    ),
    _rows("embedding_dense_backward", price="embedding_backward"),
    _rows(
        "scaled_dot_product_attention",
        "attention",
        heavy=True,
        draws="attention",
        drops="elements",
        python=("default", functional.scaled_dot_product_attention),
    ),
    # recurrences
    _rows("lstm gru rnn_tanh rnn_relu", "lstm", heavy=True, draws="recurrence", drops="layers"),
    _rows("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", samples="each", heavy=True),
    _rows("mkldnn_rnn_layer", price="recurrent"),
    _rows("mkldnn_rnn_layer_backward", price="recurrent_backward"),
    # normalisation and softmax
    _rows("batch_norm", "batch_norm", statistics="training", python=("default", torch.batch_norm)),
    _rows("instance_norm", "layer_norm", statistics="use_input_stats"),
    _rows("layer_norm", "layer_norm", python=("default", torch.layer_norm)),
    _rows("group_norm", "layer_norm"),
    _rows("rms_norm", "layer_norm", price="norm"),
    _rows("native_layer_norm native_group_norm native_batch_norm native_batch_norm_legit", price="norm"),
    _rows("cudnn_batch_norm batch_norm_with_update fused_rms_norm", price="norm"),
    _rows("native_layer_norm_backward native_group_norm_backward native_batch_norm_backward", price="norm_backward"),
    _rows("batch_norm_backward cudnn_batch_norm_backward fused_rms_norm_backward", price="norm_backward"),
    _rows("softmax", "softmax", price="softmax", python=("int", torch.softmax)),
    _rows("log_softmax", "softmax", price="softmax"),
    _rows("safe_softmax", price="softmax"),
    _rows("softmax_backward_data log_softmax_backward_data", price="softmax_backward"),
    # views, copies and parts
    _rows("alias contiguous to", "pointwise", elements=SAME, undo="same"),
    _rows("type_as", "pointwise", elements=SAME, undo="same", model="other"),
    _rows("expand_as", "pointwise", elements=SAME, model="other"),
    _rows("clone lift_fresh_copy to_copy", "pointwise", elements=SAME),
    _rows("detach", "pointwise", elements=SAME, gradient="none"),
    _rows("view reshape unflatten squeeze unsqueeze", "reshape", elements=REGROUPED, undo="shape"),
    _rows("unsafe_view", "reshape", elements=REGROUPED, undo="shape", price="free"),
    _rows("view_as", "reshape", elements=REGROUPED, undo="shape", model="other"),
    _rows("flatten", "reshape", elements=REGROUPED, undo="shape", python=("using_ints", torch.flatten)),
    _rows("expand", "reshape", elements=EXPANDED),
    _rows("t swapaxes swapdims", "reshape", elements=PERMUTED, undo="again"),
    _rows("transpose", "reshape", elements=PERMUTED, undo="again", python=("int", torch.transpose)),
    _rows("permute", "reshape", elements=PERMUTED, undo="order", python=("default", torch.permute)),
    _rows("movedim", "reshape", elements=PERMUTED),
    _rows("slice", "slice", elements=PART, undo="slice"),
    _rows("select", "slice", elements=PART, undo="select"),
    _rows("narrow", "slice", elements=PART, undo="narrow"),
    _rows("diagonal", linear="all", undo="diagonal"),
    _rows("chunk split split_with_sizes tensor_split", "slice", elements=PARTS, undo="slices"),
    _rows("unbind", "slice", elements=PARTS, undo="items"),
    _rows("cat", "concat", linear="all", python=("default", torch.cat)),
    _rows("stack concat concatenate", "concat", linear="all"),
    _rows("index index_select", linear="first", samples="places"),
    _rows("gather", samples="places"),
    _rows("select_scatter slice_scatter repeat_interleave roll", samples="dim"),
    _rows("flip", linear="all", samples="dim"),
    _rows("tril triu", samples="last two"),
    # along a dim
    _rows("cumsum", linear="all", samples="dim"),
    _rows("argsort cummax cumprod glu logcumsumexp sort topk", samples="dim"),
    _rows("logsumexp", "reduce", samples="dim"),
    _rows("cdist cosine_similarity pairwise_distance", samples="each"),
    # reductions and losses
    _rows("mean", "global_pool loss reduce", linear="all", terms="elements"),
    _rows("sum", "loss reduce", linear="all", sums=True),
    _rows("nansum count_nonzero", sums=True),
    _rows("all amax amin any argmax argmin max min norm linalg_vector_norm prod std var", "reduce"),
    _rows("binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss", "loss", terms="elements"),
    _rows("hinge_embedding_loss huber_loss l1_loss mse_loss smooth_l1_loss", "loss", terms="elements"),
    _rows("soft_margin_loss", "loss", terms="elements"),
    _rows("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d", "loss", terms="places", entries=CLASSES),
    _rows("multi_margin_loss", "loss", entries=CLASSES),
    _rows("ctc_loss", "loss"),
    # elementwise: those that torch does not tag, or of which more is known
    _rows("add", linear="all", python=("Tensor", torch.add)),
    _rows("sub", linear="all", python=("Tensor", torch.sub)),
    _rows("rsub neg getitem", linear="all"),
    _rows("mul", linear="each", python=("Tensor", torch.mul)),
    _rows("multiply where", linear="each"),
    _rows("div", linear="first", python=("Tensor", torch.div)),
    _rows("divide true_divide masked_fill masked_select", linear="first"),
    _rows("relu", "pointwise", python=("default", torch.relu)),
    _rows("gelu", "pointwise", price="activation", python=("default", functional.gelu)),
    _rows("elu hardswish mish silu softplus", "pointwise", price="activation"),
    _rows("sigmoid tanh", price="activation"),
    _rows("gelu_backward mish_backward sigmoid_backward silu_backward tanh_backward", price="activation_backward"),
    _rows("glu_jvp hardsigmoid hardtanh leaky_relu log_sigmoid prelu relu6 selu", "pointwise"),
    _rows("broadcast_tensors", "pointwise", gradient="each"),
    _rows("meshgrid", gradient="each"),
    _rows("require_finite require_valid", "pointwise"),
    # dropout and random numbers
    _rows("dropout", "pointwise", draws="dropout", drops="elements", python=("default", torch.dropout)),
    _rows("feature_dropout", "pointwise", draws="dropout", drops="channels"),
    _rows("alpha_dropout", "pointwise", draws="alpha_dropout", drops="elements"),
    _rows("feature_alpha_dropout", draws="alpha_dropout", drops="channels"),
    _rows("native_dropout", "pointwise", draws="native_dropout", price="dropout"),
    _rows("native_dropout_backward", price="dropout_backward"),
    _rows("rrelu", "pointwise", draws="rrelu"),
    _rows("uniform exponential normal_functional log_normal cauchy", draws="fill"),
    _rows("multinomial", draws="multinomial"),
    _rows("bernoulli", draws="bernoulli"),
    _rows("normal", draws="normal"),
    _rows("rand rand_like", draws="rand"),
    _rows("randn randn_like", draws="randn"),
    _rows("randint randint_like", draws="randint"),
    # new tensors
    _rows("ones new_ones", fills="ones"),
    _rows("zeros new_zeros", fills="zeros"),
    _rows("full new_full", fills="full"),
    _rows("ones_like", fills="ones", samples="like"),
    _rows("zeros_like", fills="zeros", samples="like"),
    _rows("full_like", fills="full", samples="like"),
    _rows("empty_like", fills="empty", samples="like", price="free"),
    _rows("empty empty_strided new_empty new_empty_strided", fills="empty", price="free"),
    _rows("empty_permuted", fills="empty"),
    _rows("is_same_size lift lift_fresh local_scalar_dense reshape_alias sym_numel sym_size", price="free"),
)

OPERATORS: Mapping[str, OperatorRow] = {row.name: row for rows in _TABLE for row in rows}
"""By name."""
