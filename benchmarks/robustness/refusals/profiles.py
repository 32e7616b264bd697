"""Profiles of networks that the planner refuses something of, made up: none takes a second."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.chains import chain_profile
from benchmarks.robustness.refusals import folders
from planner.ir.codec import dump
from planner.ir.graph import FIXES_SAMPLES, KEEPS_SAMPLES, NEEDS_WHOLE_BATCH
from planner.ir.profile import Profile
from tests.halopipe.commands import PROFILE
from tests.planner import causal
from tests.planner.networks import Network, priced, residual


def having(make: Callable[[], Profile]) -> Callable[[Path], None]:
    """In place of the profile another one, beside a description of machines."""

    def prepare(folder: Path) -> None:
        folders.cluster(folder)
        dump(make(), folder / "profile.json")

    return prepare


def attention() -> Profile:
    """Causal, on two devices."""
    return causal.profile()


def batch_norm() -> Profile:
    """Residual blocks."""
    return priced(*residual(samples=8))


def batch_norm_of_rows() -> Profile:
    """Of one value a channel and sample."""
    network = Network(8, 3, 8)
    return priced(network, network.norm(network.head(network.image, 8)))


def keeping() -> Profile:
    """A layer keeps what it sees of the rows of a batch."""
    return _marked(KEEPS_SAMPLES, "buffer")


def unlinked() -> Profile:
    """Of two hosts, and nothing is known of the link between them."""
    profile = chain_profile(6, 2, hosts=("n0", "n1"))
    links = {name: link for name, link in profile.cluster.links.items() if name == "within-host"}
    return replace(profile, cluster=replace(profile.cluster, links=links, collectives=()))


def small_devices() -> Profile:
    """Which hold nothing of the network."""
    return chain_profile(6, 2, parameter_bytes=2**20, activation_bytes=2**14, memory_bytes=2**12)


def with_terms() -> Profile:
    """A term of the loss is read by the layers behind it."""
    layers = list(PROFILE.graph.layers)
    layers[-2] = replace(layers[-2], kind="loss")
    return replace(PROFILE, graph=replace(PROFILE.graph, layers=tuple(layers)))


def of_one_size() -> Profile:
    """Its code fixes the number of samples."""
    return _marked(FIXES_SAMPLES)


def of_whole_batches() -> Profile:
    """Its loss joins samples."""
    return _marked(NEEDS_WHOLE_BATCH)


def _marked(attribute: str, value: object = True) -> Profile:
    *layers, last = PROFILE.graph.layers
    marked = replace(last, attributes={**last.attributes, attribute: value})
    return replace(PROFILE, graph=replace(PROFILE.graph, layers=(*layers, marked)))
