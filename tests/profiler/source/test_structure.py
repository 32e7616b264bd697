from __future__ import annotations

import collections
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from halopipe.data.factories import BatchPytree
from halopipe.data.sources import open_data
from halopipe.training.evaluate import classes_of
from planner.ir.errors import FactoryError, UnsupportedModelError
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.parts import model_of
from profiler.source.structure import BatchStructure, Nest, require_samples_first
from runtime.captured import CapturedModule

HERE = __name__
CLASSES = torch.tensor([0, 1, 1, 0])


@dataclasses.dataclass
class Boxes:
    corners: Tensor
    label: str = "cat"


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


def values() -> Iterator[Any]:
    a = torch.ones(4, 2)
    b = torch.zeros(4)
    c = torch.arange(4)
    yield a
    yield {"a": a, "b": (b, [c, None, 3])}
    yield collections.OrderedDict(b=b, a=collections.defaultdict(list, {"c": c}))
    yield Pair(a, b), Boxes(c)
    yield collections.UserDict({"a": a, "flag": True})
    yield [torch.Size([2]), a]


@pytest.mark.parametrize("value", list(values()), ids=lambda value: type(value).__name__)
def test_a_nest_is_taken_apart_and_put_together_again(value: Any) -> None:
    nest, tensors = Nest.of(value, "a test")
    other = nest.filled([tensor + 1 for tensor in tensors])
    assert type(other) is type(value)
    assert all(torch.equal(x, y + 1) for x, y in zip(nest.tensors(other), nest.tensors(value), strict=True))
    assert all(x is y for x, y in zip(nest.tensors(nest.filled(tensors)), tensors, strict=True))
    assert Nest.of(other, "a test")[0].paths == nest.paths


@pytest.mark.parametrize(
    ("batch", "fault"),
    [
        ({"x": torch.ones(4), "flag": True}, r"batch\['flag'\] is True, False in the example: a constant"),
        ({"x": torch.ones(4), "flag": 0}, r"batch\['flag'\] is 0, False in the example"),
        ({"x": torch.ones(4)}, r"batch\['flag'\] is not there"),
        ({"x": torch.ones(4), "flag": False, "id": 7}, r"batch\['id'\] is not known"),
        ({"x": [torch.ones(4)], "flag": False}, r"batch\['x'\] is \[tensor\], a tensor in the example"),
        ((torch.ones(4), torch.ones(4)), r"is \(tensor, tensor\), \{x, flag\} in the example"),
    ],
)
def test_a_batch_that_is_unlike_the_example_is_refused_by_its_place(batch: Any, fault: str) -> None:
    structure = model_of("a test", (Flagged(), {"x": torch.ones(4, 3), "flag": False})).batch
    with pytest.raises(FactoryError, match=fault):
        structure.apart(batch, "data")


class Flagged(nn.Module):
    """Takes a flag, a number and a word; gives its outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, flag: bool = False, scale: float = 1.0, mode: str = "plain", y: Any = None) -> Any:
        hidden = self.up(x)
        hidden = hidden.relu() if flag else hidden
        hidden = hidden * scale if mode == "scaled" else hidden
        logits = self.head(hidden)
        return Output(logits, hidden, None if y is None else F.cross_entropy(logits, y))


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class Joining(nn.Module):
    """A dict and a mask, or the dict alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2)
        self.right = nn.Linear(5, 2)

    def forward(self, sides: dict[str, Tensor], mask: Tensor | None = None) -> Tensor:
        found = self.left(sides["left"]) + self.right(sides["right"])
        return found if mask is None else found * mask.unsqueeze(-1)


class Summing(nn.Module):
    def __init__(self, gives: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2) for _ in range(2))
        self.gives = gives

    def forward(self, xs: list[Tensor]) -> Any:
        return self.gives(self.layers[0](xs[0]) + self.layers[1](xs[1]))


X = torch.randn(4, 3)
SIDES = {"left": torch.randn(4, 3), "right": torch.randn(4, 5)}
HABITS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], Tensor], tuple[str, ...]]] = {
    "keywords, constants, its own loss": (
        lambda: (Flagged(), {"y": CLASSES, "x": X, "flag": True, "scale": 2.0, "mode": "scaled"}),
        lambda m: m(x=X, flag=True, scale=2.0, mode="scaled", y=CLASSES).loss,
        ("y", "x"),
    ),
    "outputs by name, losses in a dict, targets in a dict": (
        lambda: (Flagged(), (X, {"class": CLASSES}), losses),
        lambda m: F.cross_entropy(m(X).logits, CLASSES) + m(X).hidden.square().mean(),
        ("inputs", "targets_class"),
    ),
    "a dict and a mask": (
        lambda: (Joining(), ((SIDES, X[:, 0]), X[:, :2]), F.mse_loss),
        lambda m: F.mse_loss(m(SIDES, X[:, 0]), X[:, :2]),
        ("left", "right", "inputs_3", "targets"),
    ),
    "a dict, whole": (lambda: (Joining(), SIDES), lambda m: m(SIDES).square().mean(), ("left", "right")),
    "a list of tensors, a number": (
        lambda: (Summing(lambda y: y.abs().mean()), [X, X + 1]),
        lambda m: m([X, X + 1]),
        ("inputs", "inputs_2"),
    ),
    "logits and a loss": (
        lambda: (Summing(lambda y: (y, F.cross_entropy(y, CLASSES[: len(y)]))), [X, X]),
        lambda m: m([X, X])[1],
        ("inputs", "inputs_2"),
    ),
    "a dict of losses": (
        lambda: (Summing(lambda y: {"a": y.mean(), "b": y.square().mean()}), [X, X]),
        lambda m: sum(m([X, X]).values()),
        ("inputs", "inputs_2"),
    ),
    "a dict with a loss": (
        lambda: (Summing(lambda y: {"loss": y.abs().mean(), "part": y.mean()}), [X, X]),
        lambda m: m([X, X])["loss"],
        ("inputs", "inputs_2"),
    ),
}


def losses(output: Output, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"classes": F.cross_entropy(output.logits, targets["class"]), "small": output.hidden.square().mean()}


@pytest.mark.parametrize("habit", HABITS)
def test_a_module_is_called_as_its_user_calls_it(habit: str) -> None:
    """The capture compares its graph with the module; here the module is compared with a call by hand."""
    make, by_hand, names = HABITS[habit]
    model = model_of("a test", make())
    torch.testing.assert_close(model.loss(*model.fed), by_hand(model.module))
    found = capture(model)
    assert tuple(found.graph.inputs) == model.names == names


def test_accuracy_is_known_whatever_the_outputs_and_targets_are_called() -> None:
    for habit in ("keywords, constants, its own loss", "outputs by name, losses in a dict, targets in a dict"):
        found = classes_of(capture(model_of("a test", HABITS[habit][0]())).graph)
        assert found is not None
        assert found.logits == "head"


@pytest.mark.parametrize(
    ("result", "match"),
    [
        (lambda: (Summing(lambda y: (y, y.mean(), y.sum())), [X, X]), r"several losses[\s\S]*tuple of 3, 2 of them"),
        (lambda: (nn.Linear(3, 2), (X, CLASSES), lambda y, t: {"a": y}), "'a' is a tensor of 2 dims"),
    ],
)
def test_losses_that_are_not_clear_are_refused_with_a_remedy(result: Callable[[], Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        capture(model_of("a test", result()))
    assert caught.value.remedies


def test_what_cannot_be_an_example_is_refused() -> None:
    with pytest.raises(FactoryError, match=r"unexpected keyword argument 'id'[\s\S]*leave out of the batch"):
        model_of("a test", (Flagged(), {"x": X, "id": CLASSES}))
    with pytest.raises(FactoryError, match=r"hold a ndarray[\s\S]*\['x'\][\s\S]*as_tensor"):
        model_of("a test", (Flagged(), {"x": X.numpy()}))
    with pytest.raises(FactoryError, match=r"no \(inputs, targets\)"):
        model_of("a test", (Flagged(), {"x": X}, losses))


def test_a_size_that_varies_is_called_by_the_key_of_its_tensor() -> None:
    model = model_of("a test", (Flagged(), {"x": torch.randn(4, 5, 3)}, None, {"time": [("x", 1)]}))
    assert capture(model).graph.inputs["x"].dims == ("sample", "time", "feature")
    with pytest.raises(FactoryError, match=r"in 'inputs', which is not there[\s\S]*there are x"):
        model_of("a test", (Flagged(), {"x": torch.randn(4, 5, 3)}, None, {"time": [("inputs", 1)]}))


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"y": CLASSES[index % 4], "x": torch.full((3,), float(index))}


def rows(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Any:
    return Rows()


def loader(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Any:
    return DataLoader(Rows(), batch_size=global_batch, collate_fn=lambda found: collections.UserDict(_collated(found)))


def micro_batches(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Any:
    yield [_collated([Rows()[0]] * 2), _collated([Rows()[1]])]


def _collated(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([row[key] for row in found]) for key in ("x", "y")}


@pytest.fixture
def labelled() -> LoadedModel:
    return model_of("a test", (Flagged().double(), {"x": X.double(), "y": CLASSES}))


@pytest.mark.parametrize("name", ["rows", "loader"])
def test_batches_of_data_are_taken_by_their_keys(labelled: LoadedModel, name: str) -> None:
    found = next(iter(open_data(f"{HERE}:{name}", labelled, 4, 0, shuffled=False).epoch(_start())))
    (x, y), targets = found
    assert (x.dtype, x[:, 0].tolist(), y.tolist(), targets) == (torch.float32, [0, 1, 2, 3], CLASSES.tolist(), ())


def test_lists_of_dicts_are_micro_batches_unless_the_batch_is_such_a_pair(labelled: LoadedModel) -> None:
    found = next(iter(open_data(f"{HERE}:micro_batches", labelled, 4, 0).epoch(_start())))
    assert isinstance(found, list)
    assert [len(inputs[0]) for inputs, _ in found] == [2, 1]
    pair = model_of("a test", (Flagged(), ({"x": X}, {"class": CLASSES}), losses))
    (x,), (y,) = BatchPytree("data", {}, pair.batch).item([{"x": X}, {"class": CLASSES}])
    assert (x is X, y is CLASSES) == (True, True)


def _start() -> Any:
    from halopipe.data.sources import Position

    return Position()


def transformer(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tests.missing_operators import declare_missing

        declare_missing()
        import transformers as t
    t.logging.set_verbosity_error()
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**size, "vocab_size": 50, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 49}
    picture = {**size, "image_size": 8, "patch_size": 4}
    ids = torch.randint(2, 49, (4, 6))
    batch: dict[str, Any] = {"labels": ids, "input_ids": ids, "attention_mask": torch.ones(4, 6, dtype=torch.int64)}
    pixels = torch.randn(4, 3, 8, 8)
    torch.manual_seed(0)
    if name == "BERT":
        return t.BertForSequenceClassification(t.BertConfig(**text)), t.BatchEncoding({**batch, "labels": CLASSES})
    if name == "GPT-2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)), batch
    if name == "T5":
        config = t.T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, pad_token_id=0)
        config.decoder_start_token_id = 0
        return t.T5ForConditionalGeneration(config), batch
    if name == "Llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**text)), batch
    if name == "ViT":
        return t.ViTForImageClassification(t.ViTConfig(**picture)), {"pixel_values": pixels, "labels": CLASSES}
    config = t.CLIPConfig(text_config=text, vision_config=picture, projection_dim=8)
    del batch["labels"]
    return t.CLIPModel(config), {**batch, "pixel_values": pixels, "return_loss": True}


TRANSFORMERS = ["BERT", "GPT-2", "T5", "Llama", "ViT", "CLIP"]


@pytest.mark.exhaustive("a capture of a transformer takes 4 s and more, and importing transformers 8 s")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_train_their_own_loss_on_a_batch_as_it_is(name: str) -> None:
    module, batch = transformer(name)
    model = model_of(name, (module, batch))
    module.eval()  # nothing is dropped
    torch.testing.assert_close(model.loss(*model.fed), module(**batch).loss)
    shuffled = dict(reversed(list(batch.items())))
    assert all(x is y for x, y in zip(model.batch.apart(shuffled, "data")[0], model.inputs, strict=True))
    found: CapturedModule = capture(model)
    some = [tensor[:3] for tensor in model.inputs]
    by_module = module(**{key: value[:3] if torch.is_tensor(value) else value for key, value in batch.items()})
    torch.testing.assert_close(found.graph_module(3, *some), by_module.loss)
    assert (classes_of(found.graph) is not None) == (name != "CLIP")  # whose loss compares each sample with all


def test_names_are_words_and_each_is_there_once() -> None:
    keys = ["loss", "class", "id", "image", "a b", "num_samples"]
    inputs = tuple({key: torch.ones(2) for key in keys} for _ in range(2))
    structure, _, _ = BatchStructure.of("a test", nn.Identity(), inputs, (), is_pair=False)
    assert len(set(structure.names)) == 2 * len(keys)
    assert all(name.isidentifier() for name in structure.names)
    assert not {"loss", "class", "id", "num_samples"} & set(structure.names)
    assert list(itertools.islice(structure.names, 3)) == ["inputs_0_loss", "inputs_0_class", "inputs_0_id"]


@pytest.mark.parametrize("loss_fn", [None, nn.functional.mse_loss])
def test_a_loader_in_place_of_a_batch_is_answered_with_a_batch_of_it(loss_fn: Any) -> None:
    loader = torch.utils.data.DataLoader([{"x": torch.randn(3)}] * 4, batch_size=2)
    with pytest.raises(FactoryError) as caught:
        model_of("hp.profile", (nn.Linear(3, 2), loader, loss_fn))
    assert "next(iter(loader)), one batch of it" in caught.value.remedies


def test_the_class_of_a_loss_is_no_loss() -> None:
    with pytest.raises(FactoryError, match="the loss is the class MSELoss") as caught:
        model_of("hp.profile", (nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2)), nn.MSELoss))
    assert caught.value.remedies == ("MSELoss()",)


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ((torch.ones(4, 3), [0, 1, 2, 0]), ["targets are 4 numbers in a list", "torch.tensor(targets)"]),
        ((torch.ones(4, 3), (0.5, 1.0, 2.0, 0.0)), ["targets are 4 numbers in a tuple"]),
        (([torch.ones(3, 5 + k) for k in range(4)], torch.zeros(4)), ["a list of 4 tensors, one a sample", "(3, 8)"]),
        (([torch.ones(3, 5)] * 2, [{"boxes": torch.ones(1, 4)}] * 2), ["a list of 2 tensors", "torch.stack(inputs)"]),
        ({"x": {"pictures": [torch.ones(3, 5)] * 4}, "y": torch.zeros(4)}, ["a list of 4 tensors"]),
    ],
)
def test_samples_that_are_items_of_a_list_are_refused(example: Any, words: list[str]) -> None:
    inputs, targets = example.values() if isinstance(example, dict) else example
    with pytest.raises(FactoryError) as caught:
        require_samples_first("f", inputs, targets)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "example",
    [
        (torch.ones(4, 3), torch.zeros(4)),
        ([torch.ones(4, 3, 8, 8), torch.ones(4, 6, 4, 4)], torch.zeros(4)),
        ([torch.ones(4, 3), torch.ones(4, 5)], (torch.zeros(4), torch.zeros(4))),
        ((torch.ones(2, 3), [64, 64]), torch.zeros(2)),
        (torch.ones(2, 3), {"labels": torch.zeros(2), "size": [8, 8]}),
        (torch.ones(2, 3), 1.0),
    ],
)
def test_other_lists_are_as_they_were(example: Any) -> None:
    require_samples_first("f", *example)
