"""Names of operators of one kind each, without namespace, overload and underscores: see ``profiler.capture.kinds``."""

from __future__ import annotations

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
