"""Everything halopipe can tell a user that went wrong.

    HalopipeError                            exit code
    ├── UsageError                   H200    2   the command or call cannot be understood
    │   ├── ModelNotFoundError       H201
    │   ├── FactoryError             H202        (H203: a user's file hides a package, see halopipe/guard.py)
    │   ├── UnsupportedModelError    H204
    │   ├── RankCountError           H205
    │   ├── UnknownNameError         H206
    │   ├── MissingDeviceError       H207
    │   ├── DifferentDataError       H208
    │   └── BusyError                H209
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
    ├── CheckError                   H600    6   a check said no
    │   ├── NumericsError            H601
    │   ├── PlanCheckError           H602
    │   └── NotFiniteError           H603
    └── EndedError                   H701    7   somebody asked the job to end, and it did

An error says what was wrong, where, the two numbers that disagree, and what to do next.

Besides, :func:`remedies`: what helps where a layer cannot be cut along a dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from planner.ir.graph import Layer


class HalopipeError(Exception):
    """Base of all errors a user may meet.

    Attributes:
        word: begins the text.
        title: one line, what went wrong.
        details: where, and the two numbers that disagree; one fact a line.
        remedies: what to do next; one action a line.
        ranks: whose failure it is, where it ended a run and that is known to who watched them.
        usual: what helps against errors of this kind, shown where ``remedies`` are none.
    """

    word: ClassVar[str] = "error"
    code: ClassVar[str] = "H100"
    exit_code: ClassVar[int] = 1
    usual: ClassVar[tuple[str, ...]] = ("report it, with the command and all that it wrote",)

    def __init__(self, title: str, details: Iterable[str] = (), remedies: Iterable[str] = ()) -> None:
        super().__init__(title)
        self.title = title
        self.details = tuple(details)
        self.remedies = tuple(remedies)
        self.ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[type[HalopipeError], tuple[str, tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.title, self.details, self.remedies)

    def render(self) -> str:
        """The error as a user reads it: ``error[H401] title``, indented details, then remedies, never none."""
        lines = [f"{self.word}[{self.code}] {self.title}"]
        lines += [f"  {line}" for detail in self.details for line in detail.splitlines()]
        lines += [f"  try: {remedy}" for remedy in self.remedies or self.usual]
        return "\n".join(lines)


class UsageError(HalopipeError):
    """The command line or the call cannot be understood."""

    code = "H200"
    exit_code = 2
    usual: ClassVar[tuple[str, ...]] = ("change what is named above; --help of the command says what may be given",)


class ModelNotFoundError(UsageError):
    """A MODEL string names no importable factory."""

    code = "H201"
    usual = ("check the name: pkg.mod:factory, or path/file.py:factory",)


class FactoryError(UsageError):
    """The model factory raised, or returned something that is not a model."""

    code = "H202"
    usual = ("mend the function that is named; the --help of the command says what it is given and may give",)


class UnsupportedModelError(UsageError):
    """The model cannot be captured or cut; the text names the layer and what is supported."""

    code = "H204"
    usual = (
        "change the layer that is named, or take it out of the model",
        "docs/networks.md lists what is refused, and what to write in its place",
    )


class RankCountError(UsageError):
    """A plan wants another number of ranks than there are."""

    code = "H205"
    usual = ("plan for as many devices as there are",)


class UnknownNameError(UsageError):
    """A schedule, solver, baseline, layer or device of that name does not exist."""

    code = "H206"
    usual = ("one of the names above",)


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The remedy of a name that is not among ``names``: the one that may be meant; empty if none is like it."""
    from difflib import get_close_matches  # late: it is asked for when something is wrong

    return [f"{near} (did you mean that?)" for near in get_close_matches(name, list(names), n=1)]


class MissingDeviceError(UsageError):
    """A plan, or somebody who asks for a profile, wants a device that this host does not have."""

    code = "H207"
    usual = ("plan for the devices of this host",)


class DifferentDataError(UsageError):
    """Ranks read other numbers as the same batch; the text names step, tensor and ranks."""

    code = "H208"
    usual = ("data that follow from what the factory is given alone",)


class BusyError(UsageError):
    """A stream has no room for another request."""

    code = "H209"
    usual = ("ask again later", "more room, at the price of latency: --room N")


class InputFileError(HalopipeError):
    """A file cannot be used."""

    code = "H300"
    exit_code = 3
    usual: ClassVar[tuple[str, ...]] = ("name another file, or make it anew",)


class MissingFileError(InputFileError):
    """The file is not there, or cannot be read or written."""

    code = "H301"
    usual = ("check the path, its folder and who may read and write there",)


class CorruptFileError(InputFileError):
    """The file is not what its schema says; ``details`` lists every fault with its path."""

    code = "H302"
    usual = ("mend what is named, or make the file anew by the command that wrote it",)


class NewerFileError(InputFileError):
    """The file was written by a newer release."""

    code = "H303"
    usual = ("pip install --upgrade halopipe",)


class StaleFileError(InputFileError):
    """A fingerprint disagrees: the file belongs to another model, profile or cluster."""

    code = "H304"
    usual = ("make the file anew from what it should belong to",)


class IllegalProgramError(InputFileError):
    """A program breaks the rules of ``passes.validate``; ``details`` shows the grid with the culprit marked."""

    code = "H305"
    usual = ("plan again; where the program was edited by hand, move the action that is marked",)


class MissingMeasurementError(InputFileError):
    """The profile does not say what a layer costs at a size the planner asks for."""

    code = "H306"
    usual = ("profile the model again, at the sizes that are named",)


class FormatError(InputFileError):
    """A file of a published format breaks that format; the text names file, line and what was found."""

    code = "H307"
    usual = ("mend the file at that place",)


class InfeasibleError(HalopipeError):
    """No plan satisfies the constraints; ``details`` names the binding one."""

    code = "H401"
    exit_code = 4
    usual = ("more devices, or devices with more memory",)


class WorkerError(HalopipeError):
    """The run of a plan failed."""

    code = "H500"
    exit_code = 5
    usual: ClassVar[tuple[str, ...]] = (
        "run again; if it comes again, report it with the command and all that it wrote",
    )


class WorkerDiedError(WorkerError):
    """A worker process ended without a word (killed, crashed)."""

    code = "H501"
    usual = ("look at the lines of stderr above, and for the out-of-memory killer: dmesg | tail",)


class StageFailedError(WorkerError):
    """A stage raised; the text names rank, stage, step, micro-batch and direction."""

    code = "H502"
    usual = (
        "mend the module, the optimiser or that step's data; halopipe plan --solver one-device: whether it comes there",
    )


class DeadlineError(WorkerError):
    """A wait lasted longer than its deadline; the text names key, peer and who waits for whom."""

    code = "H503"
    usual = (
        "--deadline SECONDS, where so much time is meant to pass",
        "look at the rank that the others wait for",
    )


class TransportError(WorkerError):
    """A message did not arrive, or arrived as something else than the program says."""

    code = "H504"
    usual = ("look at the other ranks: one of them may have ended, or its host cannot be reached",)


class CheckpointError(WorkerError):
    """A checkpoint could not be saved, or what the ranks save does not fit together; the text names step and rank."""

    code = "H505"
    usual = ("another --checkpoint folder, with room for it",)


class OutOfMemoryError(WorkerError):
    """A rank needed more memory than its limit, or than there is."""

    code = "H506"
    usual = (
        "plan again with less memory: halopipe plan --memory SIZE --recompute auto --shard auto",
        "plan with a smaller --global-batch or --micro-batch",
        "a device with more memory",
    )


class CheckError(HalopipeError):
    """A check that the user asked for failed."""

    code = "H600"
    exit_code = 6
    usual: ClassVar[tuple[str, ...]] = ("look at what is named above",)


class NumericsError(CheckError):
    """The plan's losses or gradients differ from one device's."""

    code = "H601"
    usual = ("report it, with the plan and the model",)


class PlanCheckError(CheckError):
    """The checker disagrees with the plan."""

    code = "H602"
    usual = (
        "plan again: halopipe plan PROFILE",
        "or undo what was edited by hand",
    )


class NotFiniteError(CheckError):
    """A loss or a gradient of a training step is NaN or infinite; the text names rank, micro-batch and layer.

    It comes again when the job is started again: the same step is made of the same numbers.
    """

    code = "H603"
    usual = (
        "a smaller learning rate, such as --optimizer SGD:lr=0.001",
        "--clip-norm 1, against gradients that grow",
        "--on-nan skip leaves such updates out",
    )


class EndedError(HalopipeError):
    """The job ended because somebody asked it to (SIGTERM, Ctrl-C), in good order; the text says what was saved."""

    word = "ended"
    code = "H701"
    exit_code = 7
    usual = ("run it again",)


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
