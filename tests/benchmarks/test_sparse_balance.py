from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sparse_balance
from benchmarks.sparse_balance import Case, batch_rows, case_of, minkunet, reverse, scan_rows, shape

RESULTS = Path(sparse_balance.__file__).parent / "results" / "sparse_balance.json"


def shapes(*radii: int) -> Case:
    return case_of([shape(number, radius) for number, radius in enumerate(radii)])


def test_pairs_are_those_of_a_dense_search() -> None:
    case = shapes(4, 5)
    levels = [
        {(int(sample), *site) for sample, site in zip(level.samples, level.coordinates.tolist(), strict=True)}
        for level in case.levels
    ]
    for table in case.maps:
        source, target = levels[table.source], levels[table.target]
        if table.source == table.target:
            near = list(product((-1, 0, 1), repeat=3))
            pairs = sum((b, x + i, y + j, z + k) in source for b, x, y, z in target for i, j, k in near)
        else:
            finer = max(source, target, key=len)
            pairs = len(finer)
            assert {(b, x // 2, y // 2, z // 2) for b, x, y, z in finer} == min(source, target, key=len)
        assert (table.neighbours >= 0).sum() == pairs


def test_maps_between_levels_go_both_ways() -> None:
    for table in shapes(5).maps:
        if table.source < table.target:
            fine = int((table.neighbours >= 0).sum())
            np.testing.assert_array_equal(
                reverse(reverse(table.neighbours, fine), table.neighbours.shape[1]), table.neighbours
            )


def test_the_network_ends_on_the_level_where_it_began() -> None:
    layers = minkunet()
    assert (layers[0].inputs, layers[0].kernel) == (4, 3)
    assert (layers[-1].target, layers[-1].outputs) == (0, 96)
    assert max(layer.target for layer in layers) == sparse_balance.NUM_LEVELS - 1
    assert sum(layer.kernel == 2 for layer in layers) == 2 * (sparse_balance.NUM_LEVELS - 1)


def test_goals_hold_on_shapes_and_twice_the_same() -> None:
    def found() -> list[tuple[str, float, bool]]:
        return [(row.name, row.value, row.holds) for row in batch_rows(shapes(4, 6, 8, 10, 12, 14, 9, 7))]

    rows = found()
    assert [name for name, _, holds in rows if not holds] == []
    assert rows == found()
    values = {name: value for name, value, _ in rows}
    for ranks in ("4 ranks", "8 ranks"):
        assert values[f"batch of 8, {ranks}: by work"] < values[f"batch of 8, {ranks}: equal counts"]


def test_one_shape_divided_in_space() -> None:
    values = {row.name.split(": ")[1]: row.value for row in scan_rows(case_of([shape(0, 24)]))}
    assert values["whole network"] < values["by voxels"]
    assert values["whole network, halo"] < values["random blocks, halo"]


def test_the_committed_rows_hold_and_are_of_this_code() -> None:
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert [row["name"] for row in rows if not row["holds"]] == []
    assert sum(bool(row["goal"]) for row in rows) == 5


def test_the_scan_is_there() -> None:
    pytest.importorskip("laspy")
    cloud = sparse_balance.points()
    assert cloud.shape == (518_862, 3)
    assert len(sparse_balance.voxels(cloud, 2.0)) > 100
