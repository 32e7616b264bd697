"""A model as blocks of which each is trained by a loss of its own: no gradient passes from one to the next.

    block 0 -> head 0 -> loss        block 1 reads the detached output of block 0, and so on;
       |                             the last block has the model's own output instead of a head
       v (detached)
    block 1 -> head 1 -> loss        trained is the sum of the losses, each of which reaches its own block alone

What local learning does (Belilovsky et al., "Decoupled greedy learning of CNNs", ICML 2020), and PPLL in pipelines.
**This changes the optimisation.**  A head is linear in the means over space of what its block makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from planner.ir.errors import FactoryError

Loss = Callable[[Tensor, Any], Tensor]

_BY_HAND = "write the module so: read x.detach(), return the outputs of all heads, add up their losses in loss_fn"


class Head(nn.Module):
    """Numbers for each sample, or for each place of a sequence, of what a block makes."""

    def __init__(self, made: int, wanted: int) -> None:
        super().__init__()
        self.linear = nn.Linear(made, wanted)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, channels, *space] or [samples, (places,) features] to [samples, (places,) outputs]."""
        result: Tensor = self.linear(x.flatten(2).mean(2) if x.ndim > 3 else x)
        return result


class LocalBlocks(nn.Module):
    """Blocks, each with a head but the last."""

    def __init__(self, blocks: Sequence[nn.Module], heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.heads = nn.ModuleList(heads)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of all heads, then the model's own."""
        outputs: list[Tensor] = []
        for block, head in zip(self.blocks, (*self.heads, None), strict=True):
            x = block(x.detach() if outputs else x)
            outputs.append(x if head is None else head(x))
        return tuple(outputs)


class SumOfLosses(nn.Module):
    """The loss of each output, added up."""

    def __init__(self, loss_fn: Loss) -> None:
        super().__init__()
        self.loss_fn = loss_fn

    def forward(self, outputs: tuple[Tensor, ...], targets: Any) -> Tensor:
        """A number."""
        total = self.loss_fn(outputs[0], targets)
        for output in outputs[1:]:
            total = total + self.loss_fn(output, targets)
        return total


def with_local_losses(name: str, made: Any, count: int) -> tuple[Any, ...]:
    """What a factory returned, as ``count`` blocks with a loss each.

    Args:
        name: of the factory, for errors.
        made: (module, (inputs, targets), loss_fn), the module an ``nn.Sequential`` of one tensor.

    Raises:
        FactoryError: it is something else, has fewer layers with parameters than blocks, or a block makes what no head
            is known for.
    """
    if not isinstance(made, tuple) or len(made) not in (3, 4) or not isinstance(made[0], nn.Sequential):
        type_name = type(made[0] if isinstance(made, tuple) and made else made).__name__
        raise _refused(
            name, [f"local losses are for (nn.Sequential, (inputs, targets), loss_fn), this is a {type_name}"]
        )
    module, example, loss_fn, *rest = made
    if not isinstance(example, tuple) or len(example) != 2 or not isinstance(example[0], Tensor) or loss_fn is None:
        raise _refused(name, ["its example is not (inputs, targets) of one tensor each, with a loss_fn"])
    blocks = _blocks(name, list(_flat(module)), count)
    shapes = _shapes(blocks, example[0])
    heads = [_head(name, number, shape, shapes[-1]) for number, shape in enumerate(shapes[:-1])]
    return LocalBlocks(blocks, heads), example, SumOfLosses(loss_fn), *rest


def _flat(module: nn.Sequential) -> Iterator[nn.Module]:
    """The layers of sequences inside sequences."""
    for child in module:
        if type(child) is nn.Sequential:
            yield from _flat(child)
        else:
            yield child


def _blocks(name: str, layers: list[nn.Module], count: int) -> list[nn.Sequential]:
    """As many layers with parameters in each, but for one; what has none stays with the layer before it."""
    trained = [at for at, layer in enumerate(layers) if any(True for _ in layer.parameters())]
    if len(trained) < count:
        raise _refused(
            name, [f"{count} blocks of {len(trained)} layers with parameters"], f"--local-loss {len(trained)}"
        )
    firsts = [0, *(trained[number * len(trained) // count] for number in range(1, count)), len(layers)]
    return [nn.Sequential(*layers[first:last]) for first, last in pairwise(firsts)]


@torch.no_grad()
def _shapes(blocks: Sequence[nn.Module], x: Tensor) -> list[tuple[int, ...]]:
    """Of what each block makes of the example; modes and statistics are left as they are."""
    shapes = []
    for block in blocks:
        modes = [(module, module.training) for module in block.modules()]
        block.eval()
        x = block(x)
        for module, training in modes:
            module.training = training
        shapes.append(tuple(x.shape))
    return shapes


def _head(name: str, number: int, made: tuple[int, ...], wanted: tuple[int, ...]) -> Head:
    same = len(made) == len(wanted) == 3 and made[1] == wanted[1]
    if same or (len(wanted) == 2 and len(made) == 2):
        return Head(made[-1], wanted[-1])
    if len(wanted) == 2 and len(made) > 3:
        return Head(made[1], wanted[-1])
    raise _refused(name, [f"block {number} makes {made}, the model {wanted}: no head is known between them"])


def _refused(name: str, details: list[str], remedy: str = _BY_HAND) -> FactoryError:
    return FactoryError(f"{name} cannot be trained by local losses", details, [remedy])
