"""Losses that are a mean over samples, so that the loss of a batch is the size-weighted mean of those of its parts.

Clouds have different numbers of sites. A plain mean over sites weighs a sample by its sites, and then a batch that is
split into micro-batches, or over ranks, has another gradient; a mean over samples does not. A sample without sites (or
with all its targets ignored) counts as a sample of loss 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Segments
from cuda_ops.sparse.nn.tensor import SparseTensor


def sample_mean(values: Tensor, segments: Segments, weights: Tensor | None = None) -> Tensor:
    """The mean over samples of each sample's mean over its sites.

    Args:
        values: (sites,).
        segments: where each sample's rows lie.
        weights: (sites,) of the mean over sites; None: 1 each.
    """
    columns = values.unsqueeze(1) if weights is None else torch.stack((values * weights, weights), 1)
    sums: Tensor = torch.ops.halopipe.segment_sum(columns, segments.starts, segments.lengths)
    totals = segments.lengths.clamp(min=1) if weights is None else sums[:, 1]
    means = sums[:, 0] / (totals if weights is None else torch.where(totals > 0, totals, torch.ones_like(totals)))
    return means.mean()


def site_cross_entropy(logits: Tensor, targets: Tensor, segments: Segments, ignore_index: int = -100) -> Tensor:
    """Cross-entropy of each site, its mean over each sample's sites that are not ignored, its mean over samples.

    Args:
        logits: (sites, classes).
        targets: int64 (sites,), in the order of the sorted sites.
    """
    if targets.ndim != 1 or targets.shape[0] != logits.shape[0]:
        raise SparseInputError(
            "shape of targets",
            where="site_cross_entropy",
            found=list(targets.shape),
            expected=f"[{logits.shape[0]}], one per site",
            remedy="bring targets into the order of the sites: targets[x.order]",
        )
    each = functional.cross_entropy(logits, targets, ignore_index=ignore_index, reduction="none")
    return sample_mean(each, segments, (targets != ignore_index).to(each.dtype))


class SampleMean(nn.Module):
    """The mean over samples of each sample's mean over its sites and channels."""

    def forward(self, input: SparseTensor) -> Tensor:
        """A scalar."""
        return sample_mean(input.feats.mean(1), input.segments)


class SiteCrossEntropy(nn.Module):
    """Cross-entropy of each site, mean over a sample's sites, mean over samples: the loss of a segmentation.

    Args:
        ignore_index: a site with this target counts for nothing.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, input: SparseTensor, targets: Tensor) -> Tensor:
        """A scalar; ``targets`` int64 (sites,), in the order of the sorted sites.

        Raises:
            SparseInputError: targets are not one per site.
        """
        return site_cross_entropy(input.feats, targets, input.segments, self.ignore_index)

    def extra_repr(self) -> str:
        """What is ignored."""
        return f"ignore_index={self.ignore_index}"
