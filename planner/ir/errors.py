"""Everything halopipe can tell a user that went wrong.

    HalopipeError                            exit code
    ├── UsageError                   H200    2   the command or call cannot be understood
    │   ├── ModelNotFoundError       H201
    │   ├── FactoryError             H202        (H203: a user's file hides a package, see halopipe/guard.py)
    │   ├── UnsupportedModelError    H204
    │   ├── RankCountError           H205
    │   ├── UnknownNameError         H206
    │   ├── MissingDeviceError       H207
    │   └── DifferentDataError       H208
    ├── InputFileError               H300    3   a file is missing, corrupt or stale
    │   ├── MissingFileError         H301
    │   ├── CorruptFileError         H302
    │   ├── NewerFileError           H303
    │   ├── StaleFileError           H304
    │   ├── IllegalProgramError      H305
    │   ├── MissingMeasurementError  H306
    │   └── FormatError              H307
    ├── InfeasibleError              H401    4   no plan exists
    ├── WorkerError                  H500    5   the run failed
    │   ├── WorkerDiedError          H501
    │   ├── StageFailedError         H502
    │   ├── DeadlineError            H503
    │   ├── TransportError           H504
    │   ├── CheckpointError          H505
    │   └── OutOfMemoryError         H506
    └── CheckError                   H600    6   a check said no
        ├── NumericsError            H601
        └── PlanCheckError           H602

An error says what was wrong, where, the two numbers that disagree, and what to do next.

What helps where a layer cannot be cut along a dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from planner.ir.graph import Layer


class HalopipeError(Exception):
    """Base of all errors a user may meet.

    Attributes:
        title: one line, what went wrong.
        details: where, and the two numbers that disagree; one fact a line.
        remedies: what to do next; one action a line.
    """

    code: ClassVar[str] = "H100"
    exit_code: ClassVar[int] = 1

    def __init__(self, title: str, details: Iterable[str] = (), remedies: Iterable[str] = ()) -> None:
        super().__init__(title)
        self.title = title
        self.details = tuple(details)
        self.remedies = tuple(remedies)

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[type[HalopipeError], tuple[str, tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.title, self.details, self.remedies)

    def render(self) -> str:
        """The error as a user reads it: ``error[H401] title``, indented details, then remedies."""
        lines = [f"error[{self.code}] {self.title}"]
        lines += [f"  {line}" for detail in self.details for line in detail.splitlines()]
        lines += [f"  try: {remedy}" for remedy in self.remedies]
        return "\n".join(lines)


class UsageError(HalopipeError):
    """The command line or the call cannot be understood."""

    code, exit_code = "H200", 2


class ModelNotFoundError(UsageError):
    """A MODEL string names no importable factory."""

    code = "H201"


class FactoryError(UsageError):
    """The model factory raised, or returned something that is not a model."""

    code = "H202"


class UnsupportedModelError(UsageError):
    """The model cannot be captured or cut; the text names the layer and what is supported."""

    code = "H204"


class RankCountError(UsageError):
    """A plan wants another number of ranks than there are."""

    code = "H205"


class UnknownNameError(UsageError):
    """A schedule, solver, baseline, layer or device of that name does not exist."""

    code = "H206"


class MissingDeviceError(UsageError):
    """A plan, or somebody who asks for a profile, wants a device that this host does not have."""

    code = "H207"


class DifferentDataError(UsageError):
    """Ranks read other numbers as the same batch; the text names step, tensor and ranks."""

    code = "H208"


class InputFileError(HalopipeError):
    """A file cannot be used."""

    code, exit_code = "H300", 3


class MissingFileError(InputFileError):
    """The file is not there, or cannot be read or written."""

    code = "H301"


class CorruptFileError(InputFileError):
    """The file is not what its schema says; ``details`` lists every fault with its path."""

    code = "H302"


class NewerFileError(InputFileError):
    """The file was written by a newer release."""

    code = "H303"


class StaleFileError(InputFileError):
    """A fingerprint disagrees: the file belongs to another model, profile or cluster."""

    code = "H304"


class IllegalProgramError(InputFileError):
    """A program breaks the rules of ``passes.validate``; ``details`` shows the grid with the culprit marked."""

    code = "H305"


class MissingMeasurementError(InputFileError):
    """The profile does not say what a layer costs at a size the planner asks for."""

    code = "H306"


class FormatError(InputFileError):
    """A file of a published format breaks that format; the text names file, line and what was found."""

    code = "H307"


class InfeasibleError(HalopipeError):
    """No plan satisfies the constraints; ``details`` names the binding one."""

    code, exit_code = "H401", 4


class WorkerError(HalopipeError):
    """The run of a plan failed."""

    code, exit_code = "H500", 5


class WorkerDiedError(WorkerError):
    """A worker process ended without a word (killed, crashed)."""

    code = "H501"


class StageFailedError(WorkerError):
    """A stage raised; the text names rank, stage, step, micro-batch and direction."""

    code = "H502"


class DeadlineError(WorkerError):
    """A wait lasted longer than its deadline; the text names key, peer and who waits for whom."""

    code = "H503"


class TransportError(WorkerError):
    """A message did not arrive, or arrived as something else than the program says."""

    code = "H504"


class CheckpointError(WorkerError):
    """A checkpoint could not be saved, or what the ranks save does not fit together; the text names step and rank."""

    code = "H505"


class OutOfMemoryError(WorkerError):
    """A rank needed more memory than its limit, or than there is."""

    code = "H506"


class CheckError(HalopipeError):
    """A check that the user asked for failed."""

    code, exit_code = "H600", 6


class NumericsError(CheckError):
    """The plan's losses or gradients differ from one device's."""

    code = "H601"


class PlanCheckError(CheckError):
    """The independent checker disagrees with the plan."""

    code = "H602"


def operator_of(layer: Layer) -> str:
    """The operator that the layer calls, as people know it: ``aten.softmax.int``; its kind if that is not known."""
    return str(layer.attributes.get("op") or layer.kind)


def remedies(layer: Layer, along: str) -> tuple[str, str, str]:
    """The three remedies for a layer that cannot be cut ``along`` a dim or family of dims."""
    parts = operator_of(layer).split(".")
    name = "::".join(parts[:2]) if len(parts) > 1 else "its operator"
    return (
        f"gather: leave {along} uncut in {layer.name}, so that each rank gets its input whole",
        f"register a rule for {name}: profiler.capture.kinds.Rules(kinds=...)",
        f"mark it elementwise, if it treats each element by itself: halopipe profile --elementwise {name}",
    )
