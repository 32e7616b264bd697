"""Boxes of many options at once are those that the runtime divides layers by."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.box import volume
from planner.ir.graph import producer
from planner.layers.boxes import as_tuples, moved
from planner.layers.division import Division, LayerDivision, layer_division
from tests.oracles.boxes import grown, parts
from tests.planner.networks import priced
from tests.planner.solvers.laid_out_plans import EVERYTHING, MADE


def random_prices(draw: random.Random) -> LayoutPrices:
    count = draw.randint(2, 6)
    profile = priced(*draw.choice(MADE), speeds=[draw.choice([1.0, 2.5]) for _ in range(count)])
    return LayoutPrices(CostModel(profile), tuple(range(count)), draw.choice([2, 3, 4]), EVERYTHING, halo_depth=2)


def random_options(draw: random.Random, prices: LayoutPrices) -> dict[int, ShardingSpec]:
    """Of each layer one, with ways to contract where it has some."""
    found = {}
    for index in range(len(prices.layers)):
        option = draw.choice(prices.options(index))
        ways = prices.shards(index, (option,)).contractions[0]
        found[index] = replace(option, ways=draw.choice([1, *(each.ways for each in ways)]))
    return found


def divided(prices: LayoutPrices, options: dict[int, ShardingSpec]) -> Division:
    graph = prices.cost_model.profile.graph
    values = graph.values()
    layers: dict[str, LayerDivision] = {
        graph.layers[index].name: layer_division(
            graph, graph.layers[index], values, option.placement(0), prices.samples
        )
        for index, option in options.items()
    }
    return Division(layers, len(prices.ranks), prices.samples)


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(25))
def test_every_rank_does_holds_and_reads_what_loops_over_ranks_say(seed: int) -> None:
    prices = random_prices(random.Random(seed))
    for index in range(len(prices.layers)):
        sized, options = prices.sized(index), prices.options(index)
        shards, relation = prices.shards(index, options), sized.relation
        specs = (sized.work, *sized.layer.outputs)
        for k, option in enumerate(options):
            own = [parts(option.layout, spec, prices.samples) for spec in specs]
            held = [
                tuple(grown(box, spec, option.layout, option.margin) for box in boxes)
                for boxes, spec in zip(own, specs, strict=True)
            ]
            read = [relation.input_boxes(sized.layer, sized.inputs, box) for box in held[0]]
            used = [relation.weight_boxes(sized.layer, sized.parameters, box) for box in held[0]]
            assert [as_tuples(boxes[k]) for boxes in (shards.own, *shards.owned)] == own
            assert [as_tuples(boxes[k]) for boxes in (shards.done, *shards.held)] == held
            assert [as_tuples(boxes[k]) for boxes in shards.needed] == [*zip(*read, strict=True)]
            assert [as_tuples(boxes[k]) for boxes in shards.weights] == [*zip(*used, strict=True)]


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(25))
def test_what_a_stage_runs_is_one_of_the_options_that_planners_look_at(seed: int) -> None:
    draw = random.Random(seed)
    prices = random_prices(draw)
    options = random_options(draw, prices)
    division = divided(prices, options)
    for index, option in options.items():
        layer, shards = division.layers[prices.layers[index].name], prices.shards(index, (option,))
        assert shards.samples[0].tolist() == list(layer.rows)
        if option.ways == 1:
            assert [as_tuples(boxes[0]) for boxes in shards.weights] == [*layer.weights]
        for position, value in enumerate(layer.layer.inputs):
            if layer.layer.inputs.count(value) == 1:
                assert as_tuples(shards.wanted[position][0]) == division.wanted(layer.layer.name, position)


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(25))
def test_what_is_priced_is_what_moves(seed: int) -> None:
    draw = random.Random(seed)
    prices = random_prices(draw)
    options = random_options(draw, prices)
    division, ranks = divided(prices, options), range(len(prices.ranks))
    number = {layer.name: index for index, layer in enumerate(prices.layers)}
    for index, option in options.items():
        layer = prices.layers[index]
        for position, value in enumerate(layer.inputs):
            if producer(value) not in number or layer.inputs.count(value) > 1:
                continue
            maker = number[producer(value)]
            source, reader = prices.shards(maker, (options[maker],)), prices.shards(index, (option,))
            expected = np.zeros((len(ranks), len(ranks)))
            for move in division.moves(layer.name, position):
                expected[move.src, move.dst] += volume(move.box)
            assert moved(source.owned[0], source.held[0], reader.wanted[position])[0, 0].tolist() == expected.tolist()
