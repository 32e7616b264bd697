"""What programs of some years run a step with: names, sources, and what follows for a way."""

from __future__ import annotations

import pytest

from planner.extras.export.launchers import LAUNCHERS
from planner.extras.kernels.models import AttentionKernel
from planner.extras.transformers.shape import Fusion, Launch, ParallelDegrees
from planner.extras.transformers.software import LAUNCHED, SOFTWARE, Software, launch_s, named_software
from planner.ir.errors import UnknownNameError


@pytest.mark.parametrize("software", SOFTWARE.values(), ids=lambda software: software.name)
def test_every_software_has_a_name_and_a_source_and_says_four_parts_of_a_way(software: Software) -> None:
    assert SOFTWARE[software.name] is software
    assert len(software.about) > 20
    assert len(software.source) > 20
    ways = software.of(ParallelDegrees(tensor=2, micro_batch=4))
    told = (software.kernels, software.launch, software.attention, software.overlap_tensor)
    assert (ways.kernels, ways.launch, ways.attention, ways.overlap_tensor) == told
    assert (ways.tensor, ways.micro_batch) == (2, 4)


def test_every_launcher_starts_a_software_that_is_known_and_none_starts_megatron() -> None:
    assert set(LAUNCHED) == {"", *LAUNCHERS}
    assert set(LAUNCHED.values()) <= set(SOFTWARE)
    assert named_software(LAUNCHED[""]).of(ParallelDegrees()) == ParallelDegrees()


def test_the_host_takes_less_of_a_kernel_that_is_compiled_and_nothing_of_one_in_a_graph() -> None:
    for kernels in Fusion:
        eager, compiled, graphs = (launch_s(ParallelDegrees(kernels=kernels, launch=launch)) for launch in Launch)
        assert graphs == 0 < compiled <= eager


def test_attention_of_2023_is_the_first_flash_attention() -> None:
    assert named_software("pytorch-2023").attention is AttentionKernel.FLASH
    with pytest.raises(UnknownNameError, match=r"no software 'pytorch-2022'(.|\n)*did you mean that"):
        named_software("pytorch-2022")
