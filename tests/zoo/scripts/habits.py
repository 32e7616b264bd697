"""Modules with the habits of people: inputs, outputs and losses of other forms, state, and Python within forward.

As in ``packages``, each function is the first half of a script, and its source is all that the script has.
"""

from __future__ import annotations

from typing import Any


def dict_inputs() -> Any:
    """A dict in, a dict out, a loss that reads both."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Fusion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text = nn.EmbeddingBag(50, 8)
            self.image = nn.Linear(12, 8)
            self.head = nn.Linear(17, 3)

        def forward(self, batch: Any) -> Any:
            """What is known of each sample, and its classes."""
            parts = [self.text(batch["words"]), self.image(batch["pixels"]).relu(), batch["age"][:, None]]
            features = torch.cat(parts, 1)
            return {"logits": self.head(features), "features": features}

    def loss(output: Any, labels: Any) -> Any:
        return functional.cross_entropy(output["logits"], labels) + 0.01 * output["features"].square().mean()

    batch = {"words": torch.randint(50, (8, 5)), "pixels": torch.randn(8, 12), "age": torch.rand(8)}
    return Fusion(), (batch, torch.randint(3, (8,))), loss


def list_outputs() -> Any:
    """A list of outputs, each of which has a loss: deep supervision."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
            self.heads = nn.ModuleList(nn.Linear(12, 3) for _ in range(3))

        def forward(self, x: Any) -> Any:
            """One answer a block."""
            found = []
            for block, head in zip(self.blocks, self.heads, strict=True):
                x = block(x).relu()
                found.append(head(x))
            return found

    batch = torch.randn(8, 12), torch.randint(3, (8,))
    return Deep(), batch, lambda outputs, y: sum(functional.cross_entropy(each, y) for each in outputs)


def several_losses() -> Any:
    """Two tasks; the losses are a dict, whose sum is meant."""
    import torch
    from torch import nn
    from torch.nn import functional

    class TwoTasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(12, 16)
            self.classes = nn.Linear(16, 3)
            self.value = nn.Linear(16, 1)

        def forward(self, x: Any) -> Any:
            """A class and a number."""
            hidden = self.trunk(x).tanh()
            return self.classes(hidden), self.value(hidden).squeeze(-1)

    def losses(output: Any, targets: Any) -> Any:
        logits, values = output
        labels, wanted = targets
        return {"classes": functional.cross_entropy(logits, labels), "value": functional.mse_loss(values, wanted)}

    return TwoTasks(), (torch.randn(8, 12), (torch.randint(3, (8,)), torch.randn(8))), losses


def keywords_and_constants() -> Any:
    """Keyword-only arguments, one of them a number, one a text; the module gives its loss."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 16)
            self.last = nn.Linear(16, 3)

        def forward(self, *, x: Any, labels: Any, scale: float = 1.0, how: str = "mean") -> Any:
            """The loss and the logits."""
            logits = self.last(self.first(x * scale).relu())
            return {"loss": functional.cross_entropy(logits, labels, reduction=how), "logits": logits}

    return Keywords(), {"x": torch.randn(8, 12), "labels": torch.randint(3, (8,)), "scale": 0.5, "how": "mean"}


def shared_module() -> Any:
    """One encoder, called for both sides of a pair."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
            self.head = nn.Linear(8, 1)

        def forward(self, left: Any, right: Any) -> Any:
            """How alike the two are."""
            return self.head((self.encoder(left) - self.encoder(right)).abs()).squeeze(-1)

    batch = (torch.randn(8, 12), torch.randn(8, 12)), torch.randint(2, (8,)).float()
    return Siamese(), batch, functional.binary_cross_entropy_with_logits


def own_function() -> Any:
    """An autograd function of one's own: signs whose gradient goes straight through."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x.sign()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() <= 1)

    class Binary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 16)
            self.last = nn.Linear(16, 3)

        def forward(self, x: Any) -> Any:
            """Classes of signs."""
            return self.last(Sign.apply(self.first(x)))

    return Binary(), (torch.randn(8, 12), torch.randint(3, (8,))), functional.cross_entropy


def buffer_by_hand() -> Any:
    """A buffer that forward moves by hand: how many batches there were."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 16)
            self.last = nn.Linear(16, 3)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            """Classes, weighted more as training goes on."""
            self.steps += 1
            return self.last(self.first(x).relu()) * (1 - torch.exp(-self.steps))

    return Counting(), (torch.randn(8, 12), torch.randint(3, (8,))), functional.cross_entropy


def frozen_backbone() -> Any:
    """A backbone as if it were trained already: in evaluation mode, without gradients, below a new head."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torchvision.models import mobilenet_v3_small

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = mobilenet_v3_small(weights=None).features.eval().requires_grad_(False)
            self.head = nn.Sequential(nn.Linear(576, 32), nn.ReLU(), nn.Linear(32, 5))

        def train(self, mode: bool = True) -> Any:
            """The backbone stays as it is."""
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x: Any) -> Any:
            """Classes."""
            with torch.no_grad():
                features = self.backbone(x).mean((2, 3))
            return self.head(features)

    return Tuned(), (torch.randn(4, 3, 64, 64), torch.randint(5, (4,))), functional.cross_entropy


def notebook_cell() -> Any:
    """A module whose source is in no file, as in a cell of a notebook, with a function beside it."""
    import math

    import torch
    from torch import nn
    from torch.nn import functional

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(12)
            self.up = nn.Linear(12, 32)
            self.down = nn.Linear(32, 3)

        def forward(self, x: Any) -> Any:
            """Classes."""
            return self.down(gelu(self.up(self.norm(x))))

    return Cell(), (torch.randn(8, 12), torch.randint(3, (8,))), functional.cross_entropy


def control_flow() -> Any:
    """A branch that depends on what the batch holds: it cannot be kept, and the line is to be named."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(12, 12)
            self.second = nn.Linear(12, 12)
            self.last = nn.Linear(12, 3)

        def forward(self, x: Any) -> Any:
            """Classes; the second layer only where the first is not sure."""
            x = self.first(x).relu()
            if x.mean() > 0.2:
                x = self.second(x).relu()
            return self.last(x)

    return Early(), (torch.randn(8, 12), torch.randint(3, (8,))), functional.cross_entropy
