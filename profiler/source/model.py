"""A model with its example and its loss, as a factory describes it.

The example of a model for other numbers of samples, and when two results of it are one.

What a factory says about sizes that vary from batch to batch, checked against its example.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cuda_ops.dense.recurrent import autocast
from planner.ir.errors import FactoryError
from planner.ir.graph import LOSS_PREFIX, SAMPLE, TensorSpec
from profiler.source.structure import BatchStructure

if TYPE_CHECKING:
    from cuda_ops.preparation import InputPreparation


def example_of(names: Iterable[str], model: LoadedModel, samples: int) -> dict[str, Tensor]:
    """Inputs and targets by name, for ``samples`` samples: the model's example, cut or repeated; where the model is."""
    fed = fed_example(model, samples)
    count = len(model.fed[0])
    inputs, targets = model.prepared(fed[:count], fed[count:])
    return dict(zip(names, (*inputs, *targets), strict=True))


def fed_example(model: LoadedModel, samples: int) -> tuple[Tensor, ...]:
    """The same as a step is given it: of a sparse network its clouds."""
    inputs, targets = model.fed
    return tuple(
        _of_samples(tensor, rows, samples) for tensor, rows in zip((*inputs, *targets), model.fed_rows, strict=True)
    )


def _of_samples(tensor: Tensor, rows: int, samples: int) -> Tensor:
    """``tensor``, of which a sample has so many rows, cut or repeated; whole where it has no samples."""
    if not rows:
        return tensor
    wanted = samples * rows
    repeats = -(-wanted // len(tensor))
    return (torch.cat([tensor] * repeats) if repeats > 1 else tensor)[:wanted]


def as_captured(model: LoadedModel, inputs: Mapping[str, TensorSpec], samples: int) -> LoadedModel:
    """``model``, which knows how many rows of its tensors a sample has, as its capture for so many samples says."""
    if model.clouds is not None:
        return model
    lengths = {name: spec.shape[0] for name, spec in inputs.items() if spec.dims[:1] == (SAMPLE,)}
    return replace(model, rows={name: length // samples for name, length in lengths.items()})


def owners(module: nn.Module, loss_fn: Any) -> dict[str, nn.Module]:
    """The module, and the loss where it is one too, by what begins the names of their tensors."""
    return {"": module, **({LOSS_PREFIX: loss_fn} if isinstance(loss_fn, nn.Module) else {})}


def named_parameters(owned: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Of :func:`owners`, by the graph's names, tied ones under each of theirs."""
    listed = ((prefix, module.named_parameters(remove_duplicate=False)) for prefix, module in owned.items())
    return {prefix + name: each for prefix, named in listed for name, each in named}


def named_buffers(owned: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The same of buffers."""
    listed = ((prefix, module.named_buffers(remove_duplicate=False)) for prefix, module in owned.items())
    return {prefix + name: each for prefix, named in listed for name, each in named}


def state_of(owned: Mapping[str, nn.Module]) -> dict[str, Any]:
    """The state dict of :func:`owners`, that of the loss behind the module's."""
    return {prefix + name: value for prefix, module in owned.items() for name, value in module.state_dict().items()}


def load_state(owned: Mapping[str, nn.Module], state: Mapping[str, Any], *, whole_loss: bool = True) -> None:
    """Loads what :func:`state_of` gave.

    Args:
        whole_loss: whether all of the loss's state has to be there.

    Raises:
        RuntimeError: it is another model's.
    """
    for prefix, module in owned.items():
        own = {name: value for name, value in state.items() if name.startswith(LOSS_PREFIX) == bool(prefix)}
        own = {name.removeprefix(prefix): value for name, value in own.items()}
        module.load_state_dict(own, strict=whole_loss or not prefix)


def is_alike(a: Tensor, b: Tensor) -> bool:
    """Whether they are equal but for rounding, that of their dtype."""
    if a.shape != b.shape:
        return False
    if a.is_complex() and b.is_complex():
        a = torch.view_as_real(a.resolve_conj())
        b = torch.view_as_real(b.resolve_conj())
    if not a.is_floating_point():
        return torch.equal(a, b)
    tolerance = min(1000 * torch.finfo(a.dtype).eps, 0.05)
    scale = a.abs().nan_to_num(posinf=0.0).max().item() if a.numel() else 0.0
    if scale and a.dtype == b.dtype and (a - b).abs().max().item() <= tolerance * scale:  # a fraction of what follows
        return True
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


Casts = Mapping[torch.dtype, torch.dtype]
"""Dtypes that go with a module's where that was cast; others stay as they are."""


WITH_COMPLEX = (torch.float32, torch.float64)
"""Precisions in which complex parameters are cast."""


def casts_to(dtype: torch.dtype, dtypes: Iterable[torch.dtype]) -> Casts:
    """Of real ``dtypes`` to ``dtype``, and of the complex numbers of their precision to those of its own."""
    casts = dict.fromkeys(dtypes, dtype)
    complexes = [each.to_complex() for each in casts if each in WITH_COMPLEX and dtype in WITH_COMPLEX]
    return {**casts, **dict.fromkeys(complexes, dtype.to_complex())}


def cast_tensors(tensors: tuple[Tensor, ...], casts: Casts) -> tuple[Tensor, ...]:
    """Each cast as ``casts`` says of its dtype."""
    return tuple(tensor.to(casts.get(tensor.dtype, tensor.dtype)) for tensor in tensors)


Varying = dict[str, tuple[tuple[str, int], ...]]

_LEAST = 2  # an extent of 1 would be taken for one that is always 1
_FORM = '{"time": [("inputs", 1), ("targets", 1)]}: the size\'s name, and the tensors and dims where it is'


def parse_varying(factory: str, value: Any, tensors: Mapping[str, Tensor]) -> Varying:
    """The places of each size that varies, by its name; see ``profiler.source.source`` for the form of ``value``.

    Args:
        factory: whose answer it is, for errors.
        tensors: of the example, by name.

    Raises:
        FactoryError: it has another form, or does not fit the example.
    """
    title = f"{factory} says in another way which sizes vary"
    if not isinstance(value, Mapping):
        raise FactoryError(title, [f"a {type(value).__name__}"], [_FORM])
    varying: Varying = {}
    owner: dict[tuple[str, int], str] = {}
    for name, places in value.items():
        _require_name(factory, name, tensors)
        try:
            varying[name] = tuple((str(tensor), int(dim)) for tensor, dim in places)
        except (TypeError, ValueError):
            raise FactoryError(title, [f"{name}: {places!r}"], [_FORM]) from None
        if not varying[name]:
            raise FactoryError(f"{factory} names no place of {name}", [], [_FORM])
        for place in varying[name]:
            _require_place(factory, name, place, tensors)
            if owner.setdefault(place, name) != name:
                raise FactoryError(
                    f"{factory} gives dim {place[1]} of {place[0]} two names", [f"{owner[place]} and {name}"]
                )
        _require_extent(factory, name, varying[name], tensors)
    return varying


def _require_name(factory: str, name: Any, tensors: Mapping[str, Tensor]) -> None:
    reserved = (*tensors, "num_samples", SAMPLE)
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name) or name in reserved:
        raise FactoryError(
            f"{factory}: {name!r} cannot be the name of a size that varies",
            [f"taken: {', '.join(reserved)}"],
            ["a word, such as time, points, height"],
        )


def _require_place(factory: str, name: str, place: tuple[str, int], tensors: Mapping[str, Tensor]) -> None:
    tensor, dim = place
    if tensor not in tensors:
        raise FactoryError(
            f"{factory}: {name} is said to be in {tensor!r}, which is not there", [f"there are {', '.join(tensors)}"]
        )
    shape = tuple(tensors[tensor].shape)
    first = next(iter(tensors))
    if not (1 if tensor == first else 0) <= dim < len(shape):
        raise FactoryError(
            f"{factory}: {name} is said to be dim {dim} of {tensor}",
            [f"its shape is {shape}", *(["dim 0 holds the samples"] if dim == 0 else [])],
            ["count dims from 0, samples first"],
        )


def _require_extent(
    factory: str, name: str, places: tuple[tuple[str, int], ...], tensors: Mapping[str, Tensor]
) -> None:
    extents = {place: tensors[place[0]].shape[place[1]] for place in places}
    if len(set(extents.values())) > 1:
        shown = [f"dim {dim} of {tensor}: {extent}" for (tensor, dim), extent in extents.items()]
        raise FactoryError(f"{factory}: {name} has several extents in the example", shown, ["give them several names"])
    if min(extents.values()) < _LEAST:
        raise FactoryError(
            f"{factory}: {name} is {min(extents.values())} in the example",
            [f"a size that varies must be at least {_LEAST} there"],
            ["a larger example, --input"],
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, ready to train: ``loss_fn(structure.output(module, inputs), structure.aims(targets))`` is its loss.

    Attributes:
        module: each part in the mode that it is trained in.
        inputs, targets: the tensors of the example; samples first.
        loss_fn: takes the module's output and the targets as the user has them; a mean over samples.
        varying: the places, (tensor, dim), of each size that varies from batch to batch, by name.
        autocast: the dtype that operators run in where torch's autocast says so; None: no autocast.
        elementwise: operators (``mylib::op``) of which the user says that they treat every element by itself.
        clouds: of a sparse network, how ``inputs`` and ``targets`` are made of batches of clouds (of a graph network,
            of seeds).
        structure: of its user's batches; None: tuples of tensors.
        sizes: by name, extents of what varies in the batches that are wanted, where they are not the example's.
        casts: the dtypes that the module was cast from, and to; tensors of its example and of batches go with it, and
            those of other dtypes stay what they are.
        origin: what it was loaded of, as a fingerprint; empty: it is not known.
        rows: rows along dim 0 that a sample has in each tensor of the example that holds samples: 12 of targets of
            [samples x 12 tokens], each sample's one after another.  Empty, as long as no capture has found it: 1 in
            each tensor that is as long as the first input.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[[Any, Any], Tensor]
    varying: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    elementwise: frozenset[str] = frozenset()
    clouds: PreparedExample | None = None
    structure: BatchStructure | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    casts: Casts = field(default_factory=dict)
    origin: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)

    def cast(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of the module's former dtypes to its own."""
        return cast_tensors(tensors, self.casts)

    def with_cast_example(self) -> LoadedModel:
        """Its example cast as its module was."""
        clouds = self.clouds and self.clouds.cast(self.casts)
        return replace(self, inputs=self.cast(self.inputs), targets=self.cast(self.targets), clouds=clouds)

    @property
    def owners(self) -> dict[str, nn.Module]:
        """See :func:`owners`, with the loss as its user has it."""
        return owners(self.module, getattr(self.loss_fn, "function", self.loss_fn))

    @property
    def stateful(self) -> tuple[Any, ...]:
        """The module, and the loss as its user has it, which may keep something from call to call as well."""
        return self.module, getattr(self.loss_fn, "function", self.loss_fn)

    @property
    def batch(self) -> BatchStructure:
        """Of what a step is given; of clouds coordinates, features and counts."""
        if self.structure is not None:
            return self.structure
        return BatchStructure.plain(*map(len, self.fed))

    @property
    def call(self) -> BatchStructure:
        """Of what :attr:`module` and :attr:`loss_fn` are given."""
        if self.clouds is None:
            return self.batch
        return replace(self.batch, inputs=BatchStructure.plain(len(self.inputs), 0).inputs)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of the example, as the graph has them."""
        return self.call.names

    def loss(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """The loss of a batch as a step is given it, under autocast if that is asked for."""
        return self.loss_of_prepared(*self.prepared(inputs, targets))

    def loss_of_prepared(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """The same of what :meth:`prepared` made of it."""
        with self.precision():
            return self.loss_fn(self.call.output(self.module, inputs), self.call.aims(targets))

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which forward passes run."""
        return autocast(self.inputs[0].device.type, self.autocast)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The example's inputs and targets, by the names that the graph has for them."""
        return dict(zip(self.names, (*self.inputs, *self.targets), strict=True))

    @property
    def fed(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The example as a step is given it, inputs and targets: samples first."""
        return (self.inputs, self.targets) if self.clouds is None else (self.clouds.inputs, self.clouds.targets)

    def shape_of(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a tensor of the example is wanted (``sizes``), where it has ``shape``."""
        extents = list(shape)
        for word, places in self.varying.items():
            for tensor, dim in places:
                if tensor == name and word in self.sizes:
                    extents[dim] = self.sizes[word]
        return tuple(extents)

    def prepared(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What ``module`` and ``loss_fn`` take, of a batch as a step is given it; where the model's example is."""
        prepared = (inputs, targets) if self.clouds is None else self.clouds.prepared(inputs, targets)
        device = self.inputs[0].device
        return tuple(tensor.to(device) for tensor in prepared[0]), tuple(tensor.to(device) for tensor in prepared[1])

    @property
    def extents(self) -> dict[str, int]:
        """The example's extent of each size that varies."""
        return {name: self.tensors[places[0][0]].shape[places[0][1]] for name, places in self.varying.items()}

    @property
    def samples(self) -> int:
        """Number of samples of the example."""
        return self.inputs[0].shape[0] // self.rows.get(self.names[0], 1) if self.inputs[0].ndim else 1

    @property
    def fed_rows(self) -> tuple[int, ...]:
        """Rows that a sample has in each tensor of :attr:`fed`; 0: it has no samples."""
        if self.rows:
            return tuple(self.rows.get(name, 0) for name in self.names)
        return tuple(int(each.ndim > 0 and len(each) == self.samples) for tensors in self.fed for each in tensors)


@dataclass(frozen=True, slots=True)
class PreparedExample:
    """The example of a network whose inputs are prepared, as its user's batches are.

    Attributes:
        preparation: makes of them what the network is given.
        inputs: those of ``preparation.raw_names``, samples first; of clouds padded to the largest.
        targets: samples first; (samples, points, ...) where there is one a site.
    """

    preparation: InputPreparation
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    def prepared(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs and targets of the network, for a batch of its user's."""
        tensors = self.preparation.prepared((*inputs, *targets))
        num_inputs = self.preparation.num_inputs
        return tensors[:num_inputs], tensors[num_inputs:]

    def cast(self, casts: Casts) -> PreparedExample:
        """With features and targets of those dtypes cast."""
        inputs = cast_tensors(self.inputs, casts)
        targets = cast_tensors(self.targets, casts)
        return PreparedExample(self.preparation.cast(casts), inputs, targets)

    def of_fewer_rows(self, divisor: int) -> PreparedExample:
        """With a part of the points of each cloud, or of the neighbours of each seed."""
        preparation, raw = self.preparation.of_fewer((*self.inputs, *self.targets), divisor)
        return PreparedExample(preparation, raw[: len(self.inputs)], raw[len(self.inputs) :])

    def inputs_of(self, beginnings: tuple[str, ...]) -> frozenset[str]:
        """The graph's inputs whose names in the preparation begin so."""
        own = self.preparation.names
        names = BatchStructure.plain(self.preparation.num_inputs, len(self.targets)).names
        return frozenset(name for name, each in zip(names, own, strict=True) if each.startswith(beginnings))

    @property
    def named(self) -> dict[str, Tensor]:
        """Inputs and targets by name."""
        names = (*self.preparation.raw_names, *BatchStructure.plain(0, len(self.targets)).names)
        return dict(zip(names, (*self.inputs, *self.targets), strict=True))
