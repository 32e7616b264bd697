"""What ``torch.export`` could not take of a model: the line of the user's code, and what to write there instead."""

from __future__ import annotations

from traceback import extract_tb

from planner.ir.errors import UnsupportedModelError
from profiler.capture.user_module import users_line_of
from profiler.source.model import LoadedModel


def refusal_of_sites(error: Exception) -> UnsupportedModelError | None:
    """Of a network that runs on a SparseTensor, but not on its maps alone."""
    from cuda_ops.sparse.errors import SparseInputError  # late: other networks do without

    if not isinstance(error, SparseInputError):
        return None
    detail = f"{error.where}: found {error.found}, expected {error.expected}"
    return UnsupportedModelError(f"the sparse network cannot be planned: {error.what}", [detail], [error.remedy])


def refusal_of(model: LoadedModel, error: Exception) -> UnsupportedModelError:
    """What ``torch.export`` could not take, the line of the user's code, and what to write there instead."""
    reason = [line for line in str(error).strip().splitlines() if line.strip()][:1]
    line, code = users_line_of(error)
    sizes = ", ".join(model.varying)
    return UnsupportedModelError(
        "the model cannot be captured" + (f" with sizes that vary: {sizes}" if sizes else ""),
        [f"torch.export: {type(error).__name__}", *reason, *([f"{line}: {code}" if code else line] if line else [])],
        [*([f"leave out of what varies: {sizes}"] if sizes else []), *_remedies(error, code)],
    )


def chooses_by_data(error: Exception) -> bool:
    """Whether the model's code depends on values, which a capture does not have."""
    return "data-dependent" in str(error) or "unbacked" in str(error)


def takes_sizes_for_numbers(error: Exception) -> bool:
    """Whether code makes a number of a size, as ``len(x)`` and ``int(x.shape[0])`` do, which is run with a symbol."""
    return "specialized it to be a constant" in str(error)


_WHILE_CAPTURED = "if not torch.compiler.is_exporting():"
_NOT_CAPTURED = {
    "BatchedTensorImpl": "batched operators instead of torch.func (vmap, grad), which is not captured",
    "TensorWrapper": "torch.autograd.grad instead of torch.func.grad, which is not captured",
    "being used in an in-place operation": "make a new tensor: weight = self.weight + 1, where forward writes to one",
    "__format__": f"put what prints values behind: {_WHILE_CAPTURED}",
    ".numpy()": "operators of torch instead of numpy; what is only looked at, behind: " + _WHILE_CAPTURED,
    "constant's list": "write what .data, copy or gradients inside of forward are for as a torch.autograd.Function",
    "targets in one vector": "targets padded to one length, pad_sequence(targets, batch_first=True)",
    "lengths as a list: give them as tensors": "torch.full((x.shape[0],), frames, dtype=torch.long), made in loss_fn",
    "lengths as a list": "lengths = mask.sum(1), a tensor",
    "total_length": "pad_packed_sequence(y, batch_first=True, total_length=x.size(1)), of what was packed",
    "drops values between its layers": "layers of one level each, with nn.Dropout between them",
    "dtype int32/int64 for index": "class numbers and indices in int64: targets.long(), in the data or in the loss",
    "data pointer": "torch.library.register_fake, which says an operator's shapes; no copies of modules in forward",
}
"""What to write instead, by a part of the reason that torch gives."""


def _remedies(error: Exception, code: str) -> list[str]:
    if chooses_by_data(error):
        if any("fake_quantize" in frame.filename for frame in extract_tb(error.__traceback__)):
            return ["torch.ao.quantization.FusedMovingAvgObsFakeQuantize instead of FakeQuantize, in the qconfig too"]
        if code.startswith(("assert", "raise")) or "isnan" in code or "isfinite" in code:
            return [f"put the check behind: {_WHILE_CAPTURED}"]
        if code.startswith(("for", "while")) or "range(" in code:
            return ["a number of rounds that is a setting of the module; rounds that are over, masked by torch.where"]
        if "float(" in code:
            looked = f"a number that is only looked at: .item() instead of float(), or behind {_WHILE_CAPTURED}"
            return [looked, "a number that is computed with: keep it a tensor"]
        return [
            "choose with masks instead of Python: torch.where(condition, a, b), or all experts times 0 or 1",
            "if the choice is none of data, by an argument or attribute that is a bool, an int or a text",
        ]
    remedies = [remedy for part, remedy in _NOT_CAPTURED.items() if part in str(error)]
    return remedies or [
        "a torch.autograd.Function around what torch.export cannot see through: it runs as one layer, as it is",
        "torch.export.export(module, inputs, strict=False) in plain torch shows the whole reason",
    ]
