"""What hosts prepare, seconds and bytes, for the checker.

Loops over names (model: ``planner.costs.stages.input_pipeline``).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.ir.graph import Layer
from planner.ir.profile import PreparationCost, Profile
from planner.layers import prepared_inputs


def preparation_s(
    profile: Profile, device_kind: str, layers: Sequence[Layer], samples: float, num_ranks: int = 1
) -> float:
    """Of all that ``layers`` read and is made for it; where ranks share sites, of the network, and their shares."""
    costs = profile.preparations.get(device_kind, ())
    wanted = set(_inputs(profile, layers))
    if not wanted:
        return 0.0
    own = _made_for(costs, wanted)
    everything = own if num_ranks == 1 else _made_for(costs, set(_inputs(profile, profile.graph.layers)))
    total = 0.0
    for name in everything:
        found = [cost for cost in costs if cost.name == name]
        if found:
            nearest = sorted(found, key=lambda cost: (abs(cost.samples - samples), cost.samples))[0]
            total += nearest.seconds / nearest.samples * samples
            if num_ranks > 1 and name in own:
                total += nearest.shared_s / nearest.samples * samples
    return total


def _made_for(costs: Sequence[PreparationCost], wanted: set[str]) -> set[str]:
    """Names of what makes the inputs ``wanted``, and of what that is made from."""
    names = {cost.name for cost in costs if wanted & set(cost.inputs)}
    while True:
        more = {name for cost in costs if cost.name in names for name in cost.after} - names
        if not more:
            return names
        names |= more


def prepared_bytes(profile: Profile, layers: Sequence[Layer], samples: float) -> int:
    """Of the prepared inputs that ``layers`` read."""
    specs = [profile.graph.inputs[name] for name in _inputs(profile, layers)]
    return sum(round(spec.num_bytes * samples / profile.graph.samples) for spec in specs)


def prepares_beside(profile: Profile, rank: int) -> bool:
    """Whether the rank's host prepares while its device computes: all but cores of the host itself."""
    return not profile.cluster.devices[rank].name.split("/")[-1].startswith("cpu")


def _inputs(profile: Profile, layers: Sequence[Layer]) -> tuple[str, ...]:
    return prepared_inputs(profile.graph, frozenset(layer.name for layer in layers))
