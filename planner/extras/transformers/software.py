"""How the programs that train transformers write the kernels of a step, and who starts these, by program and year.

Each is read off a program's own code and releases; what it says is told apart from how a step is divided, and is the
same in all ways of a search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.extras.kernels.models import AttentionKernel
from planner.extras.transformers.shape import Fusion, Launch, ParallelDegrees
from planner.ir.errors import UnknownNameError, nearest

OF_MODULE_S = 74e-6
ALONE_S = 20e-6
"""What the host takes of a kernel that is counted, with the Python around it: passes take no less than all of theirs.

By modules of Python: the least of each of the 13 operators of Megatron-LM's block, both passes, less 10 us that a
kernel and its start take of each, by the 34 kernels that are counted: 56 us beside GH200, 81 beside V100, 85 beside
A100-40GB (Sailor's tables of operators); of GPT-2 small in PyTorch beside an H200 31 ms of 468 kernels, 66 us
(docs/gpu.md).  The middle of these four is taken.  Of operators that are a kernel each 10 us beside H100 (Liger) to 25
us beside A100 (rotary embeddings of estimate-train-time), and as much of what a compiler makes, which calls them so.
Megatron-LM's own tests of tiny networks grow by 110 us a kernel from one stage to four: they are held against this, and
are in no figure here."""


def launch_s(ways: ParallelDegrees) -> float:
    """What the host takes of each kernel."""
    if ways.launch is Launch.GRAPHS:
        return 0.0
    return ALONE_S if ways.launch is Launch.COMPILED or ways.kernels is Fusion.EAGER else OF_MODULE_S


@dataclass(frozen=True, slots=True)
class Software:
    """A program of some years.

    Attributes:
        name: to ask for it by.
        kernels, launch, attention, overlap_tensor: as of :class:`~planner.extras.transformers.shape.ParallelDegrees`.
        about: which, in words.
        source: of these facts.
    """

    name: str
    kernels: Fusion
    launch: Launch
    attention: AttentionKernel
    overlap_tensor: bool
    about: str
    source: str

    @property
    def parts(self) -> dict[str, Any]:
        """Of a way, what it says."""
        return {
            "kernels": self.kernels,
            "launch": self.launch,
            "attention": self.attention,
            "overlap_tensor": self.overlap_tensor,
        }

    def of(self, ways: ParallelDegrees) -> ParallelDegrees:
        """Those ways in this program."""
        return replace(ways, **self.parts)


SOFTWARE: Mapping[str, Software] = {
    software.name: software
    for software in (
        Software(
            "megatron", Fusion.FUSED, Launch.EAGER, AttentionKernel.TUNED, True,
            "Megatron-LM since 2022, with Transformer Engine",
            "Megatron-LM of 2022: gradient_accumulation_fusion, async sums of tensor ranks; Transformer Engine: cuDNN",
        ),
        Software(
            "megatron-graphs", Fusion.FUSED, Launch.GRAPHS, AttentionKernel.TUNED, True,
            "the same, with CUDA graphs of its layers",
            "Megatron-LM, cuda_graph_impl: a graph of each transformer layer",
        ),
        Software(
            "megatron-2021", Fusion.KERNELS, Launch.EAGER, AttentionKernel.FLASH, False,
            "Megatron-LM before 2022, and Megatron-DeepSpeed",
            "Megatron-LM v2.5: bias, dropout and residual fused, gradients added by kernels of their own, sums of "
            "tensor ranks waited for",
        ),
        Software(
            "pytorch", Fusion.KERNELS, Launch.EAGER, AttentionKernel.FLASH_2, False,
            "PyTorch since 2.2, nothing compiled",
            "PyTorch 2.2: scaled_dot_product_attention by FlashAttention-2",
        ),
        Software(
            "pytorch-compiled", Fusion.FUSED, Launch.COMPILED, AttentionKernel.FLASH_2, False,
            "PyTorch since 2.2, blocks by torch.compile",
            "torchtitan: apply_compile, of each block",
        ),
        Software(
            "pytorch-graphs", Fusion.FUSED, Launch.GRAPHS, AttentionKernel.FLASH_2, False,
            "the same, with CUDA graphs",
            "torch.compile: mode reduce-overhead; torchtitan: training.disable_cuda_graphs",
        ),
        Software(
            "pytorch-2023", Fusion.KERNELS, Launch.EAGER, AttentionKernel.FLASH, False,
            "PyTorch of 1.13 to 2.1, with the first FlashAttention or Triton's",
            "llm-foundry v0.1 to v0.4: flash-attn 1.0.9, attn_impl triton",
        ),
        Software(
            "transformers", Fusion.EAGER, Launch.EAGER, AttentionKernel.FLASH_2, False,
            "Hugging Face's transformers, each operator a kernel",
            "transformers: modeling_gpt2.py and modeling_llama.py",
        ),
    )
}  # fmt: skip
LAUNCHED: Mapping[str, str] = {
    "": "megatron",
    "megatron": "megatron",
    "megatron-bridge": "megatron",
    "torchtitan": "pytorch",
    "deepspeed": "pytorch",
    "accelerate": "pytorch",
}
"""What runs a step that a launcher starts, where nothing else is said."""


def named_software(name: str) -> Software:
    """The software of that name.

    Raises:
        UnknownNameError: none is known.
    """
    software = SOFTWARE.get(name)
    if software is None:
        descriptions = [f"{each.name}: {each.about}" for each in SOFTWARE.values()]
        raise UnknownNameError(f"no software {name!r}", descriptions, nearest(name, SOFTWARE))
    return software
