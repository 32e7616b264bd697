"""Graph networks by plans: batches of seeds, runs beside one device, evaluation, and going on from a save."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import halopipe.data
from cuda_ops.extras.sampling.generated import power_law
from halopipe.extras.sampled_graphs.seeds import seed_batches
from halopipe.run_spec.result import RunResult
from halopipe.training.session import Execution
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job
from tests.halopipe.training.sessions import together
from tests.runtime.extras.sampled_graphs import graph_networks
from tests.test_readme import HOME, blocks, file_of

torch.set_num_threads(1)
DATA = "tests.halopipe.extras.sampled_graphs.test_graph_runs:seeds"
SHARED = {"cuts": [], "ranks": [(0, 1)], "shares": [(2, 1)]}


def seeds(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Any:
    return seed_batches(graph_networks.GRAPH, global_batch, seed)


def once(global_batch: int, input_shape: tuple[int, ...], seed: int) -> list[Any]:
    """Some nodes, the last batch smaller."""
    return list(seed_batches(graph_networks.GRAPH, global_batch, seed, torch.arange(14), endless=False))


def plan(name: str = "sage", **options: object) -> Plan:
    source = ModelSource(f"tests.runtime.extras.sampled_graphs.graph_networks:{name}", {}, (), "float64")
    return plan_of(source, **{"cuts": [], "micro_batches": (5, 3), **options})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_job(plan(), tmp_path_factory.mktemp("alone"), data=DATA, eval_data=f"{DATA[:-5]}once", steps=4)


OF_LAYERS = pytest.mark.exhaustive(
    "the runtime's own tests have every network; a run adds nothing but a loss by weights"
)


@pytest.mark.parametrize("name", [pytest.param("gat", marks=OF_LAYERS), "weighted"])
def test_a_run_computes_what_one_device_does(tmp_path: Path, name: str) -> None:
    result = run_job(plan(name, **SHARED), tmp_path, check_numerics=True, data=DATA)
    assert result.numerics is not None
    assert (result.numerics.num_steps, result.numerics.skipped) == (5, "")
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10
    assert len(set(result.losses)) == 6  # of six batches


@pytest.mark.parametrize("way", ["each", "first"])
def test_ranks_get_the_same_seeds_whoever_reads_them(tmp_path: Path, alone: RunResult, way: str) -> None:
    evaluated = f"{DATA[:-5]}once"
    result = run_job(plan(**SHARED), tmp_path, data=DATA, eval_data=evaluated, data_from=way, steps=4)
    assert result.losses == pytest.approx(alone.losses, rel=1e-10)
    (score,) = result.scores
    (expected,) = alone.scores
    assert score.loss == pytest.approx(expected.loss, rel=1e-10)
    assert (score.accuracy, score.num_samples) == (expected.accuracy, 14)


def test_a_run_goes_on_with_the_draw_that_comes_next(tmp_path: Path, alone: RunResult) -> None:
    """A batch that was taken ahead of its step, and not trained on, is taken again."""
    saved = {"data": DATA, "checkpoint": str(tmp_path / "saved")}
    run_job(plan(**SHARED), tmp_path, steps=2, **saved)
    rest = run_job(plan(), tmp_path, steps=4, resume=True, **saved)
    assert rest.losses == pytest.approx(alone.losses[2:], rel=1e-10)


def test_a_script_gives_seeds_or_sampled_graphs(alone: RunResult) -> None:
    sampler = graph_networks.sage()[1][0].sampler
    batches = list(islice(seed_batches(graph_networks.GRAPH, 8), 2))

    def of_seeds(execution: Execution) -> list[float]:
        return [execution.step(batch) for batch in batches]

    def of_graphs(execution: Execution) -> list[float]:
        return [execution.step((sampler.sample(nodes, int(draws[0])), labels)) for (nodes, draws), labels in batches]

    found = [losses for script in (of_seeds, of_graphs) for losses in together(plan(**SHARED), script)]
    assert all(losses == found[0] for losses in found)
    assert found[0][0] == pytest.approx(alone.losses[0], rel=1e-10)


@pytest.mark.exhaustive("the same network under the commands of the document is run by test_readme")
def test_the_documents_example_trains_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {file_of(block): block.text for block in blocks((HOME / "docs" / "sparse.md").read_text("utf-8"))}
    (tmp_path / "papers.py").write_text(found["papers.py"])
    example = plan_of(ModelSource("papers.py:model", {}, (), "float64"), [], (64, 64), ranks=[(0, 1)])
    result = run_job(example, tmp_path, data="papers.py:data", steps=3, check_numerics=True)
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10


def test_features_keep_a_dtype_of_their_own(tmp_path: Path) -> None:
    """Time stamps in float64, which a network in float32 makes small first."""
    made = plan_of(ModelSource("tests.runtime.extras.sampled_graphs.graph_networks:stamped"), [], (5, 3))
    result = run_job(made, tmp_path, data=DATA, steps=2, check_numerics=True)
    module, _, loss = graph_networks.stamped()
    model = load_model(ModelSource("tests.runtime.extras.sampled_graphs.graph_networks:stamped"))
    module.load_state_dict(model.module.user_module.state_dict())
    (nodes, draws), labels = next(iter(seeds(8, (), 0)))
    sampler = graph_networks.stamped()[1][0].sampler
    own = [sampler.sample(part, int(draws[0])) for part in nodes.split([5, 3])]
    outputs = torch.cat([module(each.x, each.blocks) for each in own])
    assert result.losses[0] == pytest.approx(loss(outputs, labels).item(), rel=1e-5)


GRAPH = power_law(50, degree=4.0)


def test_a_pass_has_every_node_once_with_its_label_and_batches_are_numbered() -> None:
    found = list(islice(seed_batches(GRAPH, 8, 3), 25))
    seeds = torch.cat([nodes for (nodes, _), _ in found])
    for start in (0, 50, 100, 150):
        assert seeds[start : start + 50].sort().values.tolist() == list(range(50))
    assert not torch.equal(seeds[:50], seeds[50:100])
    assert [set(draws.tolist()) for (_, draws), _ in found] == [{number} for number in range(25)]
    assert all(torch.equal(labels, torch.from_numpy(GRAPH.labels)[nodes]) for (nodes, _), labels in found)


def test_the_seed_says_the_order_and_one_pass_ends() -> None:
    again = [list(seed_batches(GRAPH, 8, seed, torch.arange(20), endless=False)) for seed in (1, 1, 2)]
    seeds = [torch.cat([nodes for (nodes, _), _ in batches]).tolist() for batches in again]
    assert seeds[0] == seeds[1] != seeds[2]
    assert sorted(seeds[0]) == list(range(20))
    assert [len(labels) for _, labels in again[0]] == [8, 8, 4]


def test_the_factories_of_generated_graphs_give_their_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (nodes, draws), labels = next(halopipe.data.small_graph_seeds(16, (16,), 0))
    assert nodes.shape == draws.shape == labels.shape == (16,)
    assert 0 <= int(nodes.min()) <= int(nodes.max()) < 20_000
