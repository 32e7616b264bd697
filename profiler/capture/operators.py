"""Names of operators of one kind each, without namespace, overload and underscores: see ``profiler.capture.kinds``.

Names of layers: the path of the user's module that computes them, unique and the same in every process.

conv1             the module does one thing
relu, relu_2      ... and is called twice
blocks.0.add      the module does several things, or has parts that do others
lstm              ... of which one uses its parameters
loss, loss.mul    what the loss function does; its result is ``loss``
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from torch import fx

from cuda_ops._torch import OpOverload, schema_of
from cuda_ops.dense.user_functions import function_of, is_user_function

LOSS = "loss"


def overload_of(node: fx.Node) -> OpOverload:
    """The operator that ``node`` calls, which is known to be one of torch's dispatcher."""
    return cast("OpOverload", node.target)


def function_called(node: fx.Node) -> Callable[..., Any]:
    """What ``node`` calls, which is known to call a function."""
    return cast("Callable[..., Any]", node.target)


def name_read(node: fx.Node) -> str:
    """The name that ``node``, known to be a placeholder or to read an attribute, has for what it stands for."""
    return cast("str", node.target)


def node_argument(node: fx.Node, index: int) -> fx.Node:
    """An argument of ``node`` that is known to be a node."""
    return cast("fx.Node", node.args[index])


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes inside of an argument, or of several, as often as they are there."""
    nodes: list[fx.Node] = []

    def note(node: fx.Node) -> fx.Node:
        nodes.append(node)
        return node

    fx.map_arg(value, note)
    return nodes


def place(node: fx.Node) -> str:
    """Path of the user's module that ``node`` belongs to: empty for the outermost, ``loss`` for the loss function."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path: str = next(reversed(stack.values()))[0]
    if path.startswith("_empty_nn_module_stack"):
        return ""
    if path == "" or path.split(".")[0] == "loss_fn":
        return LOSS
    return path.partition(".")[2].replace(":", "_")


def operation(node: fx.Node) -> str:
    """The operator's name without its namespace and overload, ``conv2d``; of a user's Function its class's."""
    if is_user_function(node):
        return function_of(node).rpartition(".")[2]
    schema = schema_of(node.target)
    name = schema.name.rpartition("::")[2] if schema else getattr(node.target, "__name__", str(node.target))
    return name.strip("_").replace(":", "_")


def layer_names(mains: Sequence[fx.Node], owns_parameters: Sequence[bool], reserved: Iterable[str]) -> tuple[str, ...]:
    """A name for each layer, given the node that makes its result; the last one is the loss.

    Args:
        owns_parameters: whether the layer uses trained parameters.
        reserved: names that are in use already, those of the graph's inputs.
    """
    paths = [place(node) for node in mains]
    parents = {path[:index] for path in paths for index, letter in enumerate(path) if letter == "."}
    operations: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    for path, node, owns in zip(paths, mains, owns_parameters, strict=True):
        operations.setdefault(path, set()).add(operation(node))
        if owns:
            owners.setdefault(path, set()).add(operation(node))
    used = {*reserved, LOSS}
    names = []
    for path, node in zip(paths, mains, strict=True):
        name = operation(node)
        leaf = path not in parents and path != LOSS
        alone = len(operations[path]) == 1 or owners.get(path) == {name}
        wanted = path if path and leaf and alone else f"{path}.{name}".lstrip(".")
        names.append(LOSS if node is mains[-1] else _unique(wanted, used))
        used.add(names[-1])
    return tuple(names)


def _unique(name: str, used: set[str]) -> str:
    number = 1
    candidate = name
    while candidate in used:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


LOSSES = frozenset(
    [
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cross_entropy_loss",
        "ctc_loss",
        "gaussian_nll_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mse_loss",
        "multi_margin_loss",
        "nll_loss",
        "nll_loss2d",
        "nll_loss_nd",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "mean",
        "sum",
    ]
)
POINTWISE = frozenset(
    [
        "alias",
        "alpha_dropout",
        "broadcast_tensors",
        "clone",
        "contiguous",
        "detach",
        "dropout",
        "elu",
        "expand_as",
        "feature_dropout",
        "gelu",
        "glu_jvp",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "lift_fresh_copy",
        "log_sigmoid",
        "mish",
        "native_dropout",
        "prelu",
        "relu",
        "relu6",
        "require_finite",
        "rrelu",
        "selu",
        "silu",
        "softplus",
        "to",
        "to_copy",
        "type_as",
    ]
)
RESHAPES = frozenset(
    [
        "expand",
        "flatten",
        "movedim",
        "permute",
        "reshape",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "transpose",
        "unflatten",
        "unsafe_view",
        "unsqueeze",
        "view",
        "view_as",
    ]
)

MEANS_OVER_ELEMENTS = frozenset(
    [
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "mean",
        "mse_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
    ]
)
"""Losses that treat every element of the prediction by itself."""

MEANS_OVER_PLACES = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"])
"""Losses that treat every place, with all its classes, by itself."""

REDUCTIONS = frozenset(
    [
        "all",
        "amax",
        "amin",
        "any",
        "argmax",
        "argmin",
        "linalg_vector_norm",
        "logsumexp",
        "max",
        "mean",
        "min",
        "norm",
        "prod",
        "std",
        "sum",
        "var",
    ]
)
"""Reductions over the dims of their argument ``dim``."""

PERMUTATIONS = frozenset(["movedim", "permute", "swapaxes", "swapdims", "t", "transpose"])
"""Those among ``RESHAPES`` that move dims, the others being views and ``expand``."""
