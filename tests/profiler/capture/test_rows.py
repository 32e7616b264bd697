"""How many rows of each tensor a sample has is found by the capture, whose parts are then those of samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.layers import check_samples_apart, merging_layer
from profiler.capture.graph import capture
from profiler.extras.modelled.networks import fake_network
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel, as_captured, fed_example
from profiler.source.source import load_model
from runtime.stage.shapes import step_inputs
from tests.captures import capture as capture_once
from tests.zoo import NETWORKS
from tests.zoo.merged import SAMPLES, TOKENS

ROWS = {
    "language_model": (1, TOKENS),
    "one_sentence": (1, TOKENS),
    "listed_inputs": (TOKENS, TOKENS),
    "listed_sentences": (TOKENS, 1),
    "tagger": (1, TOKENS),
    "masked_tokens": (1, TOKENS, TOKENS),
    "pixels": (1, 30),
    "views": (2, 1),
    "views_alone": (2, 2),
    "time_first": (1, TOKENS),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_sample_are_found(name: str) -> None:
    model = load_model(NETWORKS[f"merged:{name}"].source)
    captured = capture_once(model)
    graph = captured.graph
    found = as_captured(model, graph.inputs, graph.samples)
    assert captured.polymorphic
    assert found.fed_rows == ROWS[name]
    assert found.samples == (1 if name == "one_sentence" else SAMPLES)
    assert [len(tensor) for tensor in fed_example(found, 7)] == [7 * rows for rows in ROWS[name]]
    assert step_inputs(captured).rows(fed_example(found, 7)) == 7
    several = [f"{rows} rows of {name}" for name, rows in zip(model.names, ROWS[name], strict=True) if rows > 1]
    assert any(f"a sample has {', '.join(several)};" in line for line in captured.remarks)
    apart = [layer for layer in check_samples_apart(graph) if layer != graph.loss]
    assert ([merging_layer(graph)], apart) == ((["flatten"], ["flatten"]) if name == "time_first" else ([""], []))


@pytest.mark.parametrize("name", ["language_model", "listed_inputs", "views"])
def test_without_values_the_same_graph_is_captured(name: str) -> None:
    source = NETWORKS[f"merged:{name}"].source
    assert fake_network(source).captured.graph.inputs == capture_once(load_model(source)).graph.inputs


def test_what_has_no_samples_keeps_its_rows() -> None:
    """As many numbers as two samples, or as one has tokens, are none of theirs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, x: Tensor, places: Tensor, classes: Tensor) -> Tensor:
            return (self.layer(x) + places[:, None] + classes).flatten(0, 1)

    inputs = torch.randn(3, 6, 5), torch.randn(6), torch.randn(3)
    model = LoadedModel(Net(), inputs, (torch.randn(18, 3),), TrainedLoss(nn.functional.mse_loss, unpacked=True))
    captured = capture(model)
    assert as_captured(model, captured.graph.inputs, captured.graph.samples).fed_rows == (1, 0, 0, 6)
